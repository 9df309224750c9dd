"""One example of a run, kept so that one can see what the layer does with it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mhalearn._runtime.types import Float64
from mhalearn.data import Examples

# Tokens up to which longer examples are better to look at, ...
_ENOUGH = 16
# ... of which as many are kept of a longer one under a causal mask, where what follows changes
# nothing, ...
_PREFIX = 32
# ... and beyond which, elsewhere, its patterns would take more memory than a picture is worth.
_MOST = 512


@dataclass(frozen=True)
class ShownExample:
    """Tokens x (k, d) and label y (k, e) of one example, without padding.

    held_out: whether no step of learning has seen it.
    """

    x: Float64
    y: Float64
    held_out: bool


def choose_example(examples: Examples, *, held_out: bool, causal: bool) -> ShownExample | None:
    """The first of the longest examples of at most sixteen tokens or, if all are longer, the
    shortest; None where that is still too long to be drawn."""
    lengths = examples.lengths
    few = lengths <= _ENOUGH
    chosen = int(np.argmax(np.where(few, lengths, 0)) if few.any() else np.argmin(lengths))
    length = int(lengths[chosen])
    if causal and length > _PREFIX:
        length = _PREFIX
    if length > _MOST or (examples.columns.memory and length < examples.k):
        return None  # rows past the tokens may hold those of a second sequence
    block = next(examples.subset([chosen]).chunks(1))
    x, y = (np.asarray(a[0, :length], np.float64) for a in (block.x, block.y))
    return ShownExample(x, y, held_out)
