"""The report's figures of matrices: attention patterns, entries, differences, singular values."""

from __future__ import annotations

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LinearSegmentedColormap
from matplotlib.figure import Figure

from mhalearn._runtime.pixels import thin
from mhalearn._runtime.types import Float64
from mhalearn.report.drawing import INK, RULE, SERIES, STYLE, calm, svg
from mhalearn.report.numbers import number, short

# Sign is hue, size is opacity: zero is the page itself, whatever its colour. Few levels keep the
# rasters small. The page's keys have the same colours.
_NEGATIVE, _POSITIVE, _WEIGHT = (0.16, 0.47, 0.84), (0.85, 0.34, 0.10), (0.09, 0.59, 0.54)
_DIVERGING = LinearSegmentedColormap.from_list(
    "mhalearn_diverging",
    [
        (0.0, (*_NEGATIVE, 1.0)),
        (0.5, (*_NEGATIVE, 0.0)),
        (0.5, (*_POSITIVE, 0.0)),
        (1.0, (*_POSITIVE, 1.0)),
    ],
    N=63,
)
_SEQUENTIAL = LinearSegmentedColormap.from_list(
    "mhalearn_sequential", [(*_WEIGHT, 0.0), (*_WEIGHT, 1.0)], N=64
)

# Inches of a panel, which is square.
_SIDE = 1.7
# Most cells a heat map has on a side.
_MOST_CELLS = 64
# Singular values that have their own marks; of more, a line is drawn.
_MOST_MARKS = 40
# A difference below this share of the scale leaves its panel blank, with room for words.
_BLANK = 0.01


def heat_map(matrix: Float64, limit: float, name: str, title: str) -> Markup:
    """A matrix as a heat map on the scale -limit .. limit."""
    scale = limit if limit > 0 else 1.0
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(_SIDE, _SIDE))
        axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
        _show(axes, matrix, _DIVERGING, -scale, scale)
        return svg(figure, name, title)


def is_blank(difference: Float64, limit: float) -> bool:
    """Whether a difference cannot be seen on the scale of what it is the difference of."""
    return bool(np.abs(difference).max() <= _BLANK * limit)


def difference_map(difference: Float64, limit: float, name: str, title: str) -> Markup:
    """A difference on the scale of what it is the difference of: blank where that is right, with
    its largest entry written in."""
    if not is_blank(difference, limit):
        return heat_map(difference, limit, name, title)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(_SIDE, _SIDE))
        axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
        axes.set(xticks=[], yticks=[])
        _frame(axes)
        largest = float(np.abs(difference).max())
        words = "exactly\nequal" if largest == 0 else f"at most\n{number(largest)}"
        axes.text(0.5, 0.5, words, ha="center", va="center", color=INK, linespacing=1.35)
        return svg(figure, name, title)


def pattern(weights: Float64, largest: float, name: str, title: str) -> Markup:
    """Attention weights (k, k) on the scale 0 .. largest: row r shows where token r looks."""
    k = len(weights)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(2.1, 2.1))
        axes = figure.add_axes((0.1, 0.01, 0.89, 0.89))
        _show(axes, weights, _SEQUENTIAL, 0.0, largest or 1.0)
        cells = min(k, _MOST_CELLS)
        axes.xaxis.tick_top()
        axes.tick_params(length=0, pad=3)
        named = [str(i + 1) for i in range(k)] if k <= 10 else ["1", str(k)]
        places = list(range(cells)) if k <= 10 else [0, cells - 1]
        axes.set_xticks(places, named)
        axes.set_yticks(places, named)
        return svg(figure, name, title)


def outputs(values: Float64, limit: float, wide: bool, name: str, title: str) -> Markup:
    """Outputs (k, e) of one example, a row for each token, beside patterns of the same height."""
    width = 2 * 2.1 + 0.2 if wide else 2.1
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, 2.1))
        axes = figure.add_axes((0.01, 0.01, 0.98, 0.89))
        _show(axes, values, _DIVERGING, -limit or -1.0, limit or 1.0, fill=True)
        return svg(figure, name, title)


def by_distance(learned: Float64, truth: Float64 | None, name: str, title: str) -> Markup:
    """Numbers of a head at the distances 0, 1, ...; those of the truth as rings around them."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(_SIDE, _SIDE))
        axes = figure.add_axes((0.24, 0.165, 0.74, 0.8))
        places, few = np.arange(learned.size), learned.size <= _MOST_MARKS
        if truth is not None:
            ring = "o" if few else "--"
            axes.plot(
                places, truth, ring, color=SERIES[1], markersize=5.5, fillstyle="none", mew=0.9
            )
        axes.plot(places, learned, "o-" if few else "-", color=SERIES[0], markersize=2.8, mew=0)
        axes.get_lines()[-1].set_linewidth(0.8)
        values = learned if truth is None else np.concatenate([learned, truth])
        low, high = min(0.0, float(values.min())), max(0.0, float(values.max()))
        room = 0.06 * (high - low or 1.0)
        axes.set_ylim(low - room * (low < 0), high + room)
        ends = sorted({low, 0.0, high or 1.0})
        axes.set_yticks(ends, [short(end) for end in ends])
        axes.set_xticks([0, learned.size - 1])
        axes.tick_params(length=0, pad=4)
        calm(axes)
        return svg(figure, name, title)


def singular_values(learned: Float64, truth: Float64 | None, name: str, title: str) -> Markup:
    """The singular values of a head's matrix; those of the truth as rings around them."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(_SIDE, _SIDE))
        axes = figure.add_axes((0.2, 0.165, 0.78, 0.8))
        places = np.arange(1, learned.size + 1)
        # Many markers would make a large file and a thick line: draw a thin one.
        few = learned.size <= _MOST_MARKS
        # Marks at zero are drawn whole, over the axis.
        if truth is not None:
            axes.plot(
                places,
                truth,
                "o" if few else "--",
                color=SERIES[1],
                markersize=5.5,
                fillstyle="none",
                markeredgewidth=0.9,
                clip_on=False,
            )
        axes.plot(
            places,
            learned,
            "o" if few else "-",
            color=SERIES[0],
            markersize=2.8,
            mew=0,
            clip_on=False,
        )
        top = float(max(learned.max(), 0 if truth is None else truth.max())) or 1.0
        axes.set_ylim(0, 1.06 * top)
        axes.set_yticks([0, top], ["0", short(top)])
        axes.set_xlim(0.5, learned.size + 0.5)
        axes.set_xticks([1, learned.size] if learned.size > 1 else [1])
        axes.tick_params(length=0, pad=4)
        calm(axes)
        return svg(figure, name, title)


def is_thinned(matrix: Float64) -> bool:
    """Whether a heat map of this matrix shows blocks of entries instead of entries."""
    return max(matrix.shape) > _MOST_CELLS


def _show(
    axes: Axes, matrix: Float64, colours: Colormap, low: float, high: float, *, fill: bool = False
) -> None:
    axes.imshow(
        _thinned(matrix),
        cmap=colours,
        vmin=low,
        vmax=high,
        interpolation="none",
        aspect="auto" if fill else "equal",
    )
    axes.set(xticks=[], yticks=[])
    _frame(axes)


def _frame(axes: Axes) -> None:
    for spine in axes.spines.values():
        spine.set(visible=True, color=RULE)


def _thinned(matrix: Float64) -> Float64:
    return thin(matrix, _MOST_CELLS)
