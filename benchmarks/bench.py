"""The comparison: mhalearn beside what people would use instead, at a size for two cores.

    python benchmarks/bench.py [SUITE ...] [--folder DIR] [--record]

Writes bench.json and one page, bench.md, to the folder. Figures are ratios, counts and errors,
never bare seconds, and are compared with the committed ones (benchmarks/results/bench.json): if one
got worse by more than its slack, the command says which and ends with code 1. --record makes what
was measured the committed figures, and the page docs/bench.md.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import frontier
import noise
import numpy as np
from cases import case_at
from ledger import RESULTS, Ledger, Record, console, finite
from race import print_race, race
from speed import entries

import mhalearn as mha
from mhalearn.hardness.curve import Cell, asdict, measure_cost

PAGE = Path(__file__).parent.parent / "docs" / "bench.md"
# How a figure is compared with the committed one: may it be this much worse?
SLACK: dict[str, Callable[[float, float], bool]] = {
    "times slower than newton": lambda new, old: new >= old / 3,
    "recovered": lambda new, old: new >= old - 1,
    "learned": lambda new, old: new >= old - 1,
    "squared error over the bound": lambda new, old: new <= 1.5 * old,
    "relative squared error": lambda new, old: new <= max(100 * old, 1e-20),
}
Figures = list[Record]  # suite, what, kind, value

PUBLISHED = """## Beside published figures

