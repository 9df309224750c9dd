"""What the columns of a token array hold, where a token has more than its features.

A second sequence, and position ids, travel with the tokens: row r of an example holds the features
of its token r, then those of token r of the memory, and at the end, where it is needed, a mark.
Whoever carries examples (files, views, processes, the judge) carries them without knowing; only
`make_chunk` takes them apart.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mhalearn._runtime.arrays import widen_bfloat16
from mhalearn._runtime.validation import check_array, check_inputs, check_positions


class TokenColumns(NamedTuple):
    """Widths, from the left: features, memory features, and a last column where `marked`: with a
    memory, one where row r has a token of it and zero where it pads; without, position ids."""

    features: int
    memory: int = 0
    marked: bool = False

    @property
    def width(self) -> int:
        return self.features + self.memory + self.marked

    @property
    def is_plain(self) -> bool:
        return self.width == self.features

    def split(
        self, tokens: NDArray[Any]
    ) -> tuple[NDArray[Any], NDArray[Any] | None, NDArray[Any] | None]:
        """Features, memory tokens, marks; None where there are none."""
        d, end = self.features, self.features + self.memory
        memory = tokens[..., d:end] if self.memory else None
        return tokens[..., :d], memory, tokens[..., end] if self.marked else None


def find_columns(width: int, d: int, memory: int | None, has_positions: bool) -> TokenColumns:
    """The columns of tokens this wide, for a layer of d features, or a ValueError.

    has_positions: tokens may bring position ids.
    """
    plain = TokenColumns(d, memory or 0)
    marked = plain._replace(marked=True)
    if width == plain.width:
        return plain
    if width == marked.width and (memory is not None or has_positions):
        return marked
    if memory is not None and width == d:
        raise ValueError(
            "the layer takes keys and values from a second sequence: pass memory=, "
            f"(examples, tokens, {memory})"
        )
    raise ValueError(f"X has {width} features a token, the layer has d = {d}")


class Packed(NamedTuple):
    """Tokens with what travels beside their features."""

    tokens: NDArray[Any]
    lengths: NDArray[np.int64] | None  # None where all rows are tokens
    columns: TokenColumns


def pack_positions(x: ArrayLike, positions: ArrayLike) -> Packed:
    """Tokens with their position ids, in the first dtype that holds both exactly."""
    tokens, _ = check_inputs(x)
    n, k, d = tokens.shape
    places = check_positions(positions, n, k)
    return Packed(_join([tokens, places[..., None]]), None, TokenColumns(d, 0, True))


def pack_memory(
    x: ArrayLike, memory: ArrayLike, lengths: ArrayLike | None, memory_lengths: ArrayLike | None
) -> Packed:
    """Tokens beside those of the sequence that keys and values come from.

    Where the two are not equally long, rows of zeros fill the shorter one up; marks say which rows
    have a memory token, unless all have.
    """
    tokens = check_array("X", x, 3, "(examples, tokens, features)", narrow=True)
    keys, sizes = check_inputs(memory, None, memory_lengths, name="memory")
    n, k, d = tokens.shape
    if len(keys) != n:
        raise ValueError(f"memory has {len(keys)} examples, X has {n}: pass one for each")
    rows = max(k, keys.shape[1])
    placed = np.arange(rows) < sizes[:, None]
    parts = [_filled(tokens, rows), _filled(keys, rows)]
    marked = not placed.all()
    joined = _join([*parts, placed[..., None].astype(np.int8)] if marked else parts)
    _, own = check_inputs(_filled(tokens, rows), None, lengths)
    if lengths is None and k < rows:
        own = np.full(n, k, np.int64)
    given = None if lengths is None and k == rows else own
    return Packed(joined, given, TokenColumns(d, keys.shape[2], marked))


def _filled(array: NDArray[Any], rows: int) -> NDArray[Any]:
    missing = rows - array.shape[1]
    return array if missing == 0 else np.pad(array, ((0, 0), (0, missing), (0, 0)))


def _join(parts: list[NDArray[Any]]) -> NDArray[Any]:
    dtypes = {part.dtype for part in parts}
    if len(dtypes) > 1:
        parts = [widen_bfloat16(part) for part in parts]
    return np.concatenate(parts, axis=2)
