"""Second chances: what is done with starts that settled in a local minimum."""

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from mhalearn._types import Array
from mhalearn.attention import in_float64
from mhalearn.polish import State


def revived(state: State, cycle: int, seed: int) -> NDArray[np.float64]:
    """Where the starts (s, m, q, d) go on from: even cycles melt them, odd ones replace a head too.

    Melting is annealing anew from where a start has settled. Replacing puts a random head of norm
    one in a random head's place: a local minimum often has one head lost or doubled and the others
    right.
    """
    theta = np.where(np.isfinite(state.theta), state.theta, 0.0)
    if cycle % 2 == 0:
        return theta
    rng = np.random.default_rng([seed, 0x2E71, cycle])
    for start in theta:
        fresh = rng.normal(size=start.shape[1:])
        start[rng.integers(len(start))] = fresh / np.linalg.norm(fresh)
    return theta


@in_float64
def better(one: State, other: State) -> State:
    """Start by start, the one with the lower loss."""
    first = one.loss <= jnp.nan_to_num(other.loss, nan=jnp.inf)

    def pick(a: Array, b: Array) -> Array:
        return jnp.where(first.reshape(-1, *[1] * (a.ndim - 1)), a, b)

    return jax.tree.map(pick, one, other)
