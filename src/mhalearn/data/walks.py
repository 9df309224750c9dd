"""Walks over examples: blocks cut to another size, and some examples picked on the way."""

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mhalearn.data.sources import ExampleBlock, ExampleSource, join_blocks
from mhalearn.data.survey import Survey, survey_blocks

Indices = slice | ArrayLike


def cut_anew(source: ExampleSource, size: int) -> Iterator[ExampleBlock]:
    """All examples in order, `size` at a time. Memory: one chunk and one block of the source."""
    waiting: list[ExampleBlock] = []
    count = 0
    for index in range(len(source.starts) - 1):
        block = source.block(index)
        start = 0
        while start < len(block.x):
            part = block.rows(slice(start, start + size - count))
            waiting.append(part)
            start, count = start + len(part.x), count + len(part.x)
            if count == size:
                yield join_blocks(waiting)
                waiting, count = [], 0
        del block, part  # before the next block is read
    if waiting:
        yield join_blocks(waiting)


def survey_and_pick(
    chunks: Iterable[ExampleBlock], n: int, chosen: NDArray[np.int64], place: NDArray[np.int64]
) -> tuple[Survey, ExampleBlock]:
    """The survey of n examples, and the chosen ones, ascending, each put into its place."""
    count = len(chosen)
    lengths = np.empty(count, np.int64)
    x = y = np.empty(0)

    def picking() -> Iterator[ExampleBlock]:
        nonlocal x, y
        start = 0
        for block in chunks:
            if start == 0:
                x, y = (np.empty((count, *part.shape[1:]), part.dtype) for part in block[:2])
            first, last = np.searchsorted(chosen, [start, start + len(block.x)])
            there, here = place[first:last], chosen[first:last] - start
            x[there], y[there], lengths[there] = block.rows(here)
            start += len(block.x)
            yield block

    return survey_blocks(picking(), n), ExampleBlock(x, y, lengths)


def choose(asker: str, indices: Indices, n: int) -> NDArray[np.int64]:
    """The numbers of the examples that a slice, a mask or a list asks for; at least one."""
    try:
        if isinstance(indices, slice):
            chosen = np.arange(*indices.indices(n))
        else:
            chosen = np.arange(n)[np.asarray(indices)]
    except (IndexError, ValueError, TypeError):
        chosen = np.arange(0)
    if chosen.ndim != 1 or chosen.size == 0:
        raise ValueError(
            f"{asker}: choose at least one example by a slice, a mask of {n}, or a list "
            f"of numbers from 0 to {n - 1}"
        )
    return chosen


def is_ascending(chosen: NDArray[np.int64]) -> bool:
    """Whether each example is chosen once, in order."""
    return bool(np.all(chosen[1:] > chosen[:-1]))
