"""How the figures of the phases are drawn: one column wide, without decoration."""

import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from mhalearn.learners.chen_li.panels import Lines, Named, Panel

# Inches: a column of a paper, and a row of panels in it.
WIDTH, _ROW = 3.4, 1.75
# Zero has no place on a log axis; it is drawn at this value.
_SMALLEST = 1e-32
# Told apart by colour-blind readers (Okabe and Ito), and in grey by their dashes and marks.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_DASHES = ("-", "--", ":", "-.")
_MARKS = ("o", "s", "^", "D", "v", "P")
_RULE: dict[str, Any] = {"color": "#666666", "linewidth": 0.6, "linestyle": (0, (4, 2))}
# Points up to which each is drawn large.
_FEW = 50
# How much larger than on paper a figure is on a screen.
_ON_SCREEN = 1.5

STYLE = {
    "font.family": "sans-serif",
    "font.size": 7.0,
    "axes.titlesize": 7.0,
    "axes.labelsize": 7.0,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "legend.fontsize": 6.0,
    "axes.linewidth": 0.5,
    "xtick.major.width": 0.5,
    "ytick.major.width": 0.5,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.0,
    "lines.markersize": 3.0,
    "axes.prop_cycle": cycler(color=_COLOURS),
    "figure.facecolor": "white",
    "savefig.facecolor": "auto",
    "axes.facecolor": "white",
    "text.color": "black",
    "axes.labelcolor": "black",
    "axes.edgecolor": "black",
    "xtick.color": "black",
    "ytick.color": "black",
    "text.usetex": False,
    "pdf.fonttype": 42,  # TrueType, which is embedded and stays text
    "ps.fonttype": 42,
    "svg.fonttype": "none",  # text, not outlines
    "svg.hashsalt": "mhalearn",
}


class PaperFigure(Figure):
    """A figure that is saved in its own style, whatever the caller's settings are, and that a
    notebook shows, whether or not it has a backend for matplotlib."""

    def savefig(self, *args: Any, **options: Any) -> None:
        with matplotlib.rc_context(STYLE):
            super().savefig(*args, **options)

    def _repr_svg_(self) -> str:
        def enlarge(size: re.Match[str]) -> str:
            return f'{size[1]}="{_ON_SCREEN * float(size[2]):g}pt"'

        head, end, rest = as_svg(self).partition(">")
        return re.sub(r'\b(width|height)="([\d.]+)pt"', enlarge, head) + end + rest


def as_svg(figure: Figure) -> str:
    """A figure as one <svg> element that stands alone."""
    buffer = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return re.sub(r"\s*\n\s*", "\n", text[text.index("<svg") :])


def draw(panels: Sequence[Panel]) -> Figure:
    """The panels of one phase, two in a row."""
    with matplotlib.rc_context(STYLE):
        figure = PaperFigure(figsize=(WIDTH, measure_height(panels)), layout="constrained")
        draw_panels(figure, panels)
    return figure


def measure_height(panels: Sequence[Panel]) -> float:
    """In inches."""
    return sum(max(map(_height, row)) for row in _rows(panels))


def draw_panels(figure: Figure | SubFigure, panels: Sequence[Panel]) -> None:
    """Two in a row, on an empty figure."""
    rows, columns = _rows(panels), min(len(panels), 2)
    heights = [max(map(_height, row)) for row in rows]
    grid = figure.subplots(len(rows), columns, squeeze=False, height_ratios=heights)
    for row, line in zip(rows, grid, strict=True):
        for place, axes in enumerate(line):
            if place >= len(row):
                axes.set_visible(False)
            elif isinstance(panel := row[place], Lines):
                draw_lines(axes, panel)
            else:
                beside = row[place - 1] if place else None
                known = isinstance(beside, Named) and beside.names == panel.names
                _draw_named(axes, panel, known)
            add_key(axes)


def _rows(panels: Sequence[Panel]) -> list[Sequence[Panel]]:
    return [panels[start : start + 2] for start in range(0, len(panels), 2)]


def _height(panel: Panel) -> float:
    return _ROW if isinstance(panel, Lines) else min(_ROW, 0.75 + 0.15 * len(panel.names))


