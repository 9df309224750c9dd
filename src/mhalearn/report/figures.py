"""The report's figures of matrices: entries, singular values, a spectrum."""

from __future__ import annotations

import math

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from mhalearn._runtime.types import Float64
from mhalearn.report.drawing import RULE, SERIES, STYLE, calm, log_ticks, svg
from mhalearn.report.numbers import number, short

# Sign is hue, size is opacity: zero is the page itself, whatever its colour. Few levels keep the
# rasters small.
_NEGATIVE, _POSITIVE = (0.16, 0.47, 0.84), (0.85, 0.34, 0.10)
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

# Most cells a heat map has on a side.
_MOST_CELLS = 64
# Singular values that have their own marks; of more, a line is drawn.
_MOST_MARKS = 40


def heat_map(matrix: Float64, limit: float, name: str, title: str) -> Markup:
    """A matrix as a heat map on the scale -limit .. limit."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(2.4, 2.95))
        axes = figure.add_axes((0.005, 0.19, 0.99, 0.805))
        shown = _thinned(matrix)
        scale = limit if limit > 0 else 1.0
        axes.imshow(shown, cmap=_DIVERGING, vmin=-scale, vmax=scale, interpolation="none")
        axes.set(xticks=[], yticks=[])
        for spine in axes.spines.values():
            spine.set(visible=True, color=RULE)
        bar = figure.add_axes((0.005, 0.115, 0.99, 0.035))
        bar.imshow(
            np.linspace(-1, 1, 63)[None], cmap=_DIVERGING, aspect="auto", extent=(-1, 1, 0, 1)
        )
        bar.xaxis.set_major_locator(FixedLocator([-1, 0, 1]))
        bar.set_xticks(
            [-1, 0, 1], [number(-limit), "0", number(limit)] if limit > 0 else ["", "0", ""]
        )
        bar.set_yticks([])
        bar.tick_params(length=0, pad=3)
        for spine in bar.spines.values():
            spine.set(visible=True, color=RULE)
        first, _, last = bar.get_xticklabels()
        first.set_horizontalalignment("left")
        last.set_horizontalalignment("right")
        return svg(figure, name, title)


def singular_values(learned: Float64, truth: Float64 | None, name: str, title: str) -> Markup:
    """The singular values of a head's matrix; those of the truth as rings around them."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(2.4, 2.95))
        axes = figure.add_axes((0.21, 0.19, 0.775, 0.795))
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
                markersize=6.5,
                fillstyle="none",
                markeredgewidth=0.9,
                clip_on=False,
            )
        axes.plot(
            places,
            learned,
            "o" if few else "-",
            color=SERIES[0],
            markersize=3.2,
            mew=0,
            clip_on=False,
        )
        axes.set_ylim(bottom=0)
        axes.set_xlabel("by rank", labelpad=3)
        calm(axes)
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
        return svg(figure, name, title)


def spectrum(values: Float64, null: int, width: float, name: str, title: str) -> Markup | None:
    """Eigenvalues in ascending order on a log axis; the null ones in another colour."""
    sizes = np.abs(np.asarray(values, np.float64))
    if sizes.size == 0 or not np.any(sizes > 0):
        return None
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, 2.7))
        left = 0.55 / width
        axes = figure.add_axes((left, 0.175, 1 - left - 0.12 / width, 0.775))
        smallest = max(sizes[sizes > 0].min(), 1e-300)
        shown = np.maximum(sizes, smallest)
        places = np.arange(1, sizes.size + 1)
        kept = np.unique(
            np.concatenate(
                [np.arange(min(null + 1, sizes.size)), np.linspace(0, sizes.size - 1, 400)]
            ).astype(int)
        )
        for part, colour in ((kept[kept < null], SERIES[1]), (kept[kept >= null], SERIES[0])):
            axes.plot(places[part], shown[part], "o", color=colour, markersize=2.6, mew=0)
        axes.set_yscale("log")
        low, high = math.floor(math.log10(smallest)), math.ceil(math.log10(shown.max()))
        log_ticks(axes, low, max(high, low + 1))
        axes.set_ylim(10.0 ** (low - 0.3), 10.0 ** (max(high, low + 1) + 0.3))
        axes.set_xlabel("eigenvalue, by rank", labelpad=2)
        axes.xaxis.set_major_locator(MaxNLocator(4 if width < 5 else 8, integer=True))
        calm(axes)
        return svg(figure, name, title)


def is_thinned(matrix: Float64) -> bool:
    """Whether a heat map of this matrix shows blocks of entries instead of entries."""
    return max(matrix.shape) > _MOST_CELLS


def _thinned(matrix: Float64) -> Float64:
    """At most _MOST_CELLS rows and columns: each cell is its block's entry of largest size.

    A mean would draw independent entries as zero, and a difference smaller than it is.
    """
    for axis in (0, 1):
        size = matrix.shape[axis]
        if size > _MOST_CELLS:
            starts = np.linspace(0, size, _MOST_CELLS, endpoint=False).astype(int)
            low = np.minimum.reduceat(matrix, starts, axis=axis)
            high = np.maximum.reduceat(matrix, starts, axis=axis)
            matrix = np.where(high >= -low, high, low)
    return matrix
