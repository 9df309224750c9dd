"""What examples leave open about a block too large for its spectrum: a random direction tells.

As in `randomised_rank_test`: of a random change u of the arrays conjugate gradients find one, z,
that changes the outputs as u does; if u - z changes nothing that outputs determine, nothing is
open. The gauge does no harm. All in the metric in which J^T J is nearly the identity.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from mhalearn._runtime.programs import compiled, in_float64
from mhalearn._runtime.seeds import Stream, generator
from mhalearn._runtime.types import Array, Float64
from mhalearn.data import Examples
from mhalearn.judge.randomised_rank_test import (
    NULL_TOLERANCE,
    RankTest,
    smallest_eigenvalue,
)
from mhalearn.layer.batches import Chunk, in_one_chunk
from mhalearn.layer.block.block import Block
from mhalearn.layer.block.determined import determined
from mhalearn.layer.parametrisation import Params
from mhalearn.run.watch import Watch
from mhalearn.solvers.cg import CGResult
from mhalearn.solvers.kronecker_metric import Metric, in_metric, measure_metric
from mhalearn.solvers.metric_steps import linear_model, solve_in_metric, zero_coordinates
from mhalearn.solvers.scaled_problem import make_problem

# Times the counting limit of examples that are looked at.
_ENOUGH = 12.0
# Conjugate gradients, repeated on what they leave.
_TOLERANCE, _CG_STEPS, _ROUNDS = 1e-9, 1000, 6
# Rounds of power iteration for how far a step moves what is determined, and its margin.
_POWER, _MARGIN = 30, 2.0


@in_float64
def run_block_rank_test(
    block: Block, examples: Examples, seed: int = 0, *, watch: Watch | None = None
) -> RankTest:
    """Ask about one random direction. Cost: some thousand forward passes over a dozen times the
    counting limit of examples. Memory: what a pass over them keeps for its derivative.

    watch: told how far it is; OutOfTime where that ends it.
    Trust: a direction that is open is missed with probability 1e-5; the smallest singular value,
    from the Lanczos matrix of the conjugate gradients, is met from above, hence a margin of two.
    """
    kind: Any = block.parametrisation.straightened()
    count = min(
        examples.n, math.ceil(_ENOUGH * examples.counting_limit(block.design.without_linear))
    )
    problem = make_problem(examples.sample(count, seed), kind)
    at = jax.tree.map(jnp.asarray, kind.from_layer(block, problem.units))
    metric = measure_metric(kind, at, in_one_chunk(problem.data, problem.devices), seed)
    rng = generator(seed, Stream.RANK_TEST)
    flat = ravel_pytree(zero_coordinates(metric))[0]
    left = jnp.asarray(rng.standard_normal(flat.size))
    whole, null_component, weakest = _changes(at, left, metric, kind), 1.0, np.inf
    for turn in range(_ROUNDS):
        if watch is not None:
            watch.begin(f"randomised rank test, {count} examples, solve {turn + 1}")
            watch(turn, _ROUNDS)
        found = _answer(at, problem.data, metric, left, kind)
        left = left - found.solution
        weakest = min(weakest, smallest_eigenvalue(found))
        now = _changes(at, left, metric, kind)
        shares = np.divide(now, whole, out=np.ones_like(whole), where=whole > 0)
        before, null_component = null_component, float(np.max(shares))
        if null_component < NULL_TOLERANCE or not null_component < before / 2:
            break
    if not (null_component < NULL_TOLERANCE and weakest > 0):
        return RankTest(null_component, np.inf, count)
    steepest = float(_steepest(at, jnp.asarray(rng.standard_normal(flat.size)), metric, kind))
    return RankTest(null_component, _MARGIN * steepest / math.sqrt(weakest), count)


@partial(compiled, static_argnums=4)
def _answer(at: Params, data: Chunk, metric: Metric, left: Array, kind: Any) -> CGResult:
    """A step whose effect is that of `left`."""
    _, push, pull = linear_model(kind, at, data)
    to_step, to_slope = in_metric(kind, metric)
    unflatten = ravel_pytree(zero_coordinates(metric))[1]
    right = ravel_pytree(to_slope(pull(push(to_step(unflatten(left))))))[0]
    none, tolerance = jnp.zeros(()), jnp.asarray(_TOLERANCE)
    return solve_in_metric(kind, metric, push, pull, right, none, tolerance, _CG_STEPS)


def _move(at: Params, metric: Metric, kind: Any) -> Any:
    """What is determined, as a linear function of steps in the metric's coordinates."""
    unflatten, step = ravel_pytree(zero_coordinates(metric))[1], in_metric(kind, metric)[0]

    def look(params: Params) -> dict[str, Array]:
        return determined(kind.invariants(params), kind.design)

    def move(flat: Array) -> dict[str, Array]:
        moved: dict[str, Array] = jax.jvp(look, (at,), (step(unflatten(flat)),))[1]
        return moved

    return move, look(at)


@partial(compiled, static_argnums=3)
def _norms(at: Params, flat: Array, metric: Metric, kind: Any) -> list[Array]:
    moved = _move(at, metric, kind)[0](flat)
    return [jnp.linalg.norm(leaf.reshape(len(leaf), -1), axis=1) for leaf in moved.values()]


def _changes(at: Params, flat: Array, metric: Metric, kind: Any) -> Float64:
    """Of every head, neuron and bias."""
    return np.concatenate([np.asarray(leaf) for leaf in _norms(at, flat, metric, kind)])


@partial(compiled, static_argnums=3)
def _steepest(at: Params, start: Array, metric: Metric, kind: Any) -> Array:
    """How far a unit step moves what is determined, over the size of a head, neuron or bias."""
    move, here = _move(at, metric, kind)
    sizes = {name: jnp.linalg.norm(leaf) / len(leaf) ** 0.5 for name, leaf in here.items()}
    largest = jnp.max(jnp.stack(list(sizes.values())))

    def relative(flat: Array) -> dict[str, Array]:
        # What is zero is as far off as it is over the largest.
        return {
            name: leaf / jnp.where(sizes[name] > 1e-3 * largest, sizes[name], largest)
            for name, leaf in move(flat).items()
        }

    turned = jax.linear_transpose(relative, start)

    def iterate(_: Array, flat: Array) -> Array:
        again: Array = turned(relative(flat / jnp.linalg.norm(flat)))[0]
        return again

    return jnp.linalg.norm(jax.lax.fori_loop(0, _POWER, iterate, start)) ** 0.5
