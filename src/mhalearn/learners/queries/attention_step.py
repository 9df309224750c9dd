"""Attention matrices with W known: Gauss-Newton on Theta alone, which small logits make linear."""

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from mhalearn._runtime.types import Float64
from mhalearn.solvers.host_steps import (
    Rows,
    attend_on_host,
    complete_rows,
    covariance_products,
    normal_matrix,
    step_on_host,
)

_STEPS = 12
# Damping, relative to the mean diagonal, with which steps begin, and how it changes.
_DAMPING, _LESS, _MORE = 1e-3, 0.1, 10.0
# A step that leaves more than this part of the objective is the last.
_STALLED = 0.9
# Steps of both, their damping at first, and the loss below which nothing is left to gain.
_TOGETHER, _LIGHT, _EXACT = 10, 1e-6, 1e-28


def plain_rows(tokens: Float64, labels: Float64, *, causal: bool = False) -> Rows:
    """Whole sequences (n, k, d) and labels (n, k, e) as rows of the host's solver."""
    n, k, d = tokens.shape
    return complete_rows(
        tokens,
        tokens.reshape(n * k, d),
        labels.reshape(n * k, -1),
        np.zeros((n * k, 0)),
        np.ones((n * k, 1)),
        ~np.tri(k, dtype=bool)[None, :, None] if causal else None,
    )


def fit_attention(theta: Float64, w: Float64, rows: Rows) -> tuple[Float64, float]:
    """Descend in theta (m, d, d) with w (m, d, e) fixed; returns it and |Y - F|^2 over |Y|^2.

    Cost: a step is O(rows (m d)^2 (d + e) + (m d^2)^3). Trust: a descent.
    """
    m, d, e = w.shape
    stacked = w.reshape(m * d, e)
    energy = float(np.vdot(rows.labels, rows.labels)) or 1.0

    def look(theta: Float64) -> tuple[Float64, Float64, Float64, float]:
        p, design = attend_on_host(theta, rows)
        left = rows.labels - design @ stacked
        return p, design, left, float(np.vdot(left, left)) / energy

    p, design, left, loss = look(theta)
    damping = _DAMPING
    for _ in range(_STEPS):
        keys = covariance_products(p, design, stacked, rows)
        matrix = normal_matrix(keys, rows.queries)
        right = rows.queries.T @ (keys @ left[:, :, None])[..., 0]
        matrix.flat[:: len(matrix) + 1] += damping * np.trace(matrix) / len(matrix)
        try:
            flat = cho_solve(cho_factor(matrix), right.ravel())
        except np.linalg.LinAlgError:
            damping *= _MORE
            continue
        tried = theta + flat.reshape(d, m, d).transpose(1, 0, 2)
        there = look(tried)
        if not there[3] < loss:
            damping *= _MORE
            continue
        stalled = there[3] > _STALLED * loss
        theta, (p, design, left, loss), damping = tried, there, damping * _LESS
        if stalled or loss < _EXACT:
            break
    return theta, loss


def fit_together(theta: Float64, rows: Rows) -> tuple[Float64, Float64, float]:
    """Descend from a layer near the solution, W eliminated: theta, w and the loss.

    Direct steps: where heads write alike the equations are too ill conditioned for conjugate
    gradients. Cost: ten steps of `step_on_host` at most. Trust: a descent.
    """
    (m, d, _), energy = theta.shape, float(np.vdot(rows.labels, rows.labels)) or 1.0
    damping, idle, loss = _LIGHT, 0.0, np.inf
    for _ in range(_TOGETHER):
        step = step_on_host(theta, damping, idle, rows, energy, (0.0, 0.0))
        theta, damping, idle = step.point.theta, step.damping, step.idle
        before, loss = loss, step.point.squared / energy
        if loss < _EXACT or loss > _STALLED * before:
            break
    return theta, step.point.w.reshape(m, d, -1), loss
