"""Conjugate gradients, with the coefficients of their search: they tell of the matrix too."""

from collections.abc import Callable
from typing import Any, NamedTuple

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

    def is_going(left: Array) -> Array:
        return jnp.vdot(left, left) > tolerance**2 * jnp.vdot(right, right)

    def going(carry: Any) -> Array:
        _, _, _, left, _, _, step, broken = carry
        return is_going(left) & (step < max_steps) & ~broken

    def advance(carry: Any) -> Any:
        found, alphas, betas, left, along, size, step, _ = carry
        product = apply(along)
        curvature = jnp.vdot(along, product)
        broken = ~(curvature > 0) | ~(size > 0)
        alpha = jnp.where(broken, 0.0, size / jnp.where(broken, 1.0, curvature))
        found, left = found + alpha * along, left - alpha * product
        solved = inverse(left)
        after = jnp.vdot(left, solved)
        beta = jnp.where(broken, 0.0, after / jnp.where(broken, 1.0, size))
        alphas, betas = alphas.at[step].set(alpha), betas.at[step].set(beta)
        return found, alphas, betas, left, solved + beta * along, after, step + ~broken, broken

    first = inverse(right)
    none = jnp.zeros(max_steps, right.dtype)
    start = (jnp.zeros_like(right), none, none, right, first, jnp.vdot(right, first))
    found, alphas, betas, left, _, _, step, _ = jax.lax.while_loop(
        going, advance, (*start, jnp.asarray(0), jnp.asarray(False))
    )
    return CGResult(found, ~is_going(left), step, alphas, betas)
