"""The cost of hard layers as a picture."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from mhalearn.hardness.curve import LEARNED, Cell, Line, summarise
from mhalearn.learners.registry import list_learners

# Of learners that this process does not know.
_UNKNOWN = "#8a8a8a"
# Relative squared error of who knows all but the secret.
TRIVIAL = 0.5
_DASHES = {"parity": "-", "rounding": "--", "generic": ":"}
_LEAST = 1e-30


def draw_curve(records: Iterable[dict[str, Any]], path: Path) -> None:
    """Seconds a success against heads, one column a width; below, the errors that are left."""
    records = [record for record in records if "relative_mse" in record]
    lines = summarise(records)
    colors = list_colors({line.cell.method for line in lines})
    widths = sorted({line.cell.d for line in lines})
    heads = sorted({line.cell.n_heads for line in lines})
    with matplotlib.rc_context({"svg.hashsalt": "mhalearn", "font.size": 9}):
        figure = Figure(figsize=(9.2, 6.0), layout="constrained", facecolor="white")
        FigureCanvasSVG(figure)
        panels = figure.subplots(2, len(widths), sharey="row", squeeze=False)
        for d, (above, below) in zip(widths, panels.T, strict=True):
            for family, dash in _DASHES.items():
                for method, color in colors.items():
                    own = _of(lines, family, d, method)
                    _draw_costs(above, own, dash, color)
                    errors = [_median_error(records, line.cell) for line in own]
                    x = [line.cell.n_heads for line in own]
                    below.plot(x, errors, dash, marker="o", color=color, lw=1.2, ms=4)
            below.axhline(TRIVIAL, color="#555555", lw=1, ls=(0, (6, 3)))
            below.axhline(LEARNED, color="#bbbbbb", lw=1)
            span = heads[0] - 0.5, heads[-1] + 0.5
            above.set(yscale="log", xticks=heads, xlim=span)
            above.set_title(f"d = {d}", loc="left", fontsize=10)
            below.set(yscale="log", ylim=(_LEAST / 10, 1e2), xlabel="heads m")
            below.set(xticks=heads, xlim=span)
        panels[0, 0].set_ylabel("seconds a success\n(hollow: at least)")
        panels[1, 0].set_ylabel("median error on fresh inputs\n(dashes: all known but the secret)")
        for method, color in colors.items():
            panels[0, -1].plot([], [], color=color, label=method)
        for family, dash in _DASHES.items():
            if any(line.cell.family == family for line in lines):
                panels[0, -1].plot([], [], dash, color="#555555", label=family)
        panels[0, -1].legend(frameon=False, fontsize=8)
        figure.savefig(path, format="svg", metadata={"Date": None})


def list_colors(methods: set[str]) -> dict[str, str]:
    """The colour of each method, in the order of the registry; those it does not know are last."""
    known = {learner.name: learner.color for learner in list_learners() if learner.name in methods}
    return known | dict.fromkeys(sorted(methods - set(known)), _UNKNOWN)


def _of(lines: list[Line], family: str, d: int, method: str) -> list[Line]:
    own = [
        line
        for line in lines
        if (line.cell.family, line.cell.d, line.cell.method) == (family, d, method)
    ]
    return sorted(own, key=lambda line: line.cell.n_heads)


def _draw_costs(axes: Any, own: list[Line], dash: str, color: str) -> None:
    axes.plot(
        [line.cell.n_heads for line in own], [line.seconds for line in own], dash, color=color
    )
    for line in own:
        marker, fill = ("^", "white") if line.at_least else ("o", color)
        axes.plot(line.cell.n_heads, line.seconds, marker, color=color, mfc=fill, ms=5)


def _median_error(records: list[dict[str, Any]], cell: Cell) -> float:
    errors = [
        record["relative_mse"]
        for record in records
        if Cell(record["family"], record["n_heads"], record["d"], record["method"]) == cell
    ]
    return max(_LEAST, float(np.median(errors)))
