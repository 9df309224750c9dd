"""The body's shape by weighted least squares: its centre and the directions in which it is wide."""

from dataclasses import dataclass

import numpy as np
import scipy.linalg

from mhalearn.layer import Float64
from mhalearn.sculpt.certification import CertifiedRows
from mhalearn.threads import one_lapack_thread

_REWEIGHTINGS = 8


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
        gaps = self.eigenvalues[1:most] / self.eigenvalues[: most - 1]
        best = int(np.argmax(gaps))
        return best + 2, float(gaps[best])


def fit_shape(rows: CertifiedRows, n_heads: int, trusted: int) -> BodyShape:
    """Centre and wide directions from the constraints' Gram matrix, robustly.

    Rows weigh 4 q (1 - q), less once their score is above that at rank `trusted`, and less again
    where they disagree with the others (eight reweightings).
    Source: the eigenvector form of phases 2, 3 and 5. Cost: O(rows d^4 + d^6).
    Trust: a heuristic shortcut; `span_by_queries` is what it is checked against.
    """
    c, d = rows.query.shape
    normals = (rows.query[:, :, None] * rows.difference[:, None, :]).reshape(c, d * d)
    offsets = rows.log_odds
    usual = rows.score[min(trusted, c - 1)] + 1e-300
    base = 4 * rows.weight * (1 - rows.weight) / (1 + (rows.score / usual) ** 2)
    weights, free = base, n_heads - 1
    for _ in range(_REWEIGHTINGS + 1):
        with one_lapack_thread():
            values, basis = scipy.linalg.eigh((normals * weights[:, None]).T @ normals)
        wide, firm = basis[:, :free], basis[:, free:]
        stiffness = np.maximum(values[free:], 1e-12 * values[-1])
        proxy = firm @ ((firm.T @ (normals.T @ (weights * offsets))) / stiffness)
        leak = np.sum((normals @ wide) ** 2, axis=1) * float(proxy @ proxy)
        doubt = leak + (normals @ proxy - offsets) ** 2
        weights = base / np.sqrt(1 + doubt / max(float(np.median(doubt)), 1e-300))
    return BodyShape(proxy.reshape(d, d), wide.T.reshape(free, d, d), values / values[-1])
