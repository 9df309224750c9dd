"""What examples leave open about a layer too large for its spectrum: a random direction tells.

Let u be a random change of the parameters and z the one, found by conjugate gradients from zero,
that changes the outputs as u does. Nothing that the outputs show tells u - z from no change. What
examples leave open has almost surely a part in u, and never one in z; so if u - z changes no head,
nothing is open. The freedom of factors, which changes no head, does no harm.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jax.flatten_util import ravel_pytree
from numpy.typing import NDArray

from mhalearn._runtime.devices import replicate
from mhalearn._runtime.programs import compiled, in_float64, in_single
from mhalearn._runtime.seeds import Stream, generator
from mhalearn._runtime.types import Array, Float64
from mhalearn.data import Examples
from mhalearn.judge.feature_units import (
    layer_in_feature_units,
    measure_feature_sizes,
    problem_in_feature_units,
)
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.batches import Chunk
from mhalearn.layer.dense import Dense, DenseHeads
from mhalearn.layer.factored import Factored, Factors
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.parametrisation import Parametrisation, Params
from mhalearn.layer.units import Units
from mhalearn.run.watch import Watch
from mhalearn.solvers.cg import CGResult, CGState, advance_cg, is_going, start_cg, to_result
from mhalearn.solvers.factor_preconditioner import FactorPreconditioner, precondition_factors
from mhalearn.solvers.normal_equations import curvature
from mhalearn.solvers.scaled_problem import Problem, make_problem

# A share of a random change that is rounding. One open direction among a million shows a share of
# a thousandth, and less than this with probability 1e-5.
NULL_TOLERANCE = 1e-8
# Times the counting limit of examples that are looked at; and where they say too little, at most.
_ENOUGH, _MOST = 16.0, 32.0
# Conjugate gradients in single precision, repeated on what they leave.
_TOLERANCE, _CG_STEPS, _ROUNDS = 1e-4, 500, 8
# Steps between two looks at the clock; each look costs a forward pass.
_BETWEEN_LOOKS = 25
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

    def bound(self, error: float) -> float:
        """How far parameters may be off, where an example's labels are off by that, root mean
        square."""
        return self.error_amplification * error * math.sqrt(self.n_examples)


@in_float64
def run_rank_test(
    layer: AttentionLayer,
    examples: Examples,
    architecture: Architecture,
    seed: int = 0,
    *,
    watch: Watch | None = None,
) -> RankTest:
    """Ask about one random direction. Cost: some hundred forward passes over 16 times the counting
    limit of examples. Memory: a few copies of those.

    Only layers of the architecture's rank are considered where the heads have no less than that
    rank; of all others every layer. At a matrix of less rank than h, those of rank h lie in all
    directions of low rank, and a linear space that holds these holds all: so it takes examples
    enough for matrices of any rank, some twice their counting limit, to exclude another layer.
    watch: told how far it is; OutOfTime where that ends it.
    Features are in units of their own size (`feature_units`), and the amplification in common ones.
    Trust: a direction that is open is missed with probability 1e-5; the smallest singular value,
    from the Lanczos matrix of the conjugate gradients, is met from above, hence a margin of two.
    """
    architecture = architecture.with_heads(layer.n_heads)
    rng = generator(seed, Stream.RANK_TEST)
    asked = _Asked(layer, examples, rng.permutation(examples.n))
    question = asked.prepare(architecture.parametrisation())
    kind = question.problem.parametrisation
    if isinstance(kind, Factored) and not kind.has_full_rank(
        question.params, question.layer, question.problem.units
    ):
        # Where nothing is open among all layers, nothing is among those of a rank.
        question = asked.prepare(Dense(architecture.with_any_rank()))
        kind = question.problem.parametrisation
    at = question.params
    flat, unflatten = ravel_pytree(at)
    u = jnp.asarray(rng.standard_normal(flat.size))
    changes = partial(measure_changes, at)
    whole = changes(unflatten(u))
    left, null_component, weakest, asked_more = u, 1.0, np.inf, False
    for round_ in range(_ROUNDS):
        if watch is not None:
            watch.begin(f"randomised rank test, {question.count} examples, solve {round_ + 1}")
        found = _answer(question, left, watch)
        left = left - found.solution
        weakest = min(weakest, smallest_eigenvalue(found))
        # Where no change of the factors moves a matrix that is zero, nothing is known of it.
        shares = np.divide(
            changes(unflatten(left)), whole, out=np.ones_like(whole), where=whole > 0
        )
        before, null_component = null_component, float(np.max(shares))
        if null_component < NULL_TOLERANCE:
            break
        if not found.converged and not asked_more:
            # Too badly conditioned to solve: ask more. All that was seen they see.
            question = asked.ask_more(question)
            asked_more, weakest = True, np.inf
        elif not null_component < before / 2:
            break
    if not (null_component < NULL_TOLERANCE and weakest > 0):
        return RankTest(null_component, np.inf, question.count)
    error_amplification = _MARGIN * _steepest(layer, question) / math.sqrt(weakest)
    return RankTest(null_component, error_amplification / question.units.y_scale, question.count)


@dataclass(frozen=True)
class _Question:
    """Some examples, and a layer whose changes they may show; features in units of their own."""

    problem: Problem
    params: Params
    layer: AttentionLayer
    sizes: Float64  # of the features
    units: Units  # in which all features have one unit
    count: int  # of the examples
    metric: FactorPreconditioner | None = None  # that factors are looked at in


@dataclass(frozen=True)
class _Asked:
    """What is asked about, and in which order examples are looked at."""

    layer: AttentionLayer
    examples: Examples
    order: NDArray[np.int64]

    def prepare(self, kind: Parametrisation) -> _Question:
        found, count = self._some(kind, _ENOUGH)
        sizes = measure_feature_sizes(found)
        problem = problem_in_feature_units(found, sizes)
        layer = layer_in_feature_units(self.layer, sizes)
        params = kind.from_layer(layer, problem.units)
        metric = None
        if isinstance(kind, Factored):
            metric = precondition_factors(kind, params, problem.data, problem.devices)
        return _Question(problem, params, layer, sizes, found.units, count, metric)

    def ask_more(self, question: _Question) -> _Question:
        """The same of more examples, in the same units."""
        found, count = self._some(question.problem.parametrisation, _MOST)
        problem = problem_in_feature_units(found, question.sizes)
        return replace(question, problem=problem, count=count)

    def _some(self, kind: Parametrisation, enough: float) -> tuple[Problem, int]:
        limit = self.examples.counting_limit(kind.architecture)
        count = int(min(self.examples.n, np.ceil(enough * limit)))
        return make_problem(self.examples.subset(np.sort(self.order[:count])), kind), count


def _answer(question: _Question, left: Array, watch: Watch | None) -> CGResult:
    """A step whose effect is about that of `left`, and the coefficients of its search."""
    problem, at = question.problem, question.params
    kind, data, devices = problem.parametrisation, problem.data, problem.devices
    search = _begin(at, data, left, question.metric, kind, devices)
    for step in range(0, _CG_STEPS, _BETWEEN_LOOKS):
        if watch is not None:
            watch(step, _CG_STEPS)
        until = step + _BETWEEN_LOOKS
        search = _go_on(at, data, search, question.metric, until, kind, devices)
        if not replicate(search.is_going):
            break
    search = replicate(search)
    found = to_result(search.state, search.target)
    return found._replace(solution=search.size * found.solution.astype(left.dtype))


class _Search(NamedTuple):
    """Conjugate gradients for a right side of this norm, until a squared residual of `target`."""

    state: CGState
    target: Array
    size: Array
    is_going: Array


def _inverse(metric: FactorPreconditioner | None, at: Any) -> Callable[[Array], Array]:
    """The preconditioner as a function of flat steps."""
    if metric is None:
        return lambda step: step
    solve, unflatten = metric.prepare(), ravel_pytree(in_single(at))[1]
    return lambda step: ravel_pytree(solve(unflatten(step)))[0]


@partial(compiled, static_argnums=(4, 5))
def _begin(
    at: Any,
    data: Chunk,
    left: Array,
    metric: FactorPreconditioner | None,
    kind: Parametrisation,
    devices: int,
) -> _Search:
    right = curvature(kind, at, data, devices)(left)
    size = jnp.linalg.norm(right)
    dtype = jnp.float32 if isinstance(kind, Factored) else right.dtype
    right = (right / jnp.where(size > 0, size, 1.0)).astype(dtype)
    state = start_cg(_inverse(metric, at), right, _CG_STEPS)
    target = jnp.asarray(_TOLERANCE, dtype) ** 2 * jnp.vdot(right, right)
    return _Search(state, target, size, is_going(state, target))


@partial(compiled, static_argnums=(5, 6))
def _go_on(
    at: Any,
    data: Chunk,
    search: _Search,
    metric: FactorPreconditioner | None,
    until: Array | int,
    kind: Parametrisation,
    devices: int,
) -> _Search:
    """To step `until`, of factors in single precision."""
    if isinstance(kind, Factored):
        at, data = in_single(at), in_single(data)
    with jax.default_matmul_precision("highest"):
        product = curvature(kind, at, data, devices)
        inverse = _inverse(metric, at)
        state = advance_cg(product, inverse, search.state, search.target, until)
    return search._replace(state=state, is_going=is_going(state, search.target))


def smallest_eigenvalue(found: CGResult) -> float:
    """Of the Lanczos matrix that conjugate gradients build on their way."""
    made = int(found.num_steps)
    if made == 0:
        return 0.0
    alphas, betas = (np.asarray(part, np.float64)[:made] for part in (found.alphas, found.betas))
    diagonal = 1 / alphas
    diagonal[1:] += betas[:-1] / alphas[:-1]
    beside = np.sqrt(betas[:-1]) / alphas[:-1]
    return float(scipy.linalg.eigvalsh_tridiagonal(diagonal, beside)[0])


def measure_changes(at: DenseHeads | Factors, step: DenseHeads | Factors) -> Float64:
    """Norms of the changes of every Theta and W, and of the bias; none of d x d matrices is made
    of factors."""
    if isinstance(at, Factors):
        query, key, value, out, _ = (np.asarray(part) for part in at)
        to_query, to_key, to_value, to_out, to_bias = (np.asarray(part) for part in step)
        theta = norms_of_products([to_query, query], [key.swapaxes(1, 2), to_key.swapaxes(1, 2)])
        w = norms_of_products([to_value, value], [out, to_out])
        return np.concatenate([theta, w, np.linalg.norm(to_bias, axis=1)])
    theta, w = map(np.asarray, step)
    m, _, d = theta.shape
    heads, bias = np.split(w, [m * d])
    rows = [*theta.reshape(m, -1), *heads.reshape(m, -1), *bias]
    return np.array([np.linalg.norm(row) for row in rows])


def norms_of_products(lefts: list[Float64], rights: list[Float64]) -> Float64:
    """|L_1 R_1 + L_2 R_2| for each head, with no matrix of d x d."""
    left, right = np.concatenate(lefts, axis=2), np.concatenate(rights, axis=1)
    triangle = np.linalg.qr(left, mode="r")
    return np.linalg.norm(triangle @ right, axis=(1, 2))


def _steepest(layer: AttentionLayer, question: _Question) -> float:
    """How far a unit step of the parameters, in the metric they are looked at in, moves a Theta or
    a W at most, with all features in one unit again, relative to the size of a head: what is small
    among the features is magnified."""
    units, bias = question.units, question.problem.bias
    theta = float(np.sqrt(np.mean(np.sum(units.theta(layer, bias) ** 2, axis=(1, 2))))) or 1.0
    w = float(np.sqrt(np.sum(units.w(layer, bias) ** 2) / layer.n_heads)) or 1.0
    sizes = question.sizes / units.x_scale
    if question.metric is None:
        least = min(1.0, float(sizes.min()))
        return max(least**-2 / theta, 1 / (least * w))
    of_theta, of_w = _steepest_factors(question.params, question.metric, sizes)
    return max(of_theta / theta, of_w / w)


def _steepest_factors(
    at: Factors, metric: FactorPreconditioner, sizes: Float64
) -> tuple[float, float]:
    """How far a unit step of the factors moves a Theta, and a W or the bias, at most.

    Of dA_i B_i^T, dA_i = H Y G_i with H and G of the metric's two sides and |Y| = 1, the norm is at
    most |H| |G_i B_i^T|; and so with the others.
    """
    m, q, h = at.query.shape
    of_queries = np.append(sizes, np.ones(q - len(sizes)))
    query, key, value, out, _ = (np.asarray(part, np.float64) for part in at)
    query, key, value = query / of_queries[:, None], key / sizes[:, None], value / sizes[:, None]
    (tokens, changes), (sides, queries), (means, outs) = (
        tuple(np.asarray(side.factor, np.float64) for side in pair) for pair in metric[:3]
    )
    mixed = np.asarray(metric.out.factor, np.float64)
    by_head = changes.reshape(m, h, -1)
    heads, last = np.split(mixed, [m * out.shape[1]])
    heads = heads.reshape(m, out.shape[1], -1)
    along_query = _norm(tokens / of_queries[:, None]) * _norm(key @ by_head)
    along_key = _norm(sides / sizes[:, None]) * _norm(query @ queries)
    along_value = _norm(means / sizes[:, None]) * _norm(out.swapaxes(1, 2) @ outs)
    along_out = _norm(value @ heads)
    of_w = max(math.hypot(along_value, along_out), _norm(last) if last.size else 0.0)
    return math.hypot(along_query, along_key), of_w


def _norm(matrices: Float64) -> float:
    """The largest singular value of any of them."""
    return float(np.max(np.linalg.norm(matrices, 2, axis=(-2, -1))))
