"""The report's figures for notebooks and papers, as functions that return matplotlib axes.

    mha.plot.heads(layer).figure.savefig("heads.pdf")

Each makes a figure of its own, as wide as a column of a paper, or draws on axes of yours (`ax=`,
`axes=`), and returns the axes; a notebook shows those it made. `to_svg` turns them into SVG.
Figures that are saved embed their fonts in PDF and keep text in SVG. Nothing global changes: no
pyplot, no settings. Where a truth is given, heads stand in its order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from numpy.typing import ArrayLike

from mhalearn._runtime.types import Float64
from mhalearn.judge.certificate import Certificate
from mhalearn.judge.solution import Solution
from mhalearn.layer.base import Layer
from mhalearn.layer.comparison import compare
from mhalearn.layer.layer import AttentionLayer
from mhalearn.learners.chen_li.figures import (
    STYLE,
    WIDTH,
    PaperFigure,
    add_key,
    draw_lines,
    measure_height,
)
from mhalearn.learners.chen_li.figures import draw_panels as draw_phase
from mhalearn.learners.chen_li.panels import Curve, Lines
from mhalearn.learners.chen_li.phases import Phases
from mhalearn.learners.chen_li.plot import list_panels
from mhalearn.report import heat_maps
from mhalearn.report.descent import list_stages
from mhalearn.report.paper import Panels, as_panels, draw_one, draw_panels, to_svg
from mhalearn.run.events import Event

__all__ = [
    "descent",
    "heads",
    "identifiability",
    "patterns",
    "phases",
    "singular_values",
    "to_svg",
]

_THETA = "\N{GREEK CAPITAL LETTER THETA}"
# Heads that are drawn unless others are asked for.
_MOST_DRAWN = 12
# Inches: a picture of a matrix, the names beside and above them, a panel of curves.
_SIDE, _BESIDE, _ABOVE, _ROW = 0.8, 0.4, 0.25, 1.9
# Singular values below this share of the largest are rounding, and a few of them are drawn.
_ROUNDING, _FEW = 1e-10, 4
# Points of a curve, and heads and stages that have a name in the key: more are not told apart.
_MOST_POINTS, _MOST_NAMES, _MOST_STAGES = 240, 6, 12


def heads(
    layer: Layer,
    truth: Layer | None = None,
    *,
    which: Sequence[int] | None = None,
    axes: Any = None,
) -> Panels:
    """Theta and W of every head as heat maps, a column a head; blue is negative, orange positive.

    truth: adds two rows each, the true matrices and the difference, on the same scale, with its
    largest entry below: blank where the layer is right.
    which: the heads to draw, as `layer.theta` counts them (with a truth, as `truth.theta` does);
    the first twelve unless given.
    axes: rows and columns of axes to draw on. Large matrices are drawn by their blocks' largest
    entries.
    """
    learned, true = _softmax_heads(layer, truth)
    order, chosen = _match(learned, true), _choose(which, learned.n_heads)
    rows = []
    for symbol, name in ((_THETA, "theta"), ("W", "w")):
        matrices = getattr(learned, name)[order][chosen]
        beside = None if true is None else getattr(true, name)[chosen]
        rows += heat_maps.list_rows(symbol, matrices, beside)

    def draw(panels: Panels) -> None:
        heat_maps.draw_rows(panels, rows)
        heat_maps.name_heads(panels, chosen)

    size = _BESIDE + _SIDE * len(chosen), _ABOVE + _SIDE * len(rows)
    return draw_panels((len(rows), len(chosen)), size, draw, axes)


def patterns(
    layer: Layer,
    x: ArrayLike,
    tokens: Sequence[str] | None = None,
    truth: Layer | None = None,
    *,
    which: Sequence[int] | None = None,
    axes: Any = None,
) -> Panels:
    """Where each head looks on one example: row r shows how token r spreads its attention.

    x: its tokens (k, d), as `X[0]`. tokens: k names for them. truth: adds a row with its patterns;
    heads are matched by what they do on these tokens.
    which, axes: as in `heads`.
    """
    learned, true = _softmax_heads(layer, truth)
    x = np.asarray(x)
    x = x[0] if x.ndim == 3 and len(x) == 1 else x
    if x.ndim != 2:
        raise ValueError(f"x has shape {x.shape}: pass the tokens of one example, as X[0]")
    if tokens is not None and len(tokens) != len(x):
        raise ValueError(f"{len(tokens)} names for {len(x)} tokens: pass one for each")
    order, chosen = _match(learned, true, x[None]), _choose(which, learned.n_heads)
    weights = {"attention" if true is None else "learned": learned.patterns(x[None])[0][order]}
    if true is not None:
        weights["true"] = true.patterns(x[None])[0]
    weights = {name: some[chosen] for name, some in weights.items()}

    def draw(panels: Panels) -> None:
        heat_maps.draw_patterns(panels, weights, tokens)
        heat_maps.name_heads(panels, chosen)

    side = max(_SIDE, 0.13 * len(x)) if tokens is not None else _SIDE
    named = 0.0 if tokens is None else 0.09 * max(map(len, tokens), default=0)
    size = _BESIDE + named + side * len(chosen), _ABOVE + named + side * len(weights)
    return draw_panels((len(weights), len(chosen)), size, draw, axes)


def singular_values(
    layer: Layer,
    truth: Layer | None = None,
    *,
    which: Sequence[int] | None = None,
    axes: Any = None,
) -> Panels:
    """The singular values of every head's Theta, left, and W, right; those of the truth as rings.

    Of those at rounding, a few are drawn. which, axes: as in `heads`.
    Cost: the singular values of the heads that are drawn.
    """
    learned, true = _softmax_heads(layer, truth)
    order, chosen = _match(learned, true), _choose(which, learned.n_heads)

    def draw(panels: Panels) -> None:
        for one, (symbol, name) in zip(panels.flat, ((_THETA, "theta"), ("W", "w")), strict=True):
            values = _values(getattr(learned, name)[order][chosen])
            beside = None if true is None else _values(getattr(true, name)[chosen])
            _draw_values(one, values, beside, chosen)
            one.set_ylabel(f"singular values of {symbol}")

    return draw_panels((1, 2), (WIDTH, _ROW), draw, axes)


def descent(
    run: Solution | Sequence[Event] | Any,
    *,
    by: str = "event",
    ax: Axes | None = None,
) -> Axes:
    """Relative squared error on a log axis, with a colour for each stage of the run.

    run: a Solution, a fitted estimator, or the events of a trace. by: "event", which shows steps
    of equal width, or "seconds" since the run began, compilation included.
    """
    if by not in ("event", "seconds"):
        raise ValueError(f'by={by!r}: choose "event" or "seconds"')
    trace = run if isinstance(run, list | tuple) else _solution(run).trace
    drawn = [event for event in trace if np.isfinite(event.loss)]
    if not drawn:
        raise ValueError("no event of this run has an error: there is nothing to draw")
    places = [event.seconds if by == "seconds" else float(i) for i, event in enumerate(drawn, 1)]
    curves, start = [], 0
    for stage in list_stages(drawn):
        part = _spread(start, start + stage.steps)
        losses = np.array([drawn[i].loss for i in part])
        curves.append((stage, np.array([places[i] for i in part]), losses))
        start += stage.steps

    names = list(dict.fromkeys(stage.name for stage, _, _ in curves))
    looks = {name: (f"C{i % 6}", "os"[i // 6 % 2]) for i, name in enumerate(names)}

    def draw(axes: Axes) -> None:
        lines = tuple(Curve("", x, losses) for _, x, losses in curves)
        draw_lines(axes, Lines("relative squared error", by, lines, log="y"))
        for line, (stage, x, _) in zip(axes.get_lines()[-len(curves) :], curves, strict=True):
            colour, mark = looks[stage.name]
            line.set(color=colour, linestyle="-", clip_on=False)
            line.set(marker=mark, markersize=2.0 if len(x) > 1 else 3.5)
        # The key names each stage once, and none where there are too many to be told apart.
        if len(names) <= _MOST_STAGES:
            for name, (colour, mark) in looks.items():
                axes.plot([], [], "-", marker=mark, markersize=2.0, color=colour, label=name)
        add_key(axes)

    return draw_one((WIDTH, _ROW + 0.06 * min(len(names), _MOST_STAGES)), draw, ax)


def phases(run: Phases | Any, truth: AttentionLayer | None = None) -> Panels:
    """What each of the paper's phases found: `chen_li.plot`, all in one figure.

    run: the phases, or a Solution or estimator of method "sculpt". truth: the layer that made the
    labels; with it come errors. Returns all panels, phase by phase; the parts of the figure are
    `panels.figure.subfigs`. The number of panels depends on what was found, so that they have a
    figure of their own.
    """
    found = run if isinstance(run, Phases) else _solution(run).phases
    if not isinstance(found, Phases):
        raise ValueError('this run has no phases: fit with method="sculpt"')
    listed = list_panels(found, truth)
    if not listed:
        raise ValueError("no phase has ended: there is nothing to draw")
    rows = -(-len(listed) // 2)
    heights = [0.2 + measure_height(panels) for panels in listed.values()]
    heights = [max(heights[2 * i : 2 * i + 2]) for i in range(rows)]
    with matplotlib.rc_context(STYLE):
        figure = PaperFigure(figsize=(2 * WIDTH, sum(heights)), layout="constrained")
        grid = figure.subfigures(rows, 2, squeeze=False, height_ratios=heights)
        for (name, panels), part in zip(listed.items(), grid.flat, strict=False):
            part.suptitle(name, x=0.02, ha="left", fontweight="bold")
            draw_phase(part, panels)
    return as_panels([one for one in figure.axes if one.get_visible()])


def identifiability(run: Certificate | Solution | Any, *, axes: Any = None) -> Panels:
    """The eigenvalues behind the number of open directions: those left open in another colour.

    run: a Certificate, or a Solution or estimator that has one. Where tokens do not span the
    features, a second panel shows how much of every feature no token can show.
    axes: one or two, accordingly.
    """
    certificate = run if isinstance(run, Certificate) else _solution(run).certificate
    if certificate is None:
        raise ValueError("this run has no certificate: no example could be spared for one")
    panels = []
    if certificate.spectrum is not None and np.any(certificate.spectrum):
        panels.append(_spectrum(certificate.spectrum, certificate.null_dimension or 0))
    if certificate.span is not None:
        hidden = np.sum(np.asarray(certificate.span.normals) ** 2, axis=0)
        curve = Curve("", np.arange(1.0, len(hidden) + 1), hidden, dots=True)
        title, top = "share that is not spanned", float(hidden.max())
        panels.append(Lines(title, "feature", (curve,), top=top))
    if not panels:
        raise ValueError("the layer is too large for its spectrum: there is nothing to draw")

    def draw(drawn: Panels) -> None:
        for one, panel in zip(drawn.flat, panels, strict=True):
            draw_lines(one, panel)
            add_key(one)

    return draw_panels((1, len(panels)), (WIDTH, _ROW), draw, axes)


def _spectrum(values: Float64, null: int) -> Lines:
    sizes = np.abs(values)
    shown = np.maximum(sizes, sizes[sizes > 0].min())  # zero has no place on a log axis
    curves = tuple(
        Curve(f"{name} ({end - start})", kept + 1.0, shown[kept], dots=True)
        for name, start, end in (("seen", null, len(shown)), ("open", 0, null))
        if (kept := np.array(_spread(start, end), int)).size
    )
    return Lines("eigenvalues", "by rank", curves, log="y")


def _draw_values(
    axes: Axes, learned: list[Float64], true: list[Float64] | None, chosen: Sequence[int]
) -> None:
    shown = [_count_drawn(values) for values in learned]
    for i, (values, most) in enumerate(zip(learned, shown, strict=True)):
        places, colour = np.arange(1, most + 1), f"C{i % 6}"
        axes.plot(places, values[:most], "o-", color=colour, linewidth=0.5, clip_on=False)
        axes.get_lines()[-1].set_label(f"head {chosen[i] + 1}")
        if true is not None:
            ring: dict[str, Any] = {"markersize": 6.0, "fillstyle": "none", "markeredgewidth": 0.7}
            axes.plot(places, true[i][:most], "o", color=colour, clip_on=False, **ring)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("by rank")
    if len(learned) <= _MOST_NAMES:
        add_key(axes)


def _count_drawn(values: Float64) -> int:
    """Singular values above rounding, and a few more."""
    return min(len(values), int(np.sum(values > _ROUNDING * values[0])) + _FEW)


def _values(matrices: Float64) -> list[Float64]:
    return list(np.linalg.svd(matrices, compute_uv=False).astype(np.float64))


def _spread(start: int, end: int) -> list[int]:
    """Indices from start to before end: all of few, evenly spread ones of many, both ends kept."""
    count = min(end - start, _MOST_POINTS)
    return np.unique(np.rint(np.linspace(start, end - 1, count)).astype(int)).tolist()


def _choose(which: Sequence[int] | None, n_heads: int) -> list[int]:
    chosen = list(range(min(n_heads, _MOST_DRAWN)) if which is None else which)
    if not chosen or not all(0 <= head < n_heads for head in chosen):
        raise ValueError(f"which={which}: choose some of the heads 0 to {n_heads - 1}")
    return chosen


def _match(
    learned: AttentionLayer, true: AttentionLayer | None, inputs: ArrayLike | None = None
) -> Any:
    """The learned head of each true one, or all as they are."""
    if true is None:
        return np.arange(learned.n_heads)
    found = compare(learned, true, inputs)
    if not found.comparable:
        raise ValueError(f"heads cannot be matched with those of truth: {found.why}")
    return found.order


def _softmax_heads(
    layer: Layer, truth: Layer | None
) -> tuple[AttentionLayer, AttentionLayer | None]:
    for one in (layer, truth):
        if not isinstance(one, AttentionLayer | None):
            kind = type(one).__name__
            raise ValueError(f"cannot draw the heads of {kind}: pass an AttentionLayer")
    return layer, truth  # type: ignore[return-value]


def _solution(run: Any) -> Solution:
    solution = getattr(run, "solution_", run)
    if not isinstance(solution, Solution):
        raise ValueError(f"cannot draw {type(run).__name__}: pass a Solution or a fitted estimator")
    return solution
