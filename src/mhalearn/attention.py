"""The numerics every learner shares: patterns, means, Jacobian products, least squares for W.

With p_i(r) the attention pattern of head i at query token r, mu_i(r) its mean token and C_i(r) its
token covariance,

    dF_r / dTheta_i[a, b] = x_r[a] (C_i(r) W_i)[b, :]          dF_r / dW_i[b, :] = mu_i(r)[b].

A key-side vector v_i is one more row of Theta_i, met by a query feature that is always one; an
output bias is one more column of the design matrix V whose other columns are the means. So the
formulas below know nothing of biases. Everything here is traceable JAX, written for one chunk of
examples; sums over chunks are `total`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

from mhalearn._types import Array, Bool, Float

P = ParamSpec("P")
R = TypeVar("R")


def float64() -> AbstractContextManager[None]:
    """A context in which JAX computes in double precision; its global flag is untouched."""
    return jax.enable_x64(True)


def in_float64(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function inside `float64()`."""

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        with float64():
            return function(*args, **kwargs)

    return wrapper


def in_single(tree: Any) -> Any:
    """The same arrays in single precision: enough for a step that is checked afterwards."""
    return jax.tree.map(
        lambda a: a.astype(jnp.float32) if jnp.issubdtype(a.dtype, jnp.floating) else a, tree
    )


# For programs of many matrix products. To choose among Triton's kernels for them takes a GPU half a
# minute and gains nothing here; on a CPU the option is without effect.
compiled = partial(jax.jit, compiler_options={"xla_gpu_enable_triton_gemm": False})

# Doubles a chunk's intermediates may hold in a matrix-free step: 128 MiB.
ROOM = 2**24


def on_device(doubles: int) -> int:
    """A workspace fit for a CPU, made larger where an accelerator would idle on small chunks."""
    return doubles if jax.default_backend() == "cpu" else 16 * doubles


class Chunk(NamedTuple):
    """Examples as the numerics see them; a leading chunk axis makes it a whole data set."""

    tokens: Float[Array, "*c b k d"]
    queries: Float[Array, "*c b k q"]  # the tokens, and a last feature 1 where v is learned
    labels: Float[Array, "*c b k e"]
    constant: Float[Array, "*c b k x"]  # extra columns of the design: none, or ones for the bias
    weight: Float[Array, "*c b k"]  # 1 where a row counts, 0 where it pads
    allowed: Bool[Array, "*c b k k"]  # which keys a query may attend to


class Pattern(NamedTuple):
    """What a layer's attention does on a chunk."""

    p: Float[Array, "b k m k"]
    means: Float[Array, "b k m d"]


def total(function: Callable[[Any], Any], data: Any, devices: int = 1) -> Any:
    """Sum a function of a chunk over all chunks. Memory: that of one chunk.

    data: a Chunk, or any tree of arrays with its first two axes. devices: over how many the
    examples are spread. Known, each sums its own chunks, and sums are exchanged once and not after
    every chunk.
    """
    if jax.tree.leaves(data)[0].shape[0] == 1:
        return function(jax.tree.map(lambda leaf: leaf[0], data))
    if devices > 1:
        sums = total(lambda chunk: jax.vmap(function)(by_device(chunk, devices)), data)
        return jax.tree.map(lambda leaf: leaf.sum(axis=0), sums)
    chunk = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), data)
    zeros = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(function, chunk)
    )

    def add(sums: Any, chunk: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, function(chunk)), None

    return jax.lax.scan(add, zeros, data)[0]


