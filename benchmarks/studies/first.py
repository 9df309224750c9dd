"""The first benchmark: exact recovery, a cold start, and speed against what people use instead.

    python benchmarks/studies/first.py [--part recovery|cold|warm|speed|all] [--quick] [--fresh]
        [--seeds A:B]

Every run is appended to benchmarks/results/first.json (first-quick.json with --quick) as soon as it
ends, failures included; a run that is there already, from the same kind of machine, is not made
again. --fresh starts a new file.

The speed part compares, on the same examples and in the same process, the time to a relative
training error (squared) of 1e-20, in float64; race.py says how it is taken. Clocks start when a
method is given the examples; what mhalearn's solver does after its arrival, the choice on held-out
examples, is in the JSON. Peers are tuned: Adam by nine settings, L-BFGS by three implementations,
optimistix by two linear solvers, SciPy's least squares by two methods with the exact structured
Jacobian, and by the better number of BLAS threads.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

from rich.table import Table

import mhalearn as mha
from benchmarks import RESULTS
from benchmarks.cases import Case, case_at
from benchmarks.ledger import Ledger, Record, console, finite, say_bar, seed_range
from benchmarks.peers.peers import methods
from benchmarks.peers.race import print_race, race

# Recovery: ten fresh teachers a case, every parameter to 1e-10


RECOVERY = [Case(3, 16, 8, 200, 2.0), Case(3, 16, 8, 200, 6.0)]
RECOVERY += [Case(6, 8, 4, 200, 2.0), Case(6, 8, 4, 200, 6.0)]


def recovery(ledger: Ledger, quick: bool) -> None:
    seeds = range(1000, 1002 if quick else 1010)
    table = Table(title="Recovery: AttentionRegressor(method='newton')")
    for name in ("case", "recovered", "max error <= 1e-10", "worst error", "median s", "first s"):
        table.add_column(name)
    bars = []
    for case in RECOVERY:
        rows = [
            ledger.run(
                {"part": "recovery", "case": str(case), "seed": seed}, partial(recover, case, seed)
            )
            for seed in seeds
        ]
        errors = [math.inf if row.get("max_error") is None else row["max_error"] for row in rows]
        recovered = sum(row.get("outcome") == "RECOVERED" for row in rows)
        exact = sum(error <= 1e-10 for error in errors)
        seconds = [row["seconds"] for row in rows if "seconds" in row]
        table.add_row(
            str(case),
            f"{recovered}/{len(rows)}",
            f"{exact}/{len(rows)}",
            f"{max(errors):.1e}",
            f"{statistics.median(seconds):.2f}" if seconds else "-",
            f"{seconds[0]:.2f}" if seconds else "-",
        )
        bars.append((f"{case}: all recovered to 1e-10", recovered == exact == len(rows)))
    console.print(table)
    for bar in bars:
        say_bar(*bar)


def recover(case: Case, seed: int) -> Record:
    layer, x, y = case.draw(seed)
    began = time.perf_counter()
    learner = mha.AttentionRegressor(n_heads=case.m, method="newton", random_state=seed).fit(x, y)
    seconds = time.perf_counter() - began
    error = mha.compare(learner.layer_, layer).max_error
    return {
        "outcome": learner.outcome_.name,
        "max_error": finite(error),
        "seconds": seconds,
        "rounds": sorted({e.stage for e in learner.trace_ if e.stage.startswith("round")}),
    }


# Cold start: a new process, imports and compilation included


# And how many seconds the first and the second fit may take.
COLD = [(Case(3, 16, 8, 200, 2.0), 15.0, 1.0), (case_at(10, (2, 8, 8)), 3.0, 1.0)]


def cold(ledger: Ledger, seeds: range) -> None:
    for case, first, second in COLD:
        cold_case(ledger, "cold", seeds, case, first, second)


def warm(ledger: Ledger, seeds: range) -> None:
    """The same where the compilation cache, which the commands use, holds what an earlier process
    compiled."""
    for case, first, second in COLD[1:]:
        cold_case(ledger, "warm", seeds, case, first, second)


def cold_case(
    ledger: Ledger, part: str, seeds: range, case: Case, first: float, second: float
) -> None:
    start = start_cold if part == "cold" else start_warm
    rows = [
        ledger.run({"part": part, "case": str(case), "seed": seed}, partial(start, case, seed))
        for seed in seeds
    ]
    cache = "no compilation cache" if part == "cold" else "a compilation cache that is filled"
    table = Table(title=f"A new process: {case}, {cache}")
    for name in (
        "seed",
        "first fit, process start included",
        "second fit, another layer",
        "errors",
    ):
        table.add_column(name)
    for row in rows:
        if "crashed" in row:
            table.add_row(str(row["seed"]), row["crashed"], "-", "-")
            continue
        errors = ", ".join(f"{error:.1e}" for error in row["max_errors"])
        table.add_row(
            str(row["seed"]), f"{row['first_seconds']:.2f}", f"{row['second_seconds']:.2f}", errors
        )
    console.print(table)
    fine = [row for row in rows if "crashed" not in row]
    for name, limit in (("first", first), ("second", second)):
        within = all(row[f"{name}_seconds"] <= limit for row in fine) and rows == fine
        say_bar(f"{part}: {name} fit within {limit:g} s", within)


_COLD_CHILD = """
import json, sys, time
import mhalearn as mha

