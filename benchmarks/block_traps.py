"""Small blocks told wrongly, or with labels that no block gives: none may be called recovered.

    python benchmarks/block_traps.py [--seeds 0:34]

Every fit is appended to benchmarks/results/block_traps.json as soon as it ends. Seeds take the
activations in turn. The trap "none" is the same search with nothing wrong: how many of those are
recovered says what the others' failures are worth.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # `benchmarks` is a package there

import numpy as np

from benchmarks import RESULTS
from benchmarks.blocks import Case, fit
from benchmarks.ledger import Ledger, Record, names, seed_range
from mhalearn.layer.block.feed_forward import FeedForward
from mhalearn.learners.blocks.options import BlockOptions

ACTIVATIONS = ("gelu", "relu", "silu", "glu")
# One attempt: more of them only take longer to fail.
HASTY = BlockOptions(steps=10_000, strengths=(1e-4,))


def case_of(seed: int) -> Case:
    """Biases everywhere, no norm: so small that a fit takes seconds."""
    return Case(ACTIVATIONS[seed % 4], None, 1, 4, 4, 3, 500)


def _with_neurons(case: Case, seed: int, change: Callable[[FeedForward], dict]) -> tuple:
    """With all numbers told, as they are in a teacher some of whose neurons do not count."""
    teacher = case.teacher(seed)
    ff = teacher.feed_forward
    teacher = teacher.replace(feed_forward=ff.replace(**change(ff)))
    x = case.inputs(seed)
    return x, teacher(x), {"n_heads": case.n_heads, "hidden": case.hidden}


def _dead(ff: FeedForward) -> dict:
    return {"down": np.where(np.arange(ff.hidden)[:, None] < 1, 0.0, ff.down)}


def _equal(ff: FeedForward) -> dict:
    order = [0, 0, *range(2, ff.hidden)]
    named = {name: part for name, part in ff.parts().items() if name not in ("down", "down_bias")}
    return {name: part[..., order] for name, part in named.items()}


def _other(case: Case, seed: int, neurons: int = 0, **wrong: str) -> tuple:
    """Told so many neurons more than there are, or something else that is wrong."""
    teacher = case.teacher(seed)
    x = case.inputs(seed)
    return x, teacher(x), {"n_heads": case.n_heads, "hidden": case.hidden + neurons} | wrong


def _activation(case: Case, seed: int) -> tuple:
    """Told the next kind in turn, which for GELU and SiLU is near."""
    told = {"gelu": "silu", "silu": "gelu", "relu": "gelu", "glu": "swiglu"}
    return _other(case, seed, activation=told[case.activation])


def _dropout(case: Case, seed: int) -> tuple:
    """A tenth of what the block adds to the stream is dropped, and the rest made up for it."""
    teacher = case.teacher(seed)
    x = case.inputs(seed)
    kept = np.random.default_rng(seed).random(x.shape) > 0.1
    return x, x + (teacher(x) - x) * kept / 0.9, {"n_heads": case.n_heads, "hidden": case.hidden}


def _coarse(case: Case, seed: int) -> tuple:
    import ml_dtypes

    teacher = case.teacher(seed)
    x = case.inputs(seed)
    y = teacher(x).astype(ml_dtypes.bfloat16).astype(np.float32)
    return x, y, {"n_heads": case.n_heads, "hidden": case.hidden}


def _twice(case: Case, seed: int) -> tuple:
    first, second = case.teacher(seed), case.teacher(seed + 500)
    x = case.inputs(seed)
    return x, second(first(x)), {"n_heads": case.n_heads, "hidden": case.hidden}


TRAPS: dict[str, Callable[[Case, int], tuple]] = {
    "none": _other,
    "missing neuron": partial(_other, neurons=-1),
    "surplus told": partial(_other, neurons=2),
    "dead neurons": partial(_with_neurons, change=_dead),
    "two equal neurons": partial(_with_neurons, change=_equal),
    "wrong activation": _activation,
    "wrong norm": partial(_other, norm="pre"),
    "dropout left on": _dropout,
    "bfloat16 labels": _coarse,
    "two blocks": _twice,
}


def spring(trap: str, seed: int) -> Record:
    case = case_of(seed)
    x, y, told = TRAPS[trap](case, seed)
    return fit(case, x, y, seed, options=HASTY, **told)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=seed_range, default="0:34", help="start:stop")
    parser.add_argument("--traps", type=names, default=",".join(TRAPS))
    parser.add_argument("--out", type=Path, default=RESULTS / "block_traps.json")
    asked = parser.parse_args()
    ledger = Ledger(asked.out)
    for seed in asked.seeds:
        for trap in asked.traps:
            key = {"trap": trap, "case": case_of(seed).activation, "seed": seed}
            record = ledger.run(key, partial(spring, trap, seed))
            print(trap, seed, record.get("outcome"), record.get("crashed"), flush=True)


if __name__ == "__main__":
    main()
