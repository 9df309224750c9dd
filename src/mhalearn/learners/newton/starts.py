"""Where descent starts, and how large the unknowns are likely to be."""

from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.devices import replicate
from mhalearn._runtime.programs import in_float64
from mhalearn._runtime.seeds import Stream, generator
from mhalearn._runtime.types import Array, Float, Float64
from mhalearn.layer.batches import Chunk, sum_over_chunks
from mhalearn.solvers.scaled_problem import Problem


class Scales(NamedTuple):
    """Guesses, in solver units, that set the strength of the ridge."""

    theta: float  # |Theta_i|_F
    w: float  # root mean square entry of W_i


def _sum_moments(chunk: Chunk, xp: Any) -> tuple[Any, Any]:
    even = chunk.allowed / xp.sum(chunk.allowed, axis=-1, keepdims=True)
    v = xp.concatenate([even @ chunk.tokens, chunk.constant], axis=-1) * chunk.weight[..., None]
    flat, labels = v.reshape(-1, v.shape[-1]), chunk.labels.reshape(-1, chunk.labels.shape[-1])
    return flat.T @ flat, flat.T @ labels


@jax.jit
def _moments(data: Chunk) -> tuple[Float[Array, "p p"], Float[Array, "p e"]]:
    """V^T V and V^T Y where every head attends evenly, and V is the mean token."""
    return sum_over_chunks(partial(_sum_moments, xp=jnp), data)


def _explained(problem: Problem) -> float:
    """Share of the label energy that the mean token explains."""
    data = problem.data
    if problem.on_host:
        moments = _sum_moments(jax.tree.map(lambda leaf: np.concatenate(list(leaf)), data), np)
    else:
        moments = replicate(_moments(data))
    gram, right = map(np.asarray, moments)
    w = np.linalg.lstsq(gram, right, rcond=1e-12)[0]
    return float(np.sum(w * right)) / problem.energy


@cache
def _concentrations(k: int) -> tuple[Float64, Float64]:
    """Guesses of |Theta| and the E|p|^2 that Gaussian logits of that deviation have over k keys."""
    guesses = np.geomspace(0.5, 10.0, 16)
    logits = np.random.default_rng(int(Stream.STARTS)).normal(size=(512, k))
    powers = np.exp(guesses[:, None, None] * (logits - logits.max(axis=1, keepdims=True)))
    p = powers / powers.sum(axis=-1, keepdims=True)
    return guesses, (p**2).sum(axis=-1).mean(axis=-1)


@in_float64
def estimate_scales(problem: Problem) -> Scales:
    """Guess |Theta| and the entries of W from how much of the labels the mean token explains.

    For independent unit tokens the mean token explains the fraction (1/k) / E|p|^2 of the label
    variance, and logits of standard deviation |Theta|_F give E|p|^2: invert that relation.
    Trust: a heuristic; the solver bears an error of a factor four either way.
    """
    explained = max(_explained(problem), 1e-6)
    concentration = np.clip(1.0 / (problem.k * explained), 1.0 / problem.k, 1.0)
    guesses, expected = _concentrations(problem.k)
    nearest = int(np.argmin(np.abs(expected - concentration)))
    mean_square = problem.energy / (problem.rows * problem.out_dim)
    w = np.sqrt(mean_square / (problem.architecture.heads * problem.d * expected[nearest]))
    return Scales(float(guesses[nearest]), float(max(w, 1e-12)))


def random_starts(problem: Problem, n_starts: int, seed: int, round_: int) -> NDArray[np.float64]:
    """Attention matrices (s, m, q, d) of Frobenius norm one, so that no pattern is saturated."""
    n_heads = problem.architecture.heads
    rng = generator(seed, Stream.STARTS, round_, n_heads)
    theta = rng.normal(size=(n_starts, n_heads, problem.query_dim, problem.d))
    return theta / np.linalg.norm(theta, axis=(2, 3), keepdims=True)
