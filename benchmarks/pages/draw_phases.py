"""Draw docs/images/phase_1.svg to phase_6.svg from benchmarks/results/phases.json.

Each has the lines of `phases.py` from top to bottom and a dot for every run.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks.pages.picture import picture
from benchmarks.studies.phases import FILE, LINES

FIRST, SECOND, THIRD = "#1b6ca8", "#e07b39", "#8a8a8a"

Value = Callable[[dict], float | None]
# What an axis measures, its scale, and its series: name, colour, value of a run.
Panel = tuple[str, Literal["decades", "from zero"], list[tuple[str, str, Value]]]


def certification(round_: int, name: str) -> Value:
    """A number of the certification after so many refined sums; None where none was measured."""
    return lambda run: run["certification"][round_].get(name)


def control(name: str) -> Value:
    """A number that only the runs with controls have."""
    return lambda run: run.get("controls", {}).get(name)


def gap(run: dict) -> float | None:
    """Only a body that has a spectrum tells it."""
    found = run.get("head_count_from_widths")
    return None if found is None else found[1]


def rows_panels(before: int | None, after: int) -> list[Panel]:
    """Precision and recall of certified rows, and how far they are from exact."""
    shares = [
        ("precision", FIRST, certification(after, "precision")),
        ("recall", SECOND, certification(after, "recall_of_matched_rows")),
    ]
    scores = [("with this sum", FIRST, certification(after, "median_score"))]
    if before is not None:
        scores.append(("with the crude sum", THIRD, certification(before, "median_score")))
    return [
        ("share", "from zero", shares),
        ("median score of certified rows", "from zero", scores),
    ]


FIGURES: dict[int, list[Panel]] = {
    1: [
        (
            "relative error of the sum of projections",
            "from zero",
            [("crude sum", FIRST, lambda run: run["crude_sum_error"])],
        )
    ],
    2: rows_panels(None, 0),
    3: [
        (
            "relative error of the sum of projections",
            "decades",
            [
                ("crude", THIRD, lambda run: run["crude_sum_error"]),
                ("refined", FIRST, lambda run: run["sum_error"]),
                ("random proxy", SECOND, control("sum error, random, robust")),
            ],
        ),
        (
            "rows the robust fit believes",
            "from zero",
            [
                ("proxy", FIRST, control("inliers, proxy")),
                ("random proxy", SECOND, control("inliers, random")),
            ],
        ),
    ],
    4: rows_panels(0, -1),
    5: [
        (
            "sine of the angle",
            "decades",
            [
                ("truth to span", FIRST, lambda run: run["span_sine"]),
                ("span to queried span", SECOND, lambda run: run.get("span_by_queries_angle")),
            ],
        ),
        (
            "largest gap of the spectrum, as a ratio",
            "decades",
            [("gap that tells the heads", FIRST, gap)],
        ),
    ],
    6: [
        (
            "relative squared error on fresh examples",
            "decades",
            [
                ("net", FIRST, lambda run: run["mse"]),
                ("after polish", SECOND, lambda run: run["polished_mse"]),
            ],
        )
    ],
}


def label(line: int) -> str:
    m, d, k, scale, n, inputs, *_ = LINES[line]
    return f"m={m} d={d} k={k} s={scale:g} N={n:.0e}{' G' if inputs == 'gaussian' else ''}"


def draw_panel(axes: Axes, panel: Panel, runs: list[dict]) -> None:
    title, scale, wanted = panel
    measured = [one for one in wanted if any(one[2](run) is not None for run in runs)]
    for place, (_, color, value) in enumerate(measured):
        offset = 0.22 * (place - (len(measured) - 1) / 2)
        known = [(value(run), run["line"] + offset) for run in runs]
        found = [(x, y) for x, y in known if x is not None]
        axes.plot(*zip(*found, strict=True), "o", color=color, alpha=0.55, markersize=3.5)
    if scale == "decades":
        axes.set_xscale("log")
    else:
        right = axes.get_xlim()[1]
        axes.set_xlim(-0.03 * right, right)
    axes.set_xlabel(title)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    marks = [
        Line2D([], [], marker="o", linestyle="", color=color, markersize=4)
        for _, color, _ in measured
    ]
    axes.legend(
        marks,
        [name for name, _, _ in measured],
        frameon=False,
        fontsize=8,
        ncols=3,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        borderaxespad=0.2,
        handletextpad=0.2,
        columnspacing=1,
    )


def draw(figure: Figure, panels: list[Panel], runs: list[dict]) -> None:
    row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, panel in zip(row, panels, strict=True):
        draw_panel(axes, panel, runs)
    row[0].set_yticks(range(len(LINES)), [label(line) for line in range(len(LINES))], fontsize=7.5)
    row[0].set_ylim(len(LINES) - 0.4, -0.6)


def main() -> None:
    runs = [run for run in json.loads(FILE.read_text()) if "failure" not in run]
    for phase, panels in FIGURES.items():
        with picture(f"phase_{phase}.svg", 8.4, 3.1) as figure:
            draw(figure, panels, runs)


if __name__ == "__main__":
    main()
