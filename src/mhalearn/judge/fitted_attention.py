"""What a fitted layer does on some examples, head by head, and what it leaves of their labels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.types import Float64
from mhalearn.data import Examples
from mhalearn.data.input_information import measure_information
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.layer import AttentionLayer

# Numbers in the largest array that may be made: 160 MB.
_MOST_NUMBERS = 2e7
# Multiplications for a tangent space: a second or two.
_MOST_WORK = 2e10
_MOST_ROWS = 6000
# Inputs are nearly the same to labels of this precision.
_NEARLY_EQUAL = 1e-3
_MOST_SCALARS = 12_000


@dataclass(frozen=True)
class FittedAttention:
    """Arrays over n examples, k rows, m heads, k keys, e outputs; rows past a length are zero."""

    layer: AttentionLayer
    architecture: Architecture
    x: Float64  # (n, k, d)
    inside: NDArray[np.bool_]  # (n, k)
    residual: Float64  # (n, k, e)
    distinct: float = 1.0  # share of the examples whose inputs are not nearly those of another

    @cached_property
    def allowed(self) -> NDArray[np.bool_]:
        """Keys that a row sees (n, 1, k, k); one outside sees itself."""
        k = self.x.shape[1]
        seen = self.inside[:, None, None, :] | np.eye(k, dtype=bool)
        return seen & np.tri(k, dtype=bool) if self.layer.causal else seen

    @cached_property
    def logits(self) -> Float64:
        """(n, m, k, k); zero where a key is not seen."""
        found = (self.x[:, None] @ self.layer.theta) @ self.x[:, None].swapaxes(2, 3)
        if self.layer.key_vector is not None:
            found = found + np.einsum("mb,njb->nmj", self.layer.key_vector, self.x)[:, :, None]
        return np.where(self.allowed, found, 0.0)

    @cached_property
    def patterns(self) -> Float64:
        """(n, m, k, k)."""
        scores = np.where(self.allowed, self.logits, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return weights / weights.sum(axis=-1, keepdims=True)

    @cached_property
    def values(self) -> Float64:
        """x_j W_i (n, m, k, e)."""
        return self.x[:, None] @ self.layer.w

    @cached_property
    def means(self) -> Float64:
        """Mean tokens of the heads (n, m, k, d)."""
        return (self.patterns @ self.x[:, None]) * self.inside[:, None, :, None]

    @cached_property
    def outputs(self) -> Float64:
        """Of the heads (n, m, k, e)."""
        return (self.patterns @ self.values) * self.inside[:, None, :, None]

    @property
    def n_scalars(self) -> int:
        return int(self.inside.sum()) * self.residual.shape[2]

    def along(self, change: NDArray[Any]) -> Float64:
        """How outputs move when logits move by `change`, one direction a head (m, n, k, e)."""
        change = np.where(self.allowed, change, 0.0)
        centred = change - np.sum(self.patterns * change, axis=-1, keepdims=True)
        moved = (self.patterns * centred) @ self.values
        return np.moveaxis(moved * self.inside[:, None, :, None], 1, 0)

    def along_theta(self, weight: NDArray[Any] | float = 1.0) -> Iterator[Float64]:
        """Directions (q, n, k, e), head by head, in which Theta moves, and the key vector with it;
        with a weight (n, 1, k, k) logits move by so many times as much: a Theta that is not the
        same for all pairs of tokens. Of low rank, only those that keep the rank."""
        n, k, d = self.x.shape
        weighed = self.patterns * np.where(self.allowed, weight, 0.0)
        queries = self.x * self.inside[..., None]
        bias = self.architecture.bias
        for i, theta in enumerate(self.layer.theta):
            mean = weighed[:, i] @ self.x
            pairs = self.x[..., None] * self.values[:, i, :, None, :]
            moved = (weighed[:, i] @ pairs.reshape(n, k, -1)).reshape(n, k, d, -1)
            moved -= mean[..., None] * self.outputs[:, i, :, None, :]
            left, right = _factors(theta, self.architecture.head_dim)
            if right is not None:
                asked = queries @ left
                yield _outer(asked, moved)
                moved, asked = np.einsum("nrbe,bh->nrhe", moved, right), queries
                yield _outer(asked, moved)
            else:
                yield _outer(queries, moved)
            if bias:
                yield np.moveaxis(moved, 2, 0) * self.inside[..., None]

    def along_w(self, weight: NDArray[Any] | float = 1.0) -> Iterator[Float64]:
        """The same for W and the output bias; the weight (n, k) is that of rows."""
        eye = np.eye(self.residual.shape[2])
        rows = self.inside * weight
        for i, w in enumerate(self.layer.w):
            means = self.means[:, i] * rows[..., None]
            left, right = _factors(w, self.architecture.head_dim)
            if right is not None:
                yield _outer(means @ left, np.broadcast_to(eye, (*rows.shape, *eye.shape)))
                yield _outer(means, np.broadcast_to(right.T, (*rows.shape, *right.T.shape)))
            else:
                yield _outer(means, np.broadcast_to(eye, (*rows.shape, *eye.shape)))
        if self.architecture.bias:
            yield np.moveaxis(rows[..., None, None] * eye, 2, 0)


def look_at(
    layer: AttentionLayer, examples: Examples, architecture: Architecture, seed: int
) -> tuple[FittedAttention, Float64]:
    """The layer on as many random examples as a test of what it leaves can use; their labels.

    Of examples with nearly the same inputs one is looked at: what is left of them is nearly the
    same too, and the tests take examples for independent.
    """
    k, e = examples.k, examples.out_dim
    unknowns = architecture.with_heads(layer.n_heads).count()
    numbers = min(_MOST_NUMBERS / unknowns, _MOST_WORK / unknowns**2, _MOST_ROWS * e, _MOST_SCALARS)
    of_patterns = _MOST_NUMBERS / (layer.n_heads * k * max(k, e, examples.d))
    count = int(max(2, min(max(numbers / (k * e), _MOST_ROWS / (8 * k)), of_patterns)))
    part = examples if examples.in_memory else examples.subset(slice(0, count))
    if count < examples.n:
        part = examples.sample(count, seed)
    group_of = measure_information(part, architecture, _NEARLY_EQUAL).group_of
    first = np.unique(group_of, return_index=True)[1]
    distinct = len(first) / part.n
    part = part if len(first) == part.n else part.subset(np.sort(first))
    x, y, lengths = part.arrays()
    inside = np.arange(part.k) < lengths[:, None]
    labels = y.astype(np.float64) * inside[..., None]
    residual = labels - layer(x, lengths)
    tokens = x.astype(np.float64) * inside[..., None]
    found = FittedAttention(
        layer, architecture.with_heads(layer.n_heads), tokens, inside, residual, distinct
    )
    return found, labels


def _factors(matrix: Float64, rank: int | None) -> tuple[Float64, Float64 | None]:
    """Bases of the columns and of the rows of a matrix of low rank."""
    if rank is None or rank >= min(matrix.shape):
        return matrix, None
    left, _, right = np.linalg.svd(matrix)
    return left[:, :rank], right[:rank].T


def _outer(queries: Float64, moved: Float64) -> Float64:
    """(a b, n, k, e) of (n, k, a) and (n, k, b, e)."""
    found = np.moveaxis(queries, 2, 0)[:, None, ..., None] * np.moveaxis(moved, 2, 0)
    return found.reshape(-1, *found.shape[2:])
