"""Hashes that know an example again when it comes back changed and yet says nothing new.

Tokens in another order, (-X, -Y) for (X, Y), every token twice, other roundings: a layer that met
the labels of the one meets those of the other. So a few statistics that these changes leave alone
are rounded to a grid and hashed (locality-sensitive hashing); and since a value near the edge of a
cell may fall to either side of it, on two grids half a cell apart.
"""

from hashlib import shake_256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.types import Float64

# Width of a cell, where rows have size one: some hundred roundings of float32.
_CELL = 2.0**-16
# Directions along which rows are looked at, with two statistics each, and two sizes.
_DIRECTIONS, _STATISTICS = 2, 6
# Rows this much smaller than the largest of an example may be nothing but rounding.
_VANISHING = 2.0**-20


def near_hashes(x: NDArray[Any], y: NDArray[Any], lengths: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Two hashes (n, 2) of each example; near copies share at least one of them.

    Layer files store them, so they depend on the example's own values alone: not on the examples
    beside it, nor on a random generator that may change.
    Cost: O(n k (d + e)); two microseconds an example of a hundred numbers.
    Trust: copies off by the rounding of doubles are found; of those off by float32's, all but two
    in a thousand. Others share a hash with negligible probability, unless they differ by less than
    1e-5 of the size of their rows. Where there is a bias, a mask, or attention of another kind,
    sign or order may matter, and the hashes are merely stricter than need be.
    """
    inside = (np.arange(x.shape[1]) < lengths[:, None])[..., None]
    rows_x, size_x = _normalise(x, inside, lengths)
    rows_y, size_y = _normalise(y, inside, lengths)
    drawn = _uniform(_DIRECTIONS * (x.shape[2] + y.shape[2])).reshape(-1, _DIRECTIONS)
    along = rows_x @ drawn[: x.shape[2]] + rows_y @ drawn[x.shape[2] :]
    even = _mean(along**2, lengths)
    odd = np.abs(_mean(along**3, lengths))
    found = np.column_stack([even, odd, size_x, size_y]) / _CELL
    cells = np.floor(found[:, None] + [[0.0], [0.5]]).astype(np.int64).view(np.uint64)
    return (cells * (_words(_STATISTICS) | np.uint64(1))).sum(axis=2)


def _normalise(
    values: NDArray[Any], inside: NDArray[np.bool_], lengths: NDArray[np.int64]
) -> tuple[Float64, Float64]:
    """Rows of size one, so that no huge token hides the others, and the mean logarithm of sizes."""
    kept = np.where(inside, values, 0).astype(np.float64)
    largest = np.abs(kept).max(axis=(1, 2), keepdims=True)  # squares must not overflow
    largest[largest == 0] = 1.0
    kept /= largest
    sizes = np.sqrt(np.einsum("nkd,nkd->nk", kept, kept))[..., None]
    sizes += _VANISHING * sizes.max(axis=1, keepdims=True)
    sizes[~inside | (sizes == 0)] = 1.0
    return kept / sizes, (_mean(np.log2(sizes), lengths) + np.log2(largest[:, 0]))[:, 0]


def _mean(rows: Float64, lengths: NDArray[np.int64]) -> Float64:
    """Over the rows of each example; those past its length are zero."""
    return rows.sum(axis=1) / lengths[:, None]


def _uniform(count: int) -> Float64:
    """Fixed numbers of variance one."""
    return (_words(count) / 2.0**64 - 0.5) * np.sqrt(12)


def _words(count: int) -> NDArray[np.uint64]:
    """Fixed random words: always the same, and the first ones whatever their count."""
    return np.frombuffer(shake_256(b"near hashes").digest(8 * count), "<u8")
