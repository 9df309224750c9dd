"""Seconds to an exact fit: the solver beside its peers, and how its time grows.

    python benchmarks/studies/speed.py
        [--part race|growth|lbfgs] [--cases 0,1] [--methods NAMES] [--seeds A:B]
        --merge PART.json ...  take over runs made elsewhere
        --table                print what the JSON holds

The race is run as race.py says, on large layers with ten times the counting limit of examples and
on small ones that trouble the peers. Each peer has the settings that did well in first.py; dense
least squares is left out where ten factors of its Jacobian would take longer than the limit, and
the record says so. `lbfgs` is the race beside L-BFGS of SciPy, optax and PyTorch alone, counted in
seconds of the process, which other work on the machine does not lengthen. Growth varies one of
heads, features, tokens and examples around (4,16,8) at ratio 10.
"""

import math
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

import numpy as np

from benchmarks.cases import Case, case_at
from benchmarks.ledger import Ledger, Record, console, opened, say_bar, study
from benchmarks.peers.peers import methods, tuned_adam
from benchmarks.peers.race import Entries, has_arrived, print_race, race, seconds_of

# Case, seconds a method has, and how many times faster than (Adam, L-BFGS) the solver must be.
RACES = [
    (case_at(10, (8, 16, 8)), 30.0, (3.0, 1.5)),
    (case_at(10, (4, 32, 8)), 30.0, (3.0, 1.5)),
    (case_at(10, (8, 32, 8)), 60.0, (3.0, 5.0)),
    (case_at(10, (4, 8, 4), 15.0), 10.0, (10.0, 10.0)),
    (case_at(2, (4, 8, 4), 2.0), 10.0, (10.0, 10.0)),
    (case_at(2, (4, 8, 4), 6.0), 30.0, (10.0, 10.0)),
    (case_at(10, (2, 8, 8)), 5.0, (1.0, 1.5)),
    (case_at(10, (4, 8, 8)), 5.0, (1.0, 1.5)),
]
# Beside L-BFGS alone: case, seconds, and how many times faster by seconds of the process.
SMALL = [
    (case_at(10, (2, 8, 8)), 20.0, 1.5),
    (case_at(10, (4, 8, 8)), 20.0, 1.5),
    (case_at(10, (8, 32, 8)), 120.0, 5.0),
]
GROWTH = {
    "heads": [case_at(10, (m, 16, 8)) for m in (1, 2, 4, 8, 16)],
    "features": [case_at(10, (4, d, 8)) for d in (8, 16, 24, 32, 48)],
    "tokens": [case_at(10, (4, 16, k))._replace(n=160) for k in (4, 8, 16, 32)],
    "examples": [case_at(ratio, (4, 16, 8)) for ratio in (5, 10, 20, 40, 80)],
}
LETTERS = {"heads": "m", "features": "d", "tokens": "k", "examples": "n"}
GROWTH_LIMIT = 120.0


def entries(case: Case) -> Entries:
    """Of each method the settings worth their time."""
    known = methods()
    small = case.m * case.d**2 <= 512
    rates = (0.03, 0.1) if small else (0.01, 0.03)
    known["Adam"] = {
        f"rate {r:g}, {s} steps": tuned_adam(r, s) for r in rates for s in (1000, 3000)
    }
    for name, kept in (("scipy least_squares", "lm, 1"), ("optimistix LM", "normal")):
        known[name] = {s: run for s, run in known[name].items() if s.startswith(kept)}
    return known


def run_races(ledger: Ledger, chosen: list[int], names: list[str], seeds: range) -> None:
    for place in chosen:
        case, limit, _ = RACES[place]
        runners = {name: run for name, run in entries(case).items() if name in names}
        race(ledger, {"part": "race"}, case, runners, seeds, limit)


def run_small(ledger: Ledger, chosen: list[int], seeds: range) -> None:
    for place in chosen:
        case, limit, _ = SMALL[place]
        runners = {name: methods()[name] for name in ("newton", "L-BFGS")}
        race(ledger, {"part": "lbfgs"}, case, runners, seeds, limit)


