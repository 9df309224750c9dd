"""What people use instead of the solver, each tuned: Adam, L-BFGS, SciPy, optimistix.

All start from mhalearn's random student, whose size was chosen for Adam alone, and start again
within the time limit when a start ends short of the goal. mhalearn's own learners hold examples out
to choose by, the others fit all.
"""

import math
import time
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy.optimize import OptimizeResult, minimize

from benchmarks.cases import (
    GOAL,
    End,
    Method,
    Start,
    by_learner,
    ended,
    residuals,
    unflatten,
    with_restarts,
)
from benchmarks.peers.dense_peers import (
    OPTIMISTIX,
    optimistix_descent,
    scipy_descent,
    unless_too_large,
)
from benchmarks.peers.torch_peers import torch_lbfgs
from mhalearn.layer.batches import Chunk
from mhalearn.learners import Adam, AdamOptions, Lbfgs, LbfgsOptions, Newton
from mhalearn.learners.newton.continuation import ridge_at
from mhalearn.learners.newton.starts import estimate_scales
from mhalearn.solvers.gauss_newton import Ridge


def methods(quick: bool = False) -> dict[str, dict[str, Method]]:
    """Every method with its settings; the best setting by median time speaks for the method."""
    rates, lengths = ((0.03,), (3000,)) if quick else ((0.01, 0.03, 0.1), (1000, 3000, 10_000))
    return {
        "newton": {"": partial(by_learner, Newton())},
        "Adam": {f"rate {r:g}, {s} steps": tuned_adam(r, s) for r in rates for s in lengths},
        "Adam + ridge": {
            f"rate {r:g}": with_restarts(partial(annealed_adam, r)) for r in (0.03, 0.1)
        },
        "L-BFGS": {
            "SciPy L-BFGS-B": with_restarts(scipy_lbfgs),
            "optax.lbfgs": with_restarts(optax_lbfgs),
            "torch.optim.LBFGS": with_restarts(torch_lbfgs),
            "optax.lbfgs, mhalearn's baseline": partial(
                by_learner, Lbfgs(), options=LbfgsOptions(starts=1, goal=GOAL)
            ),
        },
        "scipy least_squares": {
            f"{name}, {'1 BLAS thread' if threads else 'all BLAS threads'}": partial(
                unless_too_large, partial(scipy_descent, name), threads
            )
            for name in ("trf", "lm")
            for threads in (1, None)
        },
        "optimistix LM": {
            solver: partial(unless_too_large, partial(optimistix_descent, solver), 1)
            for solver in OPTIMISTIX
        },
    }


def tuned_adam(rate: float, steps: int) -> Method:
    options = AdamOptions(learning_rate=rate, steps=steps, starts=1, goal=GOAL)
    return partial(by_learner, Adam(), options=options)


def relative_loss(flat: jax.Array, data: Chunk, energy: jax.Array) -> jax.Array:
    return jnp.sum(residuals(flat, data, energy) ** 2)


# Adam with the solver's own continuation: a ridge on Theta and W, annealed away


_ADAM = optax.scale_by_adam(eps=1e-16)  # with the usual eps progress would end early
ADAM_STEPS = 5000
_ANNEALED = 0.6  # of the steps
_FIRST, _LAST = 3.0, 1e-2  # strength of the ridge, as for the solver


class Walk(NamedTuple):
    """Adam on its way."""

    flat: jax.Array
    memory: Any
    step: jax.Array
    loss: jax.Array  # before the last step, penalties left out


