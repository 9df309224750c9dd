"""Damped Gauss-Newton with W eliminated, batched over starts, to machine precision from any start."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from mhalearn._types import Array, Float
from mhalearn.attention import Chunk, fit_projections, in_float64
from mhalearn.layer import AttentionLayer
from mhalearn.normal import dense, gradient, heads_first, matrix_free, query_first
from mhalearn.outcome import Trace
from mhalearn.problem import Problem

# Up to this many attention unknowns the normal matrix is formed and factored; beyond, conjugate
# gradients win (measured at ratio 10 on two cores, benchmarks/first.py).
DENSE_LIMIT = 400
# Damping factors tried at once when the normal matrix is at hand: another solve is cheap then.
_FACTORS = (0.03, 1.0, 30.0)
_CG_STEPS = 60


class Ridge(NamedTuple):
    """Penalties on |Theta|^2 and |W|^2, in units of the problem's label energy."""

    theta: Float[Array, ""]
    w: Float[Array, ""]


class State(NamedTuple):
    """One start on its way down (with a leading axis: all of them)."""

    theta: Float[Array, "*s m q d"]
    w: Float[Array, "*s p e"]
    loss: Float[Array, "*s"]  # |Y - F|^2 over the label energy, penalties left out
    damping: Float[Array, "*s"]
    moved: Float[Array, "*s"]  # relative decrease of the objective in the last step


@in_float64
def begin(theta: ArrayLike, problem: Problem) -> State:
    """Starts (s, m, q, d) before their first step."""
    thetas = jnp.asarray(theta)
    s, m = thetas.shape[:2]
    width = m * problem.d + problem.bias
    return State(
        theta=thetas,
        w=jnp.zeros((s, width, problem.out_dim)),
        loss=jnp.ones(s),
        damping=jnp.full(s, 1e-2),
        moved=jnp.ones(s),
    )


@partial(jax.jit, static_argnames=("direct",))
def _step(state: State, data: Chunk, energy: Array, ridge: Ridge, direct: bool) -> State:
    return jax.vmap(lambda one: _step_one(one, data, energy, ridge, direct))(state)


def _step_one(state: State, data: Chunk, energy: Array, ridge: Ridge, direct: bool) -> State:
    """One damped Gauss-Newton step, kept only if the penalised objective falls.

    The damping is proportional to the residual's norm, which keeps convergence quadratic on data
    that can be fitted exactly (Fan & Yuan).
    """
    theta, m = state.theta, state.theta.shape[0]
    penalty = ridge.theta * energy

    def objective(candidate: Array) -> tuple[Array, Array, Array]:
        fit = fit_projections(candidate, data, ridge.w * energy)
        squared = fit.loss - ridge.w * energy * jnp.sum(fit.w**2)
        return fit.loss + penalty * jnp.sum(candidate**2), squared / energy, fit.w

    fit = fit_projections(theta, data, ridge.w * energy)
    before = fit.loss + penalty * jnp.sum(theta**2)
    down = gradient(theta, fit, data) - penalty * theta
    level = jnp.sqrt(jnp.minimum(1.0, before / energy))
    if direct:
        steps, dampings = _direct_steps(theta, fit, data, down, penalty, state.damping, level)
        objectives, losses, ws = jax.lax.map(objective, theta + steps)
    else:
        tolerance = jnp.clip(level, 1e-4, 1e-1)
        step = matrix_free(
            theta, fit, data, down, penalty, state.damping * level, tolerance, _CG_STEPS
        )
        steps, dampings = step[None], state.damping[None]
        objectives, losses, ws = jax.tree.map(lambda leaf: leaf[None], objective(theta + step))
    best = jnp.argmin(jnp.where(jnp.isfinite(objectives), objectives, jnp.inf))
    better = objectives[best] < before
    squared = (fit.loss - ridge.w * energy * jnp.sum(fit.w**2)) / energy
    easier = dampings[best] * (0.2 if not direct else 0.5)
    del m
    return State(
        theta=jnp.where(better, theta + steps[best], theta),
        w=jnp.where(better, ws[best], fit.w),
        loss=jnp.where(better, losses[best], squared),
        damping=jnp.clip(jnp.where(better, easier, 20 * state.damping), 1e-12, 1e8),
        moved=jnp.where(better, 1 - objectives[best] / before, 0.0),
    )


def _direct_steps(
    theta: Array,
    fit: NamedTuple,
    data: Chunk,
    down: Array,
    penalty: Array,
    damping: Array,
    level: Array,
) -> tuple[Array, Array]:
    """Steps for several dampings from one formed and scaled normal matrix."""
    m, q, d = theta.shape
    schur = dense(theta, fit, data).schur
    diagonal = jnp.diag(schur).reshape(q, m, d).mean(axis=(0, 2))
    scale = jnp.maximum(diagonal, 0) + 1e-12 * diagonal.max() + 1e-300
    root = jnp.tile(jnp.repeat(1 / jnp.sqrt(scale), d), q)
    scaled = root[:, None] * schur * root[None, :] + jnp.diag(penalty * root**2)
    right = query_first(down).ravel() * root
    dampings = damping * jnp.asarray(_FACTORS)

    def solve(one: Array) -> Array:
        shifted = scaled + (one * level + 1e-15) * jnp.eye(scaled.shape[0])
        flat = jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(shifted), right) * root
        return heads_first(flat.reshape(q, m * d), m)

    return jax.lax.map(solve, dampings), dampings


def is_direct(problem: Problem, n_heads: int) -> bool:
    return n_heads * problem.query_dim * problem.d <= DENSE_LIMIT


@in_float64
def descend(state: State, problem: Problem, ridge: Ridge) -> State:
    """One step of every start."""
    direct = is_direct(problem, state.theta.shape[1])
    return _step(state, problem.data, jnp.asarray(problem.energy), ridge, direct)


NO_RIDGE = Ridge(np.float64(0.0), np.float64(0.0))


def polish(
    layer: AttentionLayer, problem: Problem, trace: Trace, *, max_steps: int = 60
) -> tuple[AttentionLayer, float]:
    """Descend from a layer until nothing improves; returns the layer and its relative loss.

    Trust: a stationary point of the training loss, to rounding. Not a certificate.
    """
    state = begin(problem.theta(layer)[None], problem)
    idle = 0
    for step in range(max_steps):
        state = descend(state, problem, NO_RIDGE)
        loss = float(state.loss[0])
        trace.emit("polish", step, loss)
        idle = idle + 1 if float(state.moved[0]) < 1e-3 else 0
        if idle >= 3 or trace.expired or not np.isfinite(loss) or loss < 1e-31:
            break
    return problem.layer(state.theta[0], state.w[0]), float(state.loss[0])
