"""How often a row is lucky: matched rows against d, k, m and the tolerance, one at a time.

    python benchmarks/studies/frequency.py   all measurements, appended to the JSON one by one
        --table                              fitted slopes of what the JSON holds
        --draw                               docs/images/frequency.svg

A row is matched when, with the exact sum of projections, its best pair of tokens has a score of at
most the tolerance and every head has the pair's log-odds to within one (`tails.certified_share`).
Each layer is random with ||Theta|| = 4; shares are pooled over the layers of a point. Slopes are by
least squares on logarithms, of the points with at least ten rows; their intervals come from drawing
the layers anew with replacement, 95 % of 2,000 times.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

import numpy as np

import mhalearn as mha
from benchmarks import RESULTS
from benchmarks.pages.picture import picture
from mhalearn import tails

FILE = RESULTS / "frequency.json"
TOLERANCES = np.geomspace(0.05, 0.4, 7)
MIDDLE = 4  # the tolerance, 0.2, at which the other laws are read
SCALE = 4.0
WIDE = 12  # from here on m(k - 1) is at most half of d in every line along it
LAYERS = 8
ROWS = {1: 50_000, 2: 100_000, 3: 400_000, 4: 600_000}  # of each layer, by heads
COLOURS = {1: "#777777", 2: "#1b6ca8", 3: "#e07b39", 4: "#5a9e4b"}


def frequency(
    layer: mha.AttentionLayer, k: int, tolerances: np.ndarray, n: int, seed: int
) -> tuple[list[int], list[int]]:
    """Matched and certified rows of n, at each tolerance."""
    found = [
        tails.certified_share(layer, k, tolerances, matched=matched, n=n, seed=seed)
        for matched in (True, False)
    ]
    matched, certified = (np.rint(tail.measured * n).astype(int).tolist() for tail in found)
    return matched, certified


def cases() -> list[dict]:
    """Lines in d at k = 3, in k and in m at d = 24, of which some share points."""
    points = [(m, d, 3) for m in (2, 3) for d in (8, 12, 16, 24, 32, 48)]
    points += [(2, 24, k) for k in (2, 4, 6, 8)] + [(3, 24, k) for k in (2, 4, 6)]
    points += [(1, 24, 3), (4, 24, 3)]
    return [{"m": m, "d": d, "k": k, "layer": s} for m, d, k in points for s in range(LAYERS)]


def measure(case: dict) -> dict:
    layer = mha.random_layer(case["m"], case["d"], scale=SCALE, seed=5000 + case["layer"])
    n = ROWS[case["m"]]
    matched, certified = frequency(layer, case["k"], TOLERANCES, n, 6000 + case["layer"])
    return case | {"n": n, "matched": matched, "certified": certified}


class Line:
    """Points along one of d, k, m or the tolerance, each with the counts of its layers."""

    def __init__(self, records: list[dict], along: str, least: int = 0, **fixed: int) -> None:
        self.along, self.fixed, self.least = along, fixed, least
        own = [r for r in records if all(r[name] == value for name, value in fixed.items())]
        own = own if along == "tolerance" else [r for r in own if r[along] >= least]
        if along == "tolerance":
            self.x = TOLERANCES
            counts = [[r["matched"][place] for r in own] for place in range(len(TOLERANCES))]
            rows = [[r["n"] for r in own]] * len(TOLERANCES)
        else:
            self.x = np.array(sorted({r[along] for r in own}), float)
            groups = [[r for r in own if r[along] == x] for x in self.x]
            counts = [[r["matched"][MIDDLE] for r in group] for group in groups]
            rows = [[r["n"] for r in group] for group in groups]
        self.counts, self.rows = np.array(counts, float), np.array(rows, float)

    @property
    def name(self) -> str:
        named = [f"{name} = {value}" for name, value in self.fixed.items()]
        return ", ".join([*named, *([f"{self.along} >= {self.least}"] if self.least else [])])

    def shares(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Pooled over layers, with their Clopper-Pearson limits."""
        seen, of = self.counts.sum(axis=1), self.rows.sum(axis=1)
        return seen / of, *tails.clopper_pearson(seen, of, 0.95)

    def slope(self) -> tuple[float, float, float]:
        """Of log share: against m itself, against the logarithm of the others; and its limits."""
        rng = np.random.default_rng(0)
        layers = self.counts.shape[1]
        drawn = [self._fit(rng.integers(0, layers, layers)) for _ in range(2000)]
        return self._fit(np.arange(layers)), *np.quantile(drawn, [0.025, 0.975]).tolist()

    def _fit(self, layers: np.ndarray) -> float:
        seen, of = self.counts[:, layers].sum(axis=1), self.rows[:, layers].sum(axis=1)
        some = (self.counts.sum(axis=1) >= 10) & (seen > 0)
        x = self.x if self.along == "m" else np.log(self.x)
        return float(np.polyfit(x[some], np.log(seen[some] / of[some]), 1)[0])


