"""The Gauss-Newton equations in all parameters: (J^T J + damping) step = J^T (Y - F), matrix-free.

For any parametrisation. Conjugate gradients that begin at zero never move along its gauge, on which
J^T J vanishes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from mhalearn._runtime.programs import in_single
from mhalearn._runtime.types import Array, Bool, Float
from mhalearn.layer.batches import Chunk, sum_over_chunks
from mhalearn.layer.parametrisation import Parametrisation, Params
from mhalearn.solvers.cg import CGResult, conjugate_gradients


class Step(NamedTuple):
    """A step, how much it lowers the squared residual by the model, and whether that was solved."""

    step: Params
    predicted_reduction: Float[Array, ""]
    solved: Bool[Array, ""]  # to the tolerance asked for
    search: CGResult  # how it was solved for
    metric: Any = None  # what preconditioned it, where another step may use it again


def curvature(
    parametrisation: Parametrisation, params: Params, data: Chunk, devices: int = 1
) -> Callable[[Array], Array]:
    """J^T J as a function of flat steps, in the precision of the parameters.

    Cost: a forward pass here, and about four each time it is called. Memory: what `linearise`
    keeps of all chunks.
    """
    unflatten = ravel_pytree(params)[1]
    at = jax.lax.map(partial(parametrisation.linearise, params), data)

    def product(step: Array) -> Array:
        parts = unflatten(step)

        def on(one: tuple[Chunk, Any]) -> Params:
            chunk, there = one
            change = parametrisation.jvp(params, there, chunk, parts)
            return parametrisation.vjp(params, there, chunk, change)

        return ravel_pytree(sum_over_chunks(on, (data, at), devices))[0]

    return product


def descent_direction(
    parametrisation: Parametrisation, params: Params, data: Chunk, devices: int = 1
) -> tuple[Params, Float[Array, ""]]:
    """J^T (Y - F), and the squared residual |Y - F|^2."""

    def slope(chunk: Chunk) -> tuple[Params, Array]:
        outputs, pull = jax.vjp(partial(parametrisation.outputs, chunk=chunk), params)
        residual = chunk.labels * chunk.weight[..., None] - outputs
        return pull(residual)[0], jnp.sum(residual**2)

    downhill, squared = sum_over_chunks(slope, data, devices)
    return downhill, squared


def squared_residual(
    parametrisation: Parametrisation, params: Params, data: Chunk, devices: int = 1
) -> Float[Array, ""]:
    def squared(chunk: Chunk) -> Array:
        labels = chunk.labels * chunk.weight[..., None]
        return jnp.sum((labels - parametrisation.outputs(params, chunk)) ** 2)

    return sum_over_chunks(squared, data, devices)


def solve_normal_equations(
    parametrisation: Parametrisation,
    params: Params,
    data: Chunk,
    downhill: Params,
    *,
    damping: Float[Array, ""],
    tolerance: Float[Array, ""],
    max_steps: int,
    single: bool,
    devices: int = 1,
    inverse: Callable[[Params], Params] | None = None,
    penalty: Params | None = None,
) -> Step:
    """Solve for a step by conjugate gradients.

    single: in single precision, enough for a step that is checked afterwards. inverse: about that
    of the equations' matrix, as a preconditioner. penalty: for each leaf of the parameters, what
    the diagonal gets beside the damping; `downhill` has its slope.
    Cost: about four forward passes a conjugate-gradient step.
    """
    flat, unflatten = ravel_pytree(downhill)
    size = jnp.linalg.norm(flat)
    if single:  # labels are not needed: their precision stays
        params, data = in_single(params), in_single(data)
    kind = jnp.float32 if single else flat.dtype
    shift = damping
    if penalty is not None:
        each = jax.tree.map(lambda weight, leaf: jnp.full(leaf.shape, weight), penalty, downhill)
        shift = damping + ravel_pytree(each)[0]
    shift = shift.astype(kind)
    light = ravel_pytree(params)[1]
    right = jnp.where(size > 0, flat / size, flat).astype(kind)
    with jax.default_matmul_precision("highest"):
        product = curvature(parametrisation, params, data, devices)
        found = conjugate_gradients(
            lambda step: product(step) + shift * step,
            (lambda v: v) if inverse is None else lambda v: ravel_pytree(inverse(light(v)))[0],
            right,
            tolerance.astype(kind),
            max_steps,
        )
    step = size * found.solution.astype(flat.dtype)
    # Conjugate gradients from zero leave a residual at right angles to the step.
    predicted = jnp.vdot(step, flat) + damping * jnp.vdot(step, step)
    return Step(unflatten(step), predicted, found.converged, found)
