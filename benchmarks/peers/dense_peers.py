"""Peers that form the Jacobian: SciPy's least squares, with its exact structure, and optimistix."""

import math
import time
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optimistix as optx
from scipy.optimize import least_squares

from benchmarks.cases import (
    GOAL,
    Arrival,
    Case,
    Descend,
    End,
    Start,
    ended,
    residuals,
    restarts,
    unflatten,
)
from mhalearn.layer.attention import attend, covariance_products, design_matrix, stacked_heads
from mhalearn.layer.batches import Chunk


class TooLarge(Exception):
    """Ten factors of the Jacobian would take longer than the limit."""


_FLOPS = 1e10  # a second: more than a core was seen to do in such a factor


def unless_too_large(
    descend: Descend, threads: int | None, case: Case, seed: int, limit: float
) -> Arrival:
    """SciPy and optimistix form the Jacobian, and one factor of it cannot be interrupted."""
    rows, unknowns = case.n * case.k * case.d, 2 * case.m * case.d**2
    if (flops := 2 * rows * unknowns**2) > _FLOPS * limit / 10:
        size = f"{rows} x {unknowns}, {8e-9 * rows * unknowns:.1f} GB"
        raise TooLarge(f"a Jacobian of {size}, of which one QR factor takes {flops:.1e} flop")
    return restarts(descend, case, seed, limit, threads)


@jax.jit
def jacobian(flat: jax.Array, data: Chunk, energy: jax.Array) -> jax.Array:
    """The exact Jacobian from its structure."""
    theta, w = unflatten(flat, data)
    m, _, d = theta.shape
    e = w.shape[1]
    pattern = attend(theta, data)
    keys = covariance_products(pattern, stacked_heads(w, m, d), data)
    of_theta = jnp.einsum("brq,brmde->bremqd", data.queries, keys)
    of_w = jnp.einsum("brp,ef->brepf", design_matrix(pattern, data), jnp.eye(e))
    rows = data.labels.size
    both = [of_theta.reshape(rows, -1), of_w.reshape(rows, -1)]
    return jnp.concatenate(both, axis=1) / jnp.sqrt(energy)


class _Reached(Exception):
    """Raised inside SciPy's loop, which has no other way out for `lm`."""


def scipy_descent(method: str, start: Start, deadline: float) -> End:
    best = End(math.inf, start.flat)

    def fun(flat: np.ndarray) -> np.ndarray:
        nonlocal best
        found = np.asarray(residuals(jnp.asarray(flat), start.data, start.energy))
        loss = float(found @ found)
        best = End(loss, flat.copy()) if loss < best.loss else best
        if best.loss <= GOAL or time.perf_counter() > deadline:
            raise _Reached
        return found

    def jac(flat: np.ndarray) -> np.ndarray:
        return np.asarray(jacobian(jnp.asarray(flat), start.data, start.energy))

    tight = {"ftol": 1e-15, "xtol": 1e-15, "gtol": 1e-15}
    try:
        least_squares(fun, start.flat, jac, method=method, max_nfev=300, **tight)
    except _Reached:
        return best
    return best


# Tolerances that never end a run before the goal or rounding does.
OPTIMISTIX = {
    "QR": optx.LevenbergMarquardt(rtol=1e-15, atol=1e-15),
    "normal equations": optx.LevenbergMarquardt(
        rtol=1e-15, atol=1e-15, linear_solver=lx.Normal(lx.Cholesky())
    ),
}


def optimistix_residuals(flat: jax.Array, args: tuple[Chunk, jax.Array]) -> tuple[jax.Array, None]:
    return residuals(flat, *args), None


def optimistix_state(solver: str, flat: jax.Array, args: tuple[Chunk, jax.Array]) -> Any:
    """Its first state: what is an array and what is not."""
    shape = jax.eval_shape(residuals, flat, *args)
    state = OPTIMISTIX[solver].init(optimistix_residuals, flat, args, {}, shape, None, frozenset())
    return eqx.partition(state, eqx.is_array)


@partial(jax.jit, static_argnames=("solver",))
def optimistix_begin(solver: str, flat: jax.Array, args: tuple[Chunk, jax.Array]) -> Any:
    loss, over = jnp.asarray(math.inf), jnp.asarray(False)
    return flat, optimistix_state(solver, flat, args)[0], jnp.asarray(0), loss, over


@partial(jax.jit, static_argnames=("solver",))
def optimistix_block(solver: str, carry: Any, until: int, args: tuple[Chunk, jax.Array]) -> Any:
    """optimistix's own loop, except that it also stops at the goal: no step is spent beyond it."""
    rest = optimistix_state(solver, carry[0], args)[1]

    def advance(carry: Any) -> Any:
        flat, arrays, step, _, _ = carry
        flat, state, _ = OPTIMISTIX[solver].step(
            optimistix_residuals, flat, args, {}, eqx.combine(arrays, rest), frozenset()
        )
        loss = jnp.sum(state.f_info.residual**2)
        return flat, eqx.filter(state, eqx.is_array), step + 1, loss, state.terminate

    def going(carry: Any) -> jax.Array:
        _, _, step, loss, over = carry
        return (step < until) & (loss > GOAL) & ~over

    return jax.lax.while_loop(going, advance, carry)


def optimistix_descent(solver: str, start: Start, deadline: float) -> End:
    args = (start.data, start.energy)
    carry = optimistix_begin(solver, jnp.asarray(start.flat), args)
    for until in range(5, 301, 5):
        carry = optimistix_block(solver, carry, until, args)
        loss, over = float(carry[3]), bool(carry[4])
        if loss <= GOAL or over or time.perf_counter() > deadline:
            break
    return ended(loss, carry[0])
