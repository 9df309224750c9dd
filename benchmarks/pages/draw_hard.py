"""Draw what hard_curve and hard_dial measured, beside their JSON and for the pages."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from benchmarks import DOCS, RESULTS
from benchmarks.studies.hard_dial import DIALS, SHARPNESSES
from mhalearn.hardness.curve import LEARNED
from mhalearn.hardness.plot import draw_curve, list_colors

FOLDERS = (RESULTS, DOCS / "images")


def runs(name: str) -> list[dict]:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text())["runs"]


def draw_dial(path: Path) -> None:
    """Median error and share learned along the two dials."""
    rows = [row for row in runs("hard_dial") if "crashed" not in row]
    figure = Figure(figsize=(9.2, 3.4), layout="constrained", facecolor="white")
    FigureCanvasSVG(figure)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, dial, fixed in zip(panels, ("mix", "sharpness"), ("sharpness", "mix"), strict=True):
        points = [point for point in DIALS if point[fixed] == {"sharpness": 8.0, "mix": 0.0}[fixed]]
        values = sorted({point[dial] for point in points})
        for method, color in list_colors({row["method"] for row in rows}).items():
            shares = []
            for value in values:
                own = [
                    row
                    for row in rows
                    if row["method"] == method
                    and row[dial] == value
                    and row[fixed] == {"sharpness": 8.0, "mix": 0.0}[fixed]
                ]
                if own:
                    learned = sum(row["relative_mse"] <= LEARNED for row in own)
                    shares.append((value, learned / len(own)))
            if shares:
                axes.plot(*zip(*shares, strict=True), "o-", color=color, label=method, ms=4, lw=1.2)
        axes.set_xlabel({"mix": "mix (0 hard, 1 random)", "sharpness": "sharpness"}[dial])
    panels[1].set_xscale("log")
    panels[1].set_xticks(SHARPNESSES, [f"{value:g}" for value in SHARPNESSES])
    panels[1].xaxis.set_minor_formatter(NullFormatter())
    panels[0].set_ylabel("share of secrets learned")
    panels[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    for folder in FOLDERS:
        draw_curve(runs("hard_curve"), folder / "hard_curve.svg")
        with matplotlib.rc_context({"svg.hashsalt": "mhalearn", "font.size": 9}):
            draw_dial(folder / "hard_dial.svg")


if __name__ == "__main__":
    main()