@jax.jit
def annealed_block(
    walk: Walk, until: int, rate: float, ridge: Ridge, data: Chunk, energy: jax.Array
) -> Walk:
    """Steps of Adam up to number `until`, the rate falling along a half cosine as the baseline's.

    ridge: the penalty at strength one.
    """

    def objective(flat: jax.Array, strength: jax.Array) -> tuple[jax.Array, jax.Array]:
        theta, w = unflatten(flat, data)
        penalty = ridge.theta * jnp.sum(theta**2) + ridge.w * jnp.sum(w**2)
        loss = relative_loss(flat, data, energy)
        return loss + strength * penalty, loss

    def advance(walk: Walk) -> Walk:
        progress = walk.step / ADAM_STEPS
        strength = _FIRST * (_LAST / _FIRST) ** (progress / _ANNEALED)
        strength = jnp.where(progress < _ANNEALED, strength, 0.0)
        slope, loss = jax.grad(objective, has_aux=True)(walk.flat, strength)
        update, memory = _ADAM.update(slope, walk.memory)
        size = rate * 0.5 * (1 + jnp.cos(jnp.pi * progress))
        return Walk(walk.flat - size * update, memory, walk.step + 1, loss)

    return jax.lax.while_loop(lambda w: (w.step < until) & (w.loss > GOAL), advance, walk)


def annealed_adam(rate: float, start: Start, deadline: float) -> End:
    """5000 steps of Adam, in 3000 of which a ridge fades: |Y - F|^2 + g (|Theta|^2, |W|^2 scaled).

    g falls geometrically from 3 to 1e-2 and is then zero. The scales are the solver's estimates.
    """
    ridge = ridge_at(1.0, estimate_scales(start.problem), start.problem)
    flat = jnp.asarray(start.flat)
    walk = Walk(flat, _ADAM.init(flat), jnp.asarray(0), jnp.asarray(math.inf))
    for until in range(100, ADAM_STEPS + 1, 100):
        walk = annealed_block(walk, until, rate, ridge, start.data, start.energy)
        if float(walk.loss) <= GOAL or time.perf_counter() > deadline:
            break
    return ended(float(walk.loss), walk.flat)


# L-BFGS


_LBFGS = optax.lbfgs(memory_size=30)


@jax.jit
def lbfgs_block(flat: jax.Array, state: Any, data: Chunk, energy: jax.Array) -> Any:
    """Twenty steps, or fewer to the goal."""
    objective = partial(relative_loss, data=data, energy=energy)
    value_and_grad = optax.value_and_grad_from_state(objective)

    def advance(carry: Any) -> Any:
        flat, state, step, _ = carry
        value, slope = value_and_grad(flat, state=state)
        updates, state = _LBFGS.update(
            slope, state, flat, value=value, grad=slope, value_fn=objective
        )
        return optax.apply_updates(flat, updates), state, step + 1, value

    def going(carry: Any) -> jax.Array:
        return (carry[2] < 20) & (carry[3] > GOAL)

    return jax.lax.while_loop(going, advance, (flat, state, jnp.asarray(0), jnp.asarray(math.inf)))


def optax_lbfgs(start: Start, deadline: float) -> End:
    flat = jnp.asarray(start.flat)
    state, best = _LBFGS.init(flat), math.inf
    for _ in range(500):
        flat, state, _, value = lbfgs_block(flat, state, start.data, start.energy)
        loss = float(value)
        stalled = not loss < best
        best = loss if loss < best else best
        if best <= GOAL or stalled or time.perf_counter() > deadline:
            break
    return ended(best, flat)


@jax.jit
def loss_and_slope(flat: jax.Array, data: Chunk, energy: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.value_and_grad(relative_loss)(flat, data, energy)


def scipy_lbfgs(start: Start, deadline: float) -> End:
    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        loss, slope = loss_and_slope(jnp.asarray(flat), start.data, start.energy)
        return float(loss), np.asarray(slope)

    def look(intermediate_result: OptimizeResult) -> None:
        if intermediate_result.fun <= GOAL or time.perf_counter() > deadline:
            raise StopIteration

    options = {"maxcor": 30, "maxiter": 5000, "maxfun": 10_000, "ftol": 0.0, "gtol": 0.0}
    found = minimize(
        objective, start.flat, jac=True, method="L-BFGS-B", callback=look, options=options
    )
    return ended(float(found.fun), found.x)
