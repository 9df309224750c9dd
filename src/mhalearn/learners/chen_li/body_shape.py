"""The body's shape by weighted least squares: its centre and the directions in which it is wide.

Phases 2 and 4 shape the body, its centre is phase 3's proxy, its wide directions phase 5's span.
"""

from dataclasses import dataclass

import numpy as np
import scipy.linalg

from mhalearn._runtime.threads import one_lapack_thread
from mhalearn._runtime.types import Float64
from mhalearn.learners.chen_li.phase2_certification import CertifiedRows

_REWEIGHTINGS = 8
_ROWS = 2048


@dataclass(frozen=True)
class BodyShape:
    """proxy: the minimum-norm point, (d, d). wide: (m - 1, d, d), orthonormal, widest first.
    eigenvalues: of the constraints' Gram matrix, ascending, over the largest; the widths of the
    body are inverse to their square roots.
    """

    proxy: Float64
    wide: Float64
    eigenvalues: Float64

    @property
    def span(self) -> Float64:
        """(m, d, d): an orthonormal basis of the span of the attention matrices."""
        points = np.concatenate([self.proxy[None], self.wide]).reshape(len(self.wide) + 1, -1)
        return np.linalg.qr(points.T)[0].T.reshape(-1, *self.proxy.shape)

    def guess_heads(self, most: int) -> tuple[int, float]:
        """The head count at the largest gap of the spectrum, and that gap as a ratio."""
        most = min(most, len(self.eigenvalues))
        gaps = self.eigenvalues[1:most] / np.maximum(self.eigenvalues[: most - 1], 1e-300)
        best = int(np.argmax(gaps))
        return best + 2, float(gaps[best])


def fit_shape(rows: CertifiedRows, n_heads: int, trusted: int) -> BodyShape:
    """Centre and wide directions from the constraints' Gram matrix, robustly.

    Rows weigh 4 q (1 - q), less once their score is above that at rank `trusted`, and less again
    where they disagree with the others (eight reweightings).
    Source: the eigenvector form of phases 2, 3 and 5. Cost: O(rows d^4 + d^6) time, O(d^4) memory.
    Trust: a heuristic shortcut; `span_by_queries` is what it is checked against.
    """
    c, d = rows.query.shape
    offsets = rows.log_odds
    usual = np.partition(rows.score, min(trusted, c - 1))[min(trusted, c - 1)] + 1e-300
    base = 4 * rows.weight * (1 - rows.weight) / (1 + np.minimum(rows.score / usual, 1e6) ** 2)
    weights, free = base, n_heads - 1
    for _ in range(_REWEIGHTINGS + 1):
        with one_lapack_thread():
            values, basis = scipy.linalg.eigh(_gram(rows, weights))
        wide, firm = basis[:, :free].T.reshape(free, d, d), basis[:, free:]
        stiffness = np.maximum(values[free:], 1e-12 * values[-1])
        pull = np.einsum("c,cd,ce->de", weights * offsets, rows.query, rows.difference)
        proxy = (firm @ ((firm.T @ pull.ravel()) / stiffness)).reshape(d, d)
        leak = np.sum(_applied(rows, wide) ** 2, axis=1) * float(np.sum(proxy**2))
        doubt = leak + (_applied(rows, proxy[None])[:, 0] - offsets) ** 2
        weights = base / np.sqrt(1 + doubt / max(float(np.median(doubt)), 1e-300))
    return BodyShape(proxy, wide, values / values[-1])


def _applied(rows: CertifiedRows, thetas: Float64) -> Float64:
    """<x_r (x_a - x_b)^T, Theta> for every row and matrix: (c, s)."""
    return np.einsum("csd,cd->cs", np.einsum("cd,sde->cse", rows.query, thetas), rows.difference)


def _gram(rows: CertifiedRows, weights: Float64) -> Float64:
    """The weighted Gram matrix of the constraints (d^2, d^2), from a few rows at a time."""
    d = rows.query.shape[1]
    gram = np.zeros((d * d, d * d))
    for start in range(0, len(weights), _ROWS):
        part = slice(start, start + _ROWS)
        outer = rows.query[part, :, None] * rows.difference[part, None, :]
        normals = outer.reshape(-1, d * d)
        gram += (normals * weights[part, None]).T @ normals
    return gram
