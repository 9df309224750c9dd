"""What examples leave open about projected heads too large for their spectrum.

As in `randomised_rank_test`, a random change u of the parameters and the one z that is solved for
from what u does to the outputs must move the layer alike. Rotary heads are asked about in the wider
class in which keys are turned by any matrix R (`layer.relaxed`): what is closed there is closed
here, and there no slow frequencies make equations hard to solve. That class determines Theta(0) =
Q K^T, Theta(1) - Theta(0) = Q (R - 1) K^T, and W.

A step of R by dR turns the dimensions of frequencies f and g into each other by dR_fg / (e^{i w_f}
- e^{i w_g}), so that errors of R count over the least distance of two frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from mhalearn._runtime.devices import replicate
from mhalearn._runtime.programs import compiled, in_float64
from mhalearn._runtime.seeds import Stream, generator
from mhalearn._runtime.types import Array, Float64
from mhalearn.data import Examples
from mhalearn.judge.randomised_rank_test import NULL_TOLERANCE, RankTest, smallest_eigenvalue
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.batches import Chunk
from mhalearn.layer.projected import Projected
from mhalearn.layer.projected_layer import ProjectedLayer
from mhalearn.layer.relaxed import Relaxed
from mhalearn.run.watch import Watch
from mhalearn.solvers.cg import CGResult, CGState, advance_cg, is_going, start_cg, to_result
from mhalearn.solvers.normal_equations import curvature
from mhalearn.solvers.projection_preconditioner import (
    ProjectionPreconditioner,
    precondition_projections,
)
from mhalearn.solvers.scaled_problem import Problem, make_problem

# Times the counting limit of examples that are looked at.
_ENOUGH = 16.0
# Of a solve: its tolerance, steps at most, and steps between two looks at the clock.
_TOLERANCE, _CG_STEPS, _BETWEEN_LOOKS = 1e-9, 2000, 25
_ROUNDS = 4
# The smallest singular value may be this much smaller than what was found.
_MARGIN = 2.0
# Eigenvalues of a rotation this near are one.
_EQUAL = 1e-12
_SIDES = {"query": "query_bias", "key": "key_bias", "value": "value_bias"}

Params = dict[str, Float64]


def may_ask(architecture: Architecture) -> bool:
    """Whether what such heads determine is products of projections, and nothing but."""
    a = architecture
    if a.norm is not None or a.latent is not None or a.distance_bias is not None:
        return False
    return a.rope is None or Relaxed(a).frees_rotation


@in_float64
def run_projected_rank_test(
    layer: ProjectedLayer, examples: Examples, seed: int = 0, *, watch: Watch | None = None
) -> RankTest | None:
    """Ask about one random direction; None of heads that `may_ask` does not know, and where tokens
    bring positions.

    Cost: some hundred to thousand products over 16 times the counting limit of examples.
    Trust: as `run_rank_test`; closed in the wider class is closed, and not the other way round.
    """
    a = layer.architecture
    if not may_ask(a):
        return None
    rng = generator(seed, Stream.RANK_TEST)
    count = int(min(examples.n, math.ceil(_ENOUGH * examples.counting_limit(a))))
    part = examples.subset(np.sort(rng.permutation(examples.n)[:count]))
    kind = Relaxed(a) if a.rope is not None else Projected(a)
    problem = make_problem(part, kind)
    if problem.data.positions is not None:
        return None
    at = {name: jnp.asarray(leaf) for name, leaf in kind.from_layer(layer, problem.units).items()}
    metric = precondition_projections(kind, at, problem.data, problem.devices)
    asked = _Asked(problem, at, metric)
    u = {name: _size(leaf) * rng.standard_normal(leaf.shape) for name, leaf in at.items()}
    left, unflatten = ravel_pytree({name: jnp.asarray(leaf) for name, leaf in u.items()})
    whole = measure_changes(a, at, u)
    null_component, weakest = 1.0, math.inf
    for round_ in range(_ROUNDS):
        if watch is not None:
            watch.begin(f"randomised rank test, {count} examples, solve {round_ + 1}")
        found = asked.answer(left, watch)
        left = left - found.solution
        weakest = min(weakest, smallest_eigenvalue(found))
        changes = measure_changes(a, at, unflatten(left))
        shares = np.divide(changes, whole, out=np.ones_like(whole), where=whole > 0)
        before, null_component = null_component, float(np.max(shares))
        if null_component < NULL_TOLERANCE or not null_component < before / 2:
            break
    if not (null_component < NULL_TOLERANCE and weakest > 0):
        return RankTest(null_component, math.inf, count)
    steepest = _steepest(a, at, metric)
    return RankTest(
        null_component, _MARGIN * steepest / math.sqrt(weakest) / problem.units.y_scale, count
    )


@dataclass(frozen=True)
class _Asked:
    problem: Problem
    at: dict[str, Array]
    metric: ProjectionPreconditioner

    def answer(self, left: Array, watch: Watch | None) -> CGResult:
        """A step whose effect is about that of `left`, and the coefficients of its search."""
        problem = self.problem
        static = (problem.parametrisation, problem.devices)
        right = _product(self.at, problem.data, left, *static)
        size = jnp.linalg.norm(right)
        right = right / jnp.where(size > 0, size, 1.0)
        state = _start(self.at, right, self.metric)
        target = _TOLERANCE**2 * jnp.vdot(right, right)
        for step in range(0, _CG_STEPS, _BETWEEN_LOOKS):
            if watch is not None:
                watch(step, _CG_STEPS)
            until = step + _BETWEEN_LOOKS
            state = _go_on(self.at, problem.data, state, target, self.metric, until, *static)
            if not replicate(is_going(state, target)):
                break
        found = to_result(replicate(state), target)
        return found._replace(solution=size * found.solution)


@partial(compiled, static_argnums=(3, 4))
def _product(
    at: dict[str, Array], data: Chunk, step: Array, kind: Projected, devices: int
) -> Array:
    return curvature(kind, at, data, devices)(step)


@jax.jit
def _start(at: dict[str, Array], right: Array, metric: ProjectionPreconditioner) -> CGState:
    return start_cg(partial(_invert, metric, at), right, _CG_STEPS)


@partial(compiled, static_argnums=(6, 7))
def _go_on(
    at: dict[str, Array],
    data: Chunk,
    state: CGState,
    target: Array,
    metric: ProjectionPreconditioner,
    until: Array | int,
    kind: Projected,
    devices: int,
) -> CGState:
    product = curvature(kind, at, data, devices)
    return advance_cg(product, partial(_invert, metric, at), state, target, until)


def _invert(metric: ProjectionPreconditioner, at: dict[str, Array], step: Array) -> Array:
    solved = metric.prepare()(ravel_pytree(at)[1](step))
    return ravel_pytree(solved)[0].astype(step.dtype)


def measure_changes(a: Architecture, at: Mapping[str, Any], step: Mapping[str, Any]) -> Float64:
    """Norms of the changes of all that a layer determines: Theta(0), where heads are rotated
    Theta(1) - Theta(0), and W of each head; the bias; the sinks. No d x d matrix is formed."""
    at, step = ({name: np.asarray(leaf) for name, leaf in tree.items()} for tree in (at, step))
    each = a.heads // a.groups
    query, key, value = (_with_bias(at, side, each) for side in _SIDES)
    to_query, to_key, to_value = (_with_bias(step, side, each) for side in _SIDES)
    out, to_out = at["out"], step["out"]
    # The same on all logits of a row cancels, and weights that sum to one make values' biases one.
    shown = slice(None) if a.sinks or a.softcap is not None else slice(a.key_features)
    theta = _norms([to_query, query], [key[:, shown], to_key[:, shown]])
    rows = slice(None) if a.sinks else slice(a.key_features)
    w = _norms([to_value[:, rows], value[:, rows]], [_t(out), _t(to_out)])
    found = [theta, w]
    if "turn" in at:
        turn = np.repeat(at["turn"], each, axis=0) - np.eye(a.qk_rank)
        moved = to_query @ turn + query @ np.repeat(step["turn"], each, axis=0)
        found.append(_norms([moved, query @ turn], [key, to_key]))
    if "out_bias" in at:
        bias = step["out_bias"]
        if not a.sinks:
            bias = bias + np.einsum("mh,mhe->e", to_value[:, -1], out)
            bias = bias + np.einsum("mh,mhe->e", value[:, -1], to_out)
        found.append(np.array([np.linalg.norm(bias)]))
    if a.sinks:
        found.append(np.abs(step["sink"]))
    return np.concatenate(found)


def _steepest(a: Architecture, at: dict[str, Array], metric: ProjectionPreconditioner) -> float:
    """How far a unit step, in the metric, moves a Theta or a W at most, relative to the size of a
    head; of rotary heads in the class in which frequencies are fixed."""
    each = a.heads // a.groups
    params: Params = {name: np.asarray(leaf) for name, leaf in at.items()}
    query, key, value = (_with_bias(params, side, each) for side in _SIDES)
    out = params["out"]
    left = {
        name: math.sqrt(_norm(np.asarray(one, np.float64))) for name, one in metric.left.items()
    }
    right = {
        name: np.linalg.cholesky(np.asarray(one, np.float64)) for name, one in metric.right.items()
    }
    reach = [
        left["query"] * _norms_of(key @ _of_heads(right["query"], a.heads)),
        left["key"] * _norms_of(query @ _of_heads(right["key"], a.heads)),
    ]
    if "turn" in params:
        turned = left["turn"] * _norms_of(_of_heads(right["turn"], a.heads))
        reach.append(2 * _norms_of(query) * _norms_of(key) * turned / _least_gap(params["turn"][0]))
    theta = _rms(_norms([query], [key]))
    of_theta = float(np.max(np.linalg.norm(reach, axis=0))) / theta
    rows = np.asarray(metric.left["out"], np.float64)[: a.heads * a.values, : a.heads * a.values]
    outs = math.sqrt(_norm(rows)) * math.sqrt(float(np.max(metric.right["out"])))
    moved = _t(out) @ _of_heads(right["value"], a.heads)
    along = [left["value"] * _norms_of(moved), outs * _norms_of(value)]
    of_w = float(np.max(np.linalg.norm(along, axis=0))) / _rms(_norms([value], [_t(out)]))
    return max(of_theta, of_w)


def _least_gap(turn: Float64) -> float:
    """The least distance of two eigenvalues that are not equal."""
    values = np.linalg.eigvals(turn)
    apart = np.abs(values[:, None] - values)
    return float(np.min(apart[apart > _EQUAL], initial=2.0))


def _size(leaf: Array) -> float:
    """Root mean square; one of what is zero."""
    return float(jnp.sqrt(jnp.mean(leaf**2))) or 1.0


def _with_bias(params: Params, side: str, each: int) -> Float64:
    """Projections (m, d + 1, h) of each head, the bias, or zeros, as a last row."""
    weight = params[side]
    bias = params.get(_SIDES[side], np.zeros((len(weight), weight.shape[2])))
    rows = np.concatenate([weight, bias[:, None]], axis=1)
    return rows if side == "query" else np.repeat(rows, each, axis=0)


def _norms(lefts: list[Float64], rights: list[Float64]) -> Float64:
    """|L_1 R_1^T + L_2 R_2^T| for each head, with no matrix of d x d."""
    ours, theirs = (np.linalg.qr(np.concatenate(part, axis=2)).R for part in (lefts, rights))
    return np.asarray(np.linalg.norm(ours @ _t(theirs), axis=(1, 2)))


def _of_heads(matrices: Float64, heads: int) -> Float64:
    return np.repeat(matrices, heads // len(matrices), axis=0)


def _t(matrices: Float64) -> Float64:
    return matrices.swapaxes(1, 2)


def _norms_of(matrices: Float64) -> Float64:
    """The largest singular value of each."""
    return np.asarray(np.linalg.norm(matrices, 2, axis=(-2, -1)))


def _norm(matrices: Float64) -> float:
    return float(np.max(_norms_of(matrices)))


def _rms(norms: Float64) -> float:
    return float(np.sqrt(np.mean(norms**2))) or 1.0
