"""Walking over examples that need not fit into memory, in chunks of one shape."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mhalearn.examples import Examples

# Rows (tokens of examples) handled at once; a few arrays of this many rows by e are alive.
_ROWS = 1 << 17


class Part(NamedTuple):
    """A chunk of examples, padded with zeros: a zero row certifies nothing and has no margin."""

    start: int  # number of its first example
    x: NDArray[Any]
    y: NDArray[np.float64]


def walk(examples: Examples, most: int | None = None) -> Iterator[Part]:
    """All examples in order, or the first `most`, padded to chunks of one shape."""
    n = examples.n if most is None else min(most, examples.n)
    size = min(n, max(1, _ROWS // examples.k))
    start = 0
    for x, y, _ in examples.chunks(size):
        count = min(len(x), n - start)
        padding = ((0, size - count), (0, 0), (0, 0))
        yield Part(start, np.pad(x[:count], padding), np.pad(y[:count].astype(np.float64), padding))
        start += count
        if start >= n:
            return


def gather(
    examples: Examples, wanted: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """X and Y of chosen examples, in the order asked for, in one pass."""
    unique, place = np.unique(wanted, return_inverse=True)
    x, y, _ = examples.subset(unique).arrays()
    return x[place].astype(np.float64), y[place].astype(np.float64)