def by_device(chunk: Any, devices: int) -> Any:
    """A chunk's examples as (devices, examples of each): none of them moves."""
    return jax.tree.map(
        lambda leaf: leaf.reshape(devices, leaf.shape[0] // devices, *leaf.shape[1:]), chunk
    )


def gathered(data: Chunk, n_heads: int, devices: int = 1) -> Chunk:
    """The same examples in fewer chunks: matrix-free steps hold little a row."""
    count, b, k, e = data.labels.shape
    row = n_heads * (k + e + 2 * data.tokens.shape[-1])
    most = max(1, on_device(ROOM) * devices // (b * k * row))
    group = max(g for g in range(1, count + 1) if count % g == 0 and g <= most)
    return grouped(data, group, devices)


def grouped(data: Chunk, group: int, devices: int = 1) -> Chunk:
    """The same examples with every `group` chunks made one; over many devices none of them moves,
    so that those of a chunk come in another order."""
    if data.tokens.shape[0] == 1:
        return data

    def join(a: Array) -> Array:
        count, b = a.shape[:2]
        parts = a.reshape(count // group, group, *a.shape[1:])
        if devices > 1:
            parts = parts.swapaxes(1, 2)
        return parts.reshape(count // group, group * b, *a.shape[2:])

    return jax.tree.map(join, data)


@partial(jax.jit, static_argnames="devices")
def in_one_chunk(data: Chunk, devices: int = 1) -> Chunk:
    """All examples as one chunk, without the chunk axis."""
    joined = grouped(data, data.tokens.shape[0], devices)
    return jax.tree.map(lambda leaf: leaf[0], joined)


def logits(theta: Float[Array, "m q d"], chunk: Chunk) -> Float[Array, "b k m k"]:
    keyed = jnp.einsum("brq,mqd->brmd", chunk.queries, theta)
    return jnp.einsum("brmd,bjd->brmj", keyed, chunk.tokens)


def attend(theta: Float[Array, "m q d"], chunk: Chunk) -> Pattern:
    """Softmax patterns and mean tokens of every head. Cost: O(b k m d (q + k))."""
    scores = jnp.where(chunk.allowed[:, :, None], logits(theta, chunk), -jnp.inf)
    p = jax.nn.softmax(scores, axis=-1)
    return Pattern(p, jnp.einsum("brmj,bjd->brmd", p, chunk.tokens))


def design(pattern: Pattern, chunk: Chunk) -> Float[Array, "b k p"]:
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
    return design(attend(theta, chunk), chunk) @ w


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
        v = design(attend(theta, chunk), chunk)
        labels = chunk.labels * chunk.weight[..., None]
        return jnp.einsum("brp,brs->ps", v, v), jnp.einsum("brp,bre->pe", v, labels)

    gram, right = total(moments, data)
    width = gram.shape[0]
    floor = 1e-13 * jnp.trace(gram) / width
    gram = gram + (ridge + floor) * jnp.eye(width)
    factor = jax.scipy.linalg.cho_factor(gram)
    w = jax.scipy.linalg.cho_solve(factor, right)

    def remaining(chunk: Chunk) -> Array:
        v = design(attend(theta, chunk), chunk)
        return jnp.einsum("brp,bre->pe", v, chunk.labels * chunk.weight[..., None] - v @ w)

    # One step of refinement takes back the floor and most of the squared conditioning.
    w = w + jax.scipy.linalg.cho_solve(factor, total(remaining, data) - ridge * w)

    def squared(chunk: Chunk) -> Array:
        return jnp.sum(residual(theta, w, chunk) ** 2)

    return LinearFit(w, gram, total(squared, data) + ridge * jnp.sum(w**2))


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


def push(at: Tangent, chunk: Chunk, step: Float[Array, "m q d"]) -> Float[Array, "b k e"]:
    """J step: the change of the outputs. Cost: about a forward pass."""
    return jnp.einsum("brmj,bmje->bre", _centre(at.p, logits(step, chunk)), at.values)


def pull(at: Tangent, chunk: Chunk, change: Float[Array, "b k e"]) -> Float[Array, "m q d"]:
    """J^T change: its exact transpose. Cost: about a forward pass."""
    return jnp.einsum("brq,brmd->mqd", chunk.queries, key_side(at, chunk, change))


def key_side(at: Tangent, chunk: Chunk, change: Float[Array, "b k e"]) -> Float[Array, "b k m d"]:
    """C_i(r) W_i change_r for every row and head: `pull` before it meets the queries."""
    scores = jnp.einsum("bre,bmje->brmj", change, at.values)
    return jnp.einsum("brmj,bjd->brmd", _centre(at.p, scores), chunk.tokens)


def covariance_products(
    pattern: Pattern, heads: Float[Array, "m d e"], chunk: Chunk
) -> Float[Array, "b k m d e"]:
    """C_i(r) W_i for every row and head: the key side of the Jacobian's Khatri-Rao product."""
    values = jnp.einsum("bjd,mde->bmje", chunk.tokens, heads)
    mean_values = jnp.einsum("brmj,bmje->brme", pattern.p, values)
    raw = jnp.einsum("brmj,bjd,bmje->brmde", pattern.p, chunk.tokens, values)
    products = raw - pattern.means[..., None] * mean_values[..., None, :]
    return products * chunk.weight[:, :, None, None, None]
