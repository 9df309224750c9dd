"""Many narrow heads by their factors, with no matrix of d x d unknowns a head.

Theta_i = A_i B_i^T and W_i = C_i D_i with h columns each. The factors have a freedom that the layer
does not see, an invertible h x h matrix a pair.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mhalearn._runtime.programs import in_float64
from mhalearn._runtime.types import Array, Float, Float64
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.base import Layer
from mhalearn.layer.batches import Chunk
from mhalearn.layer.dense import DenseHeads
from mhalearn.layer.layer import AttentionLayer, group_heads
from mhalearn.layer.parametrisation import Parametrisation
from mhalearn.layer.units import Units

# Factors make a layer to this precision, and a singular value this far below the largest is none.
_EXACT, _DEFICIENT = 1e-9, 1e-6


class Factors(NamedTuple):
    """Heads by their factors, in solver units."""

    query: Float[Array, "m q h"]
    key: Float[Array, "m d h"]
    value: Float[Array, "m d h"]
    out: Float[Array, "m h e"]
    bias: Float[Array, "c e"]  # one row, or none without an output bias


class Activations(NamedTuple):
    """What heads make of a chunk, up to their outputs; and all that their derivative needs."""

    p: Float[Array, "*c b k m k"]
    queries: Float[Array, "*c b k m h"]
    keys: Float[Array, "*c b k m h"]
    values: Float[Array, "*c b k m h"]
    mixed: Float[Array, "*c b k m h"]


@dataclass(frozen=True)
class Factored(Parametrisation):
    """Theta_i = A_i B_i^T and W_i = C_i D_i, of the architecture's rank."""

    architecture: Architecture
    scales = True

    @in_float64
    def init(self, rng: np.random.Generator) -> Factors:
        """Small factors: |Theta_i| and |W_i| are about one."""
        a = self.architecture
        d, e, h, r = a.d, a.outputs, a.qk_rank, a.ov_rank
        size = (d * h**0.5) ** -0.5

        def small(*shape: int) -> Array:
            return jnp.asarray(size * rng.standard_normal((a.heads, *shape)))

        return Factors(
            query=small(a.query_dim, h),
            key=small(d, h),
            value=small(d, r),
            out=small(r, e),
            bias=jnp.zeros((int(a.bias), e)),
        )

    def linearise(self, params: Factors, chunk: Chunk) -> Activations:
        """Cost: O(b k m h (d + k))."""
        queries = jnp.einsum("brq,mqh->brmh", chunk.queries, params.query)
        keys = jnp.einsum("bjd,mdh->bjmh", chunk.tokens, params.key)
        values = jnp.einsum("bjd,mdh->bjmh", chunk.tokens, params.value)
        scores = jnp.einsum("brmh,bjmh->brmj", queries, keys)
        p = jax.nn.softmax(jnp.where(chunk.allowed[:, :, None], scores, -jnp.inf), axis=-1)
        return Activations(p, queries, keys, values, jnp.einsum("brmj,bjmh->brmh", p, values))

    def forward(self, params: Factors, chunk: Chunk) -> Float[Array, "b k e"]:
        """Cost: O(b k m h (d + k + e))."""
        mixed = self.linearise(params, chunk).mixed
        return jnp.einsum("brmh,mhe->bre", mixed, params.out) + chunk.constant @ params.bias

    def jvp(
        self, params: Factors, at: Activations, chunk: Chunk, step: Factors
    ) -> Float[Array, "b k e"]:
        """Cost: about a forward pass."""
        queries = jnp.einsum("brq,mqh->brmh", chunk.queries, step.query)
        keys = jnp.einsum("bjd,mdh->bjmh", chunk.tokens, step.key)
        values = jnp.einsum("bjd,mdh->bjmh", chunk.tokens, step.value)
        scores = jnp.einsum("brmh,bjmh->brmj", queries, at.keys)
        scores += jnp.einsum("brmh,bjmh->brmj", at.queries, keys)
        p = at.p * (scores - jnp.sum(at.p * scores, axis=-1, keepdims=True))
        mixed = jnp.einsum("brmj,bjmh->brmh", p, at.values)
        mixed += jnp.einsum("brmj,bjmh->brmh", at.p, values)
        outputs = jnp.einsum("brmh,mhe->bre", mixed, params.out) + chunk.constant @ step.bias
        outputs += jnp.einsum("brmh,mhe->bre", at.mixed, step.out)
        return outputs * chunk.weight[..., None]

    def penalties(self, params: Factors, theta: Any, w: Any) -> Factors:
        """On the factors of Theta and of W: the sum of squares at its least is twice the nuclear
        norm of their product."""
        return Factors(theta, theta, w, w, jnp.zeros(()))

    def invariants(self, params: Factors) -> DenseHeads:
        """Theta and the stacked W, which no change of basis inside a pair of factors moves."""
        theta = jnp.einsum("mqh,mdh->mqd", params.query, params.key)
        w = jnp.einsum("mdh,mhe->mde", params.value, params.out)
        return DenseHeads(theta, jnp.concatenate([w.reshape(-1, w.shape[-1]), params.bias]))

    def to_layer(self, params: Factors, units: Units) -> AttentionLayer:
        query, key, value, out, bias = (np.asarray(part, np.float64) for part in params)
        w = (value @ out).reshape(-1, self.architecture.outputs)
        theta = query @ key.swapaxes(1, 2)
        return units.layer(theta, np.concatenate([w, bias]), self.architecture)

    @in_float64
    def from_layer(self, layer: Layer, units: Units) -> Factors:
        """The nearest balanced factors. Cost: two singular value decompositions a head."""
        assert isinstance(layer, AttentionLayer)
        a = self.architecture
        theta, w = units.theta(layer, a.bias), units.w(layer, a.bias)
        m, d = layer.n_heads, a.d
        query, key = _halves(theta, a.qk_rank)
        value, out = _halves(w[: m * d].reshape(m, d, -1), a.ov_rank)
        parts = query, np.swapaxes(key, 1, 2), value, out, w[m * d :]
        return Factors(*map(jnp.asarray, parts))

    def has_full_rank(self, params: Factors, layer: Layer, units: Units) -> bool:
        """Whether balanced factors make the layer, with no column of them near zero.

        Only then do changes of the factors make all changes of heads of their rank.
        """
        assert isinstance(layer, AttentionLayer)
        made, bias = self.to_layer(params, units), self.architecture.bias
        for matrices, others in (
            (units.theta(layer, bias), units.theta(made, bias)),
            (layer.w, made.w),
        ):
            off = np.linalg.norm(matrices - others, axis=(1, 2))
            if np.any(off > _EXACT * np.linalg.norm(matrices, axis=(1, 2))):
                return False
        sizes = [np.sum(np.asarray(part) ** 2, axis=1) for part in (params.query, params.value)]
        return all(bool(np.all(size.min(axis=1) > _DEFICIENT * size.max(axis=1))) for size in sizes)

    def size(self) -> int:
        a = self.architecture
        query_key, value_out = a.query_dim + a.d, a.d + a.outputs
        return a.heads * (a.qk_rank * query_key + a.ov_rank * value_out) + a.bias * a.outputs

    def count(self) -> int:
        return self.architecture.count()


