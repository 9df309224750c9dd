"""The phases by their plans, before polish: literal, decode, controls, noise, other distributions.

    python benchmarks/phases.py decode               every line of the table, ten seeds each
    python benchmarks/phases.py literal noise ...    some of the studies
        --workers 8                                  cells side by side, which share the cores
        --lines 0 3 --seeds 2 --budget 500 --out F   fewer cells, or until so many seconds have gone

A cell that is in the JSON is not measured again. The truth is used here, and only here, to measure.
"""

import argparse
import json
import multiprocessing
import os
import queue
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # `benchmarks` is a package there

import numpy as np

import mhalearn as mha
from benchmarks import RESULTS, describe_code
from benchmarks.studies.phases import RECALLED, matched_rows
from mhalearn.learners import chen_li
from mhalearn.run.run import Run

FILE = RESULTS / "plans.json"
SCALE = 4.0
# Features above which the examples are drawn once and held: each pass would draw them again, which
# takes longer than what the phases do with them. (The clock starts after that.) Decoding, which is
# slow there, ends at an error two orders of magnitude below the bar.
WIDE = 32
DECODED = chen_li.Constants(decode_goal=1e-12)
Record = dict[str, Any]

# m, d, k, examples, then what must hold: relative squared error, seeds of how many.
DECODE = [
    (2, 16, 3, 20_000, 1e-10, 10, 10),
    (2, 24, 6, 100_000, 1e-10, 9, 10),
    (3, 16, 3, 100_000, 1e-10, 9, 10),
    (3, 16, 4, 200_000, 1e-10, 9, 10),
    (4, 16, 3, 500_000, 1e-9, 8, 10),
    (4, 24, 3, 2_000_000, 1e-10, 9, 10),
    (2, 128, 3, 300_000, 1e-10, 5, 5),
    (3, 64, 3, 500_000, 1e-10, 5, 5),
    (5, 24, 3, 5_000_000, 1e-10, 3, 3),
    (6, 24, 3, 20_000_000, 1e-10, 1, 1),
]
# m, d, k, examples, seeds. The last two are where it does not work.
LITERAL = [
    (2, 16, 3, 200_000, 10),
    (2, 24, 3, 1_000_000, 10),
    (3, 16, 3, 1_000_000, 10),
    (2, 8, 3, 40_000, 3),
    (4, 16, 3, 1_000_000, 3),
]
NOISE = [
    (2, 16, 3, 100_000, 0.03),
    (2, 16, 3, 100_000, 0.1),
    (3, 16, 3, 400_000, 0.03),
    (3, 16, 3, 400_000, 0.1),
]
CONTROLS = [(2, 16, 3), (3, 16, 3), (4, 16, 3)]
RANDOM_SPANS = [(2, 16, 3, 12_000), (4, 16, 3, 12_000), (5, 24, 3, 30_000), (6, 24, 3, 30_000)]
STARTS = (0.3, 0.6, 1.0, None)  # distance of Theta from the truth; None: a random start
DISTRIBUTIONS = (
    "uniform on an interval",
    "bits with bias .6",
    "bits with bias .75",
    "Laplace",
    "anisotropic Gaussian",
    "sphere",
    "vocabulary of 64",
    "vocabulary of 512",
    "trained embeddings",
    "Markov bits .7",
    "Markov bits .9",
)


def relative(estimate: np.ndarray, truth: np.ndarray) -> float:
    return float(np.linalg.norm(estimate - truth) / np.linalg.norm(truth))


def mean_squared(layer: mha.AttentionLayer, fresh: mha.Examples) -> float:
    x, y, _ = fresh.arrays()
    return float(np.sum((layer(x) - y) ** 2) / np.sum(y**2))


def heads_agree(rows: Any, theta: np.ndarray) -> float:
    """Precision: the share of constraints whose log-odds every head has, to within one."""
    logits = np.einsum("cd,mde,ce->cm", rows.query, theta, rows.difference)
    return float(np.mean(np.max(np.abs(logits - rows.log_odds[:, None]), axis=1) < 1.0))


def share_kept(rows: Any, matched: set[tuple[int, int]]) -> float | None:
    """Recall: of the rows on which the heads agree, the share that the body is made of."""
    kept = set(zip(rows.example.tolist(), rows.row.tolist(), strict=True))
    return len(kept & matched) / len(matched) if matched else None


