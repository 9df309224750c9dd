"""Damped Gauss-Newton on the factors of many narrow heads, down to machine precision.

Conjugate gradients that begin at zero never move along the freedom that factors have.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from mhalearn._runtime.devices import replicate
from mhalearn._runtime.programs import compiled, in_float64, in_single
from mhalearn._runtime.types import Array, Float
from mhalearn.layer.batches import Chunk, sum_over_chunks
from mhalearn.layer.factored import Activations, Factors, apply_heads, attend_heads, push_heads
from mhalearn.run.run import Run
from mhalearn.solvers.cg import conjugate_gradients
from mhalearn.solvers.scaled_problem import Problem

# Steps are solved for as exactly as the residual is small, within these bounds: fast
# convergence at the least price.
_LOOSEST, _TIGHTEST, _TIGHTEST_SINGLE = 1e-2, 1e-10, 1e-5
_CG_STEPS = 400
# Against the mean square of the labels, the size of what a step of a factor's entry changes.
_DAMPING = 1e-3
ROUNDING = 1e-28
# Below this loss steps converge fast, and one that leaves more than this of it was too inexact.
_NEAR, _LITTLE = 1e-6, 0.1


@in_float64
def polish_heads(
    heads: Factors,
    problem: Problem,
    run: Run,
    *,
    stage: str,
    max_steps: int = 60,
    whole: Problem | None = None,
) -> tuple[Factors, float]:
    """Descend by damped Gauss-Newton steps until nothing improves; the factors and their loss.

    Steps are solved for in single precision until one gains little, then in double. Where the
    examples of `problem` say too little to solve for steps, those of `whole` take over.
    Cost: some hundred forward passes over the examples a step. Memory: as much again as they take.
    Trust: a stationary point of the training loss, to rounding. Not a certificate.
    """
    loss, damping, idle, single = np.inf, 1.0, 0, True
    for step in range(max_steps):
        made = replicate(
            _gauss_newton(
                heads,
                problem.data,
                jnp.asarray(problem.energy),
                jnp.asarray(damping),
                problem.devices,
                single=single,
            )
        )
        loss, after, predicted_reduction = map(
            float, (made.loss, made.after, made.predicted_reduction)
        )
        damping = max(damping * update_damping(loss - after, predicted_reduction), 1e-12)
        idle = 0 if after < 0.9 * loss else idle + 1
        if single and (idle == 4 or _LITTLE * loss < after < _NEAR):
            single, idle = False, 0
        if after < loss:
            heads, loss = made.heads, after
        run.emit(stage, step, loss)
        if whole is not None and whole.rows > problem.rows and not made.solved:
            problem, single, idle = whole, True, 0
        if loss < ROUNDING or idle == 4 or run.is_over():
            break
    return heads, loss


class Stepped(NamedTuple):
    """Heads one step on, and what it did to the relative loss."""

    heads: Factors
    loss: Float[Array, ""]
    after: Float[Array, ""]
    predicted_reduction: Float[Array, ""]  # the gain, by the model that was solved
    solved: Array  # whether it was, to the tolerance asked for


def update_damping(gained: float, predicted_reduction: float) -> float:
    """What the damping is multiplied by: only a model that keeps its promise is trusted further."""
    if not gained > 0:
        return 10.0
    kept = gained / predicted_reduction if predicted_reduction > 0 else 0.0
    return 0.1 if kept > 0.75 else 0.5 if kept > 0.5 else 1.0 if kept > 0.25 else 3.0


@partial(compiled, static_argnames=("single", "devices"))
def _gauss_newton(
    heads: Factors,
    data: Chunk,
    energy: Array,
    damping: Array,
    devices: int = 1,
    *,
    single: bool,
) -> Stepped:

    def slope(chunk: Chunk) -> tuple[Factors, Array]:
        outputs, pull = jax.vjp(partial(apply_heads, chunk=chunk), heads)
        wrong = chunk.labels - outputs
        return pull(wrong)[0], jnp.sum(wrong**2)

    downhill, wrong = sum_over_chunks(slope, data, devices)
    level = jnp.sqrt(jnp.minimum(1.0, wrong / energy))
    tolerance = jnp.clip(level, _TIGHTEST_SINGLE if single else _TIGHTEST, _LOOSEST)
    damping = damping * level * _DAMPING * energy
    step, solved = _solve(heads, data, downhill, damping, tolerance, single=single, devices=devices)
    trial = jax.tree.map(jnp.add, heads, step)

    def squared(chunk: Chunk) -> Array:
        return jnp.sum((chunk.labels - apply_heads(trial, chunk)) ** 2)

    # Conjugate gradients from zero leave a residual at right angles to the step.
    moved, sloping = ravel_pytree(step)[0], ravel_pytree(downhill)[0]
    predicted_reduction = jnp.vdot(moved, sloping) + damping * jnp.vdot(moved, moved)
    after = sum_over_chunks(squared, data, devices)
    return Stepped(trial, wrong / energy, after / energy, predicted_reduction / energy, solved)


def _solve(
    heads: Factors,
    data: Chunk,
    right: Factors,
    damping: Array,
    tolerance: Array,
    *,
    single: bool,
    devices: int,
) -> tuple[Factors, Array]:
    """(J^T J + damping) step = right, by conjugate gradients; and whether they arrived."""
    flat, unflatten = ravel_pytree(right)
    if single:  # labels are not needed: their precision stays
        heads, data = in_single(heads), in_single(data)
    size = jnp.linalg.norm(flat)
    kind = heads.query.dtype
    scaled = jnp.where(size > 0, flat / size, flat).astype(kind)

    with jax.default_matmul_precision("highest"):
        product = curvature(heads, data, devices)
        found = conjugate_gradients(
            lambda step: product(step) + damping.astype(kind) * step,
            lambda v: v,
            scaled,
            tolerance.astype(kind),
            _CG_STEPS,
        )
    return unflatten(size * found.solution.astype(flat.dtype)), found.converged


def curvature(heads: Factors, data: Chunk, devices: int = 1) -> Callable[[Array], Array]:
    """J^T J as a function of flat steps, at these heads, in their precision.

    Cost: a forward pass here, and about four each time it is called. Memory: O(n k m (k + h)).
    """
    unflatten = ravel_pytree(heads)[1]
    at = jax.lax.map(partial(attend_heads, heads), data)

    def product(step: Array) -> Array:
        parts = unflatten(step)

        def on(one: tuple[Chunk, Activations]) -> Factors:
            chunk, there = one
            push = partial(push_heads, heads, there, chunk)
            back: Factors = jax.linear_transpose(push, parts)(push(parts))[0]
            return back

        return ravel_pytree(sum_over_chunks(on, (data, at), devices))[0]

    return product
