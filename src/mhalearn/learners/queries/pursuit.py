"""Heads as points of a plane whose sum is the answers: matching pursuit, refined together.

Answers to a sweep are sum_i f_i v W_i beside what is linear in tokens, with features f_i that two
numbers give, the angle and the size of (p_i, s_i). They are looked for one after the other in a
grid, in the answers of the sharpest calls, of which each is freed of what is affine in t_r: there a
head shows only where it turns. All are then moved together, amplitudes eliminated (Golub & Pereyra
1973), and turned into their mirror images where that is better.
Source: orthogonal matching pursuit (Pati et al. 1993), refined off the grid as in sliding
Frank-Wolfe (Denoyelle et al. 2019).
"""

import numpy as np
from scipy.optimize import least_squares

from mhalearn._runtime.types import Float64
from mhalearn.learners.queries.sweep import Sectors, Sweep

# The grid: angles a sector, and sizes, as the change of logits over a sector.
_ANGLES, _SIZES = 6, np.geomspace(0.3, 300.0, 24)
# What a feature must have outside those chosen to be chosen; singular values that count as rank.
_APART, _RANK = 1e-2, 1e-9
# A sum that leaves less than the first is nearly one of fewer heads than there are, unless the next
# one leaves less than the second part of it: then a sharper sweep is worth more.
_BLURRED, _SHARP = 0.03, 0.03
_EVALUATIONS, _FEW = 25, 12
_LARGEST_LOG = 14.0


