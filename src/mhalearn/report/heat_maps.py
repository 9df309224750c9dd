"""Heat maps for a paper: rows of matrices, a column a head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.ticker import MaxNLocator

from mhalearn._runtime.pixels import NEGATIVE, POSITIVE, thin
from mhalearn._runtime.types import Float64
from mhalearn.report.numbers import number
from mhalearn.report.paper import Panels

_DIVERGING = LinearSegmentedColormap.from_list(
    "mhalearn_paper", [NEGATIVE, (1.0, 1.0, 1.0), POSITIVE]
)
_WEIGHTS = LinearSegmentedColormap.from_list("mhalearn_weights", ["white", "#0b5e57"])
# Cells of a picture on a side.
_MOST_CELLS = 64


class Row(NamedTuple):
    """A matrix of every head on one scale; its largest entry below where it is a difference."""

    name: str
    matrices: Float64
    limit: float
    difference: bool = False


def list_rows(symbol: str, learned: Float64, true: Float64 | None) -> list[Row]:
    """One row, or three beside the truth, whose scale is that of all."""
    limit = float(np.abs(learned if true is None else true).max())
    scale = f"\N{PLUS-MINUS SIGN}{number(limit)}"
    if true is None:
        return [Row(f"{symbol}\n{scale}", learned, limit)]
    return [
        Row(f"{symbol}, learned\n{scale}", learned, limit),
        Row(f"{symbol}, true", true, limit),
        Row("difference", learned - true, limit, difference=True),
    ]


def draw_rows(panels: Panels, rows: Sequence[Row]) -> None:
    for line, row in zip(panels, rows, strict=True):
        line[0].set_ylabel(row.name)
        scale = row.limit or 1.0
        for axes, matrix in zip(line, row.matrices, strict=True):
            axes.imshow(
                thin(matrix, _MOST_CELLS),
                cmap=_DIVERGING,
                vmin=-scale,
                vmax=scale,
                interpolation="none",
            )
            _frame(axes)
            axes.set(xticks=[], yticks=[])
            if row.difference:
                axes.set_xlabel(_say_largest(float(np.abs(matrix).max())), labelpad=2)


def draw_patterns(
    panels: Panels, weights: Mapping[str, Float64], tokens: Sequence[str] | None
) -> None:
    """A row for each layer's patterns (heads, k, k), on the scale from zero to the largest."""
    largest = max(float(some.max()) for some in weights.values())
    for line, (name, some) in zip(panels, weights.items(), strict=True):
        line[0].set_ylabel(f"{name}\n0 to {number(largest)}")
        for place, (axes, pattern) in enumerate(zip(line, some, strict=True)):
            k = len(pattern)
            edges = (0.5, k + 0.5, k + 0.5, 0.5)
            axes.imshow(
                pattern, cmap=_WEIGHTS, vmin=0, vmax=largest, interpolation="none", extent=edges
            )
            _frame(axes)
            _name_tokens(axes, k, tokens, first=place == 0)


def name_heads(panels: Panels, chosen: Sequence[int]) -> None:
    for axes, head in zip(panels[0], chosen, strict=True):
        axes.set_title(f"head {head + 1}", pad=3)


def _name_tokens(axes: Axes, k: int, tokens: Sequence[str] | None, *, first: bool) -> None:
    """Names are text, whatever is in them, and not a formula."""
    axes.tick_params(length=0, pad=2)
    if tokens is None:
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(4, integer=True))
    else:
        places = range(1, k + 1)
        names = [str(token) for token in tokens]
        axes.set_xticks(places, names, rotation=90, parse_math=False)
        axes.set_yticks(places, names, parse_math=False)
    if not first:
        axes.set_yticklabels([])


def _say_largest(difference: float) -> str:
    return f"\N{LESS-THAN OR EQUAL TO} {number(difference)}" if difference else "equal"


def _frame(axes: Axes) -> None:
    for spine in axes.spines.values():
        spine.set(visible=True, color="#999999")
