"""What examples leave open about a layer too large for its spectrum: a random direction tells.

Let u be a random change of the parameters and z the one, found by conjugate gradients from zero,
that changes the outputs as u does. Nothing that the outputs show tells u - z from no change. What
examples leave open has almost surely a part in u, and never one in z; so if u - z changes no head,
nothing is open. The freedom of factors, which changes no head, does no harm.
"""

import math
from collections.abc import Callable
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
from mhalearn.layer.attention import forward
from mhalearn.layer.batches import Chunk, sum_over_chunks
from mhalearn.layer.factored import (
    Factors,
    has_full_rank,
    to_heads,
)
from mhalearn.layer.layer import AttentionLayer
from mhalearn.solvers.cg import CGResult, conjugate_gradients
from mhalearn.solvers.gauss_newton_factored import curvature
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

    def prepare(considered: Architecture, enough: float = _ENOUGH) -> tuple[Problem, int]:
        limit = examples.counting_limit(considered)
        count = int(min(examples.n, np.ceil(enough * limit)))
        part = examples.subset(np.sort(order[:count]))
        return make_problem(part, considered, factored=considered.is_low_rank), count

    at: Any
    narrow = False
    if architecture.is_low_rank:
        problem, count = prepare(architecture)
        at = to_heads(layer, architecture, problem.units)
        narrow = has_full_rank(at, layer, architecture, problem.units)
    if not narrow:  # where nothing is open among all layers, nothing is among those of a rank
        architecture = architecture.with_any_rank()
        problem, count = prepare(architecture)
        at = jnp.asarray(problem.theta(layer)), jnp.asarray(problem.w(layer))
    flat, unflatten = ravel_pytree(at)
    u = jnp.asarray(rng.standard_normal(flat.size))
    changes = partial(_changes_of_heads if narrow else _changes_of_matrices, at)
    whole = changes(unflatten(u))
    left, null_component, weakest, asked_more = u, 1.0, np.inf, False
    for _ in range(_ROUNDS):
        found = _answer(at, problem.data, left, narrow=narrow, devices=problem.devices)
        found = replicate(found)
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
            problem, count = prepare(architecture, _MOST)
            asked_more, weakest = True, np.inf
        elif not null_component < before / 2:
            break
    if not (null_component < NULL_TOLERANCE and weakest > 0):
        return RankTest(null_component, np.inf, count)
    theta = float(np.sqrt(np.mean(np.sum(problem.theta(layer) ** 2, axis=(1, 2))))) or 1.0
    w = float(np.sqrt(np.sum(problem.w(layer) ** 2) / layer.n_heads)) or 1.0
    steepest = _steepest(at, narrow)
    relative = max(steepest[0] / theta, steepest[1] / w)
    error_amplification = _MARGIN * relative / (math.sqrt(weakest) * problem.units.y_scale)
    return RankTest(null_component, error_amplification, count)


@partial(compiled, static_argnames=("narrow", "devices"))
def _answer(at: Any, data: Chunk, left: Array, *, narrow: bool, devices: int) -> CGResult:
    """A step whose effect is about that of `left`, and the coefficients of its search."""
    curve = curvature if narrow else _curvature
    right = curve(at, data, devices)(left)
    size = jnp.linalg.norm(right)
    if narrow:
        at, data = in_single(at), in_single(data)
    kind = jax.tree.leaves(at)[0].dtype
    with jax.default_matmul_precision("highest"):
        found = conjugate_gradients(
            curve(at, data, devices),
            lambda v: v,
            (right / jnp.where(size > 0, size, 1.0)).astype(kind),
            jnp.asarray(_TOLERANCE, kind),
            _CG_STEPS,
        )
    return found._replace(solution=size * found.solution.astype(left.dtype))


def _curvature(at: tuple[Array, Array], data: Chunk, devices: int) -> Callable[[Array], Array]:
    """J^T J as a function of flat steps, for heads of any rank."""
    unflatten = ravel_pytree(at)[1]

    def product(step: Array) -> Array:
        def on(chunk: Chunk) -> Any:
            def outputs(parameters: tuple[Array, Array]) -> Array:
                return forward(*parameters, chunk)

            _, change = jax.jvp(outputs, (at,), (unflatten(step),))
            return jax.vjp(outputs, at)[1](change)[0]

        return ravel_pytree(sum_over_chunks(on, data, devices))[0]

    return product


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


def _changes_of_matrices(at: tuple[Array, Array], step: tuple[Array, Array]) -> Float64:
    """Norms of the changes of every Theta and W, and of the bias."""
    theta, w = map(np.asarray, step)
    m, _, d = theta.shape
    heads, bias = np.split(w, [m * d])
    rows = [*theta.reshape(m, -1), *heads.reshape(m, -1), *bias]
    return np.array([np.linalg.norm(row) for row in rows])


def _changes_of_heads(at: Factors, step: Factors) -> Float64:
    """The same for heads by their factors."""
    query, key, value, out, _ = (np.asarray(part) for part in at)
    to_query, to_key, to_value, to_out, to_bias = (np.asarray(part) for part in step)
    theta = _norms([to_query, query], [key.swapaxes(1, 2), to_key.swapaxes(1, 2)])
    w = _norms([to_value, value], [out, to_out])
    return np.concatenate([theta, w, np.linalg.norm(to_bias, axis=1)])


def _norms(lefts: list[Float64], rights: list[Float64]) -> Float64:
    """|L_1 R_1 + L_2 R_2| for each head, with no matrix of d x d."""
    left, right = np.concatenate(lefts, axis=2), np.concatenate(rights, axis=1)
    triangle = np.linalg.qr(left, mode="r")
    return np.linalg.norm(triangle @ right, axis=(1, 2))


def _steepest(at: Any, narrow: bool) -> tuple[float, float]:
    """How far a unit step of the parameters moves a Theta or a W at most."""
    if not narrow:
        return 1.0, 1.0
    sizes = [float(np.linalg.norm(np.asarray(part), 2, axis=(1, 2)).max()) for part in at[:4]]
    query, key, value, out = sizes
    return math.hypot(query, key), max(1.0, math.hypot(value, out))
