"""Conjugate gradients, with the coefficients of their search: they tell of the matrix too."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mhalearn._types import Array, Float


class Solved(NamedTuple):
    """A solution, and the search's coefficients at each step, nan for steps not taken."""

    step: Float[Array, " p"]
    lengths: Float[Array, " t"]
    growths: Float[Array, " t"]


def conjugate_gradients(
    apply: Callable[[Array], Array],
    inverse: Callable[[Array], Array],
    right: Array,
    tolerance: Array,
    max_steps: int,
) -> Solved:
    """From zero, until the residual is `tolerance` times the right side; JAX's own spends one more
    product on its start."""

    def going(carry: Any) -> Array:
        _, left, _, _, step = carry
        return (jnp.vdot(left, left) > tolerance**2 * jnp.vdot(right, right)) & (step < max_steps)

    def advance(carry: Any) -> Any:
        (found, lengths, growths), left, along, size, step = carry
        product = apply(along)
        length = size / jnp.vdot(along, product)
        found, left = found + length * along, left - length * product
        solved = inverse(left)
        after = jnp.vdot(left, solved)
        growth = after / size
        known = Solved(found, lengths.at[step].set(length), growths.at[step].set(growth))
        return known, left, solved + growth * along, after, step + 1

    first = inverse(right)
    unknown = jnp.full(max_steps, jnp.nan, right.dtype)
    start = Solved(jnp.zeros_like(right), unknown, unknown), right, first, jnp.vdot(right, first)
    return jax.lax.while_loop(going, advance, (*start, jnp.asarray(0)))[0]