class Pursuit:
    """Points whose features explain answers. local: each call freed of what is affine in t_r."""

    def __init__(self, calls: Sweep, answers: Float64, *, local: bool) -> None:
        self._calls = calls
        count, k = calls.t.shape
        self._weight = np.repeat(1 / calls.spread, k)[:, None]
        if local:
            call = np.repeat(np.eye(count), k, axis=0)
            away = np.hstack(
                [call, call * (calls.t - calls.t.mean(1, keepdims=True)).reshape(-1, 1)]
            )
        else:
            away = np.column_stack([np.repeat(calls.alpha, k), calls.t.ravel()])
        away = self._weight * away
        basis, values, _ = np.linalg.svd(away / np.linalg.norm(away, axis=0), full_matrices=False)
        self._away = basis[:, values > _RANK * values[0]]
        labels = self._free(self._weight * answers.reshape(count * k, -1))
        _, values, outputs = np.linalg.svd(labels, full_matrices=False)
        self._labels = labels @ outputs[values > _RANK * values[0]].T
        self._size = float(np.linalg.norm(self._labels)) or 1.0

    def search(
        self, swept: list[Sectors], most: int, enough: float, start: Float64 | None = None
    ) -> tuple[Float64, float]:
        """At most so many points (2, m), log sizes below angles, and what they leave of answers.

        swept: sectors whose angles are looked at. start: points to begin with.
        """
        grid = np.concatenate([_grid(sectors) for sectors in swept], axis=1)
        features = self.features(grid)
        norms = np.linalg.norm(features, axis=0)
        visible = norms > 1e-6 * norms.max()
        grid, features = grid[:, visible], features[:, visible] / norms[visible]
        points, left = np.zeros((2, 0)), 1.0
        if start is not None:
            points, left = self.mirror(*self.refine(start), enough)
        while points.shape[1] < most and left > enough:
            before = left
            points, left = self.refine(self._extend(points, grid, features))
            points, left = self._replace(points, left, grid, features, enough)
            points, left = self.mirror(points, left, enough)
            if before < _BLURRED and left > max(_SHARP * before, enough):
                break
        return points, left

    def refine(self, points: Float64, evaluations: int = _EVALUATIONS) -> tuple[Float64, float]:
        """Move all points together."""
        end = least_squares(
            self._residual,
            points.ravel(),
            self._jacobian,
            x_scale="jac",
            xtol=1e-15,
            ftol=1e-15,
            gtol=1e-15,
            max_nfev=evaluations,
        )
        return end.x.reshape(2, -1), float(np.sqrt(2 * end.cost)) / self._size

    def mirror(self, points: Float64, left: float, enough: float) -> tuple[Float64, float]:
        """Turn points into their opposites, one by one, as long as that explains more."""
        better = True
        while better and left > enough:
            better = False
            for i in range(points.shape[1]):
                turned = points.copy()
                turned[0, i] += np.pi
                turned, there = self.refine(turned, _FEW)
                if there < 0.9 * left:
                    points, left, better = turned, there, True
        return points, left

    def prune(self, points: Float64, left: float, enough: float) -> tuple[Float64, float]:
        """Without points that the answers do not need."""
        for i in reversed(range(points.shape[1])):
            if points.shape[1] > 1:
                fewer, there = self.refine(np.delete(points, i, axis=1))
                if there <= enough:
                    points, left = fewer, there
        return points, left

    def features(self, points: Float64) -> Float64:
        """Of points (2, n): (rows, n)."""
        rows = [
            self._calls.patterns(*coordinates(points[:, first : first + 500]))[0]
            for first in range(0, points.shape[1], 500)
        ]
        return self._free(self._weight * np.concatenate(rows).reshape(points.shape[1], -1).T)

    def _free(self, columns: Float64) -> Float64:
        freed: Float64 = columns - self._away @ (self._away.T @ columns)
        return freed

    def _extend(self, points: Float64, grid: Float64, features: Float64) -> Float64:
        """The point of the grid that explains most of what is left, added."""
        outside = np.ones(features.shape[1])
        left = self._labels
        if points.size:
            columns = np.linalg.qr(self.features(points))[0]
            left = left - columns @ (columns.T @ left)
            outside = 1 - np.sum((columns.T @ features) ** 2, axis=0)
        gain = np.sum((left.T @ features) ** 2, axis=0) / np.maximum(outside, _APART)
        return np.column_stack([points, grid[:, np.argmax(np.where(outside > _APART, gain, 0))]])

    def _replace(
        self, points: Float64, left: float, grid: Float64, features: Float64, enough: float
    ) -> tuple[Float64, float]:
        """Look for each point again, the others given, as long as that halves what is left."""
        while points.shape[1] > 1 and left > enough:
            before = left
            for i in range(points.shape[1]):
                others = np.delete(points, i, axis=1)
                tried, there = self.refine(self._extend(others, grid, features), _FEW)
                if there < left:
                    points, left = tried, there
            if left > 0.5 * before:
                break
        return points, left

    def _residual(self, flat: Float64) -> Float64:
        columns = np.linalg.qr(self.features(flat.reshape(2, -1)))[0]
        left: Float64 = (self._labels - columns @ (columns.T @ self._labels)).ravel()
        return left

    def _jacobian(self, flat: Float64) -> Float64:
        """By angles and log sizes, amplitudes eliminated (Kaufman's approximation)."""
        p, s = coordinates(flat.reshape(2, -1))
        calls, m = self._calls, len(p)
        means, weights = calls.patterns(p, s)
        centred = calls.t - calls.t.mean(axis=1, keepdims=True)
        variance = np.einsum("mcrj,cj->mcr", weights, centred**2) - (means + centred) ** 2
        by_p, by_s = calls.alpha[:, None] * variance, calls.t * variance
        turn = p[:, None, None] * by_s - s[:, None, None] * by_p
        grow = p[:, None, None] * by_p + s[:, None, None] * by_s
        values = self._free(self._weight * means.reshape(m, -1).T)
        columns = np.linalg.qr(values)[0]
        amplitudes = np.linalg.lstsq(values, self._labels, rcond=None)[0]  # (m, r)
        blocks = []
        for moved in (turn, grow):
            move = self._free(self._weight * moved.reshape(m, -1).T)
            move = move - columns @ (columns.T @ move)
            blocks.append((move[:, None, :] * -amplitudes.T).reshape(-1, m))
        return np.concatenate(blocks, axis=1)


def _grid(sectors: Sectors) -> Float64:
    """Points that turn within the sectors, and their mirror images: (2, n)."""
    within = sectors.width * (np.arange(_ANGLES) / _ANGLES - 0.5)
    angles = (sectors.centres[:, None] + within).ravel() + np.pi / 2
    sizes = np.log(_SIZES / (sectors.rho * sectors.width) ** 2)
    both = np.meshgrid(np.concatenate([angles, angles + np.pi]), sizes)
    return np.stack([axis.ravel() for axis in both])


def coordinates(points: Float64) -> tuple[Float64, Float64]:
    """(p, s) of points (2, n)."""
    size = np.exp(np.minimum(points[1], _LARGEST_LOG))
    return size * np.cos(points[0]), size * np.sin(points[0])
