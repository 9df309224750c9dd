"""Whole blocks from random examples: recovery, traps, and Adam alone beside it.

    python benchmarks/blocks.py [--part recovery|peers|traps] [--seeds 0:5] [--cases NAME,NAME]

Every run is appended to benchmarks/results/blocks.json as soon as it ends, failures included; one
that is there already, from the same kind of machine, is not made again. Numbers of heads and
neurons are found, not told, in the part `recovery`. Seconds are those of the processor, of all
threads together, compilation included where a run was the first of its kind in the process; the
wall clock's stand beside them, and are those of a machine that others used as well.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # `benchmarks` is a package there

import numpy as np

import mhalearn as mha
from benchmarks import RESULTS
from benchmarks.ledger import Ledger, Record, finite, names, seed_range
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.block.design import BlockDesign
from mhalearn.learners.blocks.learner import Sizes, anneal_student
from mhalearn.learners.blocks.options import BlockClass, BlockOptions
from mhalearn.run.run import Run
from mhalearn.solvers.polish import relative_error

# Students of peers have these seeds' streams to themselves.
_FRESH = 7000


class Case(NamedTuple):
    """A kind of block, and the examples it is learned from."""

    activation: str = "gelu"
    norm: str | None = None
    n_heads: int = 2
    d: int = 8
    hidden: int = 16
    k: int = 4
    n: int = 3000
    max_seconds: float = 600.0
    norm_kind: str = "layer"

    def teacher(self, seed: int) -> mha.Block:
        sizes = self.n_heads, self.d, self.hidden
        kind = {"norm_kind": self.norm_kind, "seed": seed}
        return mha.random_block(*sizes, self.activation, self.norm, **kind)

    def inputs(self, seed: int, n: int | None = None) -> np.ndarray:
        return mha.sample_inputs("gaussian", n or self.n, self.k, self.d, seed=seed)


CASES = {name: Case(name) for name in ("gelu", "relu", "silu", "glu")}
for _place in ("pre", "post"):
    for _kind, _name in (("layer", "LayerNorm"), ("rms", "RMSNorm")):
        CASES[f"{_place} {_name}"] = Case("gelu", _place, norm_kind=_kind)
    # The d = 16 line of the docs' table.
    CASES[f"{_place} LayerNorm, d = 16"] = Case("gelu", _place, 4, 16, 64, 4, 20_000)


def fit(
    case: Case, x: np.ndarray, y: np.ndarray, seed: int, **told
) -> tuple[mha.BlockRegressor, Record]:
    """A fitted estimator, and what it took."""
    settings = {"activation": case.activation, "norm": case.norm, "norm_kind": case.norm_kind}
    settings |= {"max_seconds": case.max_seconds, "random_state": seed}
    began, used = time.monotonic(), time.process_time()
    found = mha.BlockRegressor(**(settings | told)).fit(x, y)
    return found, {
        "outcome": found.outcome_.name,
        "reason": found.solution_.reason,
        "heads": found.block_.n_heads,
        "neurons": found.block_.hidden,
        "processor_seconds": time.process_time() - used,
        "wall_seconds": time.monotonic() - began,
    }


def held_out(
    found: Callable[[np.ndarray], np.ndarray], teacher: mha.Block, case: Case, seed: int
) -> float:
    """Relative squared error on fresh examples."""
    x = case.inputs(_FRESH + seed, 500)
    y = teacher(x)
    return float(np.sum((found(x) - y) ** 2) / np.sum(y**2))


def recover(case: Case, seed: int) -> Record:
    teacher = case.teacher(seed)
    x = case.inputs(seed)
    found, record = fit(case, x, teacher(x), seed)
    error = mha.compare(found.block_, teacher).max_error
    limit = teacher.architecture.counting_limit(case.k)
    return record | {
        "max_error": finite(error),
        "held_out": finite(held_out(found.block_, teacher, case, seed)),
        "ratio": case.n / limit,
    }


def descend_alone(case: Case, surplus: float, seed: int) -> Record:
    """Adam without what comes after it: the same student, steps and examples."""
    teacher = case.teacher(seed)
    x = case.inputs(seed)
    design = BlockDesign(Architecture(case.d, 1, bias=True), 1, case.activation, norm=case.norm)
    sizes = Sizes(round(surplus * case.n_heads), round(surplus * case.hidden))
    examples = mha.Examples(x, teacher(x))
    options, used = BlockOptions(), time.process_time()
    errors = []
    for strength in (0.0, options.strengths[0]):
        student = anneal_student(
            examples, BlockClass(design), sizes, 0, max(strength, 1e-30), Run(seed=seed), options
        )
        errors.append(relative_error(student, mha.Examples(x[:500], teacher(x[:500]))))
    return {
        "without_penalty": finite(errors[0]),
        "with_penalty": finite(errors[1]),
        "processor_seconds": time.process_time() - used,
    }


# Traps: what must never be called recovered


def _missing(case: Case, seed: int) -> tuple:
    teacher = case.teacher(seed)
    x = case.inputs(seed)
    return x, teacher(x), {"n_heads": case.n_heads, "hidden": case.hidden - 1}


def _surplus(case: Case, seed: int) -> tuple:
    teacher = case.teacher(seed)
    x = case.inputs(seed)
    return x, teacher(x), {"n_heads": case.n_heads, "hidden": case.hidden + 4}


def _with_neurons(case: Case, seed: int, change: Callable) -> tuple:
    """With all numbers told, as they are in a teacher some of whose neurons do not count."""
    teacher = case.teacher(seed)
    ff = teacher.feed_forward
    teacher = teacher.replace(feed_forward=ff.replace(**change(ff)))
    x = case.inputs(seed)
    return x, teacher(x), {"n_heads": case.n_heads, "hidden": case.hidden}


def _dead(ff) -> dict:
    return {"down": np.where(np.arange(ff.hidden)[:, None] < 2, 0.0, ff.down)}


def _equal(ff) -> dict:
    order = [0, 0, *range(2, ff.hidden)]
    return {"up": ff.up[:, order], "up_bias": ff.up_bias[order]}


def _other(case: Case, seed: int, **wrong) -> tuple:
    teacher = case.teacher(seed)
    x = case.inputs(seed)
    return x, teacher(x), {"n_heads": case.n_heads, "hidden": case.hidden} | wrong


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
    "missing neuron": _missing,
    "surplus told": _surplus,
    "dead neurons": partial(_with_neurons, change=_dead),
    "two equal neurons": partial(_with_neurons, change=_equal),
    "wrong activation": partial(_other, activation="silu"),
    "wrong norm": partial(_other, norm="pre"),
    "dropout left on": _dropout,
    "bfloat16 labels": _coarse,
    "two blocks": _twice,
}


def spring(case: Case, trap: str, seed: int) -> Record:
    """One attempt a trap: more of them only take longer to fail."""
    x, y, told = TRAPS[trap](case, seed)
    options = BlockOptions(strengths=BlockOptions().strengths[:1])
    return fit(case, x, y, seed, options=options, **told)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("recovery", "peers", "traps"), default="recovery")
    parser.add_argument("--seeds", type=seed_range, default="0:5", help="start:stop")
    parser.add_argument("--cases", type=names, default="gelu,relu,silu,glu")
    parser.add_argument("--out", type=Path, default=RESULTS / "blocks.json")
    asked = parser.parse_args()
    ledger = Ledger(asked.out)
    for name in asked.cases:
        case = CASES[name]
        for seed in asked.seeds:
            key = {"part": asked.part, "case": name, "seed": seed}
            if asked.part == "recovery":
                _say(ledger.run(key, partial(recover, case, seed)))
            elif asked.part == "peers":
                for width, surplus in (("exact", 1.0), ("surplus", 1.5)):
                    found = partial(descend_alone, case, surplus, seed)
                    _say(ledger.run(key | {"student": width}, found))
            else:
                for trap in TRAPS:
                    _say(ledger.run(key | {"trap": trap}, partial(spring, case, trap, seed)))


def _say(record: Record) -> None:
    left_out = ("machine", "device", "code", "reason")
    print({name: value for name, value in record.items() if name not in left_out}, flush=True)


if __name__ == "__main__":
    main()
