"""What examples leave open about a layer too large for its spectrum: a random direction tells.

Let u be a random change of the parameters and z the one, found by conjugate gradients from zero,
that changes the outputs as u does. Nothing that the outputs show tells u - z from no change. What
examples leave open has almost surely a part in u, and never one in z; so if u - z changes no head,
nothing is open. The freedom of factors, which changes no head, does no harm.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jax.flatten_util import ravel_pytree

from mhalearn._runtime.devices import replicate
from mhalearn._runtime.programs import compiled, in_float64, in_single
from mhalearn._runtime.seeds import Stream, generator
from mhalearn._runtime.types import Array, Float64
from mhalearn.data import Examples
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.batches import Chunk
from mhalearn.layer.dense import Dense, DenseHeads
from mhalearn.layer.factored import Factored, Factors
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.parametrisation import Parametrisation
from mhalearn.solvers.cg import CGResult, conjugate_gradients
from mhalearn.solvers.normal_equations import curvature
from mhalearn.solvers.scaled_problem import Problem, make_problem

# A share of a random change that is rounding. One open direction among a million shows a share of
# a thousandth, and less than this with probability 1e-5.
NULL_TOLERANCE = 1e-8
# Times the counting limit of examples that are looked at; and where they say too little, at most.
_ENOUGH, _MOST = 8.0, 32.0
# Conjugate gradients in single precision, repeated on what they leave.
_TOLERANCE, _CG_STEPS, _ROUNDS = 1e-4, 500, 8
# The smallest singular value may be this much smaller than what was found.
_MARGIN = 2.0


@dataclass(frozen=True)
class RankTest:
    """null_component: the largest share, over heads, of a random change that outputs do not show.

    error_amplification: how far, relative to the size of a head, a residual of norm one (in units
    of the labels) lets parameters be off, to first order; infinite unless all is closed.
    """

    null_component: float
    error_amplification: float
    n_examples: int  # looked at


@in_float64
def run_rank_test(
    layer: AttentionLayer, examples: Examples, architecture: Architecture, seed: int = 0
) -> RankTest:
    """Ask about one random direction. Cost: some hundred forward passes over 8 times the counting
    limit of examples. Memory: a few copies of those.

    Only layers of the architecture's rank are considered where the heads have no less than that
    rank; of all others every layer.
    Trust: a direction that is open is missed with probability 1e-5; the smallest singular value,
    from the Lanczos matrix of the conjugate gradients, is met from above, hence a margin of two.
    """
    architecture = architecture.with_heads(layer.n_heads)
    rng = generator(seed, Stream.RANK_TEST)
    order = rng.permutation(examples.n)

    def prepare(kind: Parametrisation, enough: float = _ENOUGH) -> tuple[Problem, int]:
        limit = examples.counting_limit(kind.architecture)
        count = int(min(examples.n, np.ceil(enough * limit)))
        return make_problem(examples.subset(np.sort(order[:count])), kind), count

    problem, count = prepare(architecture.parametrisation())
    kind = problem.parametrisation
    at = kind.from_layer(layer, problem.units)
    if isinstance(kind, Factored) and not kind.has_full_rank(at, layer, problem.units):
        # Where nothing is open among all layers, nothing is among those of a rank.
        problem, count = prepare(Dense(architecture.with_any_rank()))
        kind = problem.parametrisation
        at = kind.from_layer(layer, problem.units)
    flat, unflatten = ravel_pytree(at)
    u = jnp.asarray(rng.standard_normal(flat.size))
    changes = partial(_measure_changes, at)
    whole = changes(unflatten(u))
    left, null_component, weakest, asked_more = u, 1.0, np.inf, False
    for _ in range(_ROUNDS):
        found = replicate(_answer(at, problem.data, left, kind, problem.devices))
        left = left - found.solution
        weakest = min(weakest, _smallest_eigenvalue(found))
        # Where no change of the factors moves a matrix that is zero, nothing is known of it.
        shares = np.divide(
            changes(unflatten(left)), whole, out=np.ones_like(whole), where=whole > 0
        )
        before, null_component = null_component, float(np.max(shares))
        if null_component < NULL_TOLERANCE:
            break
        if not found.converged and not asked_more:
            # Too badly conditioned to solve: ask more. All that was seen they see.
            problem, count = prepare(kind, _MOST)
            asked_more, weakest = True, np.inf
        elif not null_component < before / 2:
            break
    if not (null_component < NULL_TOLERANCE and weakest > 0):
        return RankTest(null_component, np.inf, count)
    theta = float(np.sqrt(np.mean(np.sum(problem.theta(layer) ** 2, axis=(1, 2))))) or 1.0
    w = float(np.sqrt(np.sum(problem.w(layer) ** 2) / layer.n_heads)) or 1.0
    steepest = _steepest(at)
    relative = max(steepest[0] / theta, steepest[1] / w)
    error_amplification = _MARGIN * relative / (math.sqrt(weakest) * problem.units.y_scale)
    return RankTest(null_component, error_amplification, count)


@partial(compiled, static_argnums=(3, 4))
def _answer(at: Any, data: Chunk, left: Array, kind: Parametrisation, devices: int) -> CGResult:
    """A step whose effect is about that of `left`, and the coefficients of its search."""
    right = curvature(kind, at, data, devices)(left)
    size = jnp.linalg.norm(right)
    if isinstance(kind, Factored):
        at, data = in_single(at), in_single(data)
    dtype = jax.tree.leaves(at)[0].dtype
    with jax.default_matmul_precision("highest"):
        found = conjugate_gradients(
            curvature(kind, at, data, devices),
            lambda v: v,
            (right / jnp.where(size > 0, size, 1.0)).astype(dtype),
            jnp.asarray(_TOLERANCE, dtype),
            _CG_STEPS,
        )
    return found._replace(solution=size * found.solution.astype(left.dtype))


def _smallest_eigenvalue(found: CGResult) -> float:
    """Of the Lanczos matrix that conjugate gradients build on their way."""
    made = int(found.num_steps)
    if made == 0:
        return 0.0
    alphas, betas = (np.asarray(part, np.float64)[:made] for part in (found.alphas, found.betas))
    diagonal = 1 / alphas
    diagonal[1:] += betas[:-1] / alphas[:-1]
    beside = np.sqrt(betas[:-1]) / alphas[:-1]
    return float(scipy.linalg.eigvalsh_tridiagonal(diagonal, beside)[0])


def _measure_changes(at: DenseHeads | Factors, step: DenseHeads | Factors) -> Float64:
    """Norms of the changes of every Theta and W, and of the bias; none of d x d matrices is made
    of factors."""
    if isinstance(at, Factors):
        query, key, value, out, _ = (np.asarray(part) for part in at)
        to_query, to_key, to_value, to_out, to_bias = (np.asarray(part) for part in step)
        theta = _norms([to_query, query], [key.swapaxes(1, 2), to_key.swapaxes(1, 2)])
        w = _norms([to_value, value], [out, to_out])
        return np.concatenate([theta, w, np.linalg.norm(to_bias, axis=1)])
    theta, w = map(np.asarray, step)
    m, _, d = theta.shape
    heads, bias = np.split(w, [m * d])
    rows = [*theta.reshape(m, -1), *heads.reshape(m, -1), *bias]
    return np.array([np.linalg.norm(row) for row in rows])


def _norms(lefts: list[Float64], rights: list[Float64]) -> Float64:
    """|L_1 R_1 + L_2 R_2| for each head, with no matrix of d x d."""
    left, right = np.concatenate(lefts, axis=2), np.concatenate(rights, axis=1)
    triangle = np.linalg.qr(left, mode="r")
    return np.linalg.norm(triangle @ right, axis=(1, 2))


def _steepest(at: DenseHeads | Factors) -> tuple[float, float]:
    """How far a unit step of the parameters moves a Theta or a W at most."""
    if isinstance(at, DenseHeads):
        return 1.0, 1.0
    sizes = [float(np.linalg.norm(np.asarray(part), 2, axis=(1, 2)).max()) for part in at[:4]]
    query, key, value, out = sizes
    return math.hypot(query, key), max(1.0, math.hypot(value, out))
