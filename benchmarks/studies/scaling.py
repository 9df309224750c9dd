"""Scaling laws of the six phases as they are run: error and time.

    python benchmarks/studies/scaling.py  all measurements, appended to the JSON one by one
        --number 17                       one of them
        --table                           fitted exponents of what the JSON holds
        --draw                            docs/images/scaling.svg

How often rows are lucky is measured by frequency.py, in d, k, m and the tolerance separately.
Error: a run keeps a fixed number of rows, so with a frequency of t^a the tolerance falls as
N^(-1/a), the angle of the span with it, and the squared error with its square: N^(-2/a), a as
measured. That is an argument, not a theorem, and it holds for two heads only: see `decay`. The
theorem says error (kd)^-Omega(m) from N = (kd)^Theta(m), and nothing of how error falls with N.
Time: passes are linear in N, programmes have d^2 unknowns. The theorem's time is that of another
algorithm, whose net has (kd)^O(m^3) points, and is not compared with.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

import numpy as np
from matplotlib.ticker import NullFormatter, ScalarFormatter

import mhalearn as mha
from benchmarks import RESULTS
from benchmarks.pages.picture import picture
from benchmarks.studies import frequency
from benchmarks.studies.phases import machine, mean_squared, measure_missing, span_sine
from mhalearn.data import Examples
from mhalearn.learners import chen_li
from mhalearn.run.run import Run

FILE = RESULTS / "scaling.json"
SCALE = 4.0


def runs() -> list[dict]:
    """Whole runs: error and time against N for two head counts, time against d and m."""
    cases = [(2, 16, n) for n in (20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000)]
    cases += [(3, 16, n) for n in (200_000, 500_000, 1_000_000, 2_000_000)]
    cases += [(2, d, 200_000) for d in (8, 12, 20, 24)] + [(1, 16, 1_000_000), (4, 16, 1_000_000)]
    return [
        {"kind": "run", "m": m, "d": d, "k": 3, "n": n, "seed": seed}
        for m, d, n in cases
        for seed in range(3)
    ]


def measure(case: dict) -> dict:
    m, d, k, n, seed = case["m"], case["d"], case["k"], case["n"], case.get("seed", 0)
    truth = mha.random_layer(n_heads=m, d=d, scale=SCALE, seed=5000 + seed)
    examples = Examples.from_callable(truth, "boolean", n=n, k=k, d=d, seed=6000 + seed)
    record = case | {"machine": machine()}
    trace = Run(seed=seed)
    try:
        phases = chen_li.run_phases(examples, m, trace)
    except chen_li.Breakdown as breakdown:
        return record | {"failure": f"{breakdown.phase}: {breakdown}", "seconds": trace.seconds}
    fresh = Examples.from_callable(truth, "boolean", n=10_000, k=k, d=d, seed=7000 + seed)
    return record | {
        "seconds": trace.seconds,
        "mse": mean_squared(phases.net.layer, fresh),
        "span_sine": span_sine(phases.span.basis, truth),
    }


def slope(x: list[float], y: list[float]) -> float:
    """The exponent of a power law through the points, by least squares on logarithms."""
    points = [(a, b) for a, b in zip(x, y, strict=True) if b > 0]
    if len(points) < 2:
        return float("nan")
    return float(np.polyfit(*np.log(np.array(points)).T, 1)[0])


def medians(records: list[dict], name: str, value: str, **fixed: int) -> tuple[list, list]:
    """`value` against `name` over the successful runs with some parameters fixed.

    Medians over seeds; of times the least, since other work on the machine only adds to them.
    """
    chosen = [
        r
        for r in records
        if r["kind"] == "run"
        and "failure" not in r
        and all(r[key] == number for key, number in fixed.items())
    ]
    places = sorted({r[name] for r in chosen})
    middle = min if value == "seconds" else np.median
    return places, [float(middle([r[value] for r in chosen if r[name] == p])) for p in places]


def decay(records: list[dict], m: int) -> tuple[float, float]:
    """The exponent of the squared error in N, and -2/a, which the argument above gives for it."""
    shares = json.loads(frequency.FILE.read_text())
    fitted = frequency.Line(shares, "tolerance", m=m, d=16, k=3).slope()[0]
    return slope(*medians(records, "n", "mse", m=m, d=16)), -2 / fitted


def laws(records: list[dict]) -> list[tuple[str, float, str]]:
    """Every law: what, the fitted exponent, what is expected."""
    found = []
    for m in (2, 3):
        fitted, expected = decay(records, m)
        said = f"-2/a = {expected:.2f}, by an argument"
        if abs(fitted / expected - 1) > 0.25:
            said += f" that is wrong here by a factor of {fitted / expected:.1f}"
        found.append((f"squared error against N, m = {m}", fitted, said))
        n, seconds = medians(records, "n", "seconds", m=m, d=16)
        found.append((f"time against N, m = {m}", slope(n, seconds), "at most 1"))
    d, seconds = medians(records, "d", "seconds", m=2, n=200_000)
    found.append(
        ("time against d, m = 2", slope(d, seconds), "at most 6, from d^2 x d^2 programmes")
    )
    return found


def draw(records: list[dict]) -> None:
    with picture("scaling.svg", 8.4, 3.4) as figure:
        error, clock = figure.subplots(1, 2)
        colours = {1: "#777777", 2: "#1b6ca8", 3: "#e07b39", 4: "#5a9e4b"}
        for m in (2, 3):
            n, mse = medians(records, "n", "mse", m=m, d=16)
            label = f"m = {m}: {slope(n, mse):.2f}"
            error.loglog(n, mse, "o-", color=colours[m], label=label)
            each = [
                (r["n"], r["mse"]) for r in records if "mse" in r and (r["m"], r["d"]) == (m, 16)
            ]
            error.loglog(*zip(*each, strict=True), ".", color=colours[m], alpha=0.4)
        error.set_xlabel("examples N")
        error.set_title("Relative squared error before polish", loc="left", fontsize=10)
        for m in (1, 2, 3, 4):
            n, seconds = medians(records, "n", "seconds", m=m, d=16)
            law = f": {slope(n, seconds):.2f}" if len(n) > 1 else ""
            clock.loglog(n, seconds, "o-", color=colours[m], label=f"m = {m}{law}")
        clock.set_xlabel("examples N")
        clock.set_title("Seconds, two cores, d = 16", loc="left", fontsize=10)
        style = {"frameon": False, "fontsize": 7, "title": "fitted exponent", "title_fontsize": 7}
        for axes in (error, clock):
            axes.legend(**style)
        clock.yaxis.set_major_formatter(ScalarFormatter())
        clock.yaxis.set_minor_formatter(NullFormatter())
        clock.set_yticks([10, 20, 40])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--results", type=Path, default=FILE)
    options = parser.parse_args()
    cases = runs()
    if options.number is not None:
        cases = [cases[options.number]]
    if options.table or options.draw:
        cases = []
    records = measure_missing(options.results, cases, measure)
    for name, fitted, expected in laws(records):
        print(f"{name:48} {fitted:6.2f}   expected: {expected}")
    if options.draw:
        draw(records)


if __name__ == "__main__":
    main()
