"""What a box can be asked besides: the same once more, and its tokens in another order."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.seeds import Stream, generator
from mhalearn.data import Examples
from mhalearn.data.box import Box
from mhalearn.layer.span_coordinates import SpanCoordinates

# Examples whose tokens are reordered, and those that are asked about once more.
_ASKED, _REPEATED = 32, 8


def box_in_span(box: Box, coordinates: SpanCoordinates, examples: Examples) -> Box:
    """A box that is asked in coordinates of the span of the examples' tokens, and sees tokens of
    their dtype."""
    dtype = next(examples.chunks(1)).x.dtype

    def ask(z: NDArray[Any]) -> NDArray[Any]:
        x = coordinates.inputs(z)
        return box((np.rint(x) if np.issubdtype(dtype, np.integer) else x).astype(dtype))

    return box.behind(ask)


class Answers(NamedTuple):
    """Differences are root mean squares, relative to the answers."""

    twice: float  # between two answers to the same inputs
    reordered: float  # between answers to reordered tokens and the reordered answers
    asked: int


def ask_again(box: Box, examples: Examples, seed: int) -> Answers:
    """Ask about the inputs of at most 32 examples in another order of tokens and, unless the box is
    known to answer at random, about eight of them as they are.

    Trust: a box that is random only now and then, or sees order only in some inputs, may not show
    it.
    """
    x, y, lengths = examples.subset(slice(0, _ASKED)).arrays()
    whole = lengths == examples.k
    x, known = x[whole], y[whole].astype(np.float64)
    if len(x) == 0:
        return Answers(0.0, 0.0, 0)
    size = float(np.sqrt(np.mean(known**2))) or 1.0
    twice = box.repeated
    if twice == 0.0:
        again = box(x[:_REPEATED]).astype(np.float64)
        twice = float(np.sqrt(np.mean((again - known[:_REPEATED]) ** 2))) / size
    order = generator(seed, Stream.BOX_ORDER).permutation(examples.k)
    reordered = box(np.ascontiguousarray(x[:, order])).astype(np.float64)
    return Answers(
        twice=twice,
        reordered=float(np.sqrt(np.mean((known[:, order] - reordered) ** 2))) / size,
        asked=len(x),
    )
