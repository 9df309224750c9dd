"""L-BFGS on all parameters at once, from several random starts."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from numpy.typing import NDArray
from scipy.optimize import OptimizeResult, minimize

from mhalearn._types import Array, Float
from mhalearn.attention import Chunk
from mhalearn.baselines import Descent, Run, Student, best_of_starts, value_and_gradient
from mhalearn.examples import Examples
from mhalearn.outcome import Solution, Trace

_EMIT = 10  # iterations between two events


def learn(
    examples: Examples,
    *,
    n_heads: int,
    bias: bool,
    causal: bool,
    head_dim: int | None,
    seed: int,
    trace: Trace,
    memory: int = 30,
    steps: int = 5_000,
    starts: int = 5,
    goal: float = 1e-24,
) -> Solution:
    """Fit a layer with SciPy's L-BFGS-B, which keeps `memory` pairs of gradient differences.

    Each step sees all examples. A start ends after `steps` iterations, at a relative training error
    of `goal`, or where rounding lets the line search go no further.
    Cost: a little over three forward passes an iteration. Trust: a heuristic.
    """

    def descend(run: Run, student: Student, start: int) -> Descent:
        return _descend(run, student, start, memory, steps)

    return best_of_starts(
        descend,
        examples,
        n_heads=n_heads,
        bias=bias,
        causal=causal,
        head_dim=head_dim,
        seed=seed,
        starts=starts,
        goal=goal,
        trace=trace,
        settings={"method": "lbfgs", "memory": memory, "steps": steps, "goal": goal},
    )


@jax.jit
def _slope(
    flat: Float[Array, " u"], like: Student, data: Chunk, energy: Array
) -> tuple[Array, Float[Array, " u"]]:
    """Loss and gradient of a student laid out as one vector, in the order of `like`."""
    student = ravel_pytree(like)[1](flat)
    loss, slope = value_and_gradient(student, data, energy)
    return loss, ravel_pytree(slope)[0]


def _descend(run: Run, student: Student, start: int, memory: int, steps: int) -> Descent:
    first, unravel = ravel_pytree(student)
    end = Descent(student, math.inf, True)
    step = 0

    def objective(flat: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        loss, slope = _slope(jnp.asarray(flat), student, run.data, run.energy)
        return float(loss), np.asarray(slope)

    def look(intermediate_result: OptimizeResult) -> None:
        nonlocal end, step
        loss = float(intermediate_result.fun)
        if not math.isfinite(loss):
            end = end._replace(finite=False)
            raise StopIteration
        reached = loss <= run.goal or run.trace.expired
        step += 1
        if reached or step % _EMIT == 1:
            run.trace.emit("lbfgs", step, loss, start=start)
            end = Descent(unravel(jnp.asarray(intermediate_result.x)), loss, True)
            run.keep(end.student, loss)
        if reached:
            raise StopIteration

    result = minimize(
        objective,
        np.asarray(first),
        jac=True,
        method="L-BFGS-B",
        callback=look,
        options={"maxcor": memory, "maxiter": steps, "maxfun": 2 * steps, "ftol": 0.0, "gtol": 0.0},
    )
    if not (end.finite and np.isfinite(result.fun) and np.isfinite(result.x).all()):
        return end._replace(finite=False)
    run.trace.emit("lbfgs", step, float(result.fun), start=start)
    return Descent(unravel(jnp.asarray(result.x)), float(result.fun), True)
