"""Recorded text with fewer features and some of a layer's heads, of which a CPU can learn many.

Tokens and outputs are restricted to every so many-th of their principal directions, so that their
variances are spread as widely as before, and turned at random. Heads are cut to their rank there,
and their Theta given back the size of its logits.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.recorded.recording import Recording
from mhalearn import AttentionLayer

Array = NDArray[np.float64]


def restrict(
    fit: Recording, other: Recording, heads: list[int], every: int = 4
) -> tuple[Recording, Recording]:
    """Both recordings, with these heads on a part of the features. Cost: two eigenproblems."""
    x, y = fit.x[fit.inside], fit.y[fit.inside]
    rng = np.random.default_rng([len(heads), every])
    inside, outside = (_spread_directions(part, every, rng) for part in (x, y))
    covariances = np.cov(x.T), np.cov((x @ inside).T)
    layer, rank = fit.layer, fit.head_dim
    assert layer.key_vector is not None
    assert layer.out_bias is not None
    thetas, vectors, ws = [], [], []
    for head in heads:
        given, vector = layer.theta[head], layer.key_vector[head]
        cut = _cut(np.vstack([inside.T @ given @ inside, vector @ inside]), rank)
        cut *= _size_of_logits(given, covariances[0]) / _size_of_logits(cut[:-1], covariances[1])
        thetas.append(cut[:-1])
        vectors.append(cut[-1])
        ws.append(_cut(inside.T @ layer.w[head] @ outside, rank))
    found = AttentionLayer(
        np.stack(thetas), np.stack(ws), np.stack(vectors), layer.out_bias @ outside
    )
    return _run(fit, found, inside), _run(other, found, inside)


def _run(given: Recording, layer: AttentionLayer, inside: Array) -> Recording:
    there = given.inside[..., None]
    x = np.where(there, given.x @ inside, 0.0)
    y = np.where(there, layer(x, given.lengths), 0.0)
    return replace(given, x=x, y=y, layer=layer)


def _spread_directions(rows: Array, every: int, rng: np.random.Generator) -> Array:
    """Orthonormal columns: principal directions from the first to the last, turned at random."""
    directions = np.linalg.eigh(np.cov(rows.T))[1][:, ::-every]
    count = directions.shape[1]
    return directions @ np.linalg.qr(rng.normal(size=(count, count)))[0]


def _size_of_logits(theta: Array, covariance: Array) -> float:
    """Root mean square of x^T Theta y over independent tokens of that covariance."""
    return float(np.sqrt(np.sum((theta @ covariance) * (covariance @ theta))))


def _cut(matrix: Array, rank: int) -> Array:
    """The nearest matrix of that rank."""
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ vt[:rank]
