"""Is the attention of trained decoders recovered, from random tokens and from text?

    python benchmarks/studies/trained_decoders.py           train three shapes, recover a layer each
        --shapes tiny --steps 200 --sources random --methods newton,adam --out part.json
        --keep FOLDER                                       and keep these layers, in half precision
        --merge part.json ...                               take such files over
        --table                                             print what the JSON holds

Decoders of `benchmarks/recorded/decoder.py` are trained on text; the attention of one layer of
each, rounded to half precision and computed in double, is then learned from random Gaussian tokens
and from what the layer was given on running text, at most 25 times the counting limit of examples.
Exact: all that the function determines to 1e-10, and RECOVERED. Beside it Adam: a student of the
right shape on the same examples, for as many seconds of the clock. The three shapes are for a GPU;
"tiny" and "small" show that the script runs.
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
from benchmarks.recorded.decoder import (
    LAYER,
    SMALL,
    Params,
    Shape,
    inputs_of_text,
    layer_of,
    train,
)
from benchmarks.studies.decoders import descend_by_adam, is_exact
from mhalearn._runtime import storage
from mhalearn.layer.architecture_record import write_architecture

K, RATIO, LIMIT, FRESH = 32, 25.0, 300.0, 100
# Examples of a step of Adam.
BATCH = 256
KEPT = Path(__file__).parents[2] / "build" / "trained_decoders"
SHAPES = {
    "9 heads of 64, 3 keys": Shape(576, 9, 3, 64, hidden=1536),
    "14 heads of 64, 2 keys, biases": Shape(896, 14, 2, 64, hidden=2432, bias=True),
    "8 heads of 64, a quarter rotary": Shape(
        512, 8, 8, 64, hidden=2048, rope=mha.Rope(fraction=0.25)
    ),
}
TINY = {"tiny": Shape(16, 4, 2, 4, layers=2, hidden=32, bias=True), "small": SMALL}
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


def keep(name: str, steps: int, folder: Path) -> None:
    """The layer that is learned, as a file in half precision."""
    layer = layer_of(trained(name, steps), LAYER, (SHAPES | TINY)[name])
    halves = {side: leaf.astype(np.float16) for side, leaf in layer.params.items()}
    said = {"kind": "layer", "architecture": write_architecture(layer.architecture)}
    path = folder / f"{name.replace(', ', '_').replace(' ', '-')}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    storage.write_tensors(path, halves, said | {"trained": f"{steps} steps of Adam"})


def teach(
    name: str, source: str, steps: int
) -> tuple[mha.ProjectedLayer, mha.Examples, mha.Examples]:
    """A trained layer, examples of it, and fresh ones."""
    shape, params = (SHAPES | TINY)[name], trained(name, steps)
    layer = layer_of(params, LAYER, shape)
    n = int(RATIO * layer.architecture.counting_limit(K))
    if source == "random":
        x = np.random.default_rng(0).standard_normal((n + FRESH, K, shape.d))
    else:
        x = inputs_of_text(params, LAYER, shape, n + FRESH, K).astype(np.float64)
        n = min(n, len(x) - len(x) // 10)  # where there is less text than asked for
    made = [mha.Examples(part, layer(part)) for part in (x[:n], x[n:])]
    return layer, made[0], made[1]


class Progress:
    """What a fit says, a line now and then on the screen, and the last of each stage."""

    def __init__(self, name: str) -> None:
        self.name, self.said, self.began = name, -np.inf, time.monotonic()
        self.stages: dict[str, Record] = {}

    def __call__(self, event: mha.Event) -> None:
        now = time.monotonic() - self.began
        new = event.stage not in self.stages
        self.stages[event.stage] = {"seconds": round(now, 1), "loss": finite(event.loss)}
        if new or now - self.said > 2 or event.detail:
            self.said = now
            told = f"{event.stage} {event.step} {event.loss:.1e} {event.detail}"
            print(f"{self.name} {now:6.1f} s  {told}", flush=True)


def fit(name: str, source: str, steps: int, limit: float = LIMIT) -> Record:
    truth, examples, fresh = teach(name, source, steps)
    a = truth.architecture
    progress = Progress(f"{name}, {source}:")
    began = time.monotonic()
    found = mha.AttentionRegressor(
        a.heads,
        head_dim=a.head_dim,
        causal=True,
        bias=a.bias,
        kv_heads=a.kv_heads,
        rope=a.rope,
        max_seconds=limit,
        on_event=progress,
    ).fit(examples)
    seconds = time.monotonic() - began
    x, y, _ = fresh.arrays()
    certificate = found.certificate_
    return {
        "n": examples.n,
        "ratio": round(examples.n / examples.counting_limit(a), 2),
        "unknowns": a.count(),
        "outcome": found.outcome_.name,
        "error": finite(mha.compare(found.layer_, truth).max_error),
        "left": finite(float(np.sum((found.predict(x) - y) ** 2) / np.sum(y**2))),
        "bound": None if certificate is None else finite(certificate.parameter_bound or np.inf),
        "reason": found.solution_.reason,
        "seconds": round(seconds, 1),
        "stages": progress.stages,
    }


def run_adam(name: str, source: str, steps: int, seconds: float) -> Record:
    truth, examples, fresh = teach(name, source, steps)
    return descend_by_adam(
        truth.architecture, examples, fresh, 0, seconds, batch=BATCH, clock=time.monotonic
    )


def main() -> None:
    parser = study(__doc__, "trained_decoders", "0:1", "newton,adam")
    parser.add_argument("--shapes", type=names, default=list(SHAPES))
    parser.add_argument("--sources", type=names, default=list(SOURCES))
    parser.add_argument("--steps", type=int, default=1500, help="of training")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of a fit")
    parser.add_argument("--keep", type=Path, help="a folder for the layers")
    options = parser.parse_args()
    ledger, anything = opened(options)
    for name in options.shapes if anything else ():
        if options.keep is not None:
            keep(name, options.steps, options.keep)
        keys = [
            {"shape": name, "source": source, "trained": options.steps, "limit": options.limit}
            for source in options.sources
        ]
        fits = []
        for key in keys:  # all of ours first: there may be no time for the others
            measure = partial(fit, name, key["source"], options.steps, options.limit)
            fits.append(ledger.run(key | {"method": "newton"}, measure))
            console.print(f"{name}, {key['source']}: {fits[-1].get('outcome', fits[-1])}", fits[-1])
        for key, ours in zip(keys, fits, strict=True):
            if "adam" in options.methods and "seconds" in ours:
                peer = partial(run_adam, name, key["source"], options.steps, ours["seconds"])
                console.print(ledger.run(key | {"method": "adam"}, peer))
    wrong = [r for r in ledger.records if r.get("outcome") == "RECOVERED" and not is_exact(r)]
    say_bar("no layer is called RECOVERED that is not exact", not wrong)


if __name__ == "__main__":
    main()
