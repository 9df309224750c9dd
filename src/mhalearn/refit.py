"""Least squares over examples that do not fit into memory, from a fit to a part of them."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg

from mhalearn._types import Array, Float
from mhalearn.attention import (
    ROOM,
    Chunk,
    attend,
    design,
    fit_projections,
    in_float64,
    pull,
    stacked_heads,
    tangent,
)
from mhalearn.examples import Examples
from mhalearn.layer import AttentionLayer, Float64, make_chunk
from mhalearn.normal import Normal, dense, heads_first, query_first, tangent_projection
from mhalearn.outcome import Trace
from mhalearn.problem import Problem, make_problem
from mhalearn.spectrum import DENSE_LIMIT

# Passes at most, and the distance from the minimum, in standard deviations of the estimate, that is
# near enough.
_PASSES = 12
_NEAR = 1e-2
_MOST_EXAMPLES = 1024  # in a chunk


class _Sums(NamedTuple):
    """What a pass collects at a layer, with r = Y - F."""

    theta: Float[Array, "m q d"]  # J^T r
    w: Float[Array, "p e"]  # V^T r
    loss: Float[Array, ""]  # |r|^2
    energy: Float[Array, ""]  # |Y|^2


@in_float64
def refit(
    layer: AttentionLayer,
    examples: Examples,
    part: Examples,
    trace: Trace,
    *,
    head_dim: int | None,
) -> AttentionLayer | None:
    """The least-squares layer of all examples, near one that fits a random part of them.

    Newton's steps with the gradient of all examples, a pass each, and the normal matrix of `part`
    in proportion. Matrices of a random part differ from those of all by some sqrt(unknowns /
    scalars of the part), and each step leaves about that share of the way.
    None: the matrix is too large (above `DENSE_LIMIT`), or the steps did not converge.
    Cost: a forward and a backward pass over all examples a step, mostly four steps, and
    `normal.dense` on the part. Memory: that of the part's problem.
    Trust: a stationary point to a hundredth of a standard deviation of the estimate.
    """
    bias = layer.out_bias is not None
    problem = make_problem(part, layer.n_heads, bias=bias, causal=layer.causal)
    theta, w = jnp.asarray(problem.theta(layer)), jnp.asarray(problem.w(layer))
    if theta.size > DENSE_LIMIT:
        return None
    rows = examples.rows
    solve = _solver(theta, w, problem, head_dim)
    distance = np.inf
    for number in range(_PASSES):
        sums = _collect(theta, w, examples, problem)
        by_theta, by_w = (step * (problem.rows / rows) for step in solve(sums))
        gain = float(jnp.vdot(sums.theta, by_theta) + jnp.vdot(sums.w, by_w))
        variance = float(sums.loss) / (rows * problem.out_dim)
        before, distance = distance, float(np.sqrt(max(gain, 0.0) / max(variance, 1e-300)))
        trace.emit(
            "refit",
            number,
            float(sums.loss / sums.energy),
            detail=f"{distance:.1g} standard deviations from the minimum over all examples",
        )
        if distance <= _NEAR:
            return problem.layer(np.asarray(theta), np.asarray(w))
        if not distance < before or trace.expired:
            return None
        theta = tangent_projection(theta, head_dim).retract(theta + by_theta)
        w = w + by_w
    return None


def _solver(
    theta: Array, w: Array, problem: Problem, head_dim: int | None
) -> Callable[[_Sums], tuple[Array, Array]]:
    """Solve the part's normal equations for any right side; heads keep their rank."""
    normal = _normal(theta, w, problem.data)
    m, size = len(theta), theta.size
    schur = np.asarray(normal.schur)
    inside = _projector(theta, head_dim)
    if inside is not None:  # beside the tangent space nothing moves
        schur = inside @ schur @ inside + np.diag(schur).mean() * (np.eye(size) - inside)
    root = 1 / np.sqrt(np.diag(schur))
    factor = scipy.linalg.cho_factor(root[:, None] * schur * root + 1e-12 * np.eye(size))

    def solve(sums: _Sums) -> tuple[Array, Array]:
        half = jax.scipy.linalg.solve_triangular(normal.chol, sums.w, lower=True)
        absorbed = jnp.einsum("qmpe,pe->qm", normal.coupling, half)
        right = np.asarray(query_first(sums.theta) - absorbed).ravel()
        right = right if inside is None else inside @ right
        flat = jnp.asarray(root * scipy.linalg.cho_solve(factor, root * right))
        flat = flat.reshape(theta.shape[1], -1)
        left = half - jnp.einsum("qmpe,qm->pe", normal.coupling, flat)
        by_w = jax.scipy.linalg.solve_triangular(normal.chol, left, lower=True, trans="T")
        return heads_first(flat, m), by_w

    return solve


@jax.jit
def _normal(theta: Float[Array, "m q d"], w: Float[Array, "p e"], data: Chunk) -> Normal:
    return dense(theta, fit_projections(theta, data, jnp.zeros(()))._replace(w=w), data)


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
    v, labels = design(pattern, chunk), chunk.labels * chunk.weight[..., None]
    wrong = labels - v @ w
    at = tangent(pattern.p, stacked_heads(w, m, d), chunk)
    by_w = jnp.einsum("brp,bre->pe", v, wrong)
    return _Sums(pull(at, chunk, wrong), by_w, jnp.sum(wrong**2), jnp.sum(labels**2))


def _chunks(examples: Examples, problem: Problem, n_heads: int) -> Iterator[Chunk]:
    """All examples in the units of the problem, in chunks of one shape."""
    k, d, e = examples.k, examples.d, examples.out_dim
    size = max(1, min(_MOST_EXAMPLES, examples.n, ROOM // (k * n_heads * (k + e + 2 * d))))
    for x, y, lengths in examples.chunks(size):
        yield make_chunk(
            x / problem.x_scale,
            lengths,
            key_vector=problem.bias,
            out_bias=problem.bias,
            causal=problem.causal,
            labels=y / problem.y_scale,
            size=size,
        )