def draw_lines(axes: Axes, panel: Lines) -> None:
    """Curves on axes that may be the caller's."""
    logarithmic = [bool(panel.log), panel.log == "xy"]
    for place, curve in enumerate(panel.curves):
        few = len(curve.y) <= _FEW
        axes.plot(
            curve.x,
            _shown(curve.y, logarithmic[0]),
            linestyle="" if curve.dots else _DASHES[place % len(_DASHES)],
            marker=_MARKS[place % len(_MARKS)] if curve.dots else "",
            markersize=3.0 if few else 1.2,
            color=_COLOURS[place % len(_COLOURS)],
            label=curve.name,
            clip_on=not curve.dots,
        )
    if panel.level is not None:
        level = float(_shown(np.array(panel.level), logarithmic[0]))
        axes.axhline(level, label=panel.level_name, **_RULE)
    if panel.divide is not None:
        axes.axvline(panel.divide, **_RULE)
    everything = np.concatenate([curve.y for curve in panel.curves] + [np.zeros(0)])
    if logarithmic[0]:
        levels = [] if panel.level is None else [panel.level]
        _set_decades(axes, "y", np.append(everything, levels))
    if logarithmic[1]:
        _set_decades(axes, "x", np.concatenate([curve.x for curve in panel.curves]))
    elif all(np.all(curve.x == np.rint(curve.x)) for curve in panel.curves):
        low, high = axes.get_xlim()
        axes.set_xlim(min(low, np.ceil(low) - 0.5), max(high, np.floor(high) + 0.5))
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(4))
    if panel.top is not None:
        axes.set_ylim(0, 1.02 * panel.top)
    axes.set_xlabel(panel.axis)
    axes.set_ylabel(panel.title)


def _draw_named(axes: Axes, panel: Named, named_beside: bool) -> None:
    names, series = panel.names, panel.series
    for place, one in enumerate(series):
        mine = [(value, names.index(name)) for name, which, value in panel.entries if which == one]
        values, rows = np.array(mine).T
        axes.plot(
            _shown(values, panel.log),
            rows + 0.2 * (place - (len(series) - 1) / 2),
            linestyle="",
            marker=_MARKS[place % len(_MARKS)],
            color=_COLOURS[place % len(_COLOURS)],
            label=one,
            clip_on=False,
        )
    if panel.level is not None:
        axes.axvline(panel.level, **_RULE)
    axes.set_yticks(range(len(names)), [""] * len(names) if named_beside else names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    if panel.log:
        _set_decades(axes, "x", np.array([value for _, _, value in panel.entries]))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(4))
    if panel.from_zero:
        right = axes.get_xlim()[1]
        axes.set_xlim(-0.04 * right, right)
    axes.set_xlabel(panel.title)


def _shown(values: Any, logarithmic: bool) -> Any:
    return np.maximum(values, _SMALLEST) if logarithmic else values


def _set_decades(axes: Axes, name: str, values: Any) -> None:
    """A log axis from one power of ten to another, with at most five of them as ticks."""
    shown = _shown(values, True)
    first, last = int(np.floor(np.log10(shown.min()))), int(np.ceil(np.log10(shown.max())))
    first, last = (first, last) if first < last else (first - 1, last + 1)
    every = -(-(last - first) // 4)
    powers = [10.0**power for power in range(first, last + 1, every)]
    axis = getattr(axes, f"{name}axis")
    axes.set(**{f"{name}scale": "log"})
    axes.set(**{f"{name}lim": (10.0**first, 10.0**last)})
    axis.set_major_locator(FixedLocator(powers))
    axis.set_minor_locator(NullLocator())


def add_key(axes: Axes) -> None:
    """Above the panel, where it hides nothing; none for a single thing."""
    drawn, names = axes.get_legend_handles_labels()
    if len(names) < 2:
        return
    axes.legend(
        drawn,
        names,
        frameon=False,
        ncols=2,
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        borderaxespad=0.1,
        borderpad=0.1,
        handlelength=1.5,
        handletextpad=0.3,
        columnspacing=0.8,
        labelspacing=0.2,
        markerscale=1.0,
    )
