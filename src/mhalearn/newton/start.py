"""Where descent starts, and how large the unknowns are likely to be."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from mhalearn.attention import fit_projections, in_float64
from mhalearn.problem import Problem

# A random stream of the learner's own: a start must never coincide with a teacher.
_STREAM = 0x57A27


class Scales(NamedTuple):
    """Guesses, in solver units, that set the strength of the ridge."""

    theta: float  # |Theta_i|_F
    w: float  # root mean square entry of W_i


@in_float64
def estimate_scales(problem: Problem, n_heads: int) -> Scales:
    """Guess |Theta| and the entries of W from how much of the labels the mean token explains.

    For independent unit tokens the mean token explains the fraction (1/k) / E|p|^2 of the label
    variance, and logits of standard deviation |Theta|_F give E|p|^2: invert that relation.
    Trust: a heuristic; the solver bears an error of a factor four either way.
    """
    flat = jnp.zeros((1, problem.query_dim, problem.d))
    unexplained = float(fit_projections(flat, problem.data, jnp.asarray(0.0)).loss) / problem.energy
    explained = max(1.0 - unexplained, 1e-6)
    concentration = np.clip(1.0 / (problem.k * explained), 1.0 / problem.k, 1.0)
    logits = np.random.default_rng(_STREAM).normal(size=(2048, problem.k))
    guesses = np.geomspace(0.5, 10.0, 30)
    powers = np.exp(guesses[:, None, None] * (logits - logits.max(axis=1, keepdims=True)))
    p = powers / powers.sum(axis=-1, keepdims=True)
    expected = (p**2).sum(axis=-1).mean(axis=-1)
    nearest = int(np.argmin(np.abs(expected - concentration)))
    mean_square = problem.energy / (problem.rows * problem.out_dim)
    w = np.sqrt(mean_square / (n_heads * problem.d * expected[nearest]))
    return Scales(float(guesses[nearest]), float(max(w, 1e-12)))


def random_starts(
    problem: Problem, n_heads: int, n_starts: int, seed: int, round_: int
) -> NDArray[np.float64]:
    """Attention matrices (s, m, q, d) of Frobenius norm one, so that no pattern is saturated."""
    rng = np.random.default_rng([seed, _STREAM, round_, n_heads])
    theta = rng.normal(size=(n_starts, n_heads, problem.query_dim, problem.d))
    return theta / np.linalg.norm(theta, axis=(2, 3), keepdims=True)
