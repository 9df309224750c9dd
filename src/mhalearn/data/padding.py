"""Padding: real tokens moved to the front, and sequences of different lengths side by side."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.arrays import to_numpy
from mhalearn.data.sources import ExampleBlock


def move_to_front(
    x: NDArray[Any], y: NDArray[Any], real: NDArray[np.bool_], where: str = "the mask"
) -> ExampleBlock:
    """Examples whose real tokens come first, in their order, and zeros after them.

    real (n, k): left padding, right padding, or both. Padding may hold anything, NaN too.
    where: what the mask is called in messages.
    """
    lengths = real.sum(axis=1).astype(np.int64)
    if not lengths.all():
        row = int(np.flatnonzero(lengths == 0)[0])
        raise ValueError(f"{where}: row {row} has no token at all; leave such rows out")
    first = real.argmax(axis=1)
    within = np.arange(real.shape[1])
    expected = (within >= first[:, None]) & (within < (first + lengths)[:, None])
    if not np.array_equal(real, expected):
        row = int(np.flatnonzero((real != expected).any(axis=1))[0])
        raise ValueError(
            f"{where}: row {row} has padding between its tokens; only padding on the left or on "
            "the right can be moved away"
        )
    longest = int(lengths.max())
    places = np.minimum(first[:, None] + np.arange(max(2, longest)), real.shape[1] - 1)
    inside = (np.arange(places.shape[1]) < lengths[:, None])[..., None]
    rows = np.arange(len(x))[:, None]
    moved = [np.where(inside, part[rows, places], np.zeros((), part.dtype)) for part in (x, y)]
    return ExampleBlock(moved[0], moved[1], lengths)


def pad_block(block: ExampleBlock, k: int) -> ExampleBlock:
    """The same examples with zeros up to k tokens."""
    if block.x.shape[1] == k:
        return block
    return join_padded([block], k)


def join_padded(blocks: list[ExampleBlock], k: int = 0) -> ExampleBlock:
    """All blocks as one, with zeros up to the longest, or up to k tokens.

    Memory: the list is emptied on the way.
    """
    n, k = sum(len(block.x) for block in blocks), max(k, *(block.x.shape[1] for block in blocks))
    x, y = (np.zeros((n, k, part.shape[2]), part.dtype) for part in blocks[0][:2])
    lengths = np.empty(n, np.int64)
    start = 0
    blocks.reverse()
    while blocks:
        block = blocks.pop()
        rows = slice(start, start + len(block.x))
        own = block.x.shape[1]
        x[rows, :own], y[rows, :own], lengths[rows] = block
        start = rows.stop
    return ExampleBlock(x, y, lengths)


def check_alike(first: ExampleBlock, block: ExampleBlock) -> None:
    """Refuse examples of other widths or dtypes than the first ones."""
    for name, before, now in (("inputs", first.x, block.x), ("outputs", first.y, block.y)):
        if (before.shape[2], before.dtype) != (now.shape[2], now.dtype):
            raise ValueError(
                f"its {name} have {now.shape[2]} features of {now.dtype}, those before it "
                f"{before.shape[2]} of {before.dtype}: record them apart"
            )


def read_mask(mask: Any, n: int, k: int, name: str) -> NDArray[np.bool_]:
    """A mask (n, k) of real tokens: True, one, or any number that is not zero."""
    array = np.asarray(to_numpy(mask))
    if array.shape != (n, k):
        raise ValueError(f"{name} has shape {array.shape}: expected ({n}, {k}), one entry a token")
    return array.astype(np.float64) != 0
