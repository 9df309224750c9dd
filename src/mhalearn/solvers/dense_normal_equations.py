"""Damped Gauss-Newton with the normal matrix of all parameters formed and factored.

For any parametrisation of few parameters. Conjugate gradients without a preconditioner take
hundreds of products a step where neurons are nearly alike; a factor takes the same time always.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jax.flatten_util import ravel_pytree

from mhalearn._runtime.programs import compiled, in_float64
from mhalearn._runtime.threads import one_lapack_thread
from mhalearn._runtime.types import Array, Float, Float64
from mhalearn.layer.batches import Chunk, in_one_chunk
from mhalearn.layer.parametrisation import Parametrisation, Params
from mhalearn.run.run import Run
from mhalearn.solvers.damping import ROUNDING, update_damping
from mhalearn.solvers.polish import Minimum
from mhalearn.solvers.scaled_problem import Problem

# Doubles that a piece of the Jacobian may hold: 32 MiB.
_WORKSPACE = 2**22
# Of the mean of the matrix's diagonal: keeps a matrix with a gauge factorable, and is less than
# what rounding makes of it.
_FLOOR = 1e-14
# What a step leaves of the squares after which it is not asked how outputs bend along it.
_AS_PREDICTED = 0.1
# Rejected steps in a row, and steps that gain less than a hundredth, after which descent ends.
_REJECTED, _SLOW_STEPS, _SLOW = 8, 12, 0.01


@in_float64
def descend_densely(
    params: Params, problem: Problem, run: Run, *, stage: str, max_steps: int = 100
) -> Minimum:
    """Descend from parameters until nothing improves.

    Cost of a step: as many backward passes over the problem's examples as one of them has outputs,
    and P^2, the parameters' number squared, for each of their scalars. Memory: O(P^2) beside a
    piece.
    Trust: a stationary point of the training loss, to rounding. Not a certificate.
    """
    flat, unflatten = ravel_pytree(jax.tree.map(jnp.asarray, params))
    kind, energy = problem.parametrisation, problem.energy or 1.0
    pieces = _cut(in_one_chunk(problem.data, problem.devices), flat.size)
    here = np.asarray(flat)
    damping, slow, converged = 1e-2, 0, False
    gram, slope, squared = (np.asarray(x) for x in _equations(here, pieces, kind, params))
    for step in range(max_steps):
        before = float(squared)
        moved = _step(here, gram, slope, before, energy, damping, pieces, kind, params)
        if moved is None:
            converged = True
            break
        here, damping = moved
        gram, slope, squared = (np.asarray(x) for x in _equations(here, pieces, kind, params))
        loss = float(squared) / energy
        at_hand = partial(problem.to_layer, unflatten(jnp.asarray(here)))
        run.emit(stage, step, loss, at_hand=at_hand)
        slow = slow + 1 if loss > (1 - _SLOW) * before / energy else 0
        at_rest = loss < ROUNDING and loss > 0.5 * before / energy
        if at_rest or slow >= _SLOW_STEPS:
            converged = True
            break
        if run.is_over():
            break
    found = jax.tree.map(np.asarray, unflatten(jnp.asarray(here)))
    return Minimum(found, float(squared) / energy, converged)


def _step(
    here: Float64,
    gram: Float64,
    slope: Float64,
    squared: float,
    energy: float,
    damping: float,
    pieces: Chunk,
    kind: Parametrisation,
    like: Params,
) -> tuple[Float64, float] | None:
    """The next point and its damping; None where no step lowers the loss."""
    diagonal = np.diag(gram)
    diagonal = np.maximum(diagonal, 1e-6 * float(diagonal.max()))
    floor = _FLOOR * float(np.trace(gram)) / len(gram)
    level = min(1.0, squared / energy) ** 0.5
    for _ in range(_REJECTED):
        matrix = gram.copy()
        matrix.flat[:: len(gram) + 1] += damping * level * diagonal + floor
        try:
            with one_lapack_thread():
                factor = scipy.linalg.cho_factor(matrix)
                step = scipy.linalg.cho_solve(factor, slope)
        except np.linalg.LinAlgError:
            damping = float(update_damping(damping, -1.0, np))
            continue
        there = float(_squared(here + step, pieces, kind, like))
        predicted = float(step @ slope + damping * level * (step * diagonal) @ step)
        if not there < _AS_PREDICTED * squared:
            bend = np.asarray(_curvature(here, step, pieces, kind, like))
            with one_lapack_thread():
                bent = step - scipy.linalg.cho_solve(factor, bend) / 2
            if (instead := float(_squared(here + bent, pieces, kind, like))) < there:
                step, there = bent, instead
        ratio = (squared - there) / predicted if predicted > 0 else -1.0
        damping = float(update_damping(damping, ratio if np.isfinite(ratio) else -1.0, np))
        if there < squared:
            return here + step, damping
    return None


def _cut(data: Chunk, size: int) -> Chunk:
    """Examples in pieces whose Jacobian fits into the workspace; the last ones repeat, and weigh
    nothing."""
    n, k, e = data.labels.shape
    piece = max(1, min(n, _WORKSPACE // (size * k * max(e, 1))))
    count = -(-n // piece)
    missing = piece * count - n

    def cut(leaf: Array) -> Array:
        padded = jnp.concatenate([leaf, jnp.repeat(leaf[-1:], missing, axis=0)])
        return padded.reshape(count, piece, *leaf.shape[1:])

    cuts: Chunk = jax.tree.map(cut, data)
    counts = jnp.arange(count * piece).reshape(count, piece, 1) < n
    return cuts._replace(weight=jnp.where(counts, cuts.weight, 0.0))


@partial(compiled, static_argnums=2)
def _equations(
    flat: Float[Array, " p"], pieces: Chunk, kind: Parametrisation, like: Params
) -> tuple[Float[Array, "p p"], Float[Array, " p"], Float[Array, ""]]:
    """J^T J, J^T (Y - F) and |Y - F|^2.

    Rows of J example by example, in reverse: an example has fewer outputs than there are
    parameters, and meets no other."""
    unflatten = ravel_pytree(like)[1]

    def outputs(flat: Array, example: Chunk) -> Array:
        alone: Chunk = jax.tree.map(lambda leaf: leaf[None], example)
        return kind.outputs(unflatten(flat), alone).ravel()

    def add(sums: Any, chunk: Chunk) -> tuple[Any, None]:
        labels = (chunk.labels * chunk.weight[..., None]).ravel()
        residual = labels - jax.vmap(outputs, (None, 0))(flat, chunk).ravel()
        rows = jax.vmap(jax.jacrev(outputs), (None, 0))(flat, chunk).reshape(-1, flat.size)
        found = rows.T @ rows, rows.T @ residual, jnp.sum(residual**2)
        return jax.tree.map(jnp.add, sums, found), None

    zeros = jnp.zeros((flat.size, flat.size)), jnp.zeros(flat.size), jnp.zeros(())
    return jax.lax.scan(add, zeros, pieces)[0]


@partial(compiled, static_argnums=3)
def _curvature(
    flat: Float[Array, " p"], step: Float[Array, " p"], pieces: Chunk, kind: Any, like: Params
) -> Float[Array, " p"]:
    """J^T F'', of the second derivative of outputs along a step."""
    unflatten = ravel_pytree(like)[1]

    def add(total: Array, chunk: Chunk) -> tuple[Array, None]:
        def outputs(flat: Array) -> Array:
            found: Array = kind.outputs(unflatten(flat), chunk)
            return found

        def slope(flat: Array) -> Array:
            return jax.jvp(outputs, (flat,), (step,))[1]

        second = jax.jvp(slope, (flat,), (step,))[1]
        return total + jax.vjp(outputs, flat)[1](second)[0], None

    return jax.lax.scan(add, jnp.zeros(flat.size), pieces)[0]


@partial(compiled, static_argnums=2)
def _squared(
    flat: Float[Array, " p"], pieces: Chunk, kind: Parametrisation, like: Params
) -> Float[Array, ""]:
    unflatten = ravel_pytree(like)[1]

    def add(total: Array, chunk: Chunk) -> tuple[Array, None]:
        labels = chunk.labels * chunk.weight[..., None]
        return total + jnp.sum((labels - kind.outputs(unflatten(flat), chunk)) ** 2), None

    return jax.lax.scan(add, jnp.zeros(()), pieces)[0]
