"""How well data determine a layer: the spectrum of its normal matrices, and its error bars."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg

from mhalearn._runtime.devices import replicate
from mhalearn._runtime.programs import in_float64
from mhalearn._runtime.threads import one_lapack_thread
from mhalearn._runtime.types import Array, Float, Float64
from mhalearn.data import Examples
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.attention import LinearFit, attend, design_matrix
from mhalearn.layer.batches import Chunk
from mhalearn.layer.dense import Dense
from mhalearn.layer.layer import AttentionLayer
from mhalearn.solvers.scaled_problem import Problem, make_problem
from mhalearn.solvers.variable_projection import DENSE_LIMIT, reduced_normal_matrix

# An eigenvalue this far below the largest is rounding: the data do not see that direction.
NULL = 1e-12
# The same for a head's mean square sensitivity, against that of a head without a softmax.
_ROUNDED = 1e-18
_HUGE = 2.0**200
_EPS = 4 * float(np.finfo(np.float64).eps)


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

    theta: of the Schur complement left when W is eliminated, in units where J^T J has diagonal one
    (or less, where it is rounding); w: of the design's Gram matrix, likewise, which is the same for
    each of the output columns.
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
    square: Float[Array, "qmd qmd"]  # J^T J
    cross: Float[Array, "q md p e"]  # J^T V
    triangle: Float[Array, "r p"]  # R with R^T R = V^T V, which squares no rounding


@jax.jit
def _moments(theta: Float[Array, "m q d"], w: Float[Array, "p e"], data: Chunk) -> _Moments:
    width = len(w)

    def append(triangle: Array, chunk: Chunk) -> tuple[Array, None]:
        v = design_matrix(attend(theta, chunk), chunk).reshape(-1, width)
        return jnp.linalg.qr(jnp.concatenate([triangle, v]), mode="r"), None

    triangle, _ = jax.lax.scan(append, jnp.zeros((width, width)), data)
    # Beside a Gram matrix as large as this nothing is eliminated: powers of two round nothing.
    normal = reduced_normal_matrix(
        theta, LinearFit(w, _HUGE**2 * jnp.eye(width), jnp.zeros(())), data
    )
    return _Moments(normal.schur, _HUGE * normal.coupling, triangle)


@in_float64
def measure_spectrum(
    layer: AttentionLayer, examples: Examples, architecture: Architecture | None = None
) -> Spectrum | None:
    """The spectrum of a layer's normal matrices on the given inputs; None above `DENSE_LIMIT`.

    architecture: the class of layers considered, that of the layer unless given; only directions
    that keep the rank of Theta are looked at.
    Labels are not looked at. Cost: O(n k (q m d)(m d)(q + e) + (q m d)^3).
    Trust: numerical rank is evidence of local identifiability, not a proof of it.
    """
    architecture = architecture or layer.architecture
    if layer.n_heads * architecture.query_dim * layer.d > DENSE_LIMIT:
        return None
    problem = make_problem(examples, Dense(architecture.with_heads(layer.n_heads)))
    theta = problem.theta(layer)
    found = _moments(jnp.asarray(theta), jnp.asarray(problem.w(layer)), problem.data)
    moments = jax.tree.map(np.asarray, replicate(found))
    with one_lapack_thread():
        return _decompose(moments, problem, layer)


def _decompose(moments: _Moments, problem: Problem, layer: AttentionLayer) -> Spectrum:
    head_dim = problem.architecture.head_dim
    m, q, d = layer.n_heads, problem.query_dim, problem.d
    # What is left when W is eliminated must be measured against what there was, or rounding would
    # pass for a small but regular matrix.
    root = 1 / np.sqrt(np.maximum(np.diag(moments.square), _rounding(moments, problem, layer)))
    w_root = 1 / np.maximum(np.linalg.norm(moments.triangle, axis=0), 1e-150)
    _, singular, w_basis = scipy.linalg.svd(moments.triangle * w_root)
    singular, w_basis = singular[::-1], w_basis[::-1]
    w_values = singular**2
    w_null = _null_count(w_values)
    # G^+ = back back^T on what the design spans: lifting G would leave a run of what W absorbs.
    back = w_root[:, None] * (w_basis[w_null:].T / singular[w_null:])
    coupling = np.einsum("qmpe,pz->qmze", moments.cross, back)
    flat = root[:, None] * coupling.reshape(len(root), -1)
    scaled = root[:, None] * moments.square * root - flat @ flat.T
    directions = root[:, None]
    if head_dim is not None:
        tangent = _directions(problem.theta(layer), head_dim)
        along = scipy.linalg.qr(tangent / directions, mode="economic")[0]
        directions, scaled = directions * along, along.T @ scaled @ along
    theta_values = scipy.linalg.eigvalsh(scaled)
    # Rounding of V^T J is divided by the least singular value of V kept.
    theta_null = _null_count(theta_values, _EPS / singular[w_null:].min(initial=1.0))
    if theta_null == 0:
        half = scipy.linalg.solve_triangular(
            np.linalg.cholesky(scaled), np.eye(len(scaled)), lower=True
        ).T
        open_directions = half[:, :0]
    else:
        values, basis = scipy.linalg.eigh(scaled)
        half = basis[:, theta_null:] / np.sqrt(values[theta_null:])
        open_directions = basis[:, :theta_null]
    half, open_directions = (
        directions * part if head_dim is None else directions @ part
        for part in (half, open_directions)
    )
    of_theta, of_w = _variances(coupling, back, half, open_directions)
    if w_null:
        of_theta[:], of_w[:] = np.inf, np.inf
    deviations = _in_user_units(np.sqrt(of_theta).reshape(q, m, d), np.sqrt(of_w), problem, layer)
    null = theta_null + w_null * layer.out_dim
    return Spectrum(theta_values, w_values, null, deviations, problem.units.x_scale)


def _rounding(moments: _Moments, problem: Problem, layer: AttentionLayer) -> Float64:
    """The part of each diagonal entry of J^T J that rounding alone can make.

    The covariance of nearly equal tokens is rounding, and so is a head whose W is; both in
    proportion to the features they meet.
    """
    m, q, d = layer.n_heads, problem.query_dim, problem.d
    weight = problem.data.weight[..., None]
    squares = np.asarray(jnp.sum((problem.data.queries * weight) ** 2, axis=(0, 1, 2)))
    squares = squares / problem.rows
    squares = np.maximum(squares, _ROUNDED * squares.max())
    features = np.outer(squares, squares[:d])[:, None, :]
    w = problem.w(layer)[: m * d].reshape(m, d, -1)
    energy = problem.rows * np.einsum("b,mbe->m", squares[:d], w**2)
    diagonal = np.diag(moments.square).reshape(q, m, d) / np.maximum(features, 1e-300)
    strongest = diagonal.mean(axis=(0, 2)).max()
    floor = np.maximum(_ROUNDED * energy, 1e-13 * strongest)[None, :, None] * features
    return (floor + 1e-300).ravel()


def _directions(theta: Float64, head_dim: int) -> Float64:
    """A basis (q m d, r) of the directions in which heads (m, q, d) keep their rank.

    A head of less than that rank may move in any direction, to first order.
    """
    m, q, d = theta.shape
    columns = []
    for i in range(m):
        u, values, vt = np.linalg.svd(theta[i])
        full = values[head_dim - 1] > 1e-9 * values[0]
        for a, b in np.ndindex(q, d):
            if not full or a < head_dim or b < head_dim:
                direction = np.zeros((q, m, d))
                direction[:, i] = np.outer(u[:, a], vt[b])
                columns.append(direction.ravel())
    return np.stack(columns, axis=1)


def _null_count(values: Float64, noise: float = 0.0) -> int:
    """Eigenvalues at rounding, of a matrix scaled to a diagonal of one or below."""
    return int(np.sum(values <= max(NULL, noise) * max(float(values[-1]), 1.0)))


def _variances(
    coupling: Float64, back: Float64, half: Float64, open_directions: Float64
) -> tuple[Float64, Float64]:
    """Diagonal of the inverse of the full normal matrix, block by block, with S^-1 = half half^T.

    Var(Theta) = S^-1 and Var(W column c) = G^-1 + A_c S^-1 A_c^T with A_c = G^-1 V^T J_c.
    """
    q, md, _, e = coupling.shape
    follow = np.einsum("pz,qmze->peqm", back, coupling).reshape(-1, q * md)
    of_theta = np.sum(half**2, axis=1)
    of_w = np.sum((follow @ half) ** 2, axis=1) + np.repeat(np.sum(back**2, axis=1), e)
    for variances, moved in ((of_theta, open_directions), (of_w, follow @ open_directions)):
        reach = np.sum(moved**2, axis=1)
        variances[reach > 1e-10 * max(float(reach.max()), 1e-300)] = np.inf
    return of_theta, of_w.reshape(-1, e)


def _in_user_units(
    theta: Float64, w: Float64, problem: Problem, layer: AttentionLayer
) -> Parameters:
    m, d = layer.n_heads, layer.d
    by_query, x, y = theta.transpose(1, 0, 2), problem.units.x_scale, problem.units.y_scale
    return Parameters(
        theta=by_query[:, :d] / (x**2 * y),
        w=w[: m * d].reshape(m, d, -1) / x,
        key_vector=by_query[:, d] / (x * y) if problem.bias else None,
        out_bias=w[m * d] if problem.bias else None,
    )
