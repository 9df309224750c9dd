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
    real: int  # examples before the padding
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
        labels = np.pad(y[:count].astype(np.float64), padding)
        yield Part(start, count, np.pad(x[:count], padding), labels)
        start += count
        if watch is not None:
            watch(min(n, (step + 1) * size * devices.n_processes()), n)


class Lowest:
    """The `count` lowest numbers of a pass, where they were, and the examples they belong to.

    Memory: of at most twice as many examples, in the type of the inputs.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._bar = np.inf
        self.values = np.zeros(0)
        self.places = np.zeros(0, np.int64)  # counted through all numbers of the pass
        self.x: NDArray[Any] = np.zeros((0, 0, 0))  # of no example yet
        self.y = np.zeros((0, 0, 0))
        self._waiting: list[tuple[NDArray[Any], ...]] = []

    def offer(self, values: NDArray[np.float64], part: Part) -> None:
        """Take what is low enough; every example of the part has as many numbers."""
        flat, each = values.ravel(), values[0].size
        here = np.flatnonzero(flat < self._bar)
        if len(here) > self._count:
            here = np.sort(here[np.argpartition(flat[here], self._count - 1)[: self._count]])
        examples = here // each
        places = here + part.start * each
        self._waiting.append((flat[here], places, part.x[examples], part.y[examples]))
        if sum(len(found[0]) for found in self._waiting) >= max(self._count, 4096):
            self._sort()

    def _sort(self) -> None:
        """Keep the lowest of all that wait; the earlier of equals."""
        known = [(self.values, self.places, self.x, self.y)] if len(self.values) else []
        found = [np.concatenate(one) for one in zip(*(known + self._waiting), strict=True)]
        self._waiting = []
        order = np.argsort(found[0], kind="stable")[: self._count]
        self.values, self.places, self.x, self.y = (one[order] for one in found)
        if len(order) == self._count:
            self._bar = float(self.values[-1])

    def merge(self) -> None:
        """End the pass: take in what waits, and what the other processes found, as if one had
        walked over all examples."""
        if self._waiting:
            self._sort()
        if devices.n_processes() == 1:
            return
        found = (self.values, self.places, self.x, self.y)
        values, places, x, y = map(devices.all_gather_rows, found)
        order = np.lexsort((places, values))[: self._count]
        self.values, self.places = values[order], places[order]
        self.x, self.y = x[order], y[order]


def up_to_sign(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each vector (n, d) or its negative, whichever begins above zero."""
    lead = np.sign(vectors[np.arange(len(vectors)), np.argmax(vectors != 0, axis=1)])
    return vectors * lead[:, None] + 0.0


def spread(keys: NDArray[np.float64], count: int, repeats: int) -> NDArray[np.int64]:
    """The places of the first `count` keys, none of which comes more than `repeats` times."""
    seen: dict[bytes, int] = {}
    chosen = []
    for place, one in enumerate(keys):
        key = one.tobytes()
        seen[key] = seen.get(key, 0) + 1
        if seen[key] <= repeats:
            chosen.append(place)
        if len(chosen) == count:
            break
    return np.array(chosen, np.int64)
