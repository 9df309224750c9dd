"""All of a layer from calls whose tokens lie where its heads turn.

Tokens y + t_j v differ along v alone, and head i turns from one end of them to the other at t =
-y Theta_i v / s_i. Three kinds of calls follow from the heads on one plane:

- tokens between the turns, far out: every head attends to one end, known to us, and answers are
  linear in all W_i;
- tokens at the turns, all moved by the same n: logits move by n Theta_i v alone, each row tells of
  one head, and with them Theta_i v is known;
- tokens at the turns of any y, moved a little apart: answers are linear in Theta_i.

Each is well posed, however alike the heads are in what they write. Source: ours.
"""

from typing import NamedTuple

import numpy as np
from scipy.linalg import solve_triangular
from scipy.optimize import least_squares

from mhalearn._runtime.types import Float64
from mhalearn.learners.queries.at_turns import (
    CANDIDATES,
    SLACK,
    choose_small,
    count_at_turns,
    place_at_turns,
    rank_of_images,
)
from mhalearn.learners.queries.attention_step import plain_rows
from mhalearn.learners.queries.extension import Sketch
from mhalearn.learners.queries.plane import PlaneHeads
from mhalearn.learners.queries.sweep import Sweep
from mhalearn.solvers.host_steps import attend_on_host

# Logits by which a row prefers one end, where it must be sure.
_SURE = 45.0
# By how much tokens that move may change logits: of sure rows as a share of `_SURE`, of rows at
# turns, and of those whose answers shall be linear.
_SAFE, _MOVED, _LINEAR = 0.2, 0.5, 1e-3
# Linear steps, each a thousandth of the one before or less.
_CHORDS = 4


class Moved(NamedTuple):
    """Calls y + t_j v + n_j, with y = alpha u + n where all tokens move alike."""

    y: Float64  # (calls, d)
    v: Float64
    t: Float64  # (calls, k)
    off: Float64  # (calls, k, d)

    @property
    def tokens(self) -> Float64:
        along: Float64 = self.y[:, None] + self.t[..., None] * self.v
        return along + self.off

    def patterns(self, keys: Float64) -> tuple[Float64, Float64, Float64]:
        """Weights (m, calls, k, k) of heads with these Theta_i v (m, d), the means of the t_j, and
        the t_j, both relative to their middle."""
        y = self.y[None].repeat(len(keys), axis=0)
        p = np.einsum("mcd,md->mc", y, keys)
        sweep = Sweep(self.v, self.v, np.ones(len(self.y)), self.t)
        return _patterns(sweep, p, keys @ self.v)


def _patterns(sweep: Sweep, p: Float64, s: Float64) -> tuple[Float64, Float64, Float64]:
    centred = sweep.t - sweep.t.mean(axis=1, keepdims=True)
    z = p[..., None] + sweep.t * s[:, None, None]
    logits = z[..., None] * centred[:, None, :]
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights, np.einsum("mcrj,cj->mcr", weights, centred), centred


