"""A trained layer with fewer features and lower rank, of which a CPU can learn many.

Features are restricted to those directions in which the heads do most, turned at random, and what
heads do there is cut to a lower rank and given back its size. The heads keep their norms, the
likeness of one to another and the decay of their singular values, by which trained layers differ
from random ones.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mhalearn import AttentionLayer

Array = NDArray[np.float64]


def reduce_layer(layer: AttentionLayer, d: int, rank: int) -> AttentionLayer:
    """With d features and outputs and heads of that rank. Cost: eigenvectors of its features."""
    vectors = np.zeros((layer.n_heads, layer.d)) if layer.key_vector is None else layer.key_vector
    theta, w = (part / _sizes(part) for part in (layer.theta, layer.w))
    rng = np.random.default_rng([layer.d, d, rank])
    inside = _main_directions([*theta, *theta.swapaxes(1, 2), *w], d, rng)
    outside = _main_directions(list(w.swapaxes(1, 2)), d, rng)
    attention = np.concatenate([inside.T @ layer.theta @ inside, (vectors @ inside)[:, None]], 1)
    attention = np.stack([_cut(head, rank) for head in attention])
    attention *= _sizes(layer.theta) / _sizes(attention[:, :d])
    writing = np.stack([_cut(inside.T @ head @ outside, rank) for head in layer.w])
    writing *= _sizes(layer.w) / _sizes(writing)
    bias = None if layer.out_bias is None else layer.out_bias @ outside
    return AttentionLayer(attention[:, :d], writing, attention[:, d], bias)


def _sizes(heads: Any) -> Any:
    return np.linalg.norm(heads, axis=(1, 2), keepdims=True)


def _main_directions(matrices: list[Array], count: int, rng: np.random.Generator) -> Array:
    """Orthonormal columns that span the rows of the matrices best, turned at random."""
    gram = sum(matrix @ matrix.T for matrix in matrices)
    turn = np.linalg.qr(rng.normal(size=(count, count)))[0]
    return np.linalg.eigh(gram)[1][:, -count:] @ turn


def _cut(matrix: Array, rank: int) -> Array:
    """The nearest matrix of that rank."""
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ vt[:rank]