def measure(
    phases: chen_li.Phases, truth: mha.AttentionLayer, examples: mha.Examples, fresh: mha.Examples
) -> Record:
    """What the phases found, beside the truth in the same coordinates."""
    seen = truth
    if phases.whitening is not None:
        seen = chen_li.to_whitened(truth, phases.whitening)
    total = seen.w.sum(axis=0)
    part = examples.subset(slice(0, RECALLED))
    example, row, *_ = matched_rows(truth, part)
    matched = set(zip(example.tolist(), row.tolist(), strict=True))
    record: Record = {
        "candidates": {one.name: relative(one.estimate, total) for one in phases.crude.candidates},
        "crude_sum_error": relative(phases.crude.estimate, total),
        "sum_errors": [relative(one.estimate, total) for one in phases.sums],
        "rows": [len(rows) for rows in phases.rows],
        "precision": [heads_agree(rows, seen.theta) for rows in phases.rows],
        "matched": len(matched) / part.n / part.k,
        "recall": [share_kept(rows, matched) for rows in phases.rows],
        "span_sine": chen_li.span_angle(phases.span, chen_li.exact_span(seen.theta)),
        "span_angles": dict(phases.span.angles),
        "span_queries": phases.span.queries,
        "net_mse": mean_squared(phases.net.layer, fresh),
        "mse": mean_squared(phases.layer, fresh),
        "parameter_error": mha.compare(phases.layer, truth).max_error,
    }
    bodies = [body for body in phases.bodies if isinstance(body, chen_li.ConvexBody)]
    if bodies:
        found = [[body.membership(theta) for theta in seen.theta] for body in bodies]
        record["heads_inside"] = [float(np.mean([one.inside for one in each])) for each in found]
        record["heads_outside_by"] = [max(one.violation for one in each) for each in found]
        record["rows_violated"] = [max(one.violated for one in each) for each in found]
    if (stated := phases.net.generalisation) is not None:
        record["generalisation"] = vars(stated)
    if phases.decoded is not None:
        record["decode_errors"] = phases.decoded.errors.tolist()
    return record


def run_plan(
    plan: str,
    shape: tuple[int, int, int],
    n: int,
    seed: int,
    inputs: Any = "boolean",
    noise: float = 0.0,
) -> Record:
    m, d, k = shape
    truth = mha.random_layer(n_heads=m, d=d, scale=SCALE, seed=1000 + seed)
    examples = mha.Examples.from_callable(
        truth, inputs, n=n, k=k, d=d, seed=2000 + seed, noise=noise
    )
    fresh = mha.Examples.from_callable(truth, inputs, n=5_000, k=k, d=d, seed=3000 + seed)
    if d > WIDE:
        x, y, _ = examples.arrays()
        examples = mha.Examples(x, y)
    run = Run(seed=seed)
    try:
        constants = DECODED if d > WIDE else chen_li.Constants()
        phases = chen_li.run_phases(examples, m, run, plan, constants)
    except chen_li.Breakdown as breakdown:
        return {"broke": breakdown.phase, "why": str(breakdown), "seconds": run.seconds}
    seconds = {event.stage: event.seconds for event in run.events if "of" not in event.data}
    return {"seconds": run.seconds, "stages": seconds} | measure(phases, truth, examples, fresh)


def decode(line: int, seed: int) -> Record:
    m, d, k, n, *_ = DECODE[line]
    return run_plan("decode", (m, d, k), n, seed)


def literal(line: int, seed: int) -> Record:
    m, d, k, n, _ = LITERAL[line]
    return run_plan("literal", (m, d, k), n, seed)


def noise(line: int, seed: int) -> Record:
    m, d, k, n, level = NOISE[line]
    return run_plan("decode", (m, d, k), n, seed, noise=level)


