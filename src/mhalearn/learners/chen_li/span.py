"""The span of the attention matrices: what phase 5 hands to phase 6."""

from dataclasses import dataclass

import numpy as np

from mhalearn._runtime.types import Float64


@dataclass(frozen=True)
class Span:
    """proxy: the point of the hull nearest to zero, (d, d). wide: (m - 1, d, d), the orthonormal
    directions of the hull. angles: sines between this span and those found in other ways; queries:
    how many it took."""

    proxy: Float64
    wide: Float64
    angles: tuple[tuple[str, float], ...] = ()
    queries: int = 0

    @property
    def n_heads(self) -> int:
        return len(self.wide) + 1

    @property
    def basis(self) -> Float64:
        """(m, d, d): an orthonormal basis of the span of the attention matrices."""
        points = np.concatenate([self.proxy[None], self.wide]).reshape(self.n_heads, -1)
        return np.linalg.qr(points.T)[0].T.reshape(-1, *self.proxy.shape)


def span_angle(one: Span, other: Span) -> float:
    """Sine of the largest angle between two spans."""
    a, b = (span.basis.reshape(span.n_heads, -1) for span in (one, other))
    cosines = np.linalg.svd(a @ b.T, compute_uv=False)
    return float(np.sqrt(max(0.0, 1.0 - float(cosines.min()) ** 2)))


def exact_span(theta: Float64) -> Span:
    """The minimum-norm point of the affine hull of some matrices, and the hull's directions, in
    closed form."""
    m, d, _ = theta.shape
    heads = theta.reshape(m, -1)
    shares = np.linalg.lstsq(heads @ heads.T, np.ones(m), rcond=None)[0]
    proxy = (shares / shares.sum() @ heads).reshape(d, d)
    wide = np.linalg.qr((heads[1:] - heads[0]).T)[0].T.reshape(m - 1, d, d)
    return Span(proxy, wide)
