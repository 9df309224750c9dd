"""Calls that sweep a plane by angle, sharper and sharper where heads turn from end to end.

Tokens alpha u + t_j v of one call differ along v alone. Seen from the query (alpha, t_r) = rho (cos
phi, sin phi) head i weighs them by softmax_j(z t_j), z = rho (p_i cos phi + s_i sin phi): far from
the origin it attends to one end of the call on one side of the angle where z = 0, and to the other
end beyond. Heads that turn at different angles are told apart by a sharp enough sweep, whatever
they write: where matrices W_i are multiples of each other, the rank of the answers is not the
number of heads, but their turns are seen one by one.
Source: ours; critical points of this kind are what extractions of ReLU networks search for.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.types import Float64
from mhalearn.learners.queries.plane import mean_under_softmax

# Tokens of a call, from end to end of its sector: uneven, or a head and its mirror image look
# alike; and how far sectors overlap.
_UNEVEN, _OVERLAP = 1.4, 1.25
# Near the angle of v, moving along v changes angles little: tokens reach further there.
_STEEP = 0.15
# Sectors where answers bend at least by this, relative to the most, have heads that turn.
_ACTIVE = 0.01


class Sweep(NamedTuple):
    """Calls alpha u + t_j v."""

    u: Float64  # (d,)
    v: Float64
    alpha: Float64  # (calls,)
    t: Float64  # (calls, k)

    @property
    def tokens(self) -> Float64:
        """(calls, k, d)"""
        return self.alpha[:, None, None] * self.u + self.t[..., None] * self.v

    @property
    def spread(self) -> Float64:
        """How far the tokens of a call reach: (calls,)."""
        reach: Float64 = np.ptp(self.t, axis=1)
        return reach

    def patterns(self, p: Float64, s: Float64) -> tuple[Float64, Float64]:
        """Means of the t_j (m, calls, k), relative to t_r, and the weights (m, calls, k, k)."""
        z = self.alpha[:, None] * p[:, None, None] + self.t * s[:, None, None]
        centred = self.t - self.t.mean(axis=1, keepdims=True)
        means, weights = mean_under_softmax(z, centred[:, None, :])
        return means - centred, weights

    def and_also(self, other: "Sweep") -> "Sweep":
        alpha, t = np.concatenate([self.alpha, other.alpha]), np.concatenate([self.t, other.t])
        return self._replace(alpha=alpha, t=t)


class Sectors(NamedTuple):
    """Sectors of angles: centres (n,), how wide they are, and the distance from the origin."""

    centres: Float64
    width: float
    rho: float

    def calls(self, u: Float64, v: Float64, k: int) -> Sweep:
        """One call a sector."""
        return Sweep(u, v, *self.coordinates(k))

    def coordinates(self, k: int) -> tuple[Float64, Float64]:
        ends = 2 * (np.arange(k) / (k - 1)) ** _UNEVEN - 1
        half = (
            self.rho * self.width * _OVERLAP / 2 / np.maximum(np.abs(np.cos(self.centres)), _STEEP)
        )
        return (
            self.rho * np.cos(self.centres),
            self.rho * np.sin(self.centres)[:, None] + half[:, None] * ends,
        )

    def zoom(self, active: NDArray[np.bool_]) -> "Sectors":
        """As many sectors on the active ones alone; sharper, and more so where most are active."""
        n, left = len(self.centres), int(np.sum(active))
        width = self.width * left / n
        places = (np.arange(n) + 0.5) * width
        within = np.minimum((places // self.width).astype(int), left - 1)
        starts = self.centres[active] - self.width / 2
        sharper = 2.0 if left > 0.6 * n else 1.2
        return Sectors(
            starts[within] + places - within * self.width,
            width,
            self.rho * self.width / width * sharper,
        )


def find_active(calls: Sweep, answers: Float64) -> NDArray[np.bool_]:
    """Calls whose answers (calls, k, e) are not affine in t_r: there some head turns."""
    design = np.stack(
        [np.ones_like(calls.t), calls.t - calls.t.mean(axis=1, keepdims=True)], axis=-1
    )
    columns = np.linalg.qr(design)[0]
    left = answers - columns @ (columns.transpose(0, 2, 1) @ answers)
    bend = np.sqrt(np.sum(left**2, axis=(1, 2))) / calls.spread
    active: NDArray[np.bool_] = bend > _ACTIVE * bend.max()
    return active