def controls(line: int, seed: int) -> Record:
    """Decoding from the truth perturbed, and from random starts: does it need the phases?"""
    m, d, k = CONTROLS[line]
    truth = mha.random_layer(n_heads=m, d=d, scale=SCALE, seed=1000 + seed)
    examples = mha.Examples.from_callable(truth, "boolean", n=12_000, k=k, d=d, seed=2000 + seed)
    fresh = mha.Examples.from_callable(truth, "boolean", n=5_000, k=k, d=d, seed=3000 + seed)
    rng = np.random.default_rng([seed, 5])
    record: Record = {}
    for distance in STARTS:
        step = rng.normal(size=truth.theta.shape)
        step *= SCALE / np.linalg.norm(step, axis=(1, 2), keepdims=True)
        theta = step if distance is None else truth.theta + distance * step
        known = chen_li.exact(truth.replace(theta=theta, w=_least_squares(theta, examples)))
        phases = chen_li.run(examples, m, "decode", known.before(7))
        name = "random" if distance is None else f"{distance:g}"
        record[name] = mean_squared(phases.layer, fresh)
    return record


def random_span(line: int, seed: int) -> Record:
    """Phase 6 and decoding in a span of random matrices: does it need the span of phase 5?"""
    m, d, k, n = RANDOM_SPANS[line]
    truth = mha.random_layer(n_heads=m, d=d, scale=SCALE, seed=1000 + seed)
    examples = mha.Examples.from_callable(truth, "boolean", n=n, k=k, d=d, seed=2000 + seed)
    fresh = mha.Examples.from_callable(truth, "boolean", n=5_000, k=k, d=d, seed=3000 + seed)
    known = chen_li.exact(truth).before(6)
    drawn = np.random.default_rng([seed, 6]).normal(size=(d * d, m))
    basis = np.linalg.qr(drawn)[0].T.reshape(m, d, d)
    span = chen_li.Span(basis[0] * np.linalg.norm(known.span.proxy), basis[1:])
    phases = chen_li.run(examples, m, "decode", replace(known, span=span))
    return {
        "net_mse": mean_squared(phases.net.layer, fresh),
        "mse": mean_squared(phases.layer, fresh),
    }


def _least_squares(theta: np.ndarray, examples: mha.Examples) -> np.ndarray:
    x, y, _ = examples.subset(slice(0, 4000)).arrays()
    x = x.astype(float)
    logits = np.einsum("nrd,mde,nje->nrmj", x, theta, x, optimize=True)
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    means = np.einsum("nrmj,njd->nrmd", p, x).reshape(len(x) * x.shape[1], -1)
    w = np.linalg.lstsq(means, y.reshape(len(means), -1), rcond=None)[0]
    return w.reshape(len(theta), x.shape[2], -1)


def sampler(name: str, d: int) -> Callable[[int, int, int, np.random.Generator], np.ndarray]:
    """Tokens of each distribution, of about unit variance where it has no own."""

    def draw(n: int, k: int, d: int, rng: np.random.Generator) -> np.ndarray:
        if name == "uniform on an interval":
            return rng.uniform(-np.sqrt(3), np.sqrt(3), size=(n, k, d))
        if name.startswith("bits with bias"):
            return np.where(rng.random((n, k, d)) < float(name.split()[-1]), 1.0, -1.0)
        if name == "Laplace":
            return rng.laplace(scale=np.sqrt(0.5), size=(n, k, d))
        if name == "anisotropic Gaussian":
            return rng.normal(size=(n, k, d)) * np.sqrt(np.linspace(0.25, 2.25, d))
        if name == "sphere":
            x = rng.normal(size=(n, k, d))
            return np.sqrt(d) * x / np.linalg.norm(x, axis=-1, keepdims=True)
        if name.startswith("vocabulary"):
            size = int(name.split()[-1])
            table = np.random.default_rng([size, d]).normal(size=(size, d))
            return table[rng.integers(size, size=(n, k))]
        if name == "trained embeddings":
            table = trained_table(d)
            return table[rng.integers(len(table), size=(n, k))]
        stay = float(name.split()[-1])  # Markov bits: each token keeps a bit with this probability
        first = rng.choice([-1.0, 1.0], size=(n, 1, d))
        kept = np.where(rng.random((n, k - 1, d)) < stay, 1.0, -1.0)
        return np.cumprod(np.concatenate([first, kept], axis=1), axis=1)

    return draw


