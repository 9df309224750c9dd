"""From heads on a plane to heads on all features: tokens a little off the plane, a linear problem.

With x_j = g (alpha u + t_j v) + eps n_j the answers move, to first order in eps, by

    sum_i [ nbar_i W_i + gamma_i v W_i ],   nbar_i = sum_j p_ij n_j,
    gamma_i = g^2 Var_i(t) n_r Theta_i v + g^2 k_i . (alpha u + t_r v) Theta_i,
    k_i = sum_j p_ij (t_j - tbar_i) n_j,

with patterns p_ij that the plane has told. All unknowns enter linearly: W_i, Theta_i v, u Theta_i
and v Theta_i. Outputs outside the span of the v W_i see the first term alone; along the dual of
v W_i there are those of head i besides. One design matrix serves all outputs. With all n_j in a
space of r dimensions, on which N is a basis, the unknowns are N W_i and r numbers in place of d:
heads of rank r show in this way the space that each writes to.
Source: ours.
"""

from typing import NamedTuple

import numpy as np

from mhalearn._runtime.types import Float64
from mhalearn.learners.queries.plane import PlaneCalls, PlaneHeads, mean_under_softmax


class ExtensionCalls(NamedTuple):
    """Calls a little off a plane."""

    plane: PlaneCalls  # alpha and gain of each call; t in the order of `t`
    t: Float64  # (calls, k)
    off: Float64  # (calls, k, r): eps n_j, in coordinates
    basis: Float64  # (r, d), of these coordinates

    @property
    def tokens(self) -> Float64:
        plane = self.plane
        along = plane.alpha[:, None, None] * plane.u + self.t[..., None] * plane.v
        return plane.gain[:, None, None] * along + self.off @ self.basis


class Sketch(NamedTuple):
    """Heads as first-order answers tell them: W_i whole, and some rows and columns of Theta_i."""

    theta: Float64  # (m, d, d): exact where a query is in the plane or a key along v
    w: Float64  # (m, d, e)


class Moves(NamedTuple):
    """What answers to tokens off the plane tell, in coordinates of where these went."""

    images: Float64  # (m, r, e): of W_i
    key: Float64  # (m, r): of Theta_i v
    first: Float64  # of u Theta_i
    second: Float64  # of v Theta_i

    def size(self, d: int) -> float:
        """About the norm of a Theta, where u and v have features of size one: from 3 m r numbers,
        where the plane alone has told two of each head."""
        return float(np.sqrt(d * np.mean(np.square([self.key, self.first, self.second]))))


class AlgebraFound(NamedTuple):
    """Heads by algebra: a sketch of them or, of narrow heads, the spaces that they write to, as
    bases (m, h, e). size: about the norm of a Theta, in units of one over a squared token.
    by_turns: whether heads write so much alike that only their turns tell them apart."""

    heads: PlaneHeads
    sketch: Sketch | None
    size: float
    planes: int
    by_turns: bool = False
    rows: Float64 | None = None


def design_extension(
    plane: PlaneCalls,
    gain: float,
    calls: int,
    off: float,
    rng: np.random.Generator,
    basis: Float64 | None = None,
) -> ExtensionCalls:
    """Random calls off the plane, by `off` times the gain: alpha and the order of t vary.

    basis: of the space that they go to, all features unless given.
    """
    basis = np.eye(len(plane.u)) if basis is None else basis
    alpha = rng.choice(np.array([-1.0, -0.5, 0.5, 1.0]), calls)
    t = rng.permuted(np.broadcast_to(plane.t, (calls, len(plane.t))), axis=1)
    noise = rng.standard_normal((calls, len(plane.t), len(basis)))
    at = plane._replace(alpha=alpha, gain=np.full(calls, gain))
    return ExtensionCalls(at, t, off * gain * noise, basis)


def count_extension_calls(m: int, r: int, k: int, slack: float = 1.4) -> int:
    """Calls that make the linear problem over-determined by `slack`, in r dimensions."""
    return int(np.ceil(slack * (m + 3) * r / k))