def fit(m, d, k, n, scale, seed):
    layer = mha.random_layer(n_heads=m, d=d, scale=scale, seed=seed)
    x = mha.sample_inputs("boolean", n, k, d, seed=seed)
    y = layer(x)
    began = time.perf_counter()
    learner = mha.AttentionRegressor(n_heads=m, method="newton", random_state=seed).fit(x, y)
    seconds = time.perf_counter() - began
    error = mha.compare(learner.layer_, layer).max_error
    print(json.dumps([seconds, error, time.process_time()]), flush=True)

*case, seed = json.loads(sys.argv[1])
fit(*case, seed)
fit(*case, seed + 500)
"""


def start_cold(case: Case, seed: int) -> Record:
    return in_new_process(
        case, seed, {"JAX_ENABLE_COMPILATION_CACHE": "false", "JAX_COMPILATION_CACHE_DIR": ""}
    )


def start_warm(case: Case, seed: int) -> Record:
    """The second process that has this cache; the first learned another layer."""
    with tempfile.TemporaryDirectory() as folder:
        on = {
            "JAX_ENABLE_COMPILATION_CACHE": "true",
            "JAX_COMPILATION_CACHE_DIR": folder,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        in_new_process(case, seed + 100, on)
        return in_new_process(case, seed, on)


def in_new_process(case: Case, seed: int, settings: dict[str, str]) -> Record:
    command = [sys.executable, "-c", _COLD_CHILD, json.dumps([*case, seed])]
    began = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | settings
    ) as child:
        assert child.stdout is not None
        first = child.stdout.readline()
        seconds = time.perf_counter() - began
        second = child.stdout.readline()
    (_, first_error, processor), (second_seconds, second_error, _) = map(
        json.loads, (first, second)
    )
    return {
        "first_seconds": seconds,
        "first_processor_seconds": processor,
        "second_seconds": second_seconds,
        "max_errors": [finite(first_error), finite(second_error)],
    }


# Speed: time to a training error of 1e-20


def speed(ledger: Ledger, quick: bool) -> None:
    shapes = [(2, 8, 8)] if quick else [(2, 8, 8), (4, 8, 8)]
    seeds = range(3000, 3001 if quick else 3005)
    for shape in shapes:
        case = case_at(10, shape)
        rows = race(ledger, {"part": "speed"}, case, methods(quick), seeds, 5)
        ratios = print_race(rows)
        say_bar(f"{case}: 3 x faster than scipy", ratios["scipy least_squares"] >= 3)
        say_bar(f"{case}: 3 x faster than optimistix", ratios["optimistix LM"] >= 3)
        others = "Adam", "Adam + ridge", "L-BFGS"
        slower = all(ratios[name] >= 1 for name in others)
        say_bar(f"{case}: no slower than Adam and L-BFGS", slower)


def main() -> None:
    parts = ["recovery", "cold", "warm", "speed"]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=[*parts, "all"], default="all")
    parser.add_argument(
        "--quick", action="store_true", help="few seeds and settings, one speed case"
    )
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--seeds", type=seed_range, help="of the new processes, start:stop")
    options = parser.parse_args()
    path = RESULTS / ("first-quick.json" if options.quick else "first.json")
    ledger = Ledger(path, fresh=options.fresh)
    console.print(ledger.machine)
    seeds = options.seeds or range(2000, 2001 if options.quick else 2003)
    work = recovery, lambda *_: cold(ledger, seeds), lambda *_: warm(ledger, seeds), speed
    for name, part in zip(parts, work, strict=True):
        if options.part in (name, "all"):
            part(ledger, options.quick)


if __name__ == "__main__":
    main()
