"""What travels with the tokens of examples: a second sequence, or position ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from mhalearn._runtime.validation import check_array
from mhalearn.layer.token_columns import TokenColumns, pack_memory, pack_positions

# The entry of the metadata that says what the columns of the token array hold.
_ENTRY = "columns"


class Brought(NamedTuple):
    """Arguments of examples whose tokens bring everything with them."""

    x: ArrayLike
    y: ArrayLike
    lengths: ArrayLike | None
    metadata: dict[str, Any]


def bring_beside(
    x: ArrayLike,
    y: ArrayLike,
    lengths: ArrayLike | None,
    memory: ArrayLike | None,
    memory_lengths: ArrayLike | None,
    positions: ArrayLike | None,
) -> Brought:
    """Tokens with a memory or with positions beside them; labels filled up to as many rows."""
    if memory is None:
        if memory_lengths is not None:
            raise ValueError("memory_lengths without memory: pass both, or leave it out")
        assert positions is not None
        tokens, _, columns = pack_positions(x, positions)
        return Brought(tokens, y, lengths, {_ENTRY: columns._asdict()})
    if positions is not None:
        raise ValueError("tokens of a second sequence have no distance: leave positions out")
    packed = pack_memory(x, memory, lengths, memory_lengths)
    labels = check_array("Y", y, 3, "(examples, tokens, outputs)", narrow=True)
    given = np.shape(x)[1]
    if labels.shape[1] == given:
        missing = packed.tokens.shape[1] - given
        labels = np.pad(labels, ((0, 0), (0, missing), (0, 0)))
    return Brought(packed.tokens, labels, packed.lengths, {_ENTRY: packed.columns._asdict()})


def read_columns(metadata: Mapping[str, Any], width: int) -> TokenColumns:
    """What the metadata of examples says of their columns; features alone where it says nothing
    that fits."""
    said = metadata.get(_ENTRY)
    if isinstance(said, Mapping) and set(said) == set(TokenColumns._fields):
        columns = TokenColumns(**said)
        counts = (columns.features, columns.memory)
        whole = all(type(count) is int and count >= 0 for count in counts)
        if whole and type(columns.marked) is bool and columns.width == width and counts[0] > 0:
            return columns
    return TokenColumns(width)
