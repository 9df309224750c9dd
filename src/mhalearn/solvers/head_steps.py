"""Gauss-Newton steps of projected heads, by conjugate gradients that begin with J^T J of a part.

Biases and slow rotations are hardly seen beside the rest, and plain conjugate gradients do not come
to them. J^T J of a few times the counting limit of examples, formed once and factored, makes the
equations of all examples well conditioned, so that some ten products solve them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jax.flatten_util import ravel_pytree

from mhalearn._runtime.devices import replicate
from mhalearn._runtime.programs import compiled, in_float64
from mhalearn._runtime.types import Array, Float64
from mhalearn.layer.batches import Chunk
from mhalearn.layer.parametrisation import Parametrisation, Params
from mhalearn.run.run import Run
from mhalearn.solvers.damping import IDLE, IDLE_STEPS, ROUNDING, update_damping
from mhalearn.solvers.head_normal_matrix import has_separate_heads, head_normal_matrix
from mhalearn.solvers.normal_equations import curvature, descent_direction
from mhalearn.solvers.scaled_problem import Problem

# Parameters up to which J^T J is formed and factored: 288 MiB.
MAX_PARAMETERS = 6144
# Times the counting limit of examples that J^T J is formed of.
_ENOUGH = 8.0
# Products for a step at most, and those from which on J^T J is formed anew.
_MOST_PRODUCTS, _MANY_PRODUCTS = 120, 60
# Steps that are rejected, one after the other, at most: each is damped twenty times as much.
_MOST_REJECTED = 8
# Damping, in units of the diagonal of J^T J, over the loss: small beside what is weakly seen, and
# yet convergence stays quadratic (Fan & Yuan 2005). The least of all keeps rounding from moving the
# gauge, on which steps would not be small; a larger one keeps the gauge out of the factor.
_DAMPING, _LEAST, _LEAST_IN_FACTOR = 1e-2, 1e-14, 1e-12
# Of what rounding leaves, the share to which a last step is solved.
_BELOW = 0.1
# Times a factor's damping up to which it serves for steps that are damped more.
_STALE = 100.0


class Descended(NamedTuple):
    """Parameters, their loss, and whether descent ended because nothing improved."""

    params: Params
    loss: float
    converged: bool


def may_form_normal_matrix(problem: Problem) -> bool:
    """Whether the heads' normal matrix is at hand, and not too large."""
    kind = problem.parametrisation
    return has_separate_heads(kind) and problem.devices == 1 and kind.size() <= MAX_PARAMETERS


@in_float64
def descend_with_normal_matrix(
    params: Params,
    problem: Problem,
    run: Run,
    *,
    stage: str,
    max_steps: int = 40,
    enough: float = ROUNDING,
) -> Descended:
    """Damped steps until nothing improves, or the loss is below what is enough.

    Cost: that of `head_normal_matrix` and of a Cholesky factor, once or twice; some ten products a
    step. Trust: the loss never rises.
    """
    kind, data, energy = problem.parametrisation, problem.data, problem.energy
    params = {name: jnp.asarray(leaf) for name, leaf in params.items()}
    flat, unflatten = ravel_pytree(params)
    normal: _NormalMatrix | None = None
    factor: _Factor | None = None
    damping, idle, rejected, loss = 1.0, 0, 0, math.inf
    downhill, squared = replicate(_downhill(params, data, kind))
    for step in range(max_steps):
        right, loss = np.asarray(ravel_pytree(downhill)[0]), float(squared) / energy
        if loss < enough or run.is_over():
            break
        relative = max(damping * _DAMPING * min(1.0, loss), _LEAST * max(1.0, damping))
        if normal is None:
            normal, factor = _form(params, problem), None
        if factor is None or relative > _STALE * factor.damping:
            factor = _factorise(normal, relative)
        shift = relative * factor.diagonal

        def apply(step: Float64, params: Params = params, shift: Float64 = shift) -> Float64:
            product = replicate(_product(params, jnp.asarray(step), data, kind))
            return np.asarray(product) + shift * step

        # Fast convergence at the least price: as exact as the residual is small, and no more than
        # takes it below rounding.
        least = _BELOW * math.sqrt(ROUNDING / loss)
        tolerance = min(max(math.sqrt(loss), least), 1e-2)
        found, products = _solve(apply, factor.solve, right, tolerance)
        trial = unflatten(flat + jnp.asarray(found))
        there = replicate(_downhill(trial, data, kind))
        after = float(there[1]) / energy
        predicted = float(found @ right + found @ (shift * found)) / energy
        gain = loss - after
        ratio = gain / predicted if predicted > 0 else -1.0
        damping = float(update_damping(damping, ratio, np))
        if gain > 0:
            params, flat, (downhill, squared) = trial, flat + jnp.asarray(found), there
        rejected = 0 if gain > 0 else rejected + 1
        idle = 0 if gain > IDLE * loss or rejected else idle + 1
        loss = min(loss, after) if math.isfinite(after) else loss
        run.emit(stage, step, loss, at_hand=partial(problem.to_layer, params))
        if loss < enough or idle >= IDLE_STEPS or rejected > _MOST_REJECTED:
            break
        if rejected:  # as a rule the gauge moved; and what the factor has not got is no gain
            damping = max(damping, _LEAST_IN_FACTOR / _LEAST)
        elif products >= _MANY_PRODUCTS:
            normal = None
    return Descended(params, loss, math.isfinite(loss) and not run.is_over())


