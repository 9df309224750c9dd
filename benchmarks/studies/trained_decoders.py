"""Is the attention of trained decoders recovered, from random tokens and from text?

    python benchmarks/studies/trained_decoders.py           train three shapes, recover a layer each
        --shapes tiny --steps 200 --methods newton,adam --out part.json
        --merge part.json ...                               take such files over
        --table                                             print what the JSON holds

Decoders of `benchmarks/recorded/decoder.py` are trained on text; the attention of one layer of
each, rounded to half precision and computed in double, is then learned from random Gaussian tokens
and from what the layer was given on recorded sentences, at most 25 times the counting limit of
examples. Exact: all that the function determines to 1e-10, and RECOVERED. Beside it Adam: a student
of the right shape on the same examples, for as many seconds. The three shapes are for a GPU; "tiny"
shows that the script runs.
"""

import sys
import time
from functools import cache, partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

import numpy as np
from safetensors.numpy import load_file, save_file

import mhalearn as mha
from benchmarks.ledger import Record, console, finite, names, opened, say_bar, study
from benchmarks.recorded.decoder import LAYER, Params, Shape, inputs_of, layer_of, train
from benchmarks.studies.decoders import descend_by_adam, is_exact

K, RATIO, LIMIT = 32, 25.0, 300.0
KEPT = Path(__file__).parents[2] / "build" / "trained_decoders"
SHAPES = {
    "9 heads of 64, 3 keys": Shape(576, 9, 3, 64, hidden=1536),
    "14 heads of 64, 2 keys, biases": Shape(896, 14, 2, 64, hidden=2432, bias=True),
    "8 heads of 64, a quarter rotary": Shape(
        512, 8, 8, 64, hidden=2048, rope=mha.Rope(fraction=0.25)
    ),
}
TINY = {"tiny": Shape(16, 4, 2, 4, layers=2, hidden=32, bias=True)}
SOURCES = ("random", "text")


@cache
def trained(name: str, steps: int) -> Params:
    """Kept under build/, and trained where it is missing."""
    path = KEPT / f"{name.replace(', ', '_').replace(' ', '-')}_{steps}.safetensors"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        params, loss = train((SHAPES | TINY)[name], steps)
        console.print(f"{name}: trained for {steps} steps, loss {loss:.2f}")
        save_file({key: np.asarray(leaf) for key, leaf in params.items()}, path)
    return load_file(path)


def teach(
    name: str, source: str, steps: int
) -> tuple[mha.ProjectedLayer, mha.Examples, mha.Examples]:
    """A trained layer, examples of it, and fresh ones."""
    shape, params = (SHAPES | TINY)[name], trained(name, steps)
    layer = layer_of(params, LAYER, shape)
    n = int(RATIO * layer.architecture.counting_limit(K))
    if source == "random":
        x = np.random.default_rng(0).standard_normal((n + 100, K, shape.d))
    else:
        x = inputs_of(params, LAYER, shape, n + 100, K).astype(np.float64)
        n = min(n, len(x) - len(x) // 10)  # where there are fewer sentences than asked for
    made = [mha.Examples(part, layer(part)) for part in (x[:n], x[n:])]
    return layer, made[0], made[1]


def fit(name: str, source: str, steps: int) -> Record:
    truth, examples, fresh = teach(name, source, steps)
    a = truth.architecture
    began, spent = time.monotonic(), time.process_time()
    found = mha.AttentionRegressor(
        a.heads,
        head_dim=a.head_dim,
        causal=True,
        bias=a.bias,
        kv_heads=a.kv_heads,
        rope=a.rope,
        max_seconds=LIMIT,
    ).fit(examples)
    seconds, spent = time.monotonic() - began, time.process_time() - spent
    x, y, _ = fresh.arrays()
    return {
        "n": examples.n,
        "ratio": round(examples.n / examples.counting_limit(a), 2),
        "outcome": found.outcome_.name,
        "error": finite(mha.compare(found.layer_, truth).max_error),
        "left": finite(float(np.sum((found.predict(x) - y) ** 2) / np.sum(y**2))),
        "reason": found.solution_.reason,
        "seconds": round(seconds, 1),
        "processor_seconds": round(spent, 1),
    }


def run_adam(name: str, source: str, steps: int, seconds: float) -> Record:
    truth, examples, fresh = teach(name, source, steps)
    return descend_by_adam(truth.architecture, examples, fresh, 0, seconds)


def main() -> None:
    parser = study(__doc__, "trained_decoders", "0:1", "newton,adam")
    parser.add_argument("--shapes", type=names, default=list(SHAPES))
    parser.add_argument("--steps", type=int, default=1500, help="of training")
    options = parser.parse_args()
    ledger, anything = opened(options)
    for name in options.shapes if anything else ():
        for source in SOURCES:
            key = {"shape": name, "source": source, "trained": options.steps}
            ours = ledger.run(key | {"method": "newton"}, partial(fit, name, source, options.steps))
            console.print(f"{name}, {source}: {ours.get('outcome', ours)}", ours)
            if "adam" in options.methods and "processor_seconds" in ours:
                spent = ours["processor_seconds"]
                peer = partial(run_adam, name, source, options.steps, spent)
                console.print(ledger.run(key | {"method": "adam"}, peer))
    wrong = [r for r in ledger.records if r.get("outcome") == "RECOVERED" and not is_exact(r)]
    say_bar("no layer is called RECOVERED that is not exact", not wrong)


if __name__ == "__main__":
    main()
