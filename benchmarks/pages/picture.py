"""An SVG for the pages that is the same, byte by byte, whenever it is drawn from the same JSON."""

from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from benchmarks import DOCS

IMAGES = DOCS / "images"


@contextmanager
def picture(name: str, width: float, height: float) -> Iterator[Figure]:
    """A figure to draw on; it is written when the block ends."""
    with matplotlib.rc_context({"svg.hashsalt": "mhalearn", "font.size": 9}):
        figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
        FigureCanvasSVG(figure)
        yield figure
        figure.savefig(IMAGES / name, metadata={"Date": None})
