"""What one pass over examples tells: hashes to know them again by, and their largest entries."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime import devices
from mhalearn.data.near_hashes import near_hashes
from mhalearn.data.sources import ExampleBlock

Hashes = NDArray[np.uint64]

# Bytes of an example from which on it is worth a thread's while.
_LARGE = 2**14
# Sizes of tokens and labels whose squares and quotients stay far from overflow.
_LEAST_SIZE, _MOST_SIZE = 1e-60, 1e60


class Survey(NamedTuple):
    """64-bit hashes of values, the same for every dtype that holds them exactly.

    Padding does not count for the hashes, and 0.0 equals -0.0. Inputs with equal hashes give a
    layer that sees no order the same equations.
    """

    hashes: Hashes  # of each example's inputs and labels
    input_hashes: Hashes  # of its inputs alone, whatever the order of their tokens
    near_hashes: Hashes  # two of each example, of which near copies share one
    largest_x: float  # absolute value
    largest_y: float

    @property
    def remembered(self) -> Hashes:
        """What a layer that was learned from these examples knows them again by: all hashes of
        examples, three each."""
        return np.concatenate([self.hashes, self.near_hashes.ravel()])


def survey_blocks(blocks: Iterable[ExampleBlock], n: int) -> Survey:
    """Cost: five microseconds an example of a hundred numbers; memory of a block."""
    hashes, input_hashes = np.empty(n, np.uint64), np.empty(n, np.uint64)
    near = np.empty((n, 2), np.uint64)
    largest_x = largest_y = 0.0
    start = 0
    for block in blocks:
        part = slice(start, start + len(block.x))
        hashes[part], input_hashes[part] = hash_block(block)
        near[part] = near_hashes(*block)
        largest_x = max(largest_x, float(block.x.max()), -float(block.x.min()))
        largest_y = max(largest_y, float(block.y.max()), -float(block.y.min()))
        start = part.stop
    return Survey(hashes, input_hashes, near, largest_x, largest_y)


def check_sizes(survey: Survey) -> None:
    """Refuse entries that double precision cannot square."""
    for name, size in (("X", survey.largest_x), ("Y", survey.largest_y)):
        if size > 0 and not _LEAST_SIZE < size < _MOST_SIZE:
            raise ValueError(f"the largest entry of {name} is {size:.2g}: rescale it to near one")


def hash_block(block: ExampleBlock) -> tuple[Hashes, Hashes]:
    """Hashes of the examples of a block, and of their inputs alone."""
    n, d, e = len(block.x), block.x.shape[2], block.y.shape[2]
    hashes, input_hashes = np.empty(n, np.uint64), np.empty(n, np.uint64)
    for length in np.unique(block.lengths).tolist():
        here = block.lengths == length
        shape = np.array([length, d, e], "<u8")
        x, y = _canonical(block.x[here, :length]), _canonical(block.y[here, :length])
        hashes[here] = _digests(shape, x, y)
        # Sorted as strings of bytes: any order will do that depends on the tokens alone.
        input_hashes[here] = _digests(shape, np.sort(x.view(f"V{8 * d}"), axis=1))
    return hashes, input_hashes


def _canonical(array: NDArray[Any]) -> NDArray[np.float64]:
    canonical = array.astype("<f8", order="C")
    canonical += 0.0  # turns -0.0 into 0.0
    return canonical


def _digests(shape: NDArray[np.uint64], *parts: NDArray[Any]) -> Hashes:
    """One hash for each example (row of the parts)."""
    rows = [part.view(np.uint8).reshape(len(part), -1) for part in parts]
    if sum(row.shape[1] for row in rows) < _LARGE:
        start = np.tile(shape.view(np.uint8), (len(parts[0]), 1))
        digests = (blake2b(row, digest_size=8).digest() for row in np.hstack([start, *rows]))
        return np.frombuffer(b"".join(digests), "<u8")

    def digest(*row: NDArray[np.uint8]) -> bytes:
        hashed = blake2b(shape.tobytes(), digest_size=8)
        for part in row:
            hashed.update(part.data)
        return hashed.digest()

    with ThreadPoolExecutor() as pool:  # hashing many bytes lets other threads run
        return np.frombuffer(b"".join(pool.map(digest, *rows)), "<u8")


def merge_surveys(mine: Survey) -> Survey:
    """The survey of all examples, from those that processes made of their own."""
    largest = devices.all_gather_rows(np.array([[mine.largest_x, mine.largest_y]])).max(axis=0)
    return Survey(
        devices.all_gather_rows(mine.hashes),
        devices.all_gather_rows(mine.input_hashes),
        devices.all_gather_rows(mine.near_hashes),
        *largest.tolist(),
    )
