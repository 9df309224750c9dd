"""The descent: the error of every step, with the stages of the run marked.

Steps stand at even distances, whatever time they took: on an axis of seconds, compilation and work
that measures no error would take most of the room, and the descent none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mhalearn.report.drawing import INK, MUTED, SERIES, STYLE, calm, log_ticks, svg
from mhalearn.report.numbers import number
from mhalearn.run.events import Event

# Most points of a curve that are drawn.
_MOST_POINTS = 600
# A relative squared error of zero has no place on a log axis; it is drawn at this value.
_SMALLEST_ERROR = 1e-34
# Inches between the numbers of two stages, below which they share one mark.
_APART = 0.3


class Stage(NamedTuple):
    """A contiguous run of events of one stage, as the table lists it."""

    number: int  # among those that are drawn; 0 for one that is not
    name: str
    colour: int  # 1..5, the page's series colours; 0 for a stage that is not drawn
    began: float
    ended: float
    steps: int
    error: float  # the last finite one, nan where there is none
    detail: str  # of the last event that has one


class _Piece(NamedTuple):
    """What is drawn of a stage."""

    number: int
    colour: str
    places: list[float]
    errors: list[float]


def list_stages(trace: Sequence[Event]) -> list[Stage]:
    """Contiguous runs of one stage, each with a colour that its name keeps."""
    colours: dict[str, int] = {}
    found: list[Stage] = []
    for stage, run in itertools.groupby(trace, key=lambda event: event.stage):
        events = list(run)
        errors = [event.loss for event in events if math.isfinite(event.loss)]
        if errors:
            colours.setdefault(stage, len(colours) % len(SERIES) + 1)
        found.append(
            Stage(
                number=1 + sum(stage.number > 0 for stage in found) if errors else 0,
                name=stage,
                colour=colours[stage] if errors else 0,
                began=events[0].seconds,
                ended=events[-1].seconds,
                steps=len(events),
                error=errors[-1] if errors else math.nan,
                detail=next((event.detail for event in reversed(events) if event.detail), ""),
            )
        )
    return found


def measured_seconds(trace: Sequence[Event]) -> float:
    """Seconds in which errors were measured, one soon after another: from the first to the last
    of each stage."""
    total = 0.0
    for _, run in itertools.groupby(trace, key=lambda event: event.stage):
        times = [event.seconds for event in run if math.isfinite(event.loss)]
        total += times[-1] - times[0] if times else 0.0
    return total


def draw_descent(trace: Sequence[Event], width: float, name: str) -> Markup | None:
    """Relative squared error of every step on a log axis; None where there are not two."""
    pieces = _pieces(trace)
    errors = [error for piece in pieces for error in piece.errors]
    if len(errors) < 2:
        return None
    title = (
        f"Relative squared error by step, on a log axis: {number(errors[0])} at first, "
        f"{number(errors[-1])} at last, in {len(pieces)} of the stages listed below"
    )
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, 2.1))
        left, right = 0.55 / width, 0.12 / width
        axes = figure.add_axes((left, 0.215, 1 - left - right, 0.66))
        previous: tuple[float, float] | None = None
        for piece in pieces:
            if previous is not None:
                bridge = [previous[0], piece.places[0]], [previous[1], piece.errors[0]]
                axes.plot(*bridge, ":", color=MUTED, lw=0.8)
            size = 2.6 if len(piece.places) > 1 else 5.0
            axes.plot(
                piece.places,
                piece.errors,
                "-o",
                color=piece.colour,
                markersize=size,
                linewidth=1.3,
                mew=0,
            )
            previous = piece.places[-1], piece.errors[-1]
        axes.set_yscale("log")
        low, high = math.floor(math.log10(min(errors))), math.ceil(math.log10(max(errors)))
        high = max(high, low + 1)
        axes.set_ylim(10.0 ** (low - 0.3), 10.0 ** (high + 0.3))
        log_ticks(axes, low, high)
        last = pieces[-1].places[-1]
        axes.set_xlim(0, last * 1.02 if last > 0 else 1.0)
        axes.set_xlabel("step", labelpad=2)
        axes.xaxis.set_major_locator(MaxNLocator(5 if width < 5 else 9, integer=True))
        calm(axes)
        _mark_stages(axes, pieces, width * (1 - left - right))
        return svg(figure, name, title)


def _pieces(trace: Sequence[Event]) -> list[_Piece]:
    """The stages with errors, thinned to what can be told apart."""
    found, drawn = [], 0
    stages = list_stages(trace)
    budget = max(8, _MOST_POINTS // max(1, len(stages)))
    runs = itertools.groupby(trace, key=lambda event: event.stage)
    for stage, (_, run) in zip(stages, runs, strict=True):
        events = [event for event in run if math.isfinite(event.loss)]
        if not events:
            continue
        kept = _spread([event.loss for event in events], budget)
        places = [float(drawn + i + 1) for i in kept]
        errors = [max(events[i].loss, _SMALLEST_ERROR) for i in kept]
        found.append(_Piece(stage.number, SERIES[stage.colour - 1], places, errors))
        drawn += len(events)
    return found


def _mark_stages(axes: Axes, pieces: Sequence[_Piece], inches: float) -> None:
    """A line where each stage begins and its number above; stages too close share a mark."""
    unit = inches / axes.get_xlim()[1]
    marks: list[list[_Piece]] = []
    for piece in pieces:
        if marks and (piece.places[0] - marks[-1][0].places[0]) * unit < _APART:
            marks[-1].append(piece)
        else:
            marks.append([piece])
    for piece in pieces:
        axes.axvline(piece.places[0], color=MUTED, lw=0.6, linestyle=(0, (1, 2)), zorder=0)
    for mark in marks:
        first, last, start = mark[0].number, mark[-1].number, mark[0].places[0]
        axes.annotate(
            str(first) if first == last else f"{first}\N{EN DASH}{last}",
            (start, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            color=INK,
        )


def _spread(losses: Sequence[float], most: int) -> list[int]:
    """At most about `most` places: first, last, and the highest and lowest of equal shares."""
    if len(losses) <= most:
        return list(range(len(losses)))
    kept = {0, len(losses) - 1}
    for share in np.array_split(np.arange(len(losses)), most // 2):
        part = [losses[i] for i in share]
        kept.update((int(share[np.argmin(part)]), int(share[np.argmax(part)])))
    return sorted(kept)