def extend(calls: ExtensionCalls, moves: Moves) -> Sketch:
    """Heads on all features, from calls that went to all. Trust: an error of the order of eps."""
    return Sketch(_join(calls.plane, moves.key, moves.first, moves.second), moves.images)


def find_row_spaces(heads: PlaneHeads, moves: Moves, rank: int) -> Float64:
    """The spaces (m, rank, e) that heads write to, as orthonormal rows, from calls that went to
    `rank` dimensions. Trust: an error of the order of eps over the least singular value of N W_i.
    """
    images = moves.images
    lengths = np.linalg.norm(images, axis=(1, 2)) / np.linalg.norm(heads.images, axis=1)
    every = np.concatenate([images, (lengths[:, None] * heads.images)[:, None]], axis=1)
    return np.linalg.svd(every, full_matrices=False)[2][:, :rank]


def solve_moves(heads: PlaneHeads, calls: ExtensionCalls, answers: Float64) -> Moves:
    """Solve the linear problem. Cost: O(rows (m r)^2)."""
    plane, t = calls.plane, calls.t
    n, k, d = calls.off.shape
    m, e = heads.images.shape
    gain, alpha = plane.gain[:, None], plane.alpha[:, None]
    z = gain**2 * (alpha * heads.p[:, None, None] + t * heads.s[:, None, None])  # (m, n, k)
    means, weights = mean_under_softmax(z, t[:, None, :], plane.causal)  # (m, n, r), (m, n, r, j)
    base = (gain * alpha)[..., None] * heads.shift + np.einsum(
        "mnr,me->nre", gain * means, heads.images
    )
    moved = (answers - base).reshape(n * k, e)
    nbar = np.einsum("mnrj,njd->nrmd", weights, calls.off)
    spread = weights * (t[:, None, :] - means[..., None])
    variance = np.einsum("mnrj,nj->mnr", spread, t)
    lean = gain[..., None] ** 2 * np.einsum("mnrj,njd->mnrd", spread, calls.off)
    of_key = (gain**2 * variance)[..., None] * calls.off  # meets Theta_i v
    own = np.concatenate([of_key, alpha[..., None] * lean, t[..., None] * lean], axis=-1)
    design = nbar.reshape(n * k, m * d)
    return _solve(heads, moved, design, own.reshape(m, n * k, 3 * d))


def _solve(heads: PlaneHeads, moved: Float64, design: Float64, own: Float64) -> Moves:
    (m, e), d = heads.images.shape, own.shape[-1] // 3
    dual = np.linalg.pinv(heads.images)  # (e, m)
    outside = np.linalg.qr(heads.images.T, mode="complete")[0][:, m:]
    stacked = np.zeros((m * d, e))
    if e > m:
        part = np.linalg.lstsq(design, moved @ outside, rcond=1e-12)[0]
        stacked += part @ outside.T
    key, first, second = (np.empty((m, d)) for _ in range(3))
    for i in range(m):
        both = np.column_stack([design, own[i]])
        solved = np.linalg.lstsq(both, moved @ dual[:, i], rcond=1e-12)[0]
        # What multiplies the dual of v W_i in W is carried by v W_i itself.
        stacked += np.outer(solved[: m * d], heads.images[i])
        key[i], first[i], second[i] = solved[m * d :].reshape(3, d)
    return Moves(stacked.reshape(m, d, e), key, first, second)


def _join(plane: PlaneCalls, key: Float64, first: Float64, second: Float64) -> Float64:
    """The least matrices with Theta v = key, u Theta = first and v Theta = second."""
    queries = np.stack([plane.u, plane.v])
    onto = np.linalg.pinv(queries)  # (d, 2)
    rows = np.stack([first, second], axis=1)  # (m, 2, d)
    theta = np.einsum("da,mae->mde", onto, rows)
    v = plane.v / (plane.v @ plane.v)
    left = key - theta @ plane.v
    left = left - np.einsum("da,ae,me->md", onto, queries, left)
    joined: Float64 = theta + left[:, :, None] * v
    return joined
