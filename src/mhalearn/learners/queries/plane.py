"""Heads from tokens in a plane: each is a point that one subspace shows.

Tokens g (alpha u + t_j v) of one call differ along v alone, so that head i averages the t_j with
weights softmax_j(z t_j), z = g^2 (alpha p_i + t_r s_i), where p_i = u Theta_i v, s_i = v Theta_i v.
With f the mean of the t_j under these weights, row r is

    g alpha u W_sum + g sum_i f(z_ri) v W_i:

all rows of all calls, one below the other, are a matrix whose columns are combinations of the
heads' feature vectors phi(p_i, s_i) = (g f(z_ri))_r. Its rank is the number of heads, and the heads
are the points (p, s) whose phi lies in its column space: a search in two dimensions, which a grid
settles. Under a causal mask row r averages t_0..t_r alone, and nothing else changes.
Source: ours; the search is that of MUSIC (Schmidt 1986) in array processing.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

from mhalearn._runtime.types import Float64

# Coefficients of u, and gains of both, in the calls of a plane: from flat to sharp attention.
_ALPHAS = (1.0, -1.0, 0.6, -1.7)
_GAINS = (1.0, 0.7, 1.8, 0.45)
# Coefficients of v: uneven, so that no head looks like another of opposite sign.
_REACH, _UNEVEN = 2.0, 0.07
# The grid: points a side, the largest, and how much finer it is around zero.
_SIDE, _FINER = 241, 5.0
_LARGEST = (60.0, 8.0, 500.0)  # one after the other, until the heads explain the answers
# Minima of the grid that are refined, for each head looked for.
_REFINED = 8
# What heads may leave of the answers, relative to them, to be all there are.
_EXACT = 1e-11
# What heads leave where answers are not those of a layer; a head that a grid missed leaves less.
HOPELESS = 0.03
# Points closer than this, relative to their size, are one.
_SAME = 1e-3


class PlaneCalls(NamedTuple):
    """The calls of a plane: g (alpha u + t_j v). causal: rows see no later token."""

    u: Float64  # (d,)
    v: Float64
    alpha: Float64  # (calls,)
    gain: Float64
    t: Float64  # (k,)
    causal: bool = False

    @property
    def tokens(self) -> Float64:
        """(calls, k, d)"""
        along = self.alpha[:, None, None] * self.u + self.t[:, None] * self.v
        return self.gain[:, None, None] * along

    def slopes(self, p: Float64, s: Float64) -> Float64:
        """The z of points (...,): (..., calls, k)."""
        at = self.alpha[:, None] * p[..., None, None] + self.t * s[..., None, None]
        return self.gain[:, None] ** 2 * at

    def features(self, p: Float64, s: Float64) -> Float64:
        """phi of points (...,): (..., calls k)."""
        means = mean_under_softmax(self.slopes(p, s), self.t, self.causal)[0]
        return (self.gain[:, None] * means).reshape(*p.shape, -1)

    @property
    def shift(self) -> Float64:
        """What multiplies u W_sum, a row: (calls k,)."""
        return np.repeat(self.gain * self.alpha, len(self.t))


def mean_under_softmax(z: Float64, t: Float64, causal: bool = False) -> tuple[Float64, Float64]:
    """Mean of the t_j under softmax_j(z t_j), and the weights (..., k).

    causal: the last axis of z is that of rows, and row r averages t_0..t_r."""
    logits = z[..., None] * t
    if causal:
        logits = np.where(np.tri(z.shape[-1], dtype=bool), logits, -np.inf)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.sum(weights * t, axis=-1), weights


@dataclass(frozen=True)
class PlaneHeads:
    """What the calls of a plane tell of each head.

    residual: what they leave of the answers, relative to them. singular_values: of the answers,
    relative to the largest; the number of heads is their rank. condition: of the heads' features.
    """

    p: Float64  # (m,): u Theta_i v
    s: Float64  # (m,): v Theta_i v
    images: Float64  # (m, e): v W_i
    shift: Float64  # (e,): u W_sum
    residual: float
    singular_values: Float64
    condition: float

    @property
    def n_heads(self) -> int:
        return len(self.p)


def design_plane(
    u: Float64, v: Float64, k: int, calls: int, scale: float = 1.0, *, causal: bool = False
) -> PlaneCalls:
    """Calls with tokens in the plane of u and v. scale: of their gains.

    causal: ends come first, so that early rows, which see few tokens, see different ones."""
    places = np.arange(calls) % len(_ALPHAS)
    again = 1.3 ** (np.arange(calls) // len(_ALPHAS))
    t = np.linspace(-_REACH, _REACH, k)
    t = t + _UNEVEN * np.cos(3.0 * np.arange(k)) * (_REACH if k > 2 else 0.0)
    if causal:
        t = np.stack([t, t[::-1]], axis=1).ravel()[:k]
    gain = scale * np.array(_GAINS)[places] * again
    return PlaneCalls(u, v, np.array(_ALPHAS)[places], gain, t, causal)


def find_heads_in_plane(
    calls: PlaneCalls, answers: Float64, unit: float, n_heads: int | None = None
) -> PlaneHeads | None:
    """The heads that the answers (calls, k, e) show; None where their number is not told by the
    rank: as many as outputs or more, or fewer points than heads in the column space.

    unit: rounding of the answers, relative to them. n_heads: where known.
    Cost: a grid of 58,000 points, some tenths of a second. Trust: exact for exact answers of heads
    whose images v W_i are independent; the condition says how much rounding grows.
    """
    labels = answers.reshape(-1, answers.shape[-1])
    away = calls.shift / np.linalg.norm(calls.shift)
    centred = labels - np.outer(away, away @ labels)
    basis, values, _ = np.linalg.svd(centred, full_matrices=False)
    if values[0] == 0.0:
        return None
    relative = values / values[0]
    rank = int(np.sum(relative > max(1e-11, 16 * unit)))
    heads = rank if n_heads is None else min(rank, n_heads)
    best: PlaneHeads | None = None
    for largest in _LARGEST:
        points = _search(calls, basis[:, :heads], away, heads, largest)
        if len(points) < heads:
            continue
        points = _refine_together(calls, points, centred, away)
        found = _read_off(calls, points, labels, relative)
        best = found if best is None or found.residual < best.residual else best
        if best.residual < max(_EXACT, unit) or best.residual > HOPELESS:
            break
    return best


def _search(
    calls: PlaneCalls, basis: Float64, away: Float64, heads: int, largest: float
) -> Float64:
    """The points (heads, 2) whose features are nearest to the span of `basis`, by angle."""
    side = np.sinh(_FINER * np.linspace(-1, 1, _SIDE)) / np.sinh(_FINER) * largest
    p, s = np.meshgrid(side, side, indexing="ij")
    features = calls.features(p, s)
    features -= (features @ away)[..., None] * away
    squares = np.einsum("pqr,pqr->pq", features, features)
    inside = features @ basis
    outside = 1 - np.einsum("pqr,pqr->pq", inside, inside) / np.maximum(squares, 1e-300)
    starts = _grid_minima(outside)[: _REFINED * heads]

    def residual(point: Float64) -> Float64:
        feature = calls.features(point[:1], point[1:])[0]
        feature = feature - (feature @ away) * away
        feature = feature / max(float(np.linalg.norm(feature)), 1e-300)
        left: Float64 = feature - basis @ (basis.T @ feature)
        return left

    ends = [
        least_squares(residual, side[list(place)], xtol=1e-15, ftol=1e-15, gtol=1e-15, max_nfev=60)
        for place in starts
    ]
    found: list[Float64] = []
    for end in sorted(ends, key=lambda end: end.cost):
        apart = [np.linalg.norm(end.x - other) for other in found]
        if all(gap > _SAME * (1 + np.linalg.norm(end.x)) for gap in apart):
            found.append(end.x)
    return np.array(found[:heads]).reshape(-1, 2)


def _grid_minima(values: Float64) -> list[tuple[int, int]]:
    """Places of a grid with no smaller neighbour, the smallest first."""
    rows, columns = values.shape
    padded = np.pad(values, 1, constant_values=np.inf)
    neighbours = [
        padded[1 + i : 1 + i + rows, 1 + j : 1 + j + columns]
        for i in (-1, 0, 1)
        for j in (-1, 0, 1)
        if (i, j) != (0, 0)
    ]
    places = np.argwhere(values <= np.min(neighbours, axis=0))
    order = np.argsort(values[tuple(places.T)])
    return [(int(i), int(j)) for i, j in places[order]]


def _refine_together(
    calls: PlaneCalls, points: Float64, centred: Float64, away: Float64
) -> Float64:
    """Least squares of all points at once, images eliminated: better than one by one."""

    def residual(flat: Float64) -> Float64:
        features = calls.features(*flat.reshape(2, -1)).T
        features = features - np.outer(away, away @ features)
        columns, _ = np.linalg.qr(features)
        left: Float64 = (centred - columns @ (columns.T @ centred)).ravel()
        return left

    found = least_squares(residual, points.T.ravel(), x_scale=1.0, xtol=1e-15, max_nfev=30)
    better: Float64 = found.x.reshape(2, -1).T
    return better


def _read_off(calls: PlaneCalls, points: Float64, labels: Float64, relative: Float64) -> PlaneHeads:
    p, s = points.T
    features = calls.features(p, s).T
    design = np.column_stack([features, calls.shift])
    solved: Float64 = np.linalg.lstsq(design, labels, rcond=None)[0].astype(np.float64)
    left = labels - design @ solved
    return PlaneHeads(
        p,
        s,
        solved[:-1],
        solved[-1],
        float(np.linalg.norm(left) / np.linalg.norm(labels)),
        relative,
        float(np.linalg.cond(features)),
    )