| system | given | published | here |
|---|---|---|---|
| Chen & Li, STOC 2025 | random +-1 examples | (dk)^{O(m^3)} time, no code | [each phase measured](phases.md) |
| Yau et al., 2410.10101 | random examples, linear attention | runs at d = 2 (N = 512) and d = 4 (N = 2048) | softmax attention, d = 8 to 384 ([solver](solver.md), [real layers](real.md)) |
| 2608.03294 | 4 H d^2 - 2 H + 1 chosen queries (d = 8, H = 6: 1,525) | all heads, no code | as many scalars of random examples: [solver](solver.md) |
| ePrint 2026/1678 | chosen continuous queries | d = 8, 6 heads, to 2^-51 | random examples, to about 1e-15 |
"""  # noqa: E501


def speed(ledger: Ledger) -> Figures:
    """Seconds to a relative squared training error of 1e-20, compilation apart."""
    found: Figures = []
    for shape in ((2, 8, 8), (4, 8, 8)):
        case = case_at(10, shape)
        ratios = print_race(race(ledger, {"suite": "speed"}, case, entries(case), range(3), 10))
        found += [
            figure("speed", f"{case}, {name}", "times slower than newton", ratio)
            for name, ratio in ratios.items()
            if name != "newton"
        ]
    return found


def near_the_limit(ledger: Ledger) -> Figures:
    """Layers recovered to 1e-10 near the counting limit."""
    frontier.PEER_LIMIT = 10.0
    found: Figures = []
    for ratio, shape in ((1.5, (2, 8, 4)), (1.25, (4, 8, 4))):
        case = case_at(ratio, shape)
        runs = {"newton": frontier.run_newton}
        runs |= {name: partial(frontier.run_peer, name) for name in frontier.PEERS}
        for name, run in runs.items():
            rows = [
                ledger.run(
                    {"suite": "near the limit", "case": str(case), "method": name, "seed": seed},
                    partial(run, case, seed),
                )
                for seed in range(5)
            ]
            count = sum(map(frontier.good, rows))
            found.append(figure("near the limit", f"{case}, {name}", "recovered", count, 5))
    return found


def under_noise(ledger: Ledger) -> Figures:
    """The squared parameter error over the least possible (Cramer and Rao), 1 % noise."""
    case = case_at(10, (2, 8, 4))
    rows = [
        ledger.run(
            {"suite": "under noise", "case": str(case), "seed": seed},
            partial(noise.run_newton, case, 0.01, seed),
        )
        for seed in range(8)
    ]
    ratios = [row["ratio"] for row in rows if row.get("ratio") is not None]
    value = statistics.mean(ratios) if len(ratios) == len(rows) else float("inf")
    return [figure("under noise", f"{case}, newton", "squared error over the bound", value)]


def every_method(ledger: Ledger) -> Figures:
    """Held-out error of each learner as it is, no polish, 20 seconds, two teachers."""
    found: Figures = []
    for method in ("newton", "sculpt", "adam", "lbfgs", "linear"):
        rows = [
            ledger.run(
                {"suite": "every method", "method": method, "seed": seed},
                partial(held_out, method, seed),
            )
            for seed in range(2)
        ]
        errors = [row["error"] for row in rows if row.get("error") is not None]
        value = max(errors) if len(errors) == len(rows) else float("inf")
        what = f"2 heads, d = 8, k = 3, N = 20000, scale 4, {method}"
        found.append(figure("every method", what, "relative squared error", value))
    return found


def held_out(method: str, seed: int) -> Record:
    layer = mha.random_layer(2, 8, scale=4.0, seed=seed)
    x, fresh = (mha.sample_inputs("boolean", n, 3, 8, seed=s) for n, s in ((20_000, 1), (2000, 2)))
    learner = mha.AttentionRegressor(2, method, polish=False, max_seconds=20, random_state=seed)
    learner.fit(x, layer(x))
    truth = layer(fresh)
    wrong = np.sum((learner.predict(fresh) - truth) ** 2) / np.sum(truth**2)
    return {"error": finite(float(wrong)), "outcome": learner.outcome_.name}


def hard(ledger: Ledger) -> Figures:
    """Parities of two bits and random layers of the same shape, five seconds a fit."""
    found: Figures = []
    for family in ("parity", "generic"):
        for method in ("newton", "adam"):
            cell = Cell(family, 2, 8, method)
            rows = [
                ledger.run(
                    {"suite": "hard"} | asdict(cell) | {"seed": seed},
                    lambda c=cell, s=seed: asdict(measure_cost(c, s, 5.0)),
                )
                for seed in range(3)
            ]
            count = sum(bool(row.get("learned")) for row in rows)
            found.append(figure("hard", f"{family}, 2 heads, d = 8, {method}", "learned", count, 3))
    return found


SUITES = {
    "speed": speed,
    "limit": near_the_limit,
    "noise": under_noise,
    "methods": every_method,
    "hard": hard,
}


def figure(suite: str, what: str, kind: str, value: float, of: int | None = None) -> Record:
    return {"suite": suite, "what": what, "kind": kind, "value": finite(value), "of": of}


def worse(figures: Figures, committed: Figures) -> list[str]:
    """What got worse by more than its slack; a figure that is gone is worse too."""
    known = {(one["suite"], one["what"], one["kind"]): one["value"] for one in figures}
    suites = {one["suite"] for one in figures}
    said = []
    for one in committed:
        name = one["suite"], one["what"], one["kind"]
        if one["suite"] not in suites or one["value"] is None:
            continue
        new = known.get(name)
        if new is None or not SLACK[one["kind"]](new, one["value"]):
            said.append(f"{', '.join(name)}: {show(new)}, committed {show(one['value'])}")
    return said


def show(value: float | None, of: int | None = None) -> str:
    if value is None:
        return "failed"
    return f"{value:g}/{of}" if of else f"{value:.3g}"


def page(figures: Figures, machine: str) -> str:
    text = (
        "# The comparison\n\nWritten by `benchmarks/bench.py` (`make bench`), on " + machine + ". "
        "Same examples and budget for all; peers are tuned, and failures stay in.\n"
    )
    for suite in SUITES.values():
        rows = [one for one in figures if one["suite"] == suite_name(suite)]
        if rows:
            text += f"\n## {suite_name(suite).capitalize()}\n\n{suite.__doc__}\n\n"
            text += f"| case and method | {rows[0]['kind']} |\n|---|---|\n"
            text += "".join(
                f"| {one['what']} | {show(one['value'], one['of'])} |\n" for one in rows
            )
    return text + "\n" + PUBLISHED


def suite_name(suite: Callable[[Ledger], Figures]) -> str:
    return suite.__name__.replace("_", " ")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("suites", nargs="*", default=list(SUITES), help=", ".join(SUITES))
    parser.add_argument("--folder", type=Path, default=Path("build") / "bench")
    parser.add_argument("--record", action="store_true", help="commit to these figures")
    options = parser.parse_args()
    if unknown := set(options.suites) - set(SUITES):
        parser.error(f"{', '.join(sorted(unknown))}: choose among {', '.join(SUITES)}")
    options.folder.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(options.folder / "runs.json", fresh=True)
    figures = [one for name in options.suites for one in SUITES[name](ledger)]
    text = page(figures, ledger.machine)
    content = json.dumps({"machine": ledger.machine, "figures": figures}, indent=1) + "\n"
    (options.folder / "bench.json").write_text(content)
    (options.folder / "bench.md").write_text(text)
    console.print(text, markup=False)
    committed = RESULTS / "bench.json"
    said = (
        worse(figures, json.loads(committed.read_text())["figures"]) if committed.exists() else []
    )
    for line in said:
        console.print(f"[red]WORSE[/]: {line}")
    if options.record:
        committed.write_text(content)
        PAGE.write_text(text)
    return 1 if said and not options.record else 0


if __name__ == "__main__":
    sys.exit(main())