class _NormalMatrix(NamedTuple):
    """J^T J of a part of the examples, in units of its diagonal, scaled to all of them."""

    matrix: Float64
    root: Float64  # one over the root of the diagonal


class _Factor(NamedTuple):
    """Of such a matrix, damped."""

    lower: Float64
    root: Float64
    damping: float

    @property
    def diagonal(self) -> Float64:
        return self.root**-2

    def solve(self, right: Float64) -> Float64:
        return self.root * np.asarray(
            scipy.linalg.cho_solve((self.lower, True), self.root * right, check_finite=False)
        )


def _form(params: Params, problem: Problem) -> _NormalMatrix:
    a = problem.architecture
    n = problem.count_sequences()
    few = min(n, math.ceil(_ENOUGH * a.counting_limit(problem.k)))
    matrix = head_normal_matrix(params, problem, few)
    matrix *= n / few
    diagonal = np.maximum(np.diag(matrix), 1e-18 * max(float(np.trace(matrix)), 1e-300))
    root = 1 / np.sqrt(diagonal)
    matrix *= root[:, None] * root
    return _NormalMatrix(matrix, root)


def _factorise(normal: _NormalMatrix, damping: float) -> _Factor:
    shift = max(damping, _LEAST_IN_FACTOR)
    while True:
        shifted = normal.matrix.copy()
        shifted[np.diag_indices(len(shifted))] += shift
        try:
            lower = scipy.linalg.cholesky(shifted, lower=True, overwrite_a=True, check_finite=False)
        except np.linalg.LinAlgError:
            shift *= 10  # rounding of a gauge direction
            continue
        return _Factor(lower, normal.root, shift)


def _solve(
    apply: Callable[[Float64], Float64],
    inverse: Callable[[Float64], Float64],
    right: Float64,
    tolerance: float,
) -> tuple[Float64, int]:
    """Conjugate gradients from zero, and how many products they took.

    The residual is measured in the norm of the preconditioner, in which weak directions count.
    """
    found, left = np.zeros_like(right), right.copy()
    solved = inverse(left)
    along, size = solved, float(left @ solved)
    target = tolerance**2 * size
    for done in range(_MOST_PRODUCTS):
        if not size > target:
            return found, done
        product = apply(along)
        curved = float(along @ product)
        if not curved > 0:
            return found, done
        found, left = found + size / curved * along, left - size / curved * product
        solved = inverse(left)
        after = float(left @ solved)
        along, size = solved + after / size * along, after
    return found, _MOST_PRODUCTS


@partial(compiled, static_argnums=2)
def _downhill(params: Params, data: Chunk, kind: Parametrisation) -> tuple[Params, Array]:
    return descent_direction(kind, params, data)


@partial(compiled, static_argnums=3)
def _product(params: Params, step: Array, data: Chunk, kind: Parametrisation) -> Array:
    return curvature(kind, params, data)(step)
