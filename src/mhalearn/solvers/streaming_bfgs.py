"""Least squares over examples that do not fit into memory, from a fit to a part of them."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg

from mhalearn._runtime.devices import replicate
from mhalearn._runtime.programs import in_float64
from mhalearn._runtime.types import Array, Float, Float64
from mhalearn.data import Examples
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.attention import (
    attend,
    design_matrix,
    fit_projections,
    stacked_heads,
    tangent,
    vjp,
)
from mhalearn.layer.batches import ROOM, Chunk, make_chunk
from mhalearn.layer.dense import Dense, truncate
from mhalearn.layer.layer import AttentionLayer
from mhalearn.run.run import Run
from mhalearn.solvers.scaled_problem import Problem, make_problem
from mhalearn.solvers.variable_projection import (
    DENSE_LIMIT,
    ReducedNormal,
    heads_first,
    query_first,
    reduced_normal_matrix,
    tangent_projection,
)

# Passes at most, and the distance from the minimum, in standard deviations of the estimate, that is
# near enough.
_PASSES = 20
_NEAR = 1e-2
_MOST_EXAMPLES = 1024  # in a chunk


class _Sums(NamedTuple):
    """What a pass collects at a layer, with r = Y - F."""

    theta: Float[Array, "m q d"]  # J^T r
    w: Float[Array, "p e"]  # V^T r
    loss: Float[Array, ""]  # |r|^2
    energy: Float[Array, ""]  # |Y|^2


@in_float64
def fit_streamed(
    layer: AttentionLayer,
    examples: Examples,
    part: Examples,
    architecture: Architecture,
    run: Run,
) -> AttentionLayer | None:
    """The least-squares layer of all examples, near one that fits a random part of them.

    Quasi-Newton steps with the gradient of all examples, a pass each, that begin with the normal
    matrix of `part` in proportion and correct it by what the gradients show (BFGS): it is wrong by
    some sqrt(unknowns / scalars of the part), and by more in a few directions.
    None: the matrix is too large (above `DENSE_LIMIT`), or the steps did not converge.
    Cost: a forward and a backward pass over all examples a step, mostly five to ten, and
    `normal.dense` on the part. Memory: that of the part's problem.
    Trust: a stationary point to a hundredth of a standard deviation of the estimate.
    """
    head_dim = architecture.head_dim
    problem = make_problem(part, Dense(architecture.with_heads(layer.n_heads)))
    theta, w = jnp.asarray(problem.theta(layer)), jnp.asarray(problem.w(layer))
    if theta.size > DENSE_LIMIT:
        return None
    rows = examples.rows
    solve, pairs = _solver(theta, w, problem, head_dim), list[_Pair]()
    before: tuple[Float64, Float64] | None = None
    for number in range(_PASSES):
        sums = _collect(theta, w, examples, problem)
        here, slope = _flat(theta, w), _flat(sums.theta, sums.w)
        if before is not None and (here - before[0]) @ (before[1] - slope) > 0:
            pairs.append(_Pair(here - before[0], before[1] - slope))
        before = here, slope
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
            return problem.layer(np.asarray(theta), np.asarray(w))
        if not np.isfinite(distance) or run.is_over():
            return None
        moved = theta + jnp.asarray(step[: theta.size]).reshape(theta.shape)
        theta = moved if head_dim is None else truncate(moved, head_dim)
        w = w + jnp.asarray(step[theta.size :]).reshape(w.shape)
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


def _flat(theta: Array, w: Array) -> Float64:
    return np.concatenate([np.asarray(theta).ravel(), np.asarray(w).ravel()])


def _solver(
    theta: Array, w: Array, problem: Problem, head_dim: int | None
) -> Callable[[Float64], Float64]:
    """Solve the part's normal equations for any right side; heads keep their rank."""
    normal = replicate(_normal(theta, w, problem.data))
    coupling, chol = np.asarray(normal.coupling), np.asarray(normal.chol)
    m, size = len(theta), theta.size
    schur = np.asarray(normal.schur)
    inside = _projector(theta, head_dim)
    if inside is not None:  # beside the tangent space nothing moves
        schur = inside @ schur @ inside + np.diag(schur).mean() * (np.eye(size) - inside)
    root = 1 / np.sqrt(np.diag(schur))
    factor = scipy.linalg.cho_factor(root[:, None] * schur * root + 1e-12 * np.eye(size))

    def solve(flat: Float64) -> Float64:
        of_theta = jnp.asarray(flat[:size]).reshape(theta.shape)
        of_w = flat[size:].reshape(w.shape)
        half = scipy.linalg.solve_triangular(chol, of_w, lower=True)
        absorbed = np.einsum("qmpe,pe->qm", coupling, half)
        right = (np.asarray(query_first(of_theta)) - absorbed).ravel()
        right = right if inside is None else inside @ right
        by_theta = (root * scipy.linalg.cho_solve(factor, root * right)).reshape(coupling.shape[:2])
        left = half - np.einsum("qmpe,qm->pe", coupling, by_theta)
        by_w = scipy.linalg.solve_triangular(chol, left, lower=True, trans="T")
        return _flat(heads_first(jnp.asarray(by_theta), m), jnp.asarray(by_w))

    return solve


@jax.jit
def _normal(theta: Float[Array, "m q d"], w: Float[Array, "p e"], data: Chunk) -> ReducedNormal:
    return reduced_normal_matrix(
        theta, fit_projections(theta, data, jnp.zeros(()))._replace(w=w), data
    )


def _projector(theta: Array, head_dim: int | None) -> Float64 | None:
    """The matrix (q m d, q m d) of the projection on steps that keep the heads' rank."""
    if head_dim is None:
        return None
    m, q, _ = theta.shape
    project = tangent_projection(theta, head_dim)
    along = jax.vmap(lambda flat: query_first(project(heads_first(flat.reshape(q, -1), m))).ravel())
    return np.asarray(along(jnp.eye(theta.size)))


def _collect(theta: Array, w: Array, examples: Examples, problem: Problem) -> _Sums:
    """One pass; memory of a chunk."""
    total: _Sums | None = None
    for chunk in _chunks(examples, problem, len(theta)):
        sums = _sums(theta, w, chunk)
        total = sums if total is None else jax.tree.map(jnp.add, total, sums)
    assert total is not None
    return total


@jax.jit
def _sums(theta: Float[Array, "m q d"], w: Float[Array, "p e"], chunk: Chunk) -> _Sums:
    m, _, d = theta.shape
    pattern = attend(theta, chunk)
    v, labels = design_matrix(pattern, chunk), chunk.labels * chunk.weight[..., None]
    wrong = labels - v @ w
    at = tangent(pattern.p, stacked_heads(w, m, d), chunk)
    by_w = jnp.einsum("brp,bre->pe", v, wrong)
    return _Sums(vjp(at, chunk, wrong), by_w, jnp.sum(wrong**2), jnp.sum(labels**2))


def _chunks(examples: Examples, problem: Problem, n_heads: int) -> Iterator[Chunk]:
    """All examples in the units of the problem, in chunks of one shape."""
    k, d, e = examples.k, examples.d, examples.out_dim
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
        )
