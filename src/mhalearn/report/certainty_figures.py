"""The figures of what is certain: errors of fresh examples, and spectra."""

from __future__ import annotations

import math

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from mhalearn._runtime.types import Float64
from mhalearn.judge.tail_bound import say_share
from mhalearn.report.drawing import INK, MUTED, RULE, SERIES, STYLE, calm, log_ticks, svg
from mhalearn.report.numbers import typeset

# Inches: half the page on a desk, all of it on a telephone.
_WIDTH, _HEIGHT = 5.0, 1.9
# An error of zero has no place on a log axis; it is drawn at this value.
_SMALLEST = 1e-17
# Numbers up to which each has its dot.
_MOST_DOTS = 80
# Eigenvalues that are drawn of more.
_MOST_DRAWN = 400


def fresh_errors(
    errors: Float64, n: int, threshold: float, tail: float, name: str, title: str
) -> Markup:
    """Errors of n fresh examples in ascending order (all, or quantiles), the threshold, and the
    share of inputs of which nothing is promised."""
    shown = np.maximum(errors, _SMALLEST)
    whole = len(errors) == n
    places = (np.arange(n) + 0.5) / n if whole else np.linspace(0, 1, len(errors))
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes()
        few = len(errors) <= _MOST_DOTS and whole
        axes.plot(places, shown, "o" if few else "-", color=SERIES[0], markersize=3.2, mew=0)
        axes.axhline(threshold, color=SERIES[1], linewidth=1.1, linestyle=(0, (4, 2)))
        if tail < 1:
            axes.axvspan(1 - tail, 1, color=MUTED, alpha=0.18, linewidth=0)
        axes.set_xlim(0, 1)
        _set_log_range(axes, min(shown.min(), threshold), max(shown.max(), threshold))
        axes.xaxis.set_major_locator(FixedLocator([0, 0.25, 0.5, 0.75, 1]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g} %"))
        axes.get_xticklabels()[-1].set_horizontalalignment("right")
        axes.set_xlabel("of fresh examples, by error", labelpad=2)
        calm(axes)
        asked = f"relative error t = {typeset(f'{threshold:g}')}"
        _write(axes, 0.015, threshold, asked, "bottom")
        if tail < 1:
            said = f"at least {say_share(tail)} of inputs below t"
            _write(axes, 0.015, threshold, said, "top")
        return svg(figure, name, title)


def spectrum(values: Float64, null: int, name: str, title: str) -> Markup | None:
    """Eigenvalues in ascending order on a log axis; the null ones in another colour."""
    sizes = np.abs(np.asarray(values, np.float64))
    if sizes.size == 0 or not np.any(sizes > 0):
        return None
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes()
        smallest = max(sizes[sizes > 0].min(), 1e-300)
        shown = np.maximum(sizes, smallest)
        places = np.arange(1, sizes.size + 1)
        kept = np.unique(
            np.concatenate(
                [np.arange(min(null + 1, sizes.size)), np.linspace(0, sizes.size - 1, _MOST_DRAWN)]
            ).astype(int)
        )
        for part, colour in ((kept[kept < null], SERIES[1]), (kept[kept >= null], SERIES[0])):
            axes.plot(places[part], shown[part], "o", color=colour, markersize=2.6, mew=0)
        _set_log_range(axes, smallest, shown.max())
        axes.set_xlabel("eigenvalue, by rank", labelpad=2)
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        calm(axes)
        return svg(figure, name, title)


def token_spectrum(values: Float64, features: int, name: str, title: str) -> Markup:
    """Eigenvalues of the tokens' covariance, largest first, and how many directions have none."""
    rank = len(values)
    kept = np.unique(np.linspace(0, rank - 1, min(rank, _MOST_DRAWN)).astype(int))
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes()
        axes.plot(kept + 1, values[kept], "o", color=SERIES[0], markersize=3.2, mew=0)
        _set_log_range(axes, float(values.min()), float(values.max()))
        axes.set_xlim(0.5, features + 0.5)
        if rank < features:
            axes.axvspan(rank + 0.5, features + 0.5, color=SERIES[1], alpha=0.22, linewidth=0)
        axes.set_xlabel("direction, widest first", labelpad=2)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
        calm(axes)
        return svg(figure, name, title)


def open_features(shares: Float64, name: str, title: str) -> Markup:
    """How much of each feature lies in directions that tokens do not span, 0 .. 1."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes()
        places = np.arange(1, len(shares) + 1)
        edges = np.arange(len(shares) + 1) + 0.5
        if len(shares) <= _MOST_DOTS:
            axes.bar(places, shares, width=0.75, color=SERIES[1], linewidth=0, alpha=0.8)
        else:
            axes.stairs(shares, edges, fill=True, color=SERIES[1], linewidth=0, alpha=0.8)
        axes.set_xlim(0.5, len(shares) + 0.5)
        top = min(1.0, 1.25 * float(shares.max())) or 1.0
        axes.set_ylim(0, top)
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g} %"))
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
        axes.set_xlabel("feature", labelpad=2)
        calm(axes)
        return svg(figure, name, title)


def _axes() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH, _HEIGHT))
    left = 0.52 / _WIDTH
    return figure, figure.add_axes((left, 0.22, 1 - left - 0.06 / _WIDTH, 0.75))


def _set_log_range(axes: Axes, smallest: float, largest: float) -> None:
    axes.set_yscale("log")
    low, high = math.floor(math.log10(smallest)), math.ceil(math.log10(largest))
    high = max(high, low + 1)
    log_ticks(axes, low, high)
    # Room for a line of words above the highest.
    axes.set_ylim(10.0 ** (low - 0.05 * (high - low)), 10.0 ** (high + 0.16 * (high - low)))
    axes.spines["bottom"].set_color(RULE)


def _write(axes: Axes, x: float, y: float, words: str, side: str) -> None:
    """Words at the left end of a horizontal line, on this side of it."""
    axes.annotate(
        words,
        (x, y),
        xycoords=("axes fraction", "data"),
        xytext=(0, 4 if side == "bottom" else -4),
        textcoords="offset points",
        ha="left",
        va=side,
        color=INK,
    )
