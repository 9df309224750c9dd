"""What a box can be asked besides: the same once more, and its tokens in another order."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.seeds import Stream, generator
from mhalearn.data import Examples
from mhalearn.layer.span_coordinates import SpanCoordinates

Box = Callable[[NDArray[Any]], NDArray[Any]]

_ASKED = 32


def box_in_span(box: Box, coordinates: SpanCoordinates, examples: Examples) -> Box:
    """A box that is asked in coordinates of the span of the examples' tokens, and sees tokens of
    their dtype."""
    dtype = next(examples.chunks(1)).x.dtype

    def ask(z: NDArray[Any]) -> NDArray[Any]:
        x = coordinates.inputs(z)
        return box((np.rint(x) if np.issubdtype(dtype, np.integer) else x).astype(dtype))

    return ask


class Answers(NamedTuple):
    """Differences are root mean squares, relative to the answers."""

    twice: float  # between two answers to the same inputs
    reordered: float  # between answers to reordered tokens and the reordered answers
    asked: int


def ask_again(box: Box, examples: Examples, seed: int) -> Answers:
    """Ask three times about the inputs of at most 32 examples. Trust: a box that is random only
    now and then, or sees order only in some inputs, may not show it."""
    x, _, lengths = examples.subset(slice(0, _ASKED)).arrays()
    x = x[lengths == examples.k]
    if len(x) == 0:
        return Answers(0.0, 0.0, 0)
    order = generator(seed, Stream.BOX_ORDER).permutation(examples.k)
    first, second = (box(x).astype(np.float64) for _ in range(2))
    reordered = box(np.ascontiguousarray(x[:, order])).astype(np.float64)
    size = float(np.sqrt(np.mean(first**2))) or 1.0
    return Answers(
        twice=float(np.sqrt(np.mean((first - second) ** 2))) / size,
        reordered=float(np.sqrt(np.mean((first[:, order] - reordered) ** 2))) / size,
        asked=len(x),
    )