def lines(records: list[dict]) -> list[Line]:
    """Every law that is measured."""
    found = [Line(records, "tolerance", m=m, d=24, k=3) for m in (1, 2, 3, 4)]
    found += [Line(records, "d", m=m, k=3) for m in (2, 3)]
    found += [Line(records, "k", m=m, d=24) for m in (2, 3)]
    return [*found, Line(records, "m", d=24, k=3)]


def laws(records: list[dict]) -> list[tuple[str, str, str, str]]:
    """Rows of a table: law, fitted slope, its interval, what an argument or the theorem says."""
    said = {
        "tolerance": "at least m - 1 = {m1}, by an argument",
        "d": "at a fixed tolerance, nothing",
        "k": "falls, though pairs grow as k^2",
        "m": "an exponential, at a fixed tolerance",
    }
    rows = []
    wide = [Line(records, "d", least=WIDE, m=m, k=3) for m in (2, 3)]
    for line in [*lines(records), *wide]:
        fitted, low, high = line.slope()
        per = "log share a head" if line.along == "m" else f"exponent in {line.along}"
        expected = said[line.along].format(m1=line.fixed.get("m", 0) - 1)
        rows.append((f"{per}, {line.name}", f"{fitted:.2f}", f"{low:.2f} to {high:.2f}", expected))
    return rows


def draw(records: list[dict]) -> None:
    with picture("frequency.svg", 10.0, 3.2) as figure:
        panels = dict(zip(("tolerance", "d", "k", "m"), figure.subplots(1, 4), strict=True))
        for line in lines(records):
            share, low, high = line.shares()
            colour = COLOURS[line.fixed.get("m", 1)] if line.along != "m" else "#333333"
            slope = line.slope()[0]
            some = share > 0
            axes = panels[line.along]
            axes.fill_between(line.x[some], low[some], high[some], color=colour, alpha=0.2, lw=0)
            label = f"m = {line.fixed['m']}: {slope:.2f}" if "m" in line.fixed else f"{slope:.2f}"
            axes.plot(line.x[some], share[some], "o-", color=colour, ms=3, lw=1.1, label=label)
        for along, axes in panels.items():
            axes.set_yscale("log")
            axes.set_xlabel(along)
            if along != "m":
                axes.set_xscale("log")
                ticks = {"tolerance": [0.05, 0.1, 0.2, 0.4], "d": [8, 16, 32], "k": [2, 4, 8]}
                axes.set_xticks(ticks[along], [f"{t:g}" for t in ticks[along]])
                axes.minorticks_off()
            else:
                axes.set_xticks([1, 2, 3, 4])
            axes.legend(frameon=False, fontsize=7, title="slope", title_fontsize=7)
        panels["tolerance"].set_ylabel("share of rows that are matched")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--results", type=Path, default=FILE)
    options = parser.parse_args()
    records = json.loads(options.results.read_text()) if options.results.exists() else []
    for case in [] if options.table or options.draw else cases():
        if not any(case.items() <= record.items() for record in records):
            records.append(measure(case))
            options.results.write_text("[\n" + ",\n".join(map(json.dumps, records)) + "\n]\n")
            print(json.dumps(records[-1]), flush=True)
    for row in laws(records):
        print(" | ".join(row))
    if options.draw:
        draw(records)


if __name__ == "__main__":
    main()
