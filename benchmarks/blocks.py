"""Whole blocks from random examples: recovery, with how few it works, and Adam alone beside it.

    python benchmarks/blocks.py [--part recovery|peers|few|film] [--seeds 0:5] [--cases NAME,NAME]

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
from mhalearn.learners.blocks.learner import Sizes, anneal_student, learn_block
from mhalearn.learners.blocks.options import BlockClass, BlockOptions
from mhalearn.run.events import Event
from mhalearn.run.run import Run
from mhalearn.solvers.polish import relative_error

# Numbers of examples of the part `few`.
FEW = (1600, 800, 400, 200, 100)
# Distance, over its size, at which a head or neuron of the truth counts as found in a film.
_NEAR = 0.1
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


def film(case: Case, seed: int) -> Record:
    """What is there as a search goes on: its error, and the heads and neurons of the truth that the
    block at hand has within a tenth of their size."""
    teacher = case.teacher(seed)
    x = case.inputs(seed)
    design = BlockDesign(Architecture(case.d, 1, bias=True), 1, case.activation, norm=case.norm)
    used, frames = time.process_time(), []

    def look(event: Event) -> None:
        if run.layer_at_hand is None:
            return
        block = run.layer_at_hand()
        seen = {"stage": event.stage, "seconds": time.process_time() - used, "error": event.loss}
        frames.append(seen | {"heads": _count_heads(block, teacher)} | _neurons(block, teacher))

    run = Run(seed=seed, on_event=look)
    found = learn_block(mha.Examples(x, teacher(x)), BlockClass(design), run, BlockOptions())
    error = mha.compare(found.layer, teacher).max_error
    return {"frames": frames, "max_error": finite(error)}


def _count_heads(block: mha.Block, truth: mha.Block) -> int:
    ours, true = block.attention, truth.attention
    apart = np.linalg.norm(ours.theta[:, None] - true.theta, axis=(2, 3))
    return int(np.sum((apart / np.linalg.norm(true.theta, axis=(1, 2))).min(axis=0) < _NEAR))


def _neurons(block: mha.Block, truth: mha.Block) -> Record:
    """Input weights up to their sign, which a linear map beside them can turn."""
    ours, true = block.feed_forward.up.T, truth.feed_forward.up.T
    apart = np.minimum(*(np.linalg.norm(ours[:, None] - s * true, axis=2) for s in (1, -1)))
    near = (apart / np.linalg.norm(true, axis=1)).min(axis=0) < _NEAR
    return {"neurons": int(np.sum(near)), "held": block.hidden}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("recovery", "peers", "few", "film"), default="recovery")
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
            elif asked.part == "film":
                _say(ledger.run(key, partial(film, case, seed)))
            else:
                for n in FEW:
                    _say(ledger.run(key | {"n": n}, partial(recover, case._replace(n=n), seed)))


def _say(record: Record) -> None:
    left_out = ("machine", "device", "code", "reason", "frames")
    print({name: value for name, value in record.items() if name not in left_out}, flush=True)


if __name__ == "__main__":
    main()