def small_medians(rows: list[Record]) -> dict[tuple[str, str], tuple[int, int, float, float]]:
    """By method and setting: runs that arrived, runs, and median seconds of process and clock."""
    found = {}
    for name, setting in dict.fromkeys((row["method"], row["setting"]) for row in rows):
        mine = [row for row in rows if (row["method"], row["setting"]) == (name, setting)]
        worked = statistics.median(row.get("worked") or row["limit"] for row in mine)
        clock = statistics.median(map(seconds_of, mine))
        found[name, setting] = (sum(map(has_arrived, mine)), len(mine), worked, clock)
    return found


def run_growth(ledger: Ledger, seeds: range) -> None:
    for along, cases in GROWTH.items():
        for case in cases:
            solver = {"newton": methods()["newton"]}
            race(ledger, {"part": "growth", "along": along}, case, solver, seeds, GROWTH_LIMIT)


def theory(case: Case) -> float:
    """Work of a conjugate-gradient step, n k m d (d + k + e), up to a constant."""
    return case.n * case.k * case.m * case.d * (2 * case.d + case.k)


def growth_medians(along: str, rows: list[Record]) -> dict[Case, float]:
    """Median seconds of the cases in which every run arrived."""
    medians = {}
    for case in GROWTH[along]:
        mine = [row for row in rows if (row["along"], row["case"]) == (along, str(case))]
        if mine and all(map(has_arrived, mine)):
            medians[case] = statistics.median(map(seconds_of, mine))
    return medians


def print_growth(rows: list[Record]) -> None:
    """Median seconds of each case, and their exponent beside that of the work of one step."""
    for along, name in LETTERS.items():
        medians = growth_medians(along, rows)
        if len(medians) < 2:
            continue
        steps = np.log([getattr(case, name) for case in medians])
        found = np.polyfit(steps, np.log(list(medians.values())), 1)[0]
        expected = np.polyfit(steps, np.log([theory(case) for case in medians]), 1)[0]
        times = ", ".join(f"{case} {seconds:.3f} s" for case, seconds in medians.items())
        console.print(
            f"{along}: time ~ {name}^{found:.2f}, one step {name}^{expected:.2f}; {times}"
        )


def table(rows: list[Record]) -> None:
    for case, _, (adam, lbfgs) in RACES:
        mine = [row for row in rows if row["part"] == "race" and row["case"] == str(case)]
        if not mine:
            continue
        ratios = print_race(mine)
        fast = min(ratios.get(name, math.inf) for name in ("Adam", "Adam + ridge"))
        say_bar(f"{case}: {adam:g} x faster than Adam ({fast:.2f})", fast >= adam)
        ratio = ratios.get("L-BFGS", math.inf)
        say_bar(f"{case}: {lbfgs:g} x faster than L-BFGS ({ratio:.2f})", ratio >= lbfgs)
    for case, _, times in SMALL:
        mine = [row for row in rows if row["part"] == "lbfgs" and row["case"] == str(case)]
        medians = small_medians(mine)
        for (name, setting), (arrived, of, worked, clock) in medians.items():
            console.print(
                f"{case}: {name} {setting}: {arrived}/{of}, {worked:.4f} s, {clock:.4f} s"
            )
        if medians:
            best = min(found[2] for (name, _), found in medians.items() if name == "L-BFGS")
            ratio = best / medians["newton", ""][2]
            say_bar(
                f"{case}: {times:g} x faster than L-BFGS by process ({ratio:.2f})", ratio >= times
            )
    print_growth([row for row in rows if row["part"] == "growth"])


def main() -> None:
    parser = study(__doc__, "speed", "3100:3103", ",".join(methods()))
    parser.add_argument("--part", choices=["race", "growth", "lbfgs"])
    parser.add_argument("--cases", help="numbers between commas")
    options = parser.parse_args()
    ledger, running = opened(options)
    parts = [options.part] if options.part else ["race", "growth", "lbfgs"]
    chosen = options.cases and list(map(int, options.cases.split(",")))
    if running and "race" in parts:
        run_races(ledger, chosen or list(range(len(RACES))), options.methods, options.seeds)
    if running and "lbfgs" in parts:
        run_small(ledger, chosen or list(range(len(SMALL))), options.seeds)
    if running and "growth" in parts:
        run_growth(ledger, options.seeds)
    table(ledger.records)


if __name__ == "__main__":
    main()
