"""Conjugate gradients, with the coefficients of their search: they tell of the matrix too."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mhalearn._runtime.types import Array, Bool, Float, Int


class CGResult(NamedTuple):
    """A solution, and whether it is one; the coefficients of the search are those of a Lanczos
    matrix, of which only the first `num_steps` count."""

    solution: Float[Array, " p"]
    converged: Bool[Array, ""]  # to the tolerance asked for
    num_steps: Int[Array, ""]
    alphas: Float[Array, " t"]  # step lengths
    betas: Float[Array, " t"]  # what the next direction keeps of the last


class CGState(NamedTuple):
    """Conjugate gradients on their way, so that a long search can be made in parts."""

    found: Float[Array, " p"]
    alphas: Float[Array, " t"]
    betas: Float[Array, " t"]
    left: Float[Array, " p"]  # the residual
    along: Float[Array, " p"]  # the direction of the next step
    size: Float[Array, ""]  # of the residual, in the norm of the preconditioner
    step: Int[Array, ""]
    broken: Bool[Array, ""]  # no step can be made


def start_cg(inverse: Callable[[Array], Array], right: Array, max_steps: int) -> CGState:
    """At zero, with room for so many steps."""
    first = inverse(right)
    none = jnp.zeros(max_steps, right.dtype)
    size = jnp.vdot(right, first)
    start = (jnp.zeros_like(right), none, none, right, first, size)
    return CGState(*start, jnp.asarray(0), jnp.asarray(False))


def is_going(state: CGState, target: Array) -> Array:
    """Whether there is something to do: the residual's squared norm is above `target`."""
    wanted = jnp.vdot(state.left, state.left) > target
    return wanted & (state.step < len(state.alphas)) & ~state.broken


def advance_cg(
    apply: Callable[[Array], Array],
    inverse: Callable[[Array], Array],
    state: CGState,
    target: Array,
    until: Array | int,
) -> CGState:
    """Go on to step `until`, or to the target."""

    def advance(state: CGState) -> CGState:
        found, alphas, betas, left, along, size, step, _ = state
        product = apply(along)
        curvature = jnp.vdot(along, product)
        broken = ~(curvature > 0) | ~(size > 0)
        alpha = jnp.where(broken, 0.0, size / jnp.where(broken, 1.0, curvature))
        found, left = found + alpha * along, left - alpha * product
        solved = inverse(left)
        after = jnp.vdot(left, solved)
        beta = jnp.where(broken, 0.0, after / jnp.where(broken, 1.0, size))
        alphas, betas = alphas.at[step].set(alpha), betas.at[step].set(beta)
        along = solved + beta * along
        return CGState(found, alphas, betas, left, along, after, step + ~broken, broken)

    return jax.lax.while_loop(
        lambda state: is_going(state, target) & (state.step < until), advance, state
    )


def conjugate_gradients(
    apply: Callable[[Array], Array],
    inverse: Callable[[Array], Array],
    right: Array,
    tolerance: Array,
    max_steps: int,
) -> CGResult:
    """From zero, until the residual is `tolerance` times the right side.

    Cost: a product a step; JAX's own spends one more on its start.
    Trust: a direction of no curvature, or a residual that is not finite, ends the search early, and
    `converged` says so.
    """
    target = tolerance**2 * jnp.vdot(right, right)
    end = advance_cg(apply, inverse, start_cg(inverse, right, max_steps), target, max_steps)
    return to_result(end, target)


def to_result(state: CGState, target: Array) -> CGResult:
    converged = ~(jnp.vdot(state.left, state.left) > target)
    return CGResult(state.found, converged, state.step, state.alphas, state.betas)
