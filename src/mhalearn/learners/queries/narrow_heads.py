"""Narrow heads, each on its own: outputs in the space that a head writes to are that head's alone.

Where heads of rank h write to spaces that are known, and that together are independent, answers
split: what lies in the space of head i is softmax(x_r A B^T X^T) X V, with 3 d h unknowns and no
other head. A penalty on A, B and V, which is the nuclear norm of A B^T, starts where it keeps them
near zero and fades; there is one descent, from where a linear problem and a singular value
decomposition say, and no random start.
Source: ours; the penalty is that of `learners.newton.factored`.
"""

from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize

from mhalearn._runtime.types import Float64
from mhalearn.learners.queries.extension import Sketch

# Penalties over the largest correlation of tokens and outputs, from first to last; steps with each.
_FIRST, _LAST, _PENALTIES, _STEPS = 1e-1, 1e-6, 12, 150
# Pairs that L-BFGS remembers; ridge of the linear problem, over its mean diagonal; size of A and B
# at first, in units in which features are of size one.
_MEMORY, _RIDGE, _SMALL = 20, 0.1, 0.3


class NarrowHead(NamedTuple):
    theta: Float64  # (d, d), of rank h
    values: Float64  # (d, h)
    loss: float  # |Y - F|^2 over |Y|^2


def split_answers(answers: Float64, rows: Float64) -> Float64:
    """What each head wrote: (..., e) to (..., m, h), in coordinates of its rows (m, h, e)."""
    m, h, e = rows.shape
    dual = np.linalg.pinv(rows.reshape(m * h, e))
    return (answers @ dual).reshape(*answers.shape[:-1], m, h)


def fit_narrow_heads(x: Float64, y: Float64, rows: Float64) -> tuple[Sketch, float]:
    """Heads (m, d, d), (m, d, e) from sequences (n, k, d) and answers (n, k, e), and the largest
    loss of any. Cost: some hundred passes over the sequences a head. Trust: a descent."""
    written = split_answers(y, rows)
    heads = [fit_narrow_head(x, written[:, :, i]) for i in range(len(rows))]
    theta = np.stack([head.theta for head in heads])
    w = np.stack([head.values @ space for head, space in zip(heads, rows, strict=True)])
    return Sketch(theta, w), max(head.loss for head in heads)


def fit_narrow_head(x: Float64, y: Float64) -> NarrowHead:
    """One head of rank h from sequences (n, k, d) and outputs (n, k, h)."""
    d, h = x.shape[-1], y.shape[-1]
    size, unit = float(np.sqrt(np.mean(x**2))), float(np.sqrt(np.mean(y**2))) or 1.0
    x, y = x / size, y / unit
    means = np.broadcast_to(x.mean(axis=1, keepdims=True), x.shape)
    even = float(np.linalg.norm(np.einsum("nrd,nrh->dh", means, y) / y.size, 2))
    flat = _begin(x, y).ravel()
    for penalty in even * np.geomspace(_FIRST, _LAST, _PENALTIES):
        found = minimize(
            _objective,
            flat,
            (x, y, penalty),
            method="L-BFGS-B",
            jac=True,
            options={"maxiter": _STEPS, "maxcor": _MEMORY},
        )
        flat = found.x
    query, key, values = flat.reshape(3, d, h)
    loss = _objective(flat, x, y, 0.0)[0]
    return NarrowHead(query @ key.T / size**2, values * unit / size, loss)


def _begin(x: Float64, y: Float64) -> Float64:
    """A, B and V as even attention has them: V by ridge regression on the mean token, A and B along
    the largest singular vectors of the gradient in Theta."""
    d, h = x.shape[-1], y.shape[-1]
    mean = x.mean(axis=1)
    gram = mean.T @ mean
    ridge = _RIDGE * np.trace(gram) / d * np.eye(d)
    values = np.linalg.solve(gram + ridge, mean.T @ y.mean(axis=1))
    apart = x - mean[:, None]
    left = y - (mean @ values)[:, None]
    gradient = np.einsum("nrd,nrh,njh,nje->de", x, left, apart @ values, apart, optimize=True)
    query, _, key = np.linalg.svd(gradient)
    return np.stack([_SMALL * query[:, :h], _SMALL * key[:h].T, values])


def _objective(flat: Float64, x: Float64, y: Float64, penalty: float) -> tuple[float, Float64]:
    """|Y - F|^2 over |Y|^2, with the penalty, and its gradient."""
    query, key, values = flat.reshape(3, x.shape[-1], -1)
    asks, keys, written = x @ query, x @ key, x @ values
    logits = asks @ keys.transpose(0, 2, 1)
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    left = p @ written - y
    per = 1.0 / y.size
    by_pattern = left @ written.transpose(0, 2, 1)
    by_logit = 2 * per * p * (by_pattern - np.sum(p * by_pattern, axis=-1, keepdims=True))
    gradient = np.stack(
        [
            np.tensordot(x, by_logit @ keys, axes=((0, 1), (0, 1))),
            np.tensordot(x, by_logit.transpose(0, 2, 1) @ asks, axes=((0, 1), (0, 1))),
            2 * per * np.tensordot(x, p.transpose(0, 2, 1) @ left, axes=((0, 1), (0, 1))),
        ]
    )
    value = per * float(np.vdot(left, left)) + penalty * float(flat @ flat)
    return value, gradient.ravel() + 2 * penalty * flat
