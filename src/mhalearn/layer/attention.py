"""The numerics every learner shares: patterns, means, Jacobian products, least squares for W.

With p_i(r) the attention pattern of head i at query token r, mu_i(r) its mean token and C_i(r) its
token covariance,

    dF_r / dTheta_i[a, b] = x_r[a] (C_i(r) W_i)[b, :]          dF_r / dW_i[b, :] = mu_i(r)[b].

A key-side vector v_i is one more row of Theta_i, met by a query feature that is always one; an
output bias is one more column of the design matrix V whose other columns are the means. So the
formulas below know nothing of biases. Everything here is traceable JAX, written for one chunk of
examples; sums over chunks are `total`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mhalearn._runtime.types import Array, Float
from mhalearn.layer.batches import Chunk, sum_over_chunks


class Pattern(NamedTuple):
    """What a layer's attention does on a chunk."""

    p: Float[Array, "b k m k"]
    means: Float[Array, "b k m d"]


def logits(theta: Float[Array, "m q d"], chunk: Chunk) -> Float[Array, "b k m k"]:
    keyed = jnp.einsum("brq,mqd->brmd", chunk.queries, theta)
    return jnp.einsum("brmd,bjd->brmj", keyed, chunk.tokens)


def attend(theta: Float[Array, "m q d"], chunk: Chunk) -> Pattern:
    """Softmax patterns and mean tokens of every head. Cost: O(b k m d (q + k))."""
    scores = jnp.where(chunk.allowed[:, :, None], logits(theta, chunk), -jnp.inf)
    p = jax.nn.softmax(scores, axis=-1)
    return Pattern(p, jnp.einsum("brmj,bjd->brmd", p, chunk.tokens))


def design_matrix(pattern: Pattern, chunk: Chunk) -> Float[Array, "b k p"]:
    """The matrix V with F = V w: means of all heads side by side, then the constant columns."""
    b, k = pattern.means.shape[:2]
    columns = jnp.concatenate([pattern.means.reshape(b, k, -1), chunk.constant], axis=-1)
    return columns * chunk.weight[..., None]


def stacked_heads(w: Float[Array, "p e"], n_heads: int, d: int) -> Float[Array, "m d e"]:
    """The heads' projections inside the stacked solution of the linear part."""
    return w[: n_heads * d].reshape(n_heads, d, -1)


def forward(
    theta: Float[Array, "m q d"], w: Float[Array, "p e"], chunk: Chunk
) -> Float[Array, "b k e"]:
    return design_matrix(attend(theta, chunk), chunk) @ w


class LinearFit(NamedTuple):
    """The best projections for given attention matrices."""

    w: Float[Array, "p e"]
    gram: Float[Array, "p p"]  # V^T V + ridge
    loss: Float[Array, ""]  # |Y - V w|^2 + ridge |w|^2


def fit_projections(
    theta: Float[Array, "m q d"], data: Chunk, ridge: Float[Array, ""]
) -> LinearFit:
    """Eliminate W: linear least squares on the means, one Gram matrix for all output columns.

    Cost: O(n k p (p + e)) time, O(p (p + e)) memory beside a chunk.
    Trust: normal equations with a floor that keeps unused heads solvable, refined once.
    """

    def moments(chunk: Chunk) -> tuple[Array, Array]:
        v = design_matrix(attend(theta, chunk), chunk)
        labels = chunk.labels * chunk.weight[..., None]
        return jnp.einsum("brp,brs->ps", v, v), jnp.einsum("brp,bre->pe", v, labels)

    gram, right = sum_over_chunks(moments, data)
    width = gram.shape[0]
    floor = 1e-13 * jnp.trace(gram) / width
    gram = gram + (ridge + floor) * jnp.eye(width)
    factor = jax.scipy.linalg.cho_factor(gram)
    w = jax.scipy.linalg.cho_solve(factor, right)

    def remaining(chunk: Chunk) -> Array:
        v = design_matrix(attend(theta, chunk), chunk)
        return jnp.einsum("brp,bre->pe", v, chunk.labels * chunk.weight[..., None] - v @ w)

    # One step of refinement takes back the floor and most of the squared conditioning.
    w = w + jax.scipy.linalg.cho_solve(factor, sum_over_chunks(remaining, data) - ridge * w)

    def squared(chunk: Chunk) -> Array:
        return jnp.sum(residual(theta, w, chunk) ** 2)

    return LinearFit(w, gram, sum_over_chunks(squared, data) + ridge * jnp.sum(w**2))


def residual(
    theta: Float[Array, "m q d"], w: Float[Array, "p e"], chunk: Chunk
) -> Float[Array, "b k e"]:
    return chunk.labels * chunk.weight[..., None] - forward(theta, w, chunk)


class Tangent(NamedTuple):
    """The layer's derivative with respect to Theta at a point, on a chunk."""

    p: Float[Array, "b k m k"]
    values: Float[Array, "b m k e"]  # x_j W_i


def tangent(p: Float[Array, "b k m k"], heads: Float[Array, "m d e"], chunk: Chunk) -> Tangent:
    return Tangent(
        p * chunk.weight[:, :, None, None], jnp.einsum("bjd,mde->bmje", chunk.tokens, heads)
    )


def _centre(p: Array, scores: Array) -> Array:
    """The softmax's own derivative: p (s - <p, s>), which is symmetric in its two sides."""
    return p * (scores - jnp.sum(p * scores, axis=-1, keepdims=True))


def jvp(at: Tangent, chunk: Chunk, step: Float[Array, "m q d"]) -> Float[Array, "b k e"]:
    """J step: the change of the outputs. Cost: about a forward pass."""
    b, k, m, j = at.p.shape
    moved = _centre(at.p, logits(step, chunk)).reshape(b, k, m * j)
    return moved @ at.values.reshape(b, m * j, -1)


def vjp(at: Tangent, chunk: Chunk, change: Float[Array, "b k e"]) -> Float[Array, "m q d"]:
    """J^T change: its exact transpose. Cost: about a forward pass."""
    side = key_side(at, chunk, change)
    b, k, m, d = side.shape
    # As one product of two matrices: XLA's own order for CPUs takes twice as long.
    summed = chunk.queries.reshape(b * k, -1).T @ side.reshape(b * k, m * d)
    return summed.reshape(-1, m, d).transpose(1, 0, 2)


def key_side(at: Tangent, chunk: Chunk, change: Float[Array, "b k e"]) -> Float[Array, "b k m d"]:
    """C_i(r) W_i change_r for every row and head: `pull` before it meets the queries."""
    b, m, j, e = at.values.shape
    scores = change @ at.values.reshape(b, m * j, e).mT
    moved = _centre(at.p, scores.reshape(at.p.shape))
    return jnp.einsum("brmj,bjd->brmd", moved, chunk.tokens)


def covariance_products(
    pattern: Pattern, heads: Float[Array, "m d e"], chunk: Chunk
) -> Float[Array, "b k m d e"]:
    """C_i(r) W_i for every row and head: the key side of the Jacobian's Khatri-Rao product."""
    values = jnp.einsum("bjd,mde->bmje", chunk.tokens, heads)
    mean_values = jnp.einsum("brmj,bmje->brme", pattern.p, values)
    raw = jnp.einsum("brmj,bjd,bmje->brmde", pattern.p, chunk.tokens, values)
    products = raw - pattern.means[..., None] * mean_values[..., None, :]
    return products * chunk.weight[:, :, None, None, None]
