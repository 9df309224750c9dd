"""Inverses of small matrices inside compiled programs, without LAPACK.

On a CPU a batch of LAPACK's triangular solves waits inside one of XLA's threads for others of the
same pool to do the work (`ParallelBatchMap` of jaxlib 0.10.2). As many batches at once as there are
threads then wait for ever, as the two inverses of a Jacobian of rotated heads did on two cores.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from mhalearn._runtime.types import Array, Float


@jax.custom_jvp
def invert(matrices: Float[Array, "*b h h"]) -> Float[Array, "*b h h"]:
    """The inverse of each matrix.

    Source: Gauss-Jordan elimination with partial pivoting, and one step of Newton's method, which
    takes away most of its rounding. Cost: O(h^3) each, one row after the other. Trust: as LAPACK's,
    to some units of rounding times the condition number; not finite where a matrix is singular.
    """
    *batch, h, _ = matrices.shape
    flat = matrices.reshape(-1, h, h)
    # On an accelerator a loop over rows would be one small kernel after the other.
    on_cpu = jax.default_backend() == "cpu"
    found = jax.vmap(_eliminate)(flat) if on_cpu else jnp.linalg.inv(flat)
    found = found @ (2 * jnp.eye(h, dtype=flat.dtype) - flat @ found)
    return found.reshape(*batch, h, h)


@invert.defjvp
def _differentiate(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Array, Array]:
    found = invert(primals[0])
    return found, -found @ tangents[0] @ found


def _eliminate(matrix: Float[Array, "h h"]) -> Float[Array, "h h"]:
    h = len(matrix)
    place = jnp.arange(h)

    def clear(i: Array, both: Array) -> Array:
        """Column i becomes that of the identity."""
        pivot = jnp.argmax(jnp.where(place >= i, jnp.abs(both[:, i]), -1.0))
        row, other = both[pivot], both[i]
        row = row / row[i]
        both = both.at[pivot].set(other)
        both = both - both[:, i][:, None] * row
        return both.at[i].set(row)

    both = jnp.concatenate([matrix, jnp.eye(h, dtype=matrix.dtype)], axis=1)
    return jax.lax.fori_loop(0, h, clear, both)[:, h:]
