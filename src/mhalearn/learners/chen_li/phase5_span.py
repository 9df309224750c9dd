"""Phase 5: the span of the attention matrices, by queries to the body."""

from dataclasses import dataclass

import numpy as np

from mhalearn._runtime.seeds import Stream, generator
from mhalearn._runtime.types import Float64
from mhalearn.learners.chen_li.phase2_body import ConvexBody

_CHASES = 3


@dataclass(frozen=True)
class QueriedSpan:
    """An orthonormal basis (m, d, d) of the span, and the programmes it took."""

    basis: Float64
    queries: int


def span_by_queries(body: ConvexBody, n_heads: int, seed: int = 0) -> QueriedSpan:
    """m well-spread points of the body span the attention matrices.

    The first point is the minimum-norm point (one quadratic programme). Then, m - 1 times, the body
    is stretched along a random direction orthogonal to what was found (two linear programmes): it
    is long only along the affine hull, so the chord found lies close to it, and stretching along
    the chord brings it closer. 1 + 6 (m - 1) queries in all.
    Source: phase 5 of Chen & Li, with linear optimisation in place of their separation oracle.
    Trust: as good as the body is thin across the affine hull: with three heads and more, and tight
    budgets, it is not, and the chords stray from the hull.
    """
    rng = generator(seed, Stream.SPAN_QUERIES)
    proxy = body.minimum_norm_point()
    found = [proxy.ravel()]
    for _ in range(n_heads - 1):
        direction = _orthogonal(rng.normal(size=proxy.size), found).reshape(proxy.shape)
        # A random direction is mostly across the hull; the chord it finds is less so, and the next
        # one less again.
        for _ in range(_CHASES):
            chord = body.maximise(direction) - body.maximise(-direction)
            direction = _orthogonal(chord.ravel(), found).reshape(proxy.shape)
        found.append(direction.ravel())
    basis = np.linalg.qr(np.stack(found).T)[0].T.reshape(n_heads, *proxy.shape)
    return QueriedSpan(basis, 1 + 2 * _CHASES * (n_heads - 1))


def span_angle(one: Float64, other: Float64) -> float:
    """Sine of the largest angle between two spans given by orthonormal matrices."""
    a, b = one.reshape(len(one), -1), other.reshape(len(other), -1)
    cosines = np.linalg.svd(a @ b.T, compute_uv=False)
    return float(np.sqrt(max(0.0, 1.0 - float(cosines.min()) ** 2)))


def _orthogonal(vector: Float64, found: list[Float64]) -> Float64:
    basis = np.linalg.qr(np.stack(found).T)[0]
    return vector - basis @ (basis.T @ vector)
