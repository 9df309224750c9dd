"""The six phases of Chen & Li on random layers, before and after polish, beside their controls.

    python benchmarks/studies/phases.py  all lines, ten seeds each, appended to the JSON
        --line 0 --seed 3                one run
        --table                          print what the JSON holds

A run that is already in the JSON is not repeated. The plan is the practical one. The truth is used
here, and only here, to measure: errors of the sums and of the span, precision and recall of
certification.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

import jax
import numpy as np

import mhalearn as mha
from benchmarks import RESULTS, describe_code
from mhalearn.data import Examples
from mhalearn.layer.dense import Dense
from mhalearn.learners import chen_li, newton
from mhalearn.learners.chen_li.body_shape import fit_shape
from mhalearn.learners.chen_li.phase2_certification import (
    CertifiedRows,
    certify_rows,
    fit_pairs,
    screen_pairs,
)
from mhalearn.learners.chen_li.phase3_refined_sum import large_margin_rows, refine_projection_sum
from mhalearn.run.run import Run
from mhalearn.solvers.polish import polish
from mhalearn.solvers.scaled_problem import make_problem

FILE = RESULTS / "phases.json"

# Heads, d, k, scale, examples, inputs; then what must hold: relative MSE, span sine, error of the
# refined sum, good seeds, minutes.
LINES = [
    (2, 16, 3, 4.0, 200_000, "boolean", 5e-4, 0.03, 1e-4, 9, 2),
    (2, 16, 4, 4.0, 1_000_000, "boolean", 2e-4, 0.02, 1e-4, 9, 5),
    (2, 24, 6, 4.0, 1_000_000, "boolean", 1e-3, 0.04, 1e-3, 8, 8),
    (3, 16, 3, 4.0, 1_000_000, "boolean", 3e-3, 0.08, 2e-3, 8, 5),
    (3, 16, 4, 4.0, 2_000_000, "boolean", 5e-3, 0.10, 5e-3, 7, 10),
    (2, 16, 3, 4.0, 200_000, "gaussian", 5e-4, 0.03, 1e-4, 9, 2),
    (3, 16, 3, 4.0, 1_000_000, "gaussian", 3e-3, 0.08, 2e-3, 8, 5),
    (2, 16, 3, 2.0, 200_000, "boolean", None, None, None, None, 2),
    (2, 16, 3, 6.0, 200_000, "boolean", None, None, None, None, 2),
    (3, 16, 3, 2.0, 1_000_000, "boolean", None, None, None, None, 5),
    (3, 16, 3, 6.0, 1_000_000, "boolean", None, None, None, None, 5),
    (4, 16, 3, 4.0, 4_000_000, "boolean", 2e-2, None, None, None, 10),
]
SEEDS = range(10)
CONTROLLED = 3  # seeds that also run the controls
RECALLED = 200_000  # examples on which recall is measured
CONSTANTS = chen_li.Constants()
# Heads agree on two tokens where no head has as much as this on the others, each has more than this
# on either of the two, and their log-odds are no further than ALIKE from the heads' mean.
LEAST, ALIKE = 0.1, 1.0


def relative(estimate: np.ndarray, truth: np.ndarray) -> float:
    return float(np.linalg.norm(estimate - truth) / np.linalg.norm(truth))


def span_sine(basis: np.ndarray, truth: mha.AttentionLayer) -> float:
    flat, heads = basis.reshape(len(basis), -1), truth.theta.reshape(truth.n_heads, -1)
    outside = heads - heads @ flat.T @ flat
    return float(np.max(np.linalg.norm(outside, axis=1) / np.linalg.norm(heads, axis=1)))


def mean_squared(layer: mha.AttentionLayer, fresh: Examples) -> float:
    x, y, _ = fresh.arrays()
    return float(np.sum((layer(x) - y) ** 2) / np.sum(y**2))


def certification_quality(
    rows: CertifiedRows, total: np.ndarray, truth: mha.AttentionLayer, part: Examples
) -> dict[str, object]:
    """How good the rows are that were certified with some sum, and how many it did not find.

    Precision: of the certified rows, the share on which all heads have the row's log-odds to within
    one. Recall: of all rows of some examples on which the heads do agree on two tokens, the share
    that certifies with this sum: a score no worse than that of the worst certified row, and a
    linear programme that leaves its weight on the two tokens.
    """
    logits = np.einsum("cd,mde,ce->cm", rows.query, truth.theta, rows.difference)
    true = np.max(np.abs(logits - rows.log_odds[:, None]), axis=1) < 1.0
    found = certifies(*matched_rows(truth, part)[1:], total, rows.score.max())
    return {
        "certified": len(rows),
        "median_score": float(np.median(rows.score)),
        "precision": float(true.mean()),
        "recall_of_matched_rows": float(found.mean()) if len(found) else None,
        "matched_rows": len(found),
    }


def matched_rows(
    truth: mha.AttentionLayer, part: Examples
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """All rows of some examples on which all heads agree on two tokens: example, row, pair, tokens,
    labels of each."""
    x, y, _ = part.arrays()
    k, found = part.k, []
    for start in range(0, part.n, 20_000):
        tokens = x[start : start + 20_000].astype(np.float64)
        logits = np.einsum("nrd,mde,nje->nrmj", tokens, truth.theta, tokens, optimize=True)
        p = np.exp(logits - logits.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        for a in range(k):
            for b in range(a):
                on_pair = p[..., a] + p[..., b]
                share = p[..., a] / np.maximum(on_pair, 1e-300)
                odds = logits[..., a] - logits[..., b]
                apart = np.abs(odds - odds.mean(axis=-1, keepdims=True)).max(axis=-1)
                agree = np.all((on_pair > 1 - LEAST) & (share > LEAST), axis=-1)
                agree &= np.all(share < 1 - LEAST, axis=-1) & (apart < ALIKE)
                example, row = np.nonzero(agree)
                found += [(start + n, r, a, b) for n, r in zip(example, row, strict=True)]
    example, row, a, b = np.array(found, np.int64).reshape(-1, 4).T
    return example, row, np.stack([a, b], axis=1), x[example].astype(np.float64), y[example]


def certifies(
    row: np.ndarray, pair: np.ndarray, x: np.ndarray, y: np.ndarray, total: np.ndarray, worst: float
) -> np.ndarray:
    """Which of some rows are certified on their pairs: as phases 2 and 4 do it, with the same bars
    but for the number of rows, in place of which there is the worst score that it let pass."""
    # Equal tokens share their weight: no log-odds follow.
    apart = np.linalg.norm(x[:, :, None] - x[:, None], axis=-1) + np.eye(x.shape[1])
    found = np.all(apart > 0, axis=(1, 2))
    chosen = [one[found] for one in (row, row, pair, x, y)]
    fitted = fit_pairs(*chosen, total, CONSTANTS)
    attention = certify_rows(fitted.tokens, fitted.labels, total).attention
    on_pair = np.take_along_axis(attention, fitted.pair, axis=1).sum(axis=1)
    least = CONSTANTS.least_weight
    usable = (fitted.weight > least) & (fitted.weight < 1 - least)
    found[found] = (fitted.score <= worst) & (on_pair >= CONSTANTS.on_pair) & usable
    return found


def from_exact_inputs(
    examples: Examples, truth: mha.AttentionLayer, seed: int, fresh: Examples
) -> dict[str, float]:
    """Each phase fed with the truth, to see where accuracy is lost."""
    m, d, exact = truth.n_heads, examples.d, chen_li.exact(truth)
    total, proxy = exact.crude.estimate, exact.span.proxy
    rows = screen_pairs(examples, total, CONSTANTS.later_rows[m > 2] * d * d)
    span = fit_shape(rows, m, CONSTANTS.trusted_rows * d * d).span
    margins = large_margin_rows(examples, proxy, CONSTANTS.margin_rows * d)
    refined = refine_projection_sum(margins, np.zeros_like(total))
    net = chen_li.run(examples, m, start=exact.before(6), seed=seed).net
    return {
        "span sine from the exact sum": span_sine(span.basis, truth),
        "sum error from the exact proxy": relative(refined.estimate, total),
        "mse from the exact span": mean_squared(net.layer, fresh),
    }


def controls(
    examples: Examples, phases: chen_li.Phases, truth: mha.AttentionLayer, seed: int
) -> dict[str, float]:
    """The refined sum from a random matrix in place of the proxy, and by plain least squares."""
    total, d = truth.w.sum(axis=0), examples.d
    proxy = phases.bodies[0].proxy
    random = np.random.default_rng([seed, 77]).normal(size=proxy.shape)
    random *= np.linalg.norm(proxy) / np.linalg.norm(random)
    found = {}
    for name, matrix in (("proxy", proxy), ("random", random)):
        rows = large_margin_rows(examples, matrix, CONSTANTS.margin_rows * d)
        robust = refine_projection_sum(rows, phases.crude.estimate)
        plain = refine_projection_sum(rows, phases.crude.estimate, robust=False)
        found[f"sum error, {name}, robust"] = relative(robust.estimate, total)
        found[f"sum error, {name}, plain"] = relative(plain.estimate, total)
        found[f"inliers, {name}"] = robust.inliers
    return found


def without_phases(examples: Examples, n_heads: int, seed: int, fresh: Examples) -> float:
    """The exact solver from random starts on 400 examples: what proves nothing about the phases.

    It is Levenberg-Marquardt with W eliminated, a ridge annealed away and restarts.
    """
    found = newton.learn_newton(
        examples.subset(slice(0, 400)), examples.architecture(n_heads), Run(seed=seed)
    )
    return mean_squared(found.layer, fresh)


def run(line: int, seed: int, more: int | None) -> dict[str, object]:
    m, d, k, scale, n, inputs, *_ = LINES[line]
    n = more or n
    truth = mha.random_layer(n_heads=m, d=d, scale=scale, seed=1000 + seed)
    examples = Examples.from_callable(truth, inputs, n=n, k=k, d=d, seed=2000 + seed)
    fresh = Examples.from_callable(truth, inputs, n=10_000, k=k, d=d, seed=3000 + seed)
    record: dict[str, object] = {"line": line, "seed": seed, "shape": [m, d, k], "scale": scale}
    record |= {"examples": n, "inputs": inputs, "machine": machine(), "commit": describe_code()}
    trace = Run(seed=seed)
    try:
        phases = chen_li.run_phases(examples, m, trace, chen_li.PRACTICAL, CONSTANTS)
    except chen_li.Breakdown as breakdown:
        return record | {"failure": str(breakdown), "seconds": trace.seconds}
    total = truth.w.sum(axis=0)
    estimates = [phases.crude.estimate, *(refined.estimate for refined in phases.sums)]
    record |= {
        "seconds": trace.seconds,
        "mse": mean_squared(phases.net.layer, fresh),
        "crude_sum_error": relative(phases.crude.estimate, total),
        "sum_error": relative(phases.sums[-1].estimate, total),
        "span_sine": span_sine(phases.span.basis, truth),
        "parameter_error": mha.compare(phases.net.layer, truth).max_error,
        "span_by_queries_angle": dict(phases.span.angles).get("linear optimisation"),
        "head_count_from_widths": phases.bodies[-1].guess_heads(6),
        "certification": [
            certification_quality(rows, estimate, truth, examples.subset(slice(0, RECALLED)))
            for rows, estimate in zip(phases.rows, estimates, strict=True)
        ],
        "phase_seconds": {e.stage: e.seconds for e in trace.events if "of" not in e.data},
    }
    began = time.monotonic()
    part = examples.subset(slice(0, 4000))
    problem = make_problem(part, Dense(part.architecture(m)))
    polished = polish(phases.net.layer, problem, Run()).layer
    record |= {"polished_mse": mean_squared(polished, fresh)}
    record |= {"polish_seconds": time.monotonic() - began}
    if seed < CONTROLLED:
        record |= {"controls": controls(examples, phases, truth, seed)}
        record |= {"mse_without_phases": without_phases(examples, m, seed, fresh)}
    if seed == 0:
        record |= {"from_exact_inputs": from_exact_inputs(examples, truth, seed, fresh)}
    return record


def measure_missing(path: Path, cases: list[dict], measure: Callable[[dict], dict]) -> list[dict]:
    """All records of a file, after those of these cases that it lacks were added, one by one."""
    records = json.loads(path.read_text()) if path.exists() else []
    for case in cases:
        if not any(case.items() <= record.items() for record in records):
            records.append(measure(case))
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(records, indent=1) + "\n")
            print(json.dumps({k: v for k, v in records[-1].items() if k != "machine"}), flush=True)
    return records


def machine() -> dict[str, object]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": platform.machine(),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
    }


def good(record: dict[str, object]) -> bool:
    *_, mse, sine, total, _, minutes = LINES[record["line"]]
    if "failure" in record:
        return False
    bars = [("mse", mse), ("span_sine", sine), ("sum_error", total), ("seconds", 60 * minutes)]
    met = all(record[name] <= bar for name, bar in bars if bar is not None)
    return met and record["polished_mse"] < 1e-20


def table(records: list[dict[str, object]]) -> None:
    print(
        f"{'m,d,k':>8} {'s':>3} {'N':>8} {'inputs':>8} | good | {'mse':>8} {'sine':>6} "
        f"{'sum':>8} {'sec':>5} {'polished':>9} | random-proxy / plain sum | solver only"
    )
    for number, (m, d, k, scale, n, inputs, *bars) in enumerate(LINES):
        mine = [record for record in records if record["line"] == number]
        done = [record for record in mine if "failure" not in record]
        if not mine:
            continue

        def middle(name: str, done: list = done) -> float:
            found = [record[name] for record in done if name in record]
            return float(np.median(found)) if found else float("nan")

        def control(name: str, done: list = done) -> float:
            found = [record["controls"][name] for record in done if "controls" in record]
            return float(np.median(found)) if found else float("nan")

        needed = "" if bars[3] is None else f"(bar {bars[3]})"
        print(
            f"{f'{m},{d},{k}':>8} {scale:>3g} {n:>8.0e} {inputs:>8} | "
            f"{sum(map(good, mine))}/{len(mine)} {needed} | {middle('mse'):8.1e} "
            f"{middle('span_sine'):6.3f} {middle('sum_error'):8.1e} {middle('seconds'):5.0f} "
            f"{middle('polished_mse'):9.0e} | {control('sum error, random, robust'):.2g} / "
            f"{control('sum error, proxy, plain'):.2g} | {middle('mse_without_phases'):.0e}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--line", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--examples", type=int, help="other than the line's; name other results")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--results", type=Path, default=FILE)
    options = parser.parse_args()
    lines = range(len(LINES)) if options.line is None else [options.line]
    seeds = SEEDS if options.seed is None else [options.seed]
    cases = [{"line": line, "seed": seed} for line in lines for seed in seeds]
    table(
        measure_missing(
            options.results,
            [] if options.table else cases,
            lambda case: run(**case, more=options.examples),
        )
    )


if __name__ == "__main__":
    main()
