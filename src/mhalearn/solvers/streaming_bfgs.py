"""Least squares over examples that do not fit into memory, from a fit to a part of them."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jax.flatten_util import ravel_pytree

from mhalearn._runtime.devices import replicate
from mhalearn._runtime.programs import compiled, in_float64
from mhalearn._runtime.threads import one_lapack_thread
from mhalearn._runtime.types import Array, Float, Float64
from mhalearn.data import Examples
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.attention import fit_projections
from mhalearn.layer.base import Layer
from mhalearn.layer.batches import ROOM, Chunk, make_chunk
from mhalearn.layer.dense import DenseHeads
from mhalearn.layer.parametrisation import Parametrisation, Params
from mhalearn.run.run import Run
from mhalearn.solvers.normal_equations import curvature
from mhalearn.solvers.scaled_problem import Problem, make_problem
from mhalearn.solvers.variable_projection import (
    DENSE_LIMIT,
    ReducedNormal,
    heads_first,
    query_first,
    reduced_normal_matrix,
)

# Passes at most, and the distance from the minimum, in standard deviations of the estimate, that is
# near enough.
_PASSES = 20
_NEAR = 1e-2
_MOST_EXAMPLES = 1024  # in a chunk
# An eigenvalue this far below the largest is rounding: the part does not see that direction.
_NULL = 1e-12


class _Sums(NamedTuple):
    """What a pass collects at a layer, with r = Y - F."""

    slope: Float[Array, " p"]  # J^T r, in all parameters
    loss: Float[Array, ""]  # |r|^2
    energy: Float[Array, ""]  # |Y|^2


@in_float64
def fit_streamed(
    layer: Layer,
    examples: Examples,
    part: Examples,
    architecture: Architecture,
    run: Run,
) -> Any:
    """The least-squares layer of all examples, near one that fits a random part of them.

    Quasi-Newton steps with the gradient of all examples, a pass each, that begin with the normal
    matrix of `part` in proportion and correct it by what the gradients show (BFGS): it is wrong by
    some sqrt(unknowns / scalars of the part), and by more in a few directions.
    None: the matrix is too large (above `DENSE_LIMIT`), or the steps did not converge.
    Cost: a forward and a backward pass over all examples a step, mostly five to ten, and on the
    part `reduced_normal_matrix`, or where nothing is eliminated four forward passes a parameter.
    Memory: that of the part's problem.
    Trust: a stationary point to a hundredth of a standard deviation of the estimate.
    """
    problem = make_problem(part, architecture.with_heads(layer.n_heads).parametrisation())
    at = problem.parametrisation.from_layer(layer, problem.units)
    at = jax.tree.map(jnp.asarray, at)
    here, unflatten = ravel_pytree(at)
    if (at.theta.size if isinstance(at, DenseHeads) else here.size) > DENSE_LIMIT:
        return None
    solve = _solve_reduced(at, problem) if isinstance(at, DenseHeads) else _solve_joint(at, problem)
    rows, pairs = examples.rows, list[_Pair]()
    before: tuple[Float64, Float64] | None = None
    for number in range(_PASSES):
        sums = _collect(unflatten(here), examples, problem)
        place, slope = np.asarray(here), np.asarray(sums.slope)
        if before is not None and (place - before[0]) @ (before[1] - slope) > 0:
            pairs.append(_Pair(place - before[0], before[1] - slope))
        before = place, slope
        step = _corrected(slope, pairs, lambda flat: solve(flat) * (problem.rows / rows))
        variance = float(sums.loss) / (rows * problem.out_dim)
        distance = float(np.sqrt(np.maximum(step @ slope, 0.0) / max(variance, 1e-300)))
        run.emit(
            "refit",
            number,
            float(sums.loss / sums.energy),
            detail=f"{distance:.1g} standard deviations from the minimum over all examples",
        )
        if distance <= _NEAR:
            return problem.to_layer(unflatten(here))
        if not np.isfinite(distance) or run.is_over():
            return None
        here = here + jnp.asarray(step)
    return None


class _Pair(NamedTuple):
    """A step, and how much the gradient fell along it."""

    step: Float64
    fall: Float64


def _corrected(slope: Float64, pairs: list[_Pair], solve: Callable[[Float64], Float64]) -> Float64:
    """The BFGS step: `solve` corrected by the pairs (Nocedal's two loops)."""
    shares = []
    for step, fall in reversed(pairs):
        shares.append((step @ slope) / (step @ fall))
        slope = slope - shares[-1] * fall
    found = solve(slope)
    for (step, fall), share in zip(pairs, reversed(shares), strict=True):
        found = found + (share - (fall @ found) / (step @ fall)) * step
    return found


def _solve_reduced(at: DenseHeads, problem: Problem) -> Callable[[Float64], Float64]:
    """Solve the part's normal equations, W eliminated, for any right side."""
    theta, w = at
    normal = replicate(_reduced(theta, w, problem.data))
    coupling, chol = np.asarray(normal.coupling), np.asarray(normal.chol)
    m, size = len(theta), theta.size
    schur = np.asarray(normal.schur)
    root = 1 / np.sqrt(np.diag(schur))
    factor = scipy.linalg.cho_factor(root[:, None] * schur * root + 1e-12 * np.eye(size))

    def solve(flat: Float64) -> Float64:
        of_theta = jnp.asarray(flat[:size]).reshape(theta.shape)
        of_w = flat[size:].reshape(w.shape)
        half = scipy.linalg.solve_triangular(chol, of_w, lower=True)
        absorbed = np.einsum("qmpe,pe->qm", coupling, half)
        right = (np.asarray(query_first(of_theta)) - absorbed).ravel()
        by_theta = (root * scipy.linalg.cho_solve(factor, root * right)).reshape(coupling.shape[:2])
        left = half - np.einsum("qmpe,qm->pe", coupling, by_theta)
        by_w = scipy.linalg.solve_triangular(chol, left, lower=True, trans="T")
        back = np.asarray(heads_first(jnp.asarray(by_theta), m))
        return np.concatenate([back.ravel(), by_w.ravel()])

    return solve


@jax.jit
def _reduced(theta: Float[Array, "m q d"], w: Float[Array, "p e"], data: Chunk) -> ReducedNormal:
    return reduced_normal_matrix(
        theta, fit_projections(theta, data, jnp.zeros(()))._replace(w=w), data
    )


def _solve_joint(at: Params, problem: Problem) -> Callable[[Float64], Float64]:
    """Solve the part's normal equations in all parameters, of which the gauge stays as it is."""
    kind = problem.parametrisation
    normal = np.asarray(replicate(_joint(at, problem.data, kind, problem.devices)))
    with one_lapack_thread():
        root = 1 / np.sqrt(np.maximum(np.diag(normal), 1e-18 * max(np.trace(normal), 1e-300)))
        values, basis = scipy.linalg.eigh(root[:, None] * normal * root)
    gauge = kind.size() - kind.count()
    kept = values[gauge:] > _NULL * values[-1]
    half = root[:, None] * (basis[:, gauge:][:, kept] / np.sqrt(values[gauge:][kept]))
    return lambda flat: half @ (half.T @ flat)


@partial(compiled, static_argnums=(2, 3))
def _joint(at: Params, data: Chunk, kind: Parametrisation, devices: int) -> Float[Array, "p p"]:
    return jax.lax.map(curvature(kind, at, data, devices), jnp.eye(kind.size()))


def _collect(at: Params, examples: Examples, problem: Problem) -> _Sums:
    """One pass; memory of a chunk."""
    total: _Sums | None = None
    for chunk in _chunks(examples, problem):
        sums = _sums(at, chunk, problem.parametrisation)
        total = sums if total is None else jax.tree.map(jnp.add, total, sums)
    assert total is not None
    return total


@partial(compiled, static_argnums=2)
def _sums(at: Params, chunk: Chunk, kind: Parametrisation) -> _Sums:
    labels = chunk.labels * chunk.weight[..., None]
    wrong = labels - kind.outputs(at, chunk)
    slope = kind.vjp(at, kind.linearise(at, chunk), chunk, wrong)
    return _Sums(ravel_pytree(slope)[0], jnp.sum(wrong**2), jnp.sum(labels**2))


def _chunks(examples: Examples, problem: Problem) -> Iterator[Chunk]:
    """All examples in the units of the problem, in chunks of one shape."""
    k, d, e = examples.k, examples.d, examples.out_dim
    n_heads = problem.architecture.heads
    size = max(1, min(_MOST_EXAMPLES, examples.n, ROOM // (k * n_heads * (k + e + 2 * d))))
    for x, y, lengths in examples.chunks(size):
        yield make_chunk(
            x / problem.units.x_scale,
            lengths,
            key_vector=problem.bias,
            out_bias=problem.bias,
            causal=problem.architecture.causal,
            labels=y / problem.units.y_scale,
            size=size,
            columns=examples.columns,
        )
