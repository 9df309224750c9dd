"""Scaling laws of the six phases: certified rows, error and time, against what theory expects.

    python benchmarks/studies/scaling.py  all measurements, appended to the JSON one by one
        --number 17                       one of them
        --table                           fitted exponents of what the JSON holds
        --draw                            docs/images/scaling.svg

Frequency: with the exact sum of projections (the truth is used for that here), the share of rows
whose best pair has a score below a tolerance t and on which all heads do agree. That m heads agree
on one log-odds to within t has a probability of order t^(m - 1); that no other token has weight
above t makes it smaller still: an exponent of at least m - 1.
Error: a run keeps a fixed number of rows, so with frequency t^a the tolerance falls as N^(-1/a),
the angle of the span with it, and the squared error with its square: N^(-2/a), a as measured.
These are arguments, not theorems; the theorem says error (kd)^-Omega(m) from N = (kd)^Theta(m).
Time: passes are linear in N. The theorem's time is (kd)^O(m^3), for its net.
"""

import argparse
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

import numpy as np
from matplotlib.ticker import NullFormatter, ScalarFormatter

import mhalearn as mha
from benchmarks import RESULTS
from benchmarks.pages.picture import picture
from benchmarks.studies.phases import machine, mean_squared, measure_missing, span_sine
from mhalearn.data import Examples
from mhalearn.learners import chen_li
from mhalearn.learners.chen_li.phase2_certification import screen_pairs
from mhalearn.run.run import Run

FILE = RESULTS / "scaling.json"
TOLERANCES = np.geomspace(0.05, 0.4, 7)
SCALE = 4.0


def frequencies() -> list[dict]:
    """What is measured: shapes with m (k - 1) at most the output width."""
    shapes = [(m, k) for m, k in itertools.product((2, 3, 4), (3, 4, 6)) if m * (k - 1) <= 16]
    return [
        {"kind": "frequency", "m": m, "k": k, "d": 16, "n": 4_000_000 if m == 4 else 1_000_000}
        for m, k in shapes
    ]


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
    if case["kind"] == "frequency":
        return record | {"frequencies": measure_frequency(truth, examples)}
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


def measure_frequency(truth: mha.AttentionLayer, examples: Examples) -> list[float]:
    found = screen_pairs(examples, truth.w.sum(axis=0), 200_000)
    logits = np.einsum("cd,mde,ce->cm", found.query, truth.theta, found.difference)
    agree = np.max(np.abs(logits - found.log_odds[:, None]), axis=1) < 1.0
    rows = examples.n * examples.k
    return [float(np.sum(agree & (found.score <= t)) / rows) for t in TOLERANCES]


def slope(x: list[float], y: list[float]) -> float:
    """The exponent of a power law through the points, by least squares on logarithms."""
    points = [(a, b) for a, b in zip(x, y, strict=True) if b > 0]
    if len(points) < 2:
        return float("nan")
    return float(np.polyfit(*np.log(np.array(points)).T, 1)[0])


def exponent(record: dict) -> float:
    """Of the frequency against the tolerance, where at least ten rows were found."""
    enough = 10 / (record["n"] * record["k"])
    points = zip(TOLERANCES, record["frequencies"], strict=True)
    return slope(*map(list, zip(*[(t, f) for t, f in points if f >= enough], strict=True)))


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


def expected_decay(records: list[dict], m: int) -> float:
    """-2/a with a the measured exponent of the frequency against the tolerance at k = 3."""
    shares = [r for r in records if r["kind"] == "frequency" and (r["m"], r["k"]) == (m, 3)]
    return -2 / exponent(shares[0]) if shares else float("nan")


def laws(records: list[dict]) -> list[tuple[str, float, str]]:
    """Every law: what, the fitted exponent, what is expected."""
    found = []
    shares = [r for r in records if r["kind"] == "frequency"]
    for r in shares:
        fitted = exponent(r)
        name = f"certified rows against tolerance, m = {r['m']}, k = {r['k']}"
        found.append((name, fitted, f"at least m - 1 = {r['m'] - 1}"))
    for name, other in (("m", "k"), ("k", "m")):
        for fixed in sorted({r[other] for r in shares}):
            line = sorted((r[name], r["frequencies"][4]) for r in shares if r[other] == fixed)
            line = [(a, b) for a, b in line if b > 0]
            if name == "m" and len(line) > 1:
                rate = float(np.polyfit(*np.array([(a, np.log(b)) for a, b in line]).T, 1)[0])
                kd = fixed * 16
                said = "(kd)^-Theta(m): a power of kd a head"
                found.append(
                    (f"log_kd of certified rows a head, k = {fixed}", rate / np.log(kd), said)
                )
            elif len(line) > 1:
                fitted = slope(*map(list, zip(*line, strict=True)))
                found.append((f"certified rows against k, m = {fixed}", fitted, "falls"))
    for m in (2, 3):
        n, mse = medians(records, "n", "mse", m=m, d=16)
        expected = expected_decay(records, m)
        said = f"-2/a = {expected:.2f}"
        found.append((f"squared error against N, m = {m}", slope(n, mse), said))
        n, seconds = medians(records, "n", "seconds", m=m, d=16)
        found.append((f"time against N, m = {m}", slope(n, seconds), "at most 1"))
    d, seconds = medians(records, "d", "seconds", m=2, n=200_000)
    found.append(
        ("time against d, m = 2", slope(d, seconds), "at most 6, from d^2 x d^2 programmes")
    )
    m, seconds = medians(records, "m", "seconds", d=16, n=1_000_000)
    found.append(("time against m", slope(m, seconds), "theorem: (kd)^O(m^3)"))
    return found


def draw(records: list[dict]) -> None:
    with picture("scaling.svg", 11.5, 3.4) as figure:
        share, error, clock = figure.subplots(1, 3)
        colours = {1: "#777777", 2: "#1b6ca8", 3: "#e07b39", 4: "#5a9e4b"}
        dashes = {3: "-", 4: "--", 6: ":"}
        for r in records:
            if r["kind"] == "frequency":
                label = f"m = {r['m']}, k = {r['k']}: {exponent(r):.1f}"
                style = {"color": colours[r["m"]], "linestyle": dashes[r["k"]], "label": label}
                share.loglog(
                    TOLERANCES, np.where(r["frequencies"], r["frequencies"], np.nan), **style
                )
        share.set_xlabel("tolerance of the score")
        share.set_title("Certified rows, share of all", loc="left", fontsize=10)
        for m in (2, 3):
            n, mse = medians(records, "n", "mse", m=m, d=16)
            expected = expected_decay(records, m)
            label = f"m = {m}: {slope(n, mse):.2f}, expected {expected:.2f}"
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
        share.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), **style)
        for axes in (error, clock):
            axes.legend(**style)
        for axis in (share.xaxis, clock.yaxis):
            axis.set_major_formatter(ScalarFormatter())
            axis.set_minor_formatter(NullFormatter())
        share.set_xticks([0.05, 0.1, 0.2, 0.4])
        clock.set_yticks([10, 20, 40])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--results", type=Path, default=FILE)
    options = parser.parse_args()
    cases = [*frequencies(), *runs()]
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
