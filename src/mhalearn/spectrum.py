"""How well data determine a layer: the spectrum of its normal matrices, and its error bars."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg

from mhalearn._types import Array, Float
from mhalearn.attention import Chunk, LinearFit, attend, design, in_float64, total
from mhalearn.examples import Examples
from mhalearn.layer import AttentionLayer, Float64
from mhalearn.normal import dense
from mhalearn.problem import Problem, make_problem
from mhalearn.threads import one_lapack_thread

# Attention unknowns up to which the whole spectrum is computed (a dense matrix of 128 MiB).
DENSE_LIMIT = 4096
# An eigenvalue this far below the largest is rounding: the data do not see that direction.
NULL = 1e-12
# The same for a head's mean square sensitivity, against that of a head without a softmax.
_ROUNDED = 1e-18


@dataclass(frozen=True)
class Parameters:
    """A number for each parameter of a layer, in the layer's shapes."""

    theta: Float64
    w: Float64
    key_vector: Float64 | None
    out_bias: Float64 | None


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues, ascending, of scaled normal matrices.

    theta: of the Schur complement left when W is eliminated, in units where each head's block of
    J^T J has mean diagonal one (or less, where it is rounding); w: of the design's Gram matrix,
    which is the same for each of the output columns.
    deviations: standard deviation of each parameter's estimate for label noise of deviation one;
    infinite where a parameter touches a null direction.
    token_size: root mean square of the tokens' features, to the nearest power of two.
    """

    theta: Float64
    w: Float64
    null_dimension: int
    deviations: Parameters
    token_size: float


class _Moments(NamedTuple):
    schur: Float[Array, "qmd qmd"]
    coupling: Float[Array, "q md p e"]
    chol: Float[Array, "p p"]
    gram: Float[Array, "p p"]


@jax.jit
def _moments(theta: Float[Array, "m q d"], w: Float[Array, "p e"], data: Chunk) -> _Moments:
    def gram_of(chunk: Chunk) -> Array:
        v = design(attend(theta, chunk), chunk)
        return jnp.einsum("brp,brs->ps", v, v)

    gram = total(gram_of, data)
    lifted = gram + 1e-14 * jnp.trace(gram) / len(gram) * jnp.eye(len(gram))
    normal = dense(theta, LinearFit(w, lifted, jnp.zeros(())), data)
    return _Moments(normal.schur, normal.coupling, normal.chol, gram)


@in_float64
def measure_spectrum(layer: AttentionLayer, examples: Examples) -> Spectrum | None:
    """The spectrum of a layer's normal matrices on the given inputs; None above `DENSE_LIMIT`.

    Labels are not looked at. Cost: O(n k (q m d)(m d)(q + e) + (q m d)^3).
    Trust: numerical rank is evidence of local identifiability, not a proof of it.
    """
    bias = layer.key_vector is not None or layer.out_bias is not None
    unknowns = layer.n_heads * (layer.d + bias) * layer.d
    if unknowns > DENSE_LIMIT:
        return None
    problem = make_problem(examples, layer.n_heads, bias=bias, causal=layer.causal)
    theta = problem.theta(layer)
    moments = jax.tree.map(
        np.asarray, _moments(jnp.asarray(theta), jnp.asarray(problem.w(layer)), problem.data)
    )
    with one_lapack_thread():
        return _decompose(moments, problem, layer)


def _decompose(moments: _Moments, problem: Problem, layer: AttentionLayer) -> Spectrum:
    m, q, d = layer.n_heads, problem.query_dim, problem.d
    # J^T J before W was eliminated: what is left must be measured against what there was, or
    # rounding would pass for a small but regular matrix.
    diagonal = np.diag(moments.schur) + np.sum(moments.coupling**2, axis=(2, 3)).ravel()
    per_head = diagonal.reshape(q, m, d).mean(axis=(0, 2))
    # The covariance of nearly equal tokens is rounding too, though nothing is eliminated.
    energy = problem.rows * np.sum(problem.w(layer)[: m * d].reshape(m, -1) ** 2, axis=1)
    floor = np.maximum(_ROUNDED * energy, 1e-13 * per_head.max()) + 1e-300
    root = np.tile(np.repeat(1 / np.sqrt(np.maximum(per_head, floor)), d), q)
    scaled = root[:, None] * moments.schur * root[None, :]
    gram_diagonal = np.sqrt(np.maximum(np.diag(moments.gram), 1e-300))
    w_values = scipy.linalg.eigvalsh(moments.gram / np.outer(gram_diagonal, gram_diagonal))
    w_null = _null_count(w_values)
    theta_values = scipy.linalg.eigvalsh(scaled)
    theta_null = _null_count(theta_values)
    if theta_null == 0:
        half = scipy.linalg.solve_triangular(
            np.linalg.cholesky(scaled), np.eye(len(scaled)), lower=True
        ).T
        open_directions = half[:, :0]
    else:
        values, basis = scipy.linalg.eigh(scaled)
        half = basis[:, theta_null:] / np.sqrt(values[theta_null:])
        open_directions = basis[:, :theta_null]
    of_theta, of_w = _variances(moments, root[:, None] * half, root[:, None] * open_directions)
    if w_null:
        of_theta[:], of_w[:] = np.inf, np.inf
    deviations = _in_user_units(np.sqrt(of_theta).reshape(q, m, d), np.sqrt(of_w), problem, layer)
    null = theta_null + w_null * layer.out_dim
    return Spectrum(theta_values, w_values, null, deviations, problem.x_scale)


def _null_count(values: Float64) -> int:
    """Eigenvalues at rounding, of a matrix scaled to a mean diagonal near one or below."""
    return int(np.sum(values <= NULL * max(float(values[-1]), 1.0)))


def _variances(
    moments: _Moments, half: Float64, open_directions: Float64
) -> tuple[Float64, Float64]:
    """Diagonal of the inverse of the full normal matrix, block by block, with S^-1 = half half^T.

    Var(Theta) = S^-1 and Var(W column c) = G^-1 + A_c S^-1 A_c^T with A_c = G^-1 V^T J_c.
    """
    q, md, width, e = moments.coupling.shape
    back = scipy.linalg.solve_triangular(
        moments.chol.T, moments.coupling.transpose(2, 3, 0, 1).reshape(width, -1), lower=False
    ).reshape(width * e, q * md)
    inverse_root = scipy.linalg.solve_triangular(moments.chol, np.eye(width), lower=True)
    of_theta = np.sum(half**2, axis=1)
    of_w = np.sum((back @ half) ** 2, axis=1) + np.repeat(np.sum(inverse_root**2, axis=0), e)
    for variances, moved in ((of_theta, open_directions), (of_w, back @ open_directions)):
        reach = np.sum(moved**2, axis=1)
        variances[reach > 1e-10 * max(float(reach.max()), 1e-300)] = np.inf
    return of_theta, of_w.reshape(width, e)


def _in_user_units(
    theta: Float64, w: Float64, problem: Problem, layer: AttentionLayer
) -> Parameters:
    m, d = layer.n_heads, layer.d
    by_query, x, y = theta.transpose(1, 0, 2), problem.x_scale, problem.y_scale
    return Parameters(
        theta=by_query[:, :d] / (x**2 * y),
        w=w[: m * d].reshape(m, d, -1) / x,
        key_vector=by_query[:, d] / (x * y) if problem.bias else None,
        out_bias=w[m * d] if problem.bias else None,
    )
