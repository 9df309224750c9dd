"""Walking over examples that need not fit into memory, in chunks of one shape."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime import devices
from mhalearn.data import Examples

# Rows (tokens of examples) handled at once, and entries of theirs, X and Y together: 16 MiB of
# doubles, of which a few copies are alive.
_ROWS, _ENTRIES = 2**17, 2**21


class Part(NamedTuple):
    """A chunk of examples, padded with zeros: a zero row certifies nothing and has no margin."""

    start: int  # number of its first example
    x: NDArray[Any]
    y: NDArray[np.float64]


# Told the number of examples seen and to be seen; may raise to end a pass.
Watcher = Callable[[int, int], None]


def walk(
    examples: Examples, most: int | None = None, watch: Watcher | None = None
) -> Iterator[Part]:
    """All examples in order, or the first `most`, padded to chunks of one shape.

    Processes that share the examples walk over their own, in as many steps as the slowest: what
    they find is merged by `devices.summed` and `Lowest.merge`.
    """
    n = examples.n if most is None else min(most, examples.n)
    many = jax.local_device_count()
    rows = min(_ROWS, _ENTRIES // (examples.d + examples.out_dim))
    size = many * -(-min(n, max(1, rows // examples.k)) // many)
    bounds = np.minimum(examples.bounds, n)
    start, end = bounds[devices.process_index() :][:2].tolist()
    steps = -(-int(np.diff(bounds).max()) // size)
    chunks = examples.mine().chunks(size)
    none = [np.zeros((0, examples.k, width)) for width in (examples.d, examples.out_dim)]
    for step in range(steps):
        x, y = next(chunks)[:2] if start < end else none
        count = min(len(x), end - start)
        padding = ((0, size - count), (0, 0), (0, 0))
        yield Part(start, np.pad(x[:count], padding), np.pad(y[:count].astype(np.float64), padding))
        start += count
        if watch is not None:
            watch(min(n, (step + 1) * size * devices.n_processes()), n)


class Lowest:
    """The `count` lowest numbers of a pass, where they were, and the examples they belong to."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.values = np.zeros(0)
        self.places = np.zeros(0, np.int64)  # counted through all numbers of the pass
        self.x = self.y = np.zeros((0, 0, 0))  # of no example yet

    def offer(self, values: NDArray[np.float64], part: Part) -> None:
        """Take what is low enough; every example of the part has as many numbers."""
        flat, each = values.ravel(), values[0].size
        bar = self.values[-1] if len(self.values) == self._count else np.inf
        here = np.flatnonzero(flat < bar)
        if len(here) > self._count:
            here = np.sort(here[np.argpartition(flat[here], self._count - 1)[: self._count]])
        x, y = part.x[here // each].astype(np.float64), part.y[here // each]
        if len(self.values):
            x, y = np.concatenate([self.x, x]), np.concatenate([self.y, y])
        found = np.concatenate([self.values, flat[here]])
        places = np.concatenate([self.places, here + part.start * each])
        order = np.argsort(found, kind="stable")[: self._count]
        self.values, self.places = found[order], places[order]
        self.x, self.y = x[order], y[order]

    def merge(self) -> None:
        """Take in what the other processes found, as if one had walked over all examples."""
        if devices.n_processes() == 1:
            return
        found = (self.values, self.places, self.x, self.y)
        values, places, x, y = map(devices.all_gather_rows, found)
        order = np.lexsort((places, values))[: self._count]
        self.values, self.places = values[order], places[order]
        self.x, self.y = x[order], y[order]
