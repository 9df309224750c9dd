"""A tail as a picture: what was measured, its interval, and the bounds over it."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import NullFormatter

from mhalearn._runtime.types import Float64
from mhalearn.tails.record import Tail

_MEASURED, _BESIDE = "#1b6ca8", "#8a8a8a"
_BOUNDS = {"at most": "#c0392b", "at least": "#5a9e4b", "about": "#e07b39"}
# From so many times the least to the largest, an axis has decades.
_DECADES = 18.0


def plot(record: Tail, figure: Figure | SubFigure | None = None) -> Figure | SubFigure:
    """Draw a record: dots measured with their interval, lines bounds (solid where proved).

    figure: drawn on if given; savefig writes it, as SVG, PDF or PNG.
    """
    figure = figure or Figure(figsize=(6.2, 3.6), layout="constrained")
    axes = figure.subplots()
    _draw_bounds(axes, record)
    for name, curve in record.beside.items():
        axes.plot(record.t, curve, ":", color=_BESIDE, label=name)
    seen = record.n > 0
    axes.fill_between(
        record.t[seen], record.lower[seen], record.upper[seen], color=_MEASURED, alpha=0.25, lw=0
    )
    curves = [record.measured[seen], *(b.values for b in record.bounds)]
    decades = _spans_decades(np.concatenate(curves))
    shown = _without_zeros(record.measured[seen]) if decades else record.measured[seen]
    axes.plot(record.t[seen], shown, "o-", color=_MEASURED, ms=3, label="measured")
    if decades:
        least = record.measured[record.measured > 0]
        axes.set_yscale("log")
        top = min(2.0, 3 * max(float(curve.max(initial=0)) for curve in curves))
        axes.set_ylim(bottom=0.3 * float(least.min()) if least.size else None, top=top)
    if np.all(record.t > 0) and record.t[-1] / record.t[0] >= _DECADES:
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(record.abscissa)
    axes.set_title(f"{record.event}\n{record.inputs} tokens", loc="left", fontsize=9)
    axes.legend(frameon=False, fontsize=7.5)
    return figure


def _draw_bounds(axes: Any, record: Tail) -> None:
    for place, bound in enumerate(record.bounds):
        said = "proved" if bound.proved else "not proved"
        axes.plot(
            record.t,
            _without_zeros(bound.values) if bound.side == "at least" else bound.values,
            "-" if bound.proved else "--",
            color=_BOUNDS[bound.side],
            alpha=1.0 if place == 0 else 0.6,
            lw=1.2,
            label=f"{bound.side} (bound {place + 1}, {said})",
        )


def _without_zeros(values: Float64) -> Float64:
    """Gaps where there is nothing that an axis of decades could show."""
    return np.where(values > 0, values, np.nan)


def _spans_decades(values: Float64) -> bool:
    positive = values[values > 0]
    return bool(positive.size and positive.max() / positive.min() >= _DECADES)