class Turns:
    """Calls for heads that one plane has shown.

    size: about |a Theta_i b| of tokens of size one. reach: about the size of the largest tokens.
    """

    def __init__(
        self, heads: PlaneHeads, u: Float64, v: Float64, k: int, rng: np.random.Generator
    ) -> None:
        self._heads, self._u, self._v, self._k, self._rng = heads, u, v, k, rng
        self.size = float(np.sqrt(np.mean(heads.p**2 + heads.s**2) / 2))
        self._images = np.linalg.svd(heads.images, full_matrices=False)[2][
            : rank_of_images(heads.images)
        ]

    @property
    def reach(self) -> float:
        calls = self.design_values()
        return float(np.sqrt(np.mean(calls.tokens**2, axis=-1)).max())

    def count(self) -> int:
        """Calls of all three kinds."""
        m, d = self._heads.n_heads, len(self._u)
        return self._of_values(m, d) + self._of_keys(m, d) + self._of_rows(m, d)

    def _of_values(self, m: int, d: int) -> int:
        return int(np.ceil(SLACK * d * max(1, (m + 1) / self._k))) + 2

    def _of_keys(self, m: int, d: int) -> int:
        return int(np.ceil(SLACK * (d - 2) * max(1, m / self._k))) + 2

    def _of_rows(self, m: int, d: int) -> int:
        return count_at_turns(m, d, self._k, len(self._images))

    def design_values(self) -> Moved:
        """Tokens between the turns, so far out that every row is sure."""
        heads = self._heads
        turns = np.sort(-heads.p / heads.s)
        gap = np.mean(np.diff(turns)) if len(turns) > 1 else 1.0
        between = [turns[0] - gap, *(turns[1:] + turns[:-1]) / 2, turns[-1] + gap]
        while len(between) < self._k:
            between.append(between[-1] + gap)
        count = self._of_values(heads.n_heads, len(self._u))
        t = np.stack(
            [np.sort(self._rng.choice(between, self._k, replace=False)) for _ in range(count)]
        )
        z = heads.p[:, None, None] + heads.s[:, None, None] * t
        ends = np.minimum(t[:, 1] - t[:, 0], t[:, -1] - t[:, -2])
        rho = np.sqrt(_SURE / np.min(np.abs(z) * ends[:, None], axis=(0, 2)))
        far = rho * np.maximum(1.0, np.abs(t).max(axis=1))
        off = _SAFE * _SURE / (self.size * far)
        noise = self._rng.standard_normal((count, self._k, len(self._u)))
        y = rho[:, None] * self._u
        return Moved(y, self._v, rho[:, None] * t, off[:, None, None] / 4 * noise)

    def read_values(self, calls: Moved, answers: Float64) -> Float64:
        """W (m, d, e), of answers to `design_values`."""
        heads, (n, k, d) = self._heads, calls.off.shape
        alpha = calls.y @ self._u / (self._u @ self._u)
        z = alpha[:, None] * heads.p[:, None, None] + calls.t * heads.s[:, None, None]
        ends = np.where(
            z > 0, np.argmax(calls.t, axis=1)[:, None], np.argmin(calls.t, axis=1)[:, None]
        )
        call = np.arange(n)[:, None]
        base = alpha[:, None, None] * heads.shift + np.einsum(
            "mcr,me->cre", calls.t[call, ends], heads.images
        )
        chosen = calls.off[call, ends]  # (m, calls, k, d)
        design = chosen.transpose(1, 2, 0, 3).reshape(n * k, -1)
        sizes = np.sqrt(np.mean(calls.off**2, axis=(1, 2))).repeat(k)[:, None]
        moved = (answers - base).reshape(n * k, -1)
        # What v W_i is, the plane has told better than answers that differ by little.
        along = np.kron(np.eye(heads.n_heads), self._v[None])
        design = np.vstack([design / sizes, along])
        labels = np.vstack([moved / sizes, heads.images])
        solved: Float64 = np.linalg.lstsq(design, labels, rcond=1e-12)[0]
        return solved.reshape(heads.n_heads, d, -1)

    def design_keys(self) -> Moved:
        """Tokens at the turns, all of a call moved alike, off the plane."""
        count = self._of_keys(self._heads.n_heads, len(self._u))
        y = np.tile(self._u, (count, 1))
        p, slopes = (np.tile(value, (count, 1)) for value in (self._heads.p, self._heads.s))
        rho, t = place_at_turns(p, slopes, self._k, self._rng)
        off = _MOVED / (self.size * np.ptp(t, axis=1))
        moved = self._rng.standard_normal((count, len(self._u)))
        plane = np.linalg.qr(np.stack([self._u, self._v], axis=1))[0]
        moved -= (moved @ plane) @ plane.T
        y = rho[:, None] * y + off[:, None] * moved
        return Moved(y, self._v, t, np.zeros((count, self._k, len(self._u))))

    def read_keys(self, calls: Moved, answers: Float64, w: Float64) -> Float64:
        """Theta_i v (m, d), of answers to `design_keys`."""
        heads, m = self._heads, self._heads.n_heads
        basis, _, _ = np.linalg.svd(np.stack([self._u, self._v], axis=1))
        inside = np.linalg.lstsq(
            np.stack([self._u, self._v]), np.stack([heads.p, heads.s]), rcond=None
        )[0].T
        free = basis[:, 2:]
        weight = 1 / np.ptp(calls.t, axis=1)[:, None, None]
        fixed = (
            calls.y[:, None] @ w.sum(axis=0)
            + np.einsum("c,me->ce", calls.t.mean(axis=1), heads.images)[:, None]
        )
        labels = weight * (answers - fixed) @ self._images.T
        amplitudes = heads.images @ self._images.T
        moves = calls.y @ free

        def look(flat: Float64) -> tuple[Float64, Float64]:
            weights, means, centred = calls.patterns(inside + flat.reshape(m, -1) @ free.T)
            left = labels - weight * np.einsum("mcr,me->cre", means, amplitudes)
            variance = np.einsum("mcrj,cj->mcr", weights, centred**2) - means**2
            slopes = np.einsum("crx,mcr,me,cq->cremq", weight, variance, amplitudes, moves)
            return left.ravel(), -slopes.reshape(left.size, -1)

        start = np.zeros(m * free.shape[1])
        end = least_squares(
            lambda flat: look(flat)[0],
            start,
            lambda flat: look(flat)[1],
            x_scale="jac",
            xtol=1e-15,
            ftol=1e-15,
            gtol=1e-15,
            max_nfev=40,
        )
        found: Float64 = inside + end.x.reshape(m, -1) @ free.T
        return found

    def design_rows(self, keys: Float64) -> Moved:
        """Tokens at the turns of random y, each moved a little, across v."""
        d = len(self._u)
        count = self._of_rows(len(keys), d)
        y = self._rng.standard_normal((CANDIDATES * count, d))
        slopes = np.tile(self._heads.s, (len(y), 1))
        rho, t = place_at_turns(y @ keys.T, slopes, self._k, self._rng)
        best = choose_small(rho, t, count)
        y, rho, t = y[best], rho[best], t[best]
        reach = np.maximum(rho, np.abs(t).max(axis=1))
        off = self._rng.standard_normal((count, self._k, d))
        off -= (off @ self._v)[..., None] * self._v / (self._v @ self._v)
        off *= (_LINEAR / (self.size * reach))[:, None, None]
        return Moved(rho[:, None] * y, self._v, t, off)

    def read_rows(self, calls: Moved, answers: Float64, w: Float64, keys: Float64) -> Sketch:
        """The layer, of answers to `design_rows`: linear steps, all with the first derivative."""
        d, m = len(self._v), len(keys)
        images = np.einsum("d,mde->me", self._v, w)
        weights, means, centred = calls.patterns(keys)
        spread = weights * (centred[:, None, :] - means[..., None])
        noise = np.sqrt(np.mean(calls.off**2, axis=(1, 2)))
        # All of Theta_i is open: what keys left undecided counts beside moves as small as these.
        basis = np.linalg.svd(self._v[:, None])[0]
        basis[:, 0] *= np.median(noise / np.ptp(calls.t, axis=1))
        moves = calls.off + centred[..., None] * self._v
        lean = np.einsum("mcrj,cjq->mcrq", spread, moves @ basis)
        queries = calls.y[:, None] + calls.t[..., None] * self._v
        sizes = (noise * np.ptp(calls.t, axis=1))[:, None, None]
        amplitudes = images @ self._images.T
        design = np.einsum("crd,mcrq,me->cremdq", queries / sizes, lean, amplitudes, optimize=True)
        columns, upper = np.linalg.qr(design.reshape(-1, m * d * d))
        theta = keys[:, :, None] * self._v / (self._v @ self._v)
        rows = plain_rows(calls.tokens, answers)
        for _ in range(_CHORDS):
            there = attend_on_host(theta, rows)[1] @ w.reshape(m * d, -1)
            left = (answers - there.reshape(answers.shape)) @ self._images.T / sizes
            step = solve_triangular(upper, columns.T @ left.ravel())
            theta = theta + step.reshape(m, d, d) @ basis.T
        return Sketch(theta, w)