def trained_table(d: int) -> np.ndarray:
    """Rows of a trained model's token embeddings, centred and projected to d random directions."""
    from benchmarks.studies.real import embedding_table

    table = embedding_table()
    rng = np.random.default_rng(d)
    basis = np.linalg.qr(rng.normal(size=(table.shape[1], d)))[0]
    found = (table - table.mean(axis=0)) @ basis
    return found / found.std()


def distributions(line: int, seed: int) -> Record:
    name = DISTRIBUTIONS[line]
    m, d, k, n = (2, 24, 3, 100_000) if name == "trained embeddings" else (2, 16, 3, 40_000)
    return run_plan("decode", (m, d, k), n, seed, inputs=sampler(name, d))


STUDIES: dict[str, tuple[Callable[[int, int], Record], list[Any], Callable[[int], int]]] = {
    "decode": (decode, DECODE, lambda line: DECODE[line][-1]),
    "literal": (literal, LITERAL, lambda line: LITERAL[line][-1]),
    "noise": (noise, NOISE, lambda line: 10),
    "controls": (controls, CONTROLS, lambda line: 10),
    "random_span": (random_span, RANDOM_SPANS, lambda line: 3),
    "distributions": (distributions, list(DISTRIBUTIONS), lambda line: 10),
}


def measure_cell(cell: tuple[str, int, int], cores: list[int] | None) -> Record:
    if cores:
        os.sched_setaffinity(0, cores)
    study, line, seed = cell
    began, computed = time.monotonic(), time.process_time()
    try:
        found = STUDIES[study][0](line, seed)
    except Exception as error:
        traceback.print_exc()
        found = {"broke": "error", "why": f"{type(error).__name__}: {error}"[:300]}
    told = {"study": study, "line": line, "seed": seed, "what": STUDIES[study][1][line]}
    seconds = {"cell_seconds": time.monotonic() - began}
    return told | found | seconds | {"computing_seconds": time.process_time() - computed}


def _work(cells: Any, results: Any, cores: list[int] | None, deadline: float) -> None:
    parent = multiprocessing.parent_process()
    while time.monotonic() < deadline and (parent is None or parent.is_alive()):
        cell = cells.get()
        if cell is None:
            return
        results.put(measure_cell(cell, cores))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("studies", nargs="*", choices=[*STUDIES, []], default=[])
    parser.add_argument("--lines", type=int, nargs="*")
    parser.add_argument("--seeds", type=int, help="at most so many seeds a line")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--budget", type=float, default=1e9, help="seconds")
    parser.add_argument("--out", type=Path, default=FILE)
    options = parser.parse_args()
    deadline = time.monotonic() + options.budget
    records = json.loads(options.out.read_text()) if options.out.exists() else []
    done = {(one["study"], one["line"], one["seed"]) for one in records}
    cells = [
        (study, line, seed)
        for study in options.studies or STUDIES
        for line in range(len(STUDIES[study][1]))
        if options.lines is None or line in options.lines
        for seed in range(min(options.seeds or 99, STUDIES[study][2](line)))
        if (study, line, seed) not in done
    ]
    method = multiprocessing.get_context("spawn")
    waiting, results = method.Queue(), method.Queue()
    for cell in [*cells, *[None] * options.workers]:
        waiting.put(cell)
    every = sorted(os.sched_getaffinity(0))
    workers = []
    for number in range(options.workers):
        cores = every[number :: options.workers] if options.workers > 1 else None
        workers.append(
            method.Process(target=_work, args=(waiting, results, cores, deadline), daemon=True)
        )
        workers[-1].start()
    code, left = describe_code(), len(cells)
    while left and time.monotonic() < deadline and any(one.is_alive() for one in workers):
        try:
            record = results.get(timeout=5)
        except queue.Empty:
            continue
        left -= 1
        records.append(record | {"commit": code, "cores": len(every) // options.workers})
        records.sort(key=lambda one: (one["study"], one["line"], one["seed"]))
        options.out.parent.mkdir(exist_ok=True)
        options.out.write_text(json.dumps(records, indent=1) + "\n")
        said = {k: record.get(k) for k in ("study", "line", "seed", "mse", "net_mse", "broke")}
        print(json.dumps(said), f"{record['cell_seconds']:.0f}s", flush=True)


if __name__ == "__main__":
    main()
