"""A preconditioner for the normal equations in all factors of narrow heads.

With N_r the change of row r along the queries of all heads, C_i W_i its key side, q_i the query and
mu_i the mean token of head i, the diagonal blocks of J^T J are, factor by factor,

    A: sum x_r x_r^T (x) N_r N_r^T        B_i: sum (C_i W_i)(C_i W_i)^T (x) q_i q_i^T
    C_i: sum mu_i mu_i^T (x) D_i D_i^T    D: sum mixed mixed^T (x) 1

of which the last two are Kronecker products, and the first two nearly: sums of products are taken
for products of sums. Factors of small singular values, which move the outputs least, count as the
others do then, whatever basis they are written in.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.devices import replicate
from mhalearn._runtime.programs import compiled, in_single
from mhalearn._runtime.threads import one_lapack_thread
from mhalearn._runtime.types import Array, Float, Float64
from mhalearn.layer.batches import Chunk, sum_over_chunks
from mhalearn.layer.factored import Factored, Factors
from mhalearn.solvers.variable_projection import draw_signs

# Random combinations of a row's outputs, a dimension of the largest block.
_PROBES = 16
# What is added to every matrix, over the largest mean diagonal of its kind.
_FLOOR, _TINY = 1e-6, 1e-18


class Half(NamedTuple):
    """A factor H of the inverse of each of some symmetric positive matrices, H^T A H = 1."""

    factor: Float[Array, "*m s s"]

    def inverse(self) -> Float[Array, "*m s s"]:
        factor = jnp.asarray(self.factor)
        return factor @ factor.mT


class FactorPreconditioner(NamedTuple):
    """Kronecker products, left (x) right, of rows and columns of the factors of each kind."""

    query: tuple[Half, Half]  # (q, q), and (m h, m h) of all heads together
    key: tuple[Half, Half]  # (m, d, d), (m, h, h)
    value: tuple[Half, Half]  # (m, d, d), (m, h, h)
    out: Half  # (m h + c, m h + c) of all heads together, and the bias

    def prepare(self) -> Callable[[Factors], Factors]:
        """The inverse of the approximation as a function. Cost: O(m d h (d + m h)) a call."""
        query, key, value = (
            (left.inverse(), right.inverse()) for left, right in (self.query, self.key, self.value)
        )
        mixed = self.out.inverse()

        def solve(step: Factors) -> Factors:
            m, q, h = step.query.shape
            flat = query[0] @ step.query.swapaxes(0, 1).reshape(q, m * h) @ query[1]
            stacked = jnp.concatenate([step.out.reshape(-1, step.out.shape[2]), step.bias])
            out, bias = jnp.split(mixed @ stacked, [len(stacked) - len(step.bias)])
            return Factors(
                query=flat.reshape(q, m, h).swapaxes(0, 1),
                key=key[0] @ step.key @ key[1],
                value=value[0] @ step.value @ value[1],
                out=out.reshape(step.out.shape),
                bias=bias,
            )

        return solve


class _Moments(NamedTuple):
    """Sums over rows, as the head of this file names them."""

    tokens: Float[Array, "q q"]
    changes: Float[Array, "mh mh"]
    sides: Float[Array, "m d d"]
    queries: Float[Array, "m h h"]
    means: Float[Array, "m d d"]
    mixed: Float[Array, "s s"]


def precondition_factors(
    kind: Factored, params: Factors, data: Chunk, devices: int = 1, *, damping: float = 0.0
) -> FactorPreconditioner:
    """Of J^T J + damping at a point, in single precision.

    Key sides are seen through random combinations of a row's outputs. A product is damped by
    damping both sides, in proportion to their mean diagonals (Martens & Grosse 2015). Matrices are
    factored by NumPy: many small ones at once were seen to hang in XLA's CPU thread pool.
    Cost: O(n k m d (d + k)), a few forward passes, and O(m d^3) to factor.
    """
    sums = jax.tree.map(np.asarray, replicate(_sum_moments(params, data, kind, devices)))
    out = np.asarray(params.out, np.float64)
    with one_lapack_thread():
        return FactorPreconditioner(
            query=_invert_product(sums.tokens, sums.changes, damping),
            key=_invert_product(sums.sides, sums.queries, damping),
            value=_invert_product(sums.means, out @ out.swapaxes(1, 2), damping),
            out=_invert(sums.mixed.astype(np.float64), damping),
        )


@partial(compiled, static_argnums=(2, 3))
def _sum_moments(params: Factors, data: Chunk, kind: Factored, devices: int) -> _Moments:
    params, data = in_single(params), in_single(data)
    chunks, b, k = data.weight.shape
    widest = max(params.key.shape[1], params.query.shape[0] * params.query.shape[2])
    probes = min(data.labels.shape[-1], -(-_PROBES * widest // (chunks * b * k)))
    salts = jnp.arange(chunks * b * probes, dtype=jnp.uint32).reshape(chunks, b, probes)
    with jax.default_matmul_precision("highest"):
        sums = sum_over_chunks(partial(_gather, kind, params), (data, salts), devices)
    rows = jnp.maximum(jnp.sum(data.weight), 1.0)
    return sums._replace(tokens=sums.tokens / rows, queries=sums.queries / rows)


def _gather(kind: Factored, params: Factors, part: tuple[Chunk, Array]) -> _Moments:
    chunk, salts = part
    m, q, h = params.query.shape
    at, weight = kind.linearise(params, chunk), chunk.weight[..., None]

    def see(salt: Array) -> tuple[Array, Array]:
        signs = draw_signs(salt[:, None, None], chunk.labels.shape).astype(weight.dtype) * weight
        pulled = jnp.einsum("bre,mhe->brmh", signs, params.out)
        scores = jnp.einsum("brmh,bjmh->brmj", pulled, at.values)
        scores = at.p * (scores - jnp.sum(at.p * scores, axis=-1, keepdims=True))
        changes = jnp.einsum("brmj,bjmh->brmh", scores, at.keys).reshape(-1, m * h)
        sides = jnp.einsum("brmj,bjd->mbrd", scores, chunk.tokens).reshape(
            m, -1, params.key.shape[1]
        )
        return changes.T @ changes, sides.mT @ sides

    changes, sides = (jnp.mean(leaf, axis=0) for leaf in jax.lax.map(see, salts.T))
    tokens = (chunk.queries * weight).reshape(-1, q)
    queries = (at.queries * weight[..., None]).transpose(2, 0, 1, 3).reshape(m, -1, h)
    means = jnp.einsum("brmj,bjd->mbrd", at.p * weight[..., None], chunk.tokens)
    means = means.reshape(m, -1, params.key.shape[1])
    inner = at.mixed.reshape(*at.mixed.shape[:2], -1)
    mixed = jnp.concatenate([inner, chunk.constant], axis=-1) * weight
    mixed = mixed.reshape(-1, mixed.shape[-1])
    return _Moments(
        tokens.T @ tokens,
        changes,
        sides,
        queries.mT @ queries,
        means.mT @ means,
        mixed.T @ mixed,
    )


def _invert_product(left: NDArray[Any], right: NDArray[Any], damping: float) -> tuple[Half, Half]:
    left, right = left.astype(np.float64), right.astype(np.float64)
    ratio = np.sqrt((_mean_diagonal(left) + _TINY) / (_mean_diagonal(right) + _TINY))
    root = np.sqrt(damping)
    return _invert(left, root * ratio), _invert(right, root / ratio)


def _invert(matrices: Float64, shift: Float64 | float) -> Half:
    """Of the matrices plus a shift, which is no less than a floor."""
    floor = _FLOOR * float(np.max(_mean_diagonal(matrices))) + _TINY
    shift = np.maximum(np.asarray(shift), floor)[..., None, None]
    chol = np.linalg.cholesky(matrices + shift * np.eye(matrices.shape[-1]))
    return Half(np.linalg.inv(chol).swapaxes(-1, -2).astype(np.float32))  # type: ignore[arg-type]


def _mean_diagonal(matrices: Float64) -> Float64:
    return np.asarray(np.trace(matrices, axis1=-2, axis2=-1) / matrices.shape[-1])
