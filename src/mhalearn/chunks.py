"""Examples as the numerics want them: padded, masked, in doubles."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from mhalearn.attention import Chunk


def make_chunk(
    tokens: NDArray[Any],
    lengths: NDArray[np.int64],
    *,
    key_vector: bool,
    out_bias: bool,
    causal: bool,
    labels: NDArray[Any] | None = None,
    size: int | None = None,
) -> Chunk:
    """Examples as the numerics want them, padded to `size` with rows of weight zero."""
    parts = host_chunk(tokens, lengths, key_vector, out_bias, causal, labels, size)
    return Chunk(*map(jnp.asarray, parts))


def host_chunk(
    tokens: NDArray[Any],
    lengths: NDArray[np.int64],
    key_vector: bool,
    out_bias: bool,
    causal: bool,
    labels: NDArray[Any] | None,
    size: int | None,
) -> tuple[NDArray[Any], ...]:
    """The fields of `make_chunk`, before they go to a device."""
    n, k, _ = tokens.shape
    size = n if size is None else size

    def pad(array: NDArray[Any]) -> NDArray[Any]:
        if size == n:
            return array
        return np.concatenate([array, np.zeros((size - n, *array.shape[1:]), array.dtype)])

    inside = np.arange(k) < pad(lengths)[:, None]

    def clean(array: NDArray[Any]) -> NDArray[np.float64]:
        # What pads may be anything, uninitialised memory too: weight zero would not stop an
        # overflow.
        doubles = pad(array).astype(np.float64, copy=False)
        return doubles if inside.all() else np.where(inside[..., None], doubles, 0.0)

    x = clean(tokens)
    allowed = np.broadcast_to(inside[:, None, :], (size, k, k))
    if causal:
        allowed = allowed & np.tri(k, dtype=bool)
    # A padding row may attend to itself: its weight is zero, but a softmax needs a key.
    allowed = allowed | (np.eye(k, dtype=bool) & ~inside[:, :, None])
    ones = np.ones((size, k, 1))
    y = np.zeros((size, k, 0)) if labels is None else clean(labels)
    queries = np.concatenate([x, ones], axis=-1) if key_vector else x
    constant = ones if out_bias else ones[..., :0]
    return x, queries, y, constant, inside.astype(np.float64), allowed
