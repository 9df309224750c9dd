"""Axes for a paper: on a figure of their own, or the caller's; nothing global is touched.

Figures are not made by pyplot, so that nothing keeps them and no backend is chosen; a notebook
shows axes made here by their SVG.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mhalearn.learners.chen_li.figures import STYLE, PaperFigure, as_svg


class PaperAxes(Axes):
    """Axes that a notebook shows, with the whole figure that they are part of."""

    def _repr_svg_(self) -> str:
        return _root(self)._repr_svg_()


class Panels(np.ndarray[Any, np.dtype[Any]]):
    """Several axes as an array, as `figure.subplots` returns them; a notebook shows their figure.

    `panels.figure` is the figure, to be saved: `panels.figure.savefig("heads.pdf")`.
    """

    @property
    def figure(self) -> Any:
        return _root(self.flat[0])

    def _repr_svg_(self) -> str | None:
        return self.figure._repr_svg_() if isinstance(self.figure, PaperFigure) else None


def to_svg(drawn: Any) -> str:
    """A figure, or the figure of these axes, as an SVG: one element, to be inlined or written.

    Text stays text, in the reader's fonts.
    """
    if isinstance(drawn, np.ndarray) and drawn.size and isinstance(drawn.flat[0], Axes):
        drawn = drawn.flat[0]
    figure = _root(drawn) if isinstance(drawn, Axes) else drawn
    if not isinstance(figure, Figure):
        raise ValueError(f"cannot make an SVG of {type(drawn).__name__}: pass axes or a figure")
    return as_svg(figure)


def draw_panels(
    shape: tuple[int, int],
    size: tuple[float, float],
    draw: Callable[[Panels], None],
    given: Any = None,
) -> Panels:
    """Draw on rows and columns of axes: on those given, in the caller's style, or on a new figure
    of this size in inches."""
    if given is not None:
        panels = _check_given(given, shape)
        draw(panels)
        return panels
    with matplotlib.rc_context(STYLE):
        figure = PaperFigure(figsize=size, layout="constrained")
        made = figure.subplots(*shape, squeeze=False, subplot_kw={"axes_class": PaperAxes})
        panels = as_panels(made)
        draw(panels)
    return panels


def draw_one(size: tuple[float, float], draw: Callable[[Axes], None], given: Axes | None) -> Axes:
    """The same on a single axes."""
    return draw_panels((1, 1), size, lambda panels: draw(panels[0, 0]), given)[0, 0]


def as_panels(axes: Any) -> Panels:
    return np.asarray(axes, object).view(Panels)


def _check_given(given: Any, shape: tuple[int, int]) -> Panels:
    axes = np.asarray(given, object)
    if axes.size != shape[0] * shape[1] or not all(isinstance(one, Axes) for one in axes.flat):
        raise ValueError(
            f"{axes.size} axes were given, this figure has {shape[0] * shape[1]}: pass "
            f"figure.subplots({shape[0]}, {shape[1]}), or nothing"
        )
    return as_panels(axes.reshape(shape))


def _root(axes: Axes) -> Any:
    """The figure, not the part of it that the axes are in."""
    return axes.figure.figure
