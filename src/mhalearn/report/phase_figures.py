"""The figure of the paper's phases: sorted positive numbers on a log axis, one curve a round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from mhalearn.report.drawing import CARD, MUTED, SERIES, STYLE, calm, log_ticks, svg
from mhalearn.report.numbers import short

# Inches: beside a table on a desk, and on a telephone.
WIDE, NARROW = 6.1, 4.2
# Zero has no place on a log axis; it is drawn at this value.
_SMALLEST = 1e-16
# Numbers that are joined by a line although each has its dot.
_FEW = 16


class Curve(NamedTuple):
    """Numbers in the order they are drawn: a line, or dots and rings where `solid` is given."""

    colour: int  # 1..5, the page's series colours
    places: Sequence[float]
    values: Sequence[float]
    solid: Sequence[bool] | None = None  # a dot if true, a ring if not


class Marks(NamedTuple):
    """Dashed lines that divide a figure: values under `level`, places before `before`."""

    level: float | None = None
    before: float | None = None


def sorted_values(
    curves: Sequence[Curve], axis: str, marks: Marks, name: str, title: str
) -> tuple[Markup, Markup] | None:
    """The curves, wide and narrow; None where there is nothing to draw."""
    drawn = [curve for curve in curves if len(curve.values)]
    if not drawn:
        return None
    wide, narrow = (
        _draw(drawn, axis, marks, width, f"{name}-{which}", title)
        for width, which in ((WIDE, "wide"), (NARROW, "narrow"))
    )
    return wide, narrow


def _draw(
    curves: Sequence[Curve], axis: str, marks: Marks, width: float, name: str, title: str
) -> Markup:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, 2.5))
        left = 0.55 / width
        axes = figure.add_axes((left, 0.18, 1 - left - 0.12 / width, 0.78))
        everything = [] if marks.level is None else [marks.level]
        for curve in curves:
            values = np.maximum(np.asarray(curve.values, np.float64), _SMALLEST)
            places = np.asarray(curve.places)
            colour = SERIES[(curve.colour - 1) % len(SERIES)]
            everything += values.tolist()
            # A line through many rings would hide that they are rings.
            if curve.solid is None or len(values) <= _FEW:
                axes.plot(places, values, "-", color=colour, linewidth=1.5)
            if curve.solid is None:
                continue
            solid, size = np.asarray(curve.solid, bool), 6.0 if len(values) <= _FEW else 4.2
            axes.plot(places[solid], values[solid], "o", color=colour, markersize=size, mew=0)
            axes.plot(
                places[~solid],
                values[~solid],
                "o",
                color=colour,
                markersize=size,
                markerfacecolor=CARD,
                markeredgewidth=1.0,
            )
        if marks.level is not None:
            axes.axhline(marks.level, color=MUTED, linewidth=0.9, linestyle="--")
        if marks.before is not None:
            axes.axvline(marks.before, color=MUTED, linewidth=0.9, linestyle="--")
        axes.set_yscale("log")
        _set_range(axes, min(everything), max(everything))
        axes.set_xlabel(axis, labelpad=2)
        axes.xaxis.set_major_locator(MaxNLocator(4 if width < 5 else 8, integer=True))
        calm(axes)
        return svg(figure, name, title)


def _set_range(axes: Axes, low: float, high: float) -> None:
    """Whole powers of ten as ticks; steps within them where the numbers span no power."""
    if math.log10(high / low) >= 1.5:
        log_ticks(axes, math.floor(math.log10(low)), math.ceil(math.log10(high)))
        axes.set_ylim(low / 1.6, high * 1.6)
        return
    axes.set_ylim(low / 2, high * 2)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
