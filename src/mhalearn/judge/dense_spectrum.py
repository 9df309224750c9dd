"""The spectrum of the normal matrices of heads as whole matrices, W eliminated, and error bars."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg

from mhalearn._runtime.devices import replicate
from mhalearn._runtime.threads import one_lapack_thread
from mhalearn._runtime.types import Array, Float, Float64
from mhalearn.judge.spectrum import Parameters, Spectrum, count_null
from mhalearn.layer.attention import attend, design_matrix
from mhalearn.layer.batches import Chunk
from mhalearn.layer.layer import AttentionLayer
from mhalearn.run.watch import Watch
from mhalearn.solvers.host_steps import attend_on_host, covariance_products, normal_matrix
from mhalearn.solvers.scaled_problem import Problem
from mhalearn.solvers.variable_projection import normal_moments

# The same for a head's mean square sensitivity, against that of a head without a softmax.
_ROUNDED = 1e-18
_EPS = 4 * float(np.finfo(np.float64).eps)


class _Moments(NamedTuple):
    square: Float[Array, "qmd qmd"]  # J^T J
    cross: Float[Array, "q md p e"]  # J^T V
    triangle: Float[Array, "r p"]  # R with R^T R = V^T V, which squares no rounding


@partial(jax.jit, donate_argnums=0)
def _add_moments(
    moments: _Moments, theta: Float[Array, "m q d"], w: Float[Array, "p e"], data: Chunk
) -> _Moments:
    width = len(w)

    def append(triangle: Array, chunk: Chunk) -> tuple[Array, None]:
        v = design_matrix(attend(theta, chunk), chunk).reshape(-1, width)
        return jnp.linalg.qr(jnp.concatenate([triangle, v]), mode="r"), None

    triangle, _ = jax.lax.scan(append, moments.triangle, data)
    square, cross = normal_moments(theta, w, data)
    return _Moments(moments.square + square, moments.cross + cross, triangle)


def _moments(theta: Float64, w: Float64, problem: Problem, watch: Watch | None) -> _Moments:
    """Chunk by chunk, so that it can be ended in between."""
    (m, q, d), (width, e) = theta.shape, w.shape
    shapes = _Moments((q * m * d,) * 2, (q, m * d, width, e), (width, width))  # type: ignore[arg-type]
    moments = _Moments(*map(jnp.zeros, shapes))
    of = problem.data.tokens.shape[0]
    for i in range(of):
        chunk = jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], problem.data)
        moments = _add_moments(moments, jnp.asarray(theta), jnp.asarray(w), chunk)
        if watch is not None and of > 1:
            jax.block_until_ready(moments)  # or the clock would not see the work
            watch(i + 1, of)
    found: _Moments = jax.tree.map(np.asarray, replicate(moments))
    return found


def _host_moments(theta: Float64, w: Float64, problem: Problem) -> _Moments:
    """The same in NumPy, for problems that are smaller than the program is long."""
    rows = problem.host_rows
    p, design = attend_on_host(theta, rows)
    keys = covariance_products(p, design, w, rows)
    shape = rows.queries.shape[1], design.shape[1], keys.shape[1], keys.shape[2]
    mixed = (rows.queries[:, :, None] * design[:, None, :]).reshape(len(design), -1)
    cross = (mixed.T @ keys.reshape(len(design), -1)).reshape(shape).transpose(0, 2, 1, 3)
    square = normal_matrix(keys, rows.queries)
    triangle = np.linalg.qr(np.concatenate([np.zeros((len(w), len(w))), design]), mode="r")
    return _Moments(square, cross, triangle)  # type: ignore[arg-type]


def decompose_dense(
    layer: AttentionLayer, problem: Problem, watch: Watch | None = None
) -> Spectrum:
    """The spectrum of heads as whole matrices, W eliminated.

    watch: told what is done; OutOfTime where that ends it.
    Cost: O(n k (q m d)(m d)(q + e) + (q m d)^3).
    """
    theta, w = problem.theta(layer), problem.w(layer)
    with one_lapack_thread():
        if problem.on_host:
            moments = _host_moments(theta, w, problem)
        else:
            if watch is not None:
                watch.begin(f"normal matrix of {theta.size} attention parameters")
            moments = _moments(theta, w, problem, watch)
        return _decompose(moments, problem, layer, None if problem.on_host else watch)


def _decompose(
    moments: _Moments, problem: Problem, layer: AttentionLayer, watch: Watch | None
) -> Spectrum:
    def begin(part: str) -> None:
        if watch is not None:
            watch.begin(part)

    m, q, d = layer.n_heads, problem.query_dim, problem.d
    # What is left when W is eliminated must be measured against what there was, or rounding would
    # pass for a small but regular matrix.
    root = 1 / np.sqrt(np.maximum(np.diag(moments.square), _rounding(moments, problem, layer)))
    w_root = 1 / np.maximum(np.linalg.norm(moments.triangle, axis=0), 1e-150)
    _, singular, w_basis = scipy.linalg.svd(moments.triangle * w_root)
    singular, w_basis = singular[::-1], w_basis[::-1]
    w_values = singular**2
    w_null = count_null(w_values)
    # G^+ = back back^T on what the design spans: lifting G would leave a run of what W absorbs.
    back = w_root[:, None] * (w_basis[w_null:].T / singular[w_null:])
    size = len(root)
    begin(f"W eliminated from {size} x {size} normal equations")
    coupling = np.einsum("qmpe,pz->qmze", moments.cross, back)
    flat = root[:, None] * coupling.reshape(len(root), -1)
    scaled = root[:, None] * moments.square * root - flat @ flat.T
    begin(f"eigenvalues of a {size} x {size} matrix")
    theta_values = scipy.linalg.eigvalsh(scaled)
    # Rounding of V^T J is divided by the least singular value of V kept; and no eigenvalue of an
    # exact Schur complement is negative, so that those that are show how large rounding is.
    rounded = max(_EPS / singular[w_null:].min(initial=1.0), -2 * float(theta_values[0]))
    theta_null = count_null(theta_values, rounded)
    begin(f"covariance of {size} attention parameters")
    if theta_null == 0:
        half = scipy.linalg.solve_triangular(
            np.linalg.cholesky(scaled), np.eye(len(scaled)), lower=True
        ).T
        open_directions = half[:, :0]
    else:
        values, basis = scipy.linalg.eigh(scaled)
        half = basis[:, theta_null:] / np.sqrt(values[theta_null:])
        open_directions = basis[:, :theta_null]
    half, open_directions = root[:, None] * half, root[:, None] * open_directions
    begin(f"variances of {size} attention parameters")
    of_theta, of_w = _variances(coupling, back, half, open_directions)
    if w_null:
        of_theta[:], of_w[:] = np.inf, np.inf
    deviations = in_user_units(np.sqrt(of_theta).reshape(q, m, d), np.sqrt(of_w), problem)
    null = theta_null + w_null * layer.out_dim
    return Spectrum(theta_values, w_values, null, deviations, problem.units.x_scale)


def _rounding(moments: _Moments, problem: Problem, layer: AttentionLayer) -> Float64:
    """The part of each diagonal entry of J^T J that rounding alone can make.

    The covariance of nearly equal tokens is rounding, and so is a head whose W is; both in
    proportion to the features they meet.
    """
    m, q, d = layer.n_heads, problem.query_dim, problem.d
    weight = problem.data.weight[..., None]
    xp = np if problem.on_host else jnp
    squares = np.asarray(xp.sum((problem.data.queries * weight) ** 2, axis=(0, 1, 2)))
    squares = squares / problem.rows
    squares = np.maximum(squares, _ROUNDED * squares.max())
    features = np.outer(squares, squares[:d])[:, None, :]
    w = problem.w(layer)[: m * d].reshape(m, d, -1)
    energy = problem.rows * np.einsum("b,mbe->m", squares[:d], w**2)
    diagonal = np.diag(moments.square).reshape(q, m, d) / np.maximum(features, 1e-300)
    strongest = diagonal.mean(axis=(0, 2)).max()
    floor = np.maximum(_ROUNDED * energy, 1e-13 * strongest)[None, :, None] * features
    return (floor + 1e-300).ravel()


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


def in_user_units(theta: Float64, w: Float64, problem: Problem) -> Parameters:
    """Deviations (q, m, d) and (p, e) in solver units, in the user's and by name."""
    _, m, d = theta.shape
    by_query, x, y = theta.transpose(1, 0, 2), problem.units.x_scale, problem.units.y_scale
    arrays = {"theta": by_query[:, :d] / (x**2 * y), "w": w[: m * d].reshape(m, d, -1) / x}
    if problem.bias:
        arrays |= {"key_vector": by_query[:, d] / (x * y), "out_bias": w[m * d]}
    return Parameters(arrays)
