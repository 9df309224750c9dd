"""The next calls where answers tell some direction of the parameters hardly at all.

What is known least is the right singular vector of the Jacobian that belongs to its smallest
singular value. A call tells of it as much as its outputs move when the parameters move along it:
that is maximised over the tokens, whose lengths are fixed, by L-BFGS from a few random calls. Then
the vector is found anew.
Source: E-optimal design of experiments (Kiefer 1974), one call at a time. Trust: at the layer that
is given; worth it where heads are nearly alike, and worse than random calls where nothing is
badly known (`benchmarks/query_design.py`).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import minimize

from mhalearn._runtime.programs import compiled, in_float64
from mhalearn._runtime.types import Float64

# Random calls that a search begins with, and its steps.
_STARTS, _STEPS = 4, 60


@in_float64
def jacobian(theta: Float64, w: Float64, x: Float64) -> Float64:
    """Outputs of sequences (n, k, d) by Theta (m, d, d) and W (m, d, e): (n k e, m d (d + e))."""
    by_theta, by_w = _jacobian(theta, w, x)
    rows = x.shape[0] * x.shape[1] * w.shape[2]
    parts = (np.asarray(part).reshape(rows, -1) for part in (by_theta, by_w))
    return np.concatenate(list(parts), axis=1)


@in_float64
def design_calls(
    theta: Float64, w: Float64, asked: Float64, count: int, length: float, rng: np.random.Generator
) -> Float64:
    """Calls (count, k, d) with tokens of this length that raise the smallest singular value of the
    Jacobian of all calls, those that were asked (n, k, d) among them.

    Cost: a singular value decomposition and some hundred passes over one sequence a call.
    """
    calls, rows = asked, jacobian(theta, w, asked)
    for _ in range(count):
        weak = np.linalg.svd(rows, full_matrices=True)[2][-1]
        best = _search(theta, w, weak, asked.shape[1], length, rng)
        calls = np.concatenate([calls, best])
        rows = np.concatenate([rows, jacobian(theta, w, best)])
    return calls[len(asked) :]


def _search(
    theta: Float64, w: Float64, weak: Float64, k: int, length: float, rng: np.random.Generator
) -> Float64:
    shape, cut = (1, k, theta.shape[1]), theta.size
    moves = weak[:cut].reshape(theta.shape), weak[cut:].reshape(w.shape)

    def value(flat: Float64) -> tuple[float, Float64]:
        found, slope = _blindness(flat.reshape(shape), theta, w, *moves, length)
        return float(found), np.asarray(slope, np.float64).ravel()

    ends = [
        minimize(value, start, jac=True, method="L-BFGS-B", options={"maxiter": _STEPS})
        for start in rng.standard_normal((_STARTS, k * theta.shape[1]))
    ]
    x = min(ends, key=lambda end: float(end.fun)).x.reshape(shape)
    return np.asarray(length * x / np.linalg.norm(x, axis=-1, keepdims=True), np.float64)


def _outputs(theta: Any, w: Any, x: Any) -> Any:
    p = jax.nn.softmax(jnp.einsum("nrd,mde,nje->nmrj", x, theta, x), axis=-1)
    return jnp.einsum("nmrj,njd,mde->nre", p, x, w)


@compiled
def _jacobian(theta: Any, w: Any, x: Any) -> Any:
    return jax.jacfwd(_outputs, argnums=(0, 1))(theta, w, x)


@compiled
@jax.value_and_grad
def _blindness(x: Any, theta: Any, w: Any, by_theta: Any, by_w: Any, length: Any) -> Any:
    """Minus the square by which outputs move along a direction of the parameters."""
    x = length * x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    moved = jax.jvp(lambda a, b: _outputs(a, b, x), (theta, w), (by_theta, by_w))[1]
    return -jnp.sum(moved**2)
