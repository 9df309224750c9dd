"""Basin hopping: starts trade heads while a weak ridge is still on.

Near the counting limit every wrong layer fits almost exactly once the ridge is gone, and then the
training error says little about which one is nearly right. The penalised objective does: the true
heads explain the examples without being large. A start that has one head wrong is one exchange
away from the truth.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.programs import in_float64
from mhalearn._runtime.types import Array, Float
from mhalearn.learners.newton.starts import Scales
from mhalearn.solvers.gauss_newton import Ridge, State


def exchange_heads(state: State, rng: np.random.Generator) -> NDArray[np.float64]:
    """Attention matrices (s, m, q, d) in which each start has one head replaced.

    By a random head of norm one or, half of the time, by a head of another start.
    """
    theta = np.where(np.isfinite(state.params.theta), state.params.theta, 0.0)
    changed = theta.copy()
    starts, heads = theta.shape[:2]
    for number, start in enumerate(changed):
        head = rng.normal(size=start.shape[1:])
        head /= np.linalg.norm(head)
        if starts > 1 and rng.random() < 0.5:
            donor = (number + rng.integers(1, starts)) % starts
            head = theta[donor, rng.integers(heads)]
        start[rng.integers(heads)] = head
    return changed


def penalised_objective(state: State, ridge: Ridge) -> Float[Array, " s"]:
    """The objective under a ridge, start by start; infinite where a start has diverged."""
    value = (
        state.loss
        + ridge.theta * jnp.sum(state.params.theta**2, axis=(1, 2, 3))
        + ridge.w * jnp.sum(state.params.w**2, axis=(1, 2))
    )
    return jnp.where(jnp.isfinite(value), value, jnp.inf)


@in_float64
def keep_better(one: State, other: State, ridge: Ridge) -> tuple[State, bool, bool]:
    """Start by start, the one with the lower objective; whether any of `other` is, and the lowest
    of all."""
    of_one, of_other = penalised_objective(one, ridge), penalised_objective(other, ridge)
    first = of_one <= of_other

    def pick(a: Any, b: Any) -> Array:
        return jnp.where(first.reshape(-1, *[1] * (a.ndim - 1)), a, b)

    lowest = bool(of_other.min() < of_one.min())
    return jax.tree.map(pick, one, other), not bool(first.all()), lowest


def rescale_prior(scales: Scales, state: State, factor: float) -> Scales:
    """The scales with |Theta| learned from the heads themselves (empirical Bayes).

    A prior too narrow makes heads come out larger than it, one too wide smaller: repeated, this
    settles. Heads under a ridge are a little small, which `factor` can make up for.
    """
    theta = np.asarray(state.params.theta)
    norm = float(np.sqrt(np.mean(np.sum(theta**2, axis=(2, 3)))))
    return scales._replace(theta=factor * norm) if np.isfinite(norm) and norm > 0 else scales
