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
from numpy.typing import NDArray
from scipy.optimize import minimize

from mhalearn._runtime.types import Float64
from mhalearn.learners.queries.extension import Sketch

# Penalties over the largest correlation of tokens and outputs, from first to last; steps with each.
_FIRST, _LAST, _PENALTIES, _STEPS = 1e-1, 1e-6, 12, 150
# Columns of A and B too many, and penalties when they are gone.
_SURPLUS, _AGAIN, _PENALTIES_AGAIN = 2, 1e-3, 4
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


def fit_narrow_heads(
    x: Float64, y: Float64, rows: Float64, *, causal: bool = False
) -> tuple[Sketch, float]:
    """Heads (m, d, d), (m, d, e) from sequences (n, k, d) and answers (n, k, e), and the largest
    loss of any. Cost: some hundred passes over the sequences a head. Trust: a descent."""
    written = split_answers(y, rows)
    heads = [fit_narrow_head(x, written[:, :, i], causal=causal) for i in range(len(rows))]
    theta = np.stack([head.theta for head in heads])
    w = np.stack([head.values @ space for head, space in zip(heads, rows, strict=True)])
    return Sketch(theta, w), max(head.loss for head in heads)


def fit_narrow_head(x: Float64, y: Float64, *, causal: bool = False) -> NarrowHead:
    """One head of rank h from sequences (n, k, d) and outputs (n, k, h).

    A and B have two columns too many at first: without them rank one is often stuck.
    """
    d, h = x.shape[-1], y.shape[-1]
    size, unit = float(np.sqrt(np.mean(x**2))), float(np.sqrt(np.mean(y**2))) or 1.0
    seen = np.tri(x.shape[1]) if causal else np.ones((x.shape[1], x.shape[1]))
    means = (seen / seen.sum(axis=1, keepdims=True)) @ x / size
    task = _Task(x / size, y / unit, seen > 0)
    even = float(np.linalg.norm(np.einsum("nrd,nrh->dh", means, task.y) / y.size, 2))
    wide = min(d, h + _SURPLUS)
    theta, values = task.descend(
        *_begin(task.x, task.y, means, seen, wide), even * np.geomspace(_FIRST, _LAST, _PENALTIES)
    )
    if wide > h:
        again = even * np.geomspace(_AGAIN, _LAST, _PENALTIES_AGAIN)
        theta, values = task.descend(*_factor(theta, h), values, again)
    query, key = _factor(theta, h)
    loss = task.objective(task.join(query, key, values), 0.0)[0]
    return NarrowHead(query @ key.T / size**2, values * unit / size, loss)


def _factor(theta: Float64, rank: int) -> tuple[Float64, Float64]:
    """A and B (d, rank) of the nearest matrix of that rank."""
    left, values, right = np.linalg.svd(theta)
    root = np.sqrt(values[:rank])
    return left[:, :rank] * root, right[:rank].T * root


def _begin(
    x: Float64, y: Float64, means: Float64, seen: Float64, rank: int
) -> tuple[Float64, Float64, Float64]:
    """A, B and V as even attention has them: V by ridge regression on the mean of the tokens seen,
    A and B along the largest singular vectors of the gradient in Theta."""
    d, h = x.shape[-1], y.shape[-1]
    flat = means.reshape(-1, d)
    gram = flat.T @ flat
    ridge = _RIDGE * np.trace(gram) / d * np.eye(d)
    values = np.linalg.solve(gram + ridge, flat.T @ y.reshape(-1, h))
    left = y - means @ values
    even = seen / seen.sum(axis=1, keepdims=True)
    by_logit = even * (left @ (x @ values).transpose(0, 2, 1))
    by_logit -= even * by_logit.sum(axis=-1, keepdims=True)
    gradient = np.einsum("nrd,nrj,nje->de", x, by_logit, x, optimize=True)
    query, _, key = np.linalg.svd(gradient)
    return _SMALL * query[:, :rank], _SMALL * key[:rank].T, values


class _Task(NamedTuple):
    """One head's sequences and outputs, both of size one, and which tokens rows see."""

    x: Float64  # (n, k, d)
    y: Float64  # (n, k, h)
    seen: NDArray[np.bool_]  # (k, k)

    def descend(
        self, query: Float64, key: Float64, values: Float64, penalties: Float64
    ) -> tuple[Float64, Float64]:
        """L-BFGS with one penalty after the other: Theta and V."""
        flat = self.join(query, key, values)
        for penalty in penalties:
            found = minimize(
                self.objective,
                flat,
                (penalty,),
                method="L-BFGS-B",
                jac=True,
                options={"maxiter": _STEPS, "maxcor": _MEMORY},
            )
            flat = found.x
        query, key, values = self.part(flat)
        return query @ key.T, values

    def join(self, query: Float64, key: Float64, values: Float64) -> Float64:
        return np.concatenate([query, key, values], axis=1).ravel()

    def part(self, flat: Float64) -> tuple[Float64, Float64, Float64]:
        every, h = flat.reshape(self.x.shape[-1], -1), self.y.shape[-1]
        rank = (every.shape[1] - h) // 2
        return every[:, :rank], every[:, rank : 2 * rank], every[:, 2 * rank :]

    def objective(self, flat: Float64, penalty: float) -> tuple[float, Float64]:
        """|Y - F|^2 over |Y|^2, with the penalty, and its gradient."""
        x, y = self.x, self.y
        query, key, values = self.part(flat)
        asks, keys, written = x @ query, x @ key, x @ values
        logits = np.where(self.seen, asks @ keys.transpose(0, 2, 1), -np.inf)
        p = np.exp(logits - logits.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        left, per = p @ written - y, 1.0 / y.size
        by_pattern = left @ written.transpose(0, 2, 1)
        by_logit = 2 * per * p * (by_pattern - np.sum(p * by_pattern, axis=-1, keepdims=True))
        moved = (
            by_logit @ keys,
            by_logit.transpose(0, 2, 1) @ asks,
            2 * per * p.transpose(0, 2, 1) @ left,
        )
        every = np.concatenate(moved, axis=-1)
        gradient = np.tensordot(x, every, axes=((0, 1), (0, 1))).ravel()
        value = per * float(np.vdot(left, left)) + penalty * float(flat @ flat)
        return value, gradient + 2 * penalty * flat
