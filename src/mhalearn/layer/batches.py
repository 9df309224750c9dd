"""Examples as the numerics want them: padded, masked, in doubles, cut into chunks."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.programs import on_device
from mhalearn._runtime.types import Array, Bool, Float
from mhalearn.layer.token_columns import TokenColumns

# Doubles a chunk's intermediates may hold in a matrix-free step: 128 MiB.
ROOM = 2**24


class Chunk(NamedTuple):
    """Examples as the numerics see them; a leading chunk axis makes it a whole data set."""

    tokens: Float[Array, "*c b k d"]
    queries: Float[Array, "*c b k q"]  # the tokens, and a last feature 1 where v is learned
    labels: Float[Array, "*c b k e"]
    constant: Float[Array, "*c b k x"]  # extra columns of the design: none, or ones for the bias
    weight: Float[Array, "*c b k"]  # 1 where a row counts, 0 where it pads
    allowed: Bool[Array, "*c b k j"]  # which keys a query may attend to
    positions: Float[Array, "*c b k"] | None = None  # where tokens stand; None: 0 to k - 1
    memory: Float[Array, "*c b j x"] | None = None  # what keys and values are of; None: the tokens


def sum_over_chunks(function: Callable[[Any], Any], data: Any, devices: int = 1) -> Any:
    """Sum a function of a chunk over all chunks. Memory: that of one chunk.

    data: a Chunk, or any tree of arrays with its first two axes. devices: over how many the
    examples are spread. Known, each sums its own chunks, and sums are exchanged once and not after
    every chunk.
    """
    if jax.tree.leaves(data)[0].shape[0] == 1:
        return function(jax.tree.map(lambda leaf: leaf[0], data))
    if devices > 1:
        sums = sum_over_chunks(
            lambda chunk: jax.vmap(function)(split_by_device(chunk, devices)), data
        )
        return jax.tree.map(lambda leaf: leaf.sum(axis=0), sums)
    chunk = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), data)
    zeros = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(function, chunk)
    )

    def add(sums: Any, chunk: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, function(chunk)), None

    return jax.lax.scan(add, zeros, data)[0]


def split_by_device(chunk: Any, devices: int) -> Any:
    """A chunk's examples as (devices, examples of each): none of them moves."""
    return jax.tree.map(
        lambda leaf: leaf.reshape(devices, leaf.shape[0] // devices, *leaf.shape[1:]), chunk
    )


def merge_chunks(data: Chunk, n_heads: int, devices: int = 1) -> Chunk:
    """The same examples in fewer chunks: matrix-free steps hold little a row."""
    count, b, k, e = data.labels.shape
    row = n_heads * (k + e + 2 * data.tokens.shape[-1])
    most = max(1, on_device(ROOM) * devices // (b * k * row))
    group = max(g for g in range(1, count + 1) if count % g == 0 and g <= most)
    return join_chunks(data, group, devices)


def join_chunks(data: Chunk, group: int, devices: int = 1) -> Chunk:
    """The same examples with every `group` chunks made one; over many devices none of them moves,
    so that those of a chunk come in another order."""
    if data.tokens.shape[0] == 1:
        return data

    def join(a: Array) -> Array:
        count, b = a.shape[:2]
        parts = a.reshape(count // group, group, *a.shape[1:])
        if devices > 1:
            parts = parts.swapaxes(1, 2)
        return parts.reshape(count // group, group * b, *a.shape[2:])

    return jax.tree.map(join, data)


@partial(jax.jit, static_argnames="devices")
def in_one_chunk(data: Chunk, devices: int = 1) -> Chunk:
    """All examples as one chunk, without the chunk axis."""
    joined = join_chunks(data, data.tokens.shape[0], devices)
    return jax.tree.map(lambda leaf: leaf[0], joined)


def make_chunk(
    tokens: NDArray[Any],
    lengths: NDArray[np.int64],
    *,
    key_vector: bool,
    out_bias: bool,
    causal: bool,
    labels: NDArray[Any] | None = None,
    size: int | None = None,
    positions: NDArray[Any] | None = None,
    columns: TokenColumns | None = None,
    sequences: NDArray[np.int64] | None = None,
) -> Chunk:
    """Examples as the numerics want them, padded to `size` with rows of weight zero.

    positions: (n, k), where tokens stand, for kinds of attention that ask. columns: what travels
    with the tokens, to be taken apart. sequences: as in `host_chunk`.

    Arrays of the host: a compiled function takes them as they are, where to place each on a device
    would compile a program for its shape.
    """
    memory = marks = None
    if columns is not None and not columns.is_plain:
        tokens, memory, marks = columns.split(tokens)
    fields = host_chunk(tokens, lengths, key_vector, out_bias, causal, labels, size, sequences)
    chunk: Any = Chunk(*fields)  # type: ignore[arg-type]
    size, k = chunk.weight.shape
    if memory is not None:
        seen = np.zeros((size, k), bool)
        seen[: len(tokens)] = True if marks is None else marks > 0
        keys = np.zeros((size, k, memory.shape[2]))
        keys[: len(tokens)] = np.where(seen[: len(tokens), :, None], memory, 0.0)
        seen[len(tokens) :] = True  # what pads examples has a softmax, too
        return chunk._replace(memory=keys, allowed=np.broadcast_to(seen[:, None], (size, k, k)))
    places = marks if positions is None else positions
    if places is None:
        return chunk
    placed = np.zeros((size, k))
    placed[: len(places)] = places
    return chunk._replace(positions=placed)


def host_chunk(
    tokens: NDArray[Any],
    lengths: NDArray[np.int64],
    key_vector: bool,
    out_bias: bool,
    causal: bool,
    labels: NDArray[Any] | None,
    size: int | None,
    sequences: NDArray[np.int64] | None = None,
) -> tuple[NDArray[Any], ...]:
    """The fields of `make_chunk`, before they go to a device.

    sequences: (n, k), which of several sequences a token belongs to, where examples hold more than
    one: tokens see those of their own.
    """
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
    if sequences is not None:
        of = pad(sequences)
        allowed = allowed & (of[:, :, None] == of[:, None, :])
    # A padding row may attend to itself: its weight is zero, but a softmax needs a key.
    allowed = allowed | (np.eye(k, dtype=bool) & ~inside[:, :, None])
    ones = np.ones((size, k, 1))
    y = np.zeros((size, k, 0)) if labels is None else clean(labels)
    queries = np.concatenate([x, ones], axis=-1) if key_vector else x
    constant = ones if out_bias else ones[..., :0]
    return x, queries, y, constant, inside.astype(np.float64), allowed


class Packing(NamedTuple):
    """Where sequences of different lengths lie, several of them in one row of k tokens."""

    row: NDArray[np.int64]
    start: NDArray[np.int64]
    rows: int

    def place(self, values: NDArray[Any], lengths: NDArray[np.int64]) -> NDArray[Any]:
        """(n, k, ...) -> (rows, k, ...), zeros where no sequence lies."""
        packed = np.zeros((self.rows, *values.shape[1:]), values.dtype)
        for row, start, length, each in zip(self.row, self.start, lengths, values, strict=True):
            packed[row, start : start + length] = each[:length]
        return packed

    def used(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens that lie in each row; they come first."""
        return np.bincount(self.row, lengths, self.rows).astype(np.int64)


def pack_sequences(lengths: NDArray[np.int64], k: int) -> Packing:
    """Put every sequence, the longest first, where the least room that suffices is left.

    Cost: O(n k). Trust: best fit decreasing, at most about 11/9 of the fewest rows.
    """
    row, start = np.zeros_like(lengths), np.zeros_like(lengths)
    open_rows: list[list[int]] = [[] for _ in range(k + 1)]  # rows by the room they have
    rows = 0
    for index in np.argsort(-lengths, kind="stable"):
        length = int(lengths[index])
        room = next((room for room in range(length, k + 1) if open_rows[room]), None)
        if room is None:
            number, room = rows, k
            rows += 1
        else:
            number = open_rows[room].pop()
        row[index], start[index] = number, k - room
        open_rows[room - length].append(number)
    return Packing(row, start, rows)