def _halves(product: Any, rank: int) -> tuple[Any, Any]:
    u, s, vt = np.linalg.svd(product, full_matrices=False)
    root = np.sqrt(s[:, :rank])
    return u[:, :, :rank] * root[:, None], root[:, :, None] * vt[:, :rank]


@in_float64
def merge_heads(heads: Factors, alike: float, small: float, most: int | None = None) -> Factors:
    """The canonical form by factors, which come out balanced; at most so many of the largest heads.

    Thetas are one head's if they differ by less than `alike` of the larger, or by less than `small`
    of the largest of all, and of a Theta that makes logits of one: it gets their mean, by their
    shares in the sum of W, which to first order changes no output. Heads with a W below `small` of
    the largest are dropped.
    Cost: O(m^2 d h^2): no matrix of d x d is made. What is merged is cut to rank h.
    """
    query, key, value, out, bias = (np.asarray(part, np.float64) for part in heads)
    key, value_t = key.swapaxes(1, 2), value.swapaxes(1, 2)
    theta = _inner_products(query.swapaxes(1, 2), key)
    w = _inner_products(value_t, out)
    squares = np.diag(theta)
    apart = np.sqrt(np.maximum(squares[:, None] + squares[None, :] - 2 * theta, 0.0))
    near = np.sqrt(np.maximum(squares[:, None], squares[None, :]))
    near = np.maximum(alike * near, small * min(1.0, near.max()))
    sizes = np.sqrt(np.diag(w))
    merged = []
    for group in group_heads(apart - near, sizes, 0.0):
        shares = w[np.ix_(group, group)].sum(axis=1)
        shares = shares / shares.sum() if shares.sum() > 0 else shares
        mean = np.concatenate(shares[:, None, None] * query[group], axis=1)
        attention = _balanced(mean, np.concatenate(key[group]))
        summed = _balanced(np.concatenate(value_t[group]).T, np.concatenate(out[group]))
        cuts = (attention, query.shape[2]), (summed, out.shape[1])
        merged.append(tuple(f for (a, b), rank in cuts for f in (a[:, :rank], b[:rank])))
    norms = np.array([np.sqrt(np.sum((v.T @ v) * (o @ o.T))) for _, _, v, o in merged])
    order = [g for g in np.argsort(-norms, kind="stable") if norms[g] > small * sizes.max()]
    chosen = [merged[g] for g in (order or [0])[:most]]
    a, b, c, o = (np.stack(parts) for parts in zip(*chosen, strict=True))
    return Factors(*_placed(a, b.swapaxes(1, 2), c, o, bias))


def _placed(*arrays: Any) -> list[Array]:
    """On the device. `jnp.asarray` would compile a program for every new shape."""
    return [jax.device_put(array) for array in arrays]


def _inner_products(left: Float64, right: Float64) -> Float64:
    """<L_i^T R_i, L_j^T R_j> for all pairs of (m, h, d) and (m, h, e)."""
    ours = np.einsum("ihd,jgd->ijhg", left, left, optimize=True)
    theirs = np.einsum("ihe,jge->ijhg", right, right, optimize=True)
    return np.einsum("ijhg,ijhg->ij", ours, theirs)


def _balanced(left: Float64, right: Float64) -> tuple[Float64, Float64]:
    """Factors (d, h), (h, e) of the same product that share its singular values, largest first."""
    q, r = np.linalg.qr(left)
    p, t = np.linalg.qr(right.T)
    u, s, vt = np.linalg.svd(r @ t.T, full_matrices=False)
    root = np.sqrt(s)
    return q @ (u * root), (root[:, None] * vt) @ p.T
