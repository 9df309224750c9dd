"""Are heads as decoders have them recovered exactly, each variant from few examples?

    python benchmarks/studies/decoders.py           every variant, ten seeds
        --seeds 0:2 --variants rotary,ALiBi --out part.json
        --merge part.json ...                       take such files over into the default one
        --table                                     print what the JSON holds

Layers of 4 causal heads of 8 dimensions, d = 32, sequences of 16 Gaussian tokens, 20 times the
counting limit of examples. Exact: all that the function determines to 1e-10, and RECOVERED. Seconds
are of the wall and of the processor, compilation included; on a machine that others use, the former
say little. Beside it Adam: a student of the right number of heads on the same examples, for as many
processor seconds as the fit took; what it leaves of fresh examples.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

import jax
import jax.numpy as jnp
import numpy as np

import mhalearn as mha
from benchmarks.ledger import Record, console, finite, names, opened, say_bar, study
from mhalearn._runtime.programs import float64
from mhalearn.layer.parametrisation import Params
from mhalearn.layer.position_bias import T5Bias
from mhalearn.layer.projected import Projected
from mhalearn.run.run import Run
from mhalearn.solvers.first_order import FirstOrderOptions, Schedule, anneal, cosine_rates
from mhalearn.solvers.polish import relative_error
from mhalearn.solvers.scaled_problem import make_problem

D, HEADS, HEAD_DIM, K, RATIO, LIMIT = 32, 4, 8, 16, 20.0, 600.0
EXACT = 1e-10
# Of Adam: steps in a block, its first rate, and examples a step.
_BLOCK, _RATE, _BATCH = 500, 3e-3, 64

VARIANTS = {
    "rotary": {"rope": mha.Rope()},
    "partial rotary": {"rope": mha.Rope(fraction=0.5)},
    "rotary, grouped, biases": {
        "rope": mha.Rope(),
        "kv_heads": 2,
        "key_vector": True,
        "out_bias": True,
    },
    "QK-norm, rotary": {"rope": mha.Rope(), "qk_norm": True},
    "sinks, window": {"sinks": True, "window": 6},
    "soft-cap": {"softcap": 5.0},
    "ALiBi": {"position_bias": "alibi"},
    "T5": {"position_bias": T5Bias(16, 16, bidirectional=False)},
    "cross-attention": {"memory": 24},
    "MLA": {"rope": mha.Rope(fraction=0.5), "latent": mha.Latent(12)},
}
FIELDS = ("kv_heads", "rope", "window", "sinks", "softcap", "qk_norm", "position_bias", "latent")


def teach(variant: str, seed: int) -> tuple[mha.ProjectedLayer, mha.Examples, mha.Examples]:
    """A layer, examples of it, and fresh ones."""
    given = dict(VARIANTS[variant])
    crossed = "memory" in given
    truth = mha.random_layer(HEADS, D, head_dim=HEAD_DIM, causal=not crossed, seed=seed, **given)
    sizes = (K, K) if crossed else (K,)
    n = round(RATIO * truth.architecture.counting_limit(*sizes))
    rng = np.random.default_rng(100 + seed)
    made = []
    for count in (n, 100):
        x = rng.standard_normal((count, K, D))
        memory = {"memory": rng.standard_normal((count, K, given["memory"]))} if crossed else {}
        made.append(mha.Examples(x, truth(x, **memory), **memory))
    return truth, made[0], made[1]


def fit(variant: str, seed: int) -> Record:
    truth, examples, _ = teach(variant, seed)
    a = truth.architecture
    model = mha.AttentionRegressor(
        HEADS,
        head_dim=HEAD_DIM,
        causal=a.causal,
        bias=a.bias,
        random_state=seed,
        max_seconds=LIMIT,
        **{name: getattr(a, name) for name in FIELDS},
    )
    began, spent = time.monotonic(), time.process_time()
    found = model.fit(examples)
    spent = time.process_time() - spent
    return {
        "n": examples.n,
        "ratio": round(examples.n / examples.counting_limit(a), 2),
        "outcome": found.outcome_.name,
        "error": finite(mha.compare(found.layer_, truth).max_error),
        "reason": found.solution_.reason,
        "seconds": round(time.monotonic() - began, 1),
        "processor_seconds": round(spent, 1),
    }


def run_adam(variant: str, seed: int, seconds: float) -> Record:
    truth, examples, fresh = teach(variant, seed)
    return descend_by_adam(truth.architecture, examples, fresh, seed, seconds)


def descend_by_adam(
    architecture: mha.Architecture,
    examples: mha.Examples,
    fresh: mha.Examples,
    seed: int,
    seconds: float,
    *,
    batch: int = _BATCH,
    clock: Callable[[], float] = time.process_time,
) -> Record:
    """What Adam leaves of fresh examples, with a rate that falls to zero as its seconds end.

    clock: that counts them. Those of a first block, compilation with it, are not counted."""
    kind = Projected(architecture)
    problem, rng = make_problem(examples, kind), np.random.default_rng(seed)
    with float64():
        start = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], kind.init(rng))

        def descend(steps: int) -> Params:
            schedule = Schedule(cosine_rates(_RATE, steps), np.zeros(steps))
            options = FirstOrderOptions(block=_BLOCK, batch=batch)
            walk = anneal(start, problem, Run(), schedule, options, stage="Adam", rng=rng)
            return jax.block_until_ready(walk.params)

        descend(_BLOCK)
        began = clock()
        descend(_BLOCK)
        steps = max(1, int(seconds / (clock() - began))) * _BLOCK
        began = clock()
        params = descend(steps)
    spent = clock() - began
    layer = problem.to_layer(jax.tree.map(lambda leaf: leaf[0], params))
    left = finite(relative_error(layer, fresh))
    named = "processor_seconds" if clock is time.process_time else "seconds"
    return {"steps": steps, "left": left, named: round(spent, 1)}


def is_exact(record: Record) -> bool:
    right = record.get("outcome") == "RECOVERED" and record.get("error") is not None
    return right and record["error"] <= EXACT


def _count_seeds(n: int) -> str:
    return f"{n} seeds" if n > 1 else "one seed"


def summarise(records: list[Record]) -> list[list[str]]:
    """A row a variant: runs, exact ones, the largest error of these, seconds, Adam's error."""
    rows = []
    for variant in VARIANTS:
        ours = [record for record in records if record["variant"] == variant]
        of = [record for record in ours if record.get("method", "newton") == "newton"]
        if not of:
            continue
        exact = [record for record in of if is_exact(record)]
        errors = [record["error"] for record in exact]
        claimed = [r for r in of if r.get("outcome") == "RECOVERED" and not is_exact(r)]
        spent = [record["processor_seconds"] for record in of if "processor_seconds" in record]
        left = [record.get("left") for record in ours if record.get("method") == "adam"]
        adam = sorted(one for one in left if one is not None)
        sizes = sorted({f"{record['n']}" for record in of if "n" in record})
        rows.append(
            [
                variant,
                ", ".join(sizes),
                f"{len(exact)} of {len(of)}",
                f"{max(errors):.0e}" if errors else "-",
                str(len(claimed)),
                f"{max(spent):.0f}" if spent else "-",
                f"{adam[0]:.0e} to {adam[-1]:.0e}, {_count_seeds(len(adam))}" if adam else "-",
            ]
        )
    return rows


COLUMNS = (
    "variant",
    "examples",
    "exact",
    "largest error of these",
    "wrongly called RECOVERED",
    "processor seconds, most",
    "left by Adam in as many seconds",
)


def main() -> None:
    parser = study(__doc__, "decoders", "0:10", "newton,adam")
    parser.add_argument("--variants", type=names, default=list(VARIANTS))
    options = parser.parse_args()
    ledger, anything = opened(options)
    for seed in options.seeds if anything else ():
        for variant in options.variants:
            key = {"variant": variant, "seed": seed}
            ours = ledger.run(key | {"method": "newton"}, partial(fit, variant, seed))
            console.print(f"{variant}, seed {seed}: {ours.get('outcome', ours)}", ours)
            if "adam" in options.methods and "processor_seconds" in ours:
                run = partial(run_adam, variant, seed, ours["processor_seconds"])
                console.print(ledger.run(key | {"method": "adam"}, run))
    for row in summarise(ledger.records):
        console.print(" | ".join(row))
    wrong = [r for r in ledger.records if r.get("outcome") == "RECOVERED" and not is_exact(r)]
    say_bar("no layer is called RECOVERED that is not exact", not wrong)


if __name__ == "__main__":
    main()
