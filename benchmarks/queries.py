"""Layers from chosen queries, beside random sequences with the same budget and published counts.

    python benchmarks/queries.py [--lines "NAME;..."] [--seeds 0:10]   measure what is not there yet
    python benchmarks/queries.py --table                               print what the JSON holds

A line is a setting of teachers, one a seed. Nothing is told of them but what the line says. Calls,
tokens and scalars are all that was asked, those that certify among them.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))  # `benchmarks` is a package there

import ml_dtypes
import numpy as np
from scipy.stats import norm

import mhalearn as mha
from benchmarks import RESULTS
from benchmarks.ledger import Ledger, Record, finite, seed_range
from mhalearn.learners.queries.domain import half_sharp_size, make_domain

Teacher = Callable[[int], Any]
Answers = Callable[[Any], Callable[[np.ndarray], np.ndarray]]


def published(m: int, d: int) -> int:
    """Scalars of the best published algorithm, one a call (arXiv 2608.03294)."""
    return 4 * m * d**2 - 2 * m + 1


def all_outputs(layer: Any) -> Callable[[np.ndarray], np.ndarray]:
    return layer


def last_row(layer: Any) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: layer(x)[:, -1]


def one_scalar(layer: Any) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: layer(x)[:, -1, 0]


def rounded(dtype: Any) -> Answers:
    return lambda layer: lambda x: layer(x).astype(dtype)


def in_bits(bits: int) -> Answers:
    """Numbers with so many bits of mantissa, as float64."""

    def box(layer: Any) -> Callable[[np.ndarray], np.ndarray]:
        def answer(x: np.ndarray) -> np.ndarray:
            part, power = np.frexp(layer(x))
            return np.ldexp(np.round(part * 2**bits) / 2**bits, power)

        return answer

    return box


def teacher(m: int, d: int, scale: float = 2.0, **more: Any) -> Teacher:
    return lambda seed: mha.random_layer(n_heads=m, d=d, scale=scale, seed=seed, **more)


def causal(m: int, d: int) -> Teacher:
    def make(seed: int) -> Any:
        layer = mha.random_layer(n_heads=m, d=d, scale=2.0, seed=seed)
        return mha.AttentionLayer(layer.theta, layer.w, causal=True)

    return make


def decoder(**kind: Any) -> Teacher:
    """Four heads of 8 at d = 32, as decoders have them."""
    return lambda seed: mha.random_layer(4, 32, head_dim=8, seed=seed, **kind)


def nearly_equal(apart: float) -> Teacher:
    """Three heads at d = 7, the second Theta so far from the first, over its size."""

    def make(seed: int) -> Any:
        layer = mha.random_layer(n_heads=3, d=7, scale=2.0, seed=seed)
        theta = layer.theta.copy()
        theta[1] = (1 - apart) * theta[0] + apart * theta[1]
        return mha.AttentionLayer(theta, layer.w)

    return make


def parity(m: int, d: int) -> Teacher:
    return lambda seed: mha.hard_layer("parity", n_heads=m, d=d, seed=seed)[0]


@dataclass(frozen=True)
class Line:
    """goal: the largest parameter error that counts. examples: so many random sequences in all, in
    place of questions, of `inputs`. processor_limit: seconds of the processor that a run has."""

    teacher: Teacher
    d: int
    goal: float
    box: Answers = all_outputs
    heads: int | str = "auto"
    options: dict[str, Any] = field(default_factory=dict)
    examples: int | None = None
    inputs: str = "any"
    processor_limit: float | None = None


FULL = {"max_calls": 40}
LINES = {
    "6 heads, d = 8, all outputs": Line(teacher(6, 8), 8, 1e-14, options=FULL),
    "6 heads, d = 8, all outputs, random": Line(
        teacher(6, 8), 8, 1e-14, heads=6, options=FULL | {"plan": "random"}
    ),
    "6 heads, d = 8, one scalar a call": Line(
        teacher(6, 8, out_dim=1), 8, 1e-12, one_scalar, 6, {"max_scalars": published(6, 8)}
    ),
    "6 heads, d = 8, one scalar a call, 600": Line(
        teacher(6, 8, out_dim=1), 8, 1e-12, one_scalar, 6, {"max_scalars": 600, "inputs": "cube"}
    ),
    "8 heads, d = 16, scale 6, 64 calls": Line(
        teacher(8, 16, 6.0),
        16,
        1e-10,
        heads=8,
        options={"max_calls": 64, "plan": "random", "max_seconds": 400.0},
    ),
    "8 heads, d = 16, scale 6, algebra": Line(teacher(8, 16, 6.0), 16, 1e-10, processor_limit=75.0),
    "8 heads, d = 16, scale 6, cube": Line(
        teacher(8, 16, 6.0),
        16,
        1e-10,
        heads=8,
        options={"max_calls": 64, "inputs": "cube"},
        processor_limit=75.0,
    ),
    "6 heads, d = 8, cube": Line(
        teacher(6, 8), 8, 1e-12, heads=6, options={"max_calls": 40, "inputs": "cube"}
    ),
    "6 heads, d = 8, float32": Line(teacher(6, 8), 8, 1e-5, rounded(np.float32), 6),
    "6 heads, d = 8, bfloat16": Line(teacher(6, 8), 8, 1e-1, rounded(ml_dtypes.bfloat16), 6),
    "6 heads, d = 8, 12 bits": Line(teacher(6, 8), 8, 1e-2, in_bits(12), 6),
    "4 heads, d = 8, causal, last row": Line(causal(4, 8), 8, 1e-12, last_row, 4, {"causal": True}),
} | {
    f"parity, {m} heads, d = 12": Line(
        parity(m, 12), 12, 1e-6, options={"max_calls": 600, "max_seconds": 60.0}
    )
    for m in (4, 6, 8)
}
LINES |= {
    f"parity, {m} heads, d = 12, random": Line(
        parity(m, 12),
        12,
        1e-6,
        heads=m,
        options={"max_calls": 400, "max_seconds": 40.0, "plan": "random"},
    )
    for m in (4, 6)
}
# As many as the median of what was asked of the same layers above.
LINES |= {
    f"parity, {m} heads, d = 12, {name}, {calls} calls": Line(
        parity(m, 12), 12, 1e-6, heads=m, examples=calls, inputs=inputs, processor_limit=10.0
    )
    for name, inputs in (("random", "any"), ("cube", "cube"))
    for m, calls in ((4, 297), (6, 408), (8, 519))
}
SHAPES = [(3, 12, 0.3), (2, 6, 20.0), (4, 16, 3.0)]
LINES |= {
    f"{m} heads, d = {d}, scale {scale:g}": Line(
        teacher(m, d, scale), d, 1e-12, options={"max_seconds": 60.0}
    )
    for m, d, scale in SHAPES
}
LINES |= {
    f"3 heads, d = 7, two {apart:g} apart": Line(
        nearly_equal(apart), 7, 1e-6, options={"max_calls": 200, "max_seconds": 20.0}
    )
    for apart in (1e-2, 1e-3)
}
# At most three times the counting limit of calls; and a minute.
NARROW = {"head_dim": 8, "max_calls": 90, "max_seconds": 60.0}
LINES |= {
    "8 heads of 8, d = 64": Line(teacher(8, 64, head_dim=8), 64, 1e-12, options=NARROW),
    "8 heads of 8, d = 64, random": Line(
        teacher(8, 64, head_dim=8),
        64,
        1e-12,
        heads=8,
        options=NARROW | {"max_calls": 86, "plan": "random"},
        processor_limit=60.0,
    ),
}
# 16 tokens: shorter sequences hardly show the slowest of four frequencies.
DECODERS: dict[str, dict[str, Any]] = {
    "rotary, causal": {"causal": True, "rope": mha.Rope(base=1e4)},
    "rotary, 2 groups, causal": {"causal": True, "rope": mha.Rope(base=1e4), "kv_heads": 2},
    "2 groups": {"kv_heads": 2},
    "causal": {"causal": True},
}
LINES |= {
    f"4 heads of 8, d = 32, {name}": Line(
        decoder(**kind),
        32,
        1e-10,
        heads=4,
        options=kind | {"head_dim": 8, "max_length": 16, "max_seconds": 240.0},
    )
    for name, kind in DECODERS.items()
}
# A box that gives what heads write, m r numbers a row: all outputs of narrow heads lie in as many
# dimensions, and a box that answers with more of them sends more numbers for the same calls.
RANKS = [(1, 32), (2, 32), (4, 32), (8, 32), (4, 16), (4, 48), (4, 64)]
LINES |= {
    f"4 heads of rank {r}, d = {d}": Line(
        teacher(4, d, head_dim=r, out_dim=4 * r), d, 1e-12, options={"head_dim": r}
    )
    for r, d in RANKS
}
SECONDS = 240.0
# Tokens of a sequence; sizes in which one is asked about, for that of random ones.
LENGTH, LADDER = 8, np.array([0.06, 0.12, 0.25, 0.5, 2.0])


def measure(line: Line, seed: int) -> Record:
    truth = line.teacher(seed)
    options = {"max_seconds": SECONDS} | line.options
    began, cpu = time.monotonic(), time.process_time()
    if line.processor_limit is None:
        found = ask(line, truth, seed, options)
    else:
        # Of a busy machine a clock says little: runs read seconds of the processor in its place.
        options["max_seconds"] = line.processor_limit
        with patch("time.monotonic", time.process_time):
            found = (ask if line.examples is None else fit_random)(line, truth, seed, options)
    return found | {
        "seconds": time.monotonic() - began,
        "processor_seconds": time.process_time() - cpu,
        "processor_limit": line.processor_limit,
    }


def ask(line: Line, truth: Any, seed: int, options: dict[str, Any]) -> Record:
    box = line.box(truth)

    def answer(x: np.ndarray) -> np.ndarray:
        if x.shape[1] > 1:
            return box(x)
        # A sequence of one token is all attention on it; layers here want two.
        return (x[:, 0] @ truth.w.sum(axis=0)).astype(np.float64)

    found = mha.extract(answer, line.d, line.heads, seed=seed, **options)
    error = mha.compare(found.layer, truth).max_error
    return {
        "error": finite(error),
        "outcome": found.outcome.name,
        "heads": found.layer.n_heads,
        "calls": found.calls,
        "tokens": found.tokens,
        "scalars": found.scalars,
        "random_starts": found.random_starts,
        "over_limit": found.calls / limit(truth, line, found),
        "condition": None if found.algebra is None else found.algebra.heads.condition,
        "over_bound": bound_ratio(found, truth),
    }


def fit_random(line: Line, truth: Any, seed: int, options: dict[str, Any]) -> Record:
    """All sequences of the budget at once, where tokens have any size, of a size that makes
    attention neither flat nor sharp: it is asked for as `extract` does, and that counts."""
    assert line.examples is not None
    rng, tokens = np.random.default_rng([seed, 23]), make_domain(line.inputs, line.d)
    count, size = line.examples, 1.0
    if tokens.is_continuous:
        sizes = LADDER[:, None, None] * tokens.draw(1, LENGTH, 1.0, rng)
        count, size = count - len(LADDER), half_sharp_size(LADDER, truth(sizes))
    x = tokens.draw(count, LENGTH, size, rng)
    learner = mha.AttentionRegressor(line.heads, random_state=seed, **options)
    found = learner.fit(x, truth(x)).solution_
    return {
        "error": finite(mha.compare(found.layer, truth).max_error),
        "outcome": found.outcome.name,
        "heads": found.layer.n_heads,
        "calls": line.examples,
        "tokens": line.examples * LENGTH,
        "scalars": line.examples * LENGTH * truth.out_dim,
        "random_starts": True,
        "over_limit": line.examples / truth.architecture.counting_limit(LENGTH),
    }


def limit(truth: Any, line: Line, found: mha.Extraction) -> float:
    """Calls of that length below which no method can determine a layer of the class asked for."""
    assert found.asked is not None
    asked = replace(truth.architecture, head_dim=line.options.get("head_dim"))
    return asked.counting_limit(found.asked.k)


def bound_ratio(found: mha.Extraction, truth: Any) -> float | None:
    """Root mean square error of all parameters over their deviations at the noise of the fit.

    The deviations are the Cramer-Rao bound of the calls that were fitted; None of exact answers.
    """
    certificate = found.certificate
    if certificate is None or certificate.intervals is None or certificate.relative_mse < 1e-28:
        return None
    if found.layer.n_heads != truth.n_heads:
        return None
    order = mha.compare(found.layer, truth).order
    pairs = [
        (getattr(found.layer, name)[order] - getattr(truth, name)) / half_widths[order]
        for name, half_widths in certificate.intervals.arrays.items()
    ]
    deviations = norm.ppf(1 - certificate.delta / 2)
    return float(deviations * np.sqrt(np.mean(np.concatenate([p.ravel() for p in pairs]) ** 2)))


def table(rows: list[Record]) -> None:
    for name, line in LINES.items():
        mine = [row for row in rows if row["line"] == name]
        if mine:
            good = sum((row.get("error") or 1.0) <= line.goal for row in mine)
            worst = max((row.get("error") or float("inf")) for row in mine)
            print(f"{name:42} {good}/{len(mine)} {worst:9.1e}", end=" ")
            for what in ("calls", "scalars", "processor_seconds"):
                values = [row[what] for row in mine if what in row]
                print(f"{what} {np.median(values) if values else float('nan'):.4g}", end=" ")
            print(sum(bool(row.get("random_starts")) for row in mine), "with random starts")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--lines", type=lambda text: text.split(";"), default=list(LINES), help="between semicolons"
    )
    parser.add_argument("--seeds", type=seed_range, default=range(10))
    parser.add_argument("--out", type=Path, default=RESULTS / "queries.json")
    parser.add_argument("--table", action="store_true")
    asked = parser.parse_args()
    ledger = Ledger(asked.out)
    for name in [] if asked.table else asked.lines:
        for seed in asked.seeds:
            row = ledger.run(
                {"line": name, "seed": seed}, lambda n=name, s=seed: measure(LINES[n], s)
            )
            print(name, seed, row.get("error"), row.get("outcome"), row.get("crashed"), flush=True)
    table(ledger.records)


if __name__ == "__main__":
    main()
