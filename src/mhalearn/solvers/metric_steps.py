"""Damped Gauss-Newton for many parameters of many linear maps: conjugate gradients in a metric.

The metric (`kronecker_metric`) makes J^T J nearly the identity, so that one damping suits all
parameters, and a step takes tens of products where plain conjugate gradients take thousands.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from mhalearn._runtime.programs import compiled, in_float64
from mhalearn._runtime.types import Array, Bool, Float, Int
from mhalearn.layer.batches import Chunk, in_one_chunk
from mhalearn.layer.parametrisation import Params
from mhalearn.run.run import Run
from mhalearn.solvers.cg import CGResult, conjugate_gradients
from mhalearn.solvers.damping import ROUNDING, update_damping
from mhalearn.solvers.kronecker_metric import Metric, in_metric, measure_metric
from mhalearn.solvers.polish import Minimum
from mhalearn.solvers.scaled_problem import Problem

# Products a step at most, and steps that share a metric.
_CG_STEPS, _SHARED = 400, 4
# What a step leaves of the squares after which it is not asked how outputs bend along it, and how
# exactly what makes up for that is solved for.
_AS_PREDICTED, _ROUGH = 0.1, 0.03
# How exactly steps are solved for: as the residual is small, within these bounds.
_LOOSEST, _TIGHTEST = 1e-2, 1e-8
# Rejected steps in a row, and steps that gain less than a hundredth, after which descent ends.
_REJECTED, _SLOW_STEPS, _SLOW = 8, 6, 0.01


class Trial(NamedTuple):
    """Where a step leads, and how it was solved for."""

    params: Params
    before: Float[Array, ""]  # |Y - F|^2
    after: Float[Array, ""]
    predicted_reduction: Float[Array, ""]
    products: Int[Array, ""]
    solved: Bool[Array, ""]


@in_float64
def descend_in_metric(
    params: Params,
    problem: Problem,
    run: Run,
    *,
    stage: str,
    max_steps: int = 60,
    cg_steps: int = _CG_STEPS,
) -> Minimum:
    """Descend from parameters until nothing improves.

    Cost: about four forward passes a product, and `measure_metric` every few steps. Memory: what
    a forward pass over all examples keeps for its derivative.
    Trust: a stationary point of the training loss, to rounding. Not a certificate.
    """
    kind, energy = problem.parametrisation, problem.energy or 1.0
    whole, here = in_one_chunk(problem.data, problem.devices), jax.tree.map(jnp.asarray, params)
    damping, slow, rejected, loss = 1e-2, 0, 0, float("inf")
    converged, metric = False, None
    for step in range(max_steps):
        if metric is None or step % _SHARED == 0:
            metric = measure_metric(kind, here, whole, seed=step)
        trial = _try_step(here, problem.data, metric, energy, damping, kind, cg_steps)
        before, after = float(trial.before), float(trial.after)
        ratio = (before - after) / max(float(trial.predicted_reduction), 1e-300)
        damping = float(update_damping(damping, ratio if np.isfinite(ratio) else -1.0, np))
        taken = after < before
        here, loss = (trial.params if taken else here), min(after, before) / energy
        said = f"{int(trial.products)} products{'' if bool(trial.solved) else ', not solved'}"
        at_hand = partial(problem.to_layer, here)
        run.emit(stage, step, loss, at_hand=at_hand, detail=said if taken else f"{said}, rejected")
        rejected = 0 if taken else rejected + 1
        slow = slow + 1 if taken and after > (1 - _SLOW) * before else 0
        at_rest = loss < ROUNDING and not after < 0.5 * before
        if at_rest or rejected >= _REJECTED or slow >= _SLOW_STEPS or not np.isfinite(before):
            converged = True
            break
        if run.is_over():
            break
    return Minimum(jax.tree.map(np.asarray, here), loss, converged)


@partial(compiled, static_argnums=(5, 6))
def _try_step(
    params: Params,
    data: Chunk,
    metric: Metric,
    energy: Array,
    damping: Array,
    kind: Any,
    cg_steps: int,
) -> Trial:
    residual, push, pull = linear_model(kind, params, data)
    squared = jnp.sum(residual**2)
    level = jnp.sqrt(jnp.minimum(1.0, squared / energy))
    to_step, to_slope = in_metric(kind, metric)
    right, unflatten = ravel_pytree(to_slope(pull(residual)))
    ridge = damping * level
    found = solve_in_metric(
        kind, metric, push, pull, right, ridge, jnp.clip(level, _TIGHTEST, _LOOSEST), cg_steps
    )
    step = to_step(unflatten(found.solution))
    trial = jax.tree.map(jnp.add, params, step)
    predicted = found.solution @ right + ridge * found.solution @ found.solution
    after = _squared(kind, trial, data)

    def bend(_: None) -> tuple[Params, Array, Array]:
        """Half the acceleration of the path along which outputs change as the step says."""
        slope = ravel_pytree(to_slope(pull(_second(kind, params, step, data))))[0]
        rough = jnp.asarray(_ROUGH)
        more = solve_in_metric(kind, metric, push, pull, slope, ridge, rough, cg_steps)
        bent = jax.tree.map(lambda a, b: a - b / 2, trial, to_step(unflatten(more.solution)))
        return bent, _squared(kind, bent, data), more.num_steps

    def stay(_: None) -> tuple[Params, Array, Array]:
        return trial, after, jnp.zeros_like(found.num_steps)

    as_predicted = after < _AS_PREDICTED * squared
    bent, there, more = jax.lax.cond(as_predicted, stay, bend, None)
    trial = jax.tree.map(lambda a, b: jnp.where(there < after, b, a), trial, bent)
    products = found.num_steps + more
    return Trial(trial, squared, jnp.minimum(there, after), predicted, products, found.converged)


def _second(kind: Any, params: Params, step: Params, data: Chunk) -> Array:
    """The second derivative of outputs along a step."""

    def outputs(params: Params) -> Array:
        found: Array = jax.lax.map(partial(kind.outputs, params), data)
        return found

    def slope(params: Params) -> Array:
        return jax.jvp(outputs, (params,), (step,))[1]

    return jax.jvp(slope, (params,), (step,))[1]


def linear_model(kind: Any, params: Params, data: Chunk) -> tuple[Array, Any, Any]:
    """Y - F at a point, and J and its transpose as functions."""

    def outputs(params: Params) -> Array:
        found: Array = jax.lax.map(partial(kind.outputs, params), data)
        return found

    made, push = jax.linearize(outputs, params)
    turned = jax.linear_transpose(push, params)
    residual = data.labels * data.weight[..., None] - made
    return residual, push, lambda change: turned(change)[0]


def solve_in_metric(
    kind: Any,
    metric: Metric,
    push: Any,
    pull: Any,
    right: Float[Array, " p"],
    ridge: Array,
    tolerance: Array,
    max_steps: int,
) -> CGResult:
    """(C^T J^T J C + ridge) z = right, C from the metric's coordinates to steps."""
    to_step, to_slope = in_metric(kind, metric)
    unflatten = ravel_pytree(zero_coordinates(metric))[1]

    def product(flat: Array) -> Array:
        change = push(to_step(unflatten(flat)))
        return ravel_pytree(to_slope(pull(change)))[0] + ridge * flat

    return conjugate_gradients(product, lambda v: v, right, tolerance, max_steps)


def zero_coordinates(metric: Metric) -> dict[str, Array]:
    found = {
        name: jnp.zeros((left.shape[1], right.shape[1]))
        for name, (left, right) in metric.sides.items()
    }
    return found | {name: jnp.zeros_like(leaf) for name, leaf in metric.scales.items()}


def _squared(kind: Any, params: Params, data: Chunk) -> Array:
    def add(total: Array, chunk: Chunk) -> tuple[Array, None]:
        labels = chunk.labels * chunk.weight[..., None]
        return total + jnp.sum((labels - kind.outputs(params, chunk)) ** 2), None

    return jax.lax.scan(add, jnp.zeros(()), data)[0]
