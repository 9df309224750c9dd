"""Many narrow heads: numerics in the factors of heads, with no matrix of d x d unknowns a head.

Theta_i = A_i B_i^T and W_i = C_i D_i with h columns each. The factors have a freedom that the layer
does not see, an invertible h x h matrix a pair; conjugate gradients that begin at zero never move
along it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from mhalearn._types import Array, Float
from mhalearn.attention import Chunk, compiled, in_float64, total
from mhalearn.devices import known
from mhalearn.layer import AttentionLayer, Float64, group_heads
from mhalearn.normal import conjugate_gradients
from mhalearn.outcome import Trace
from mhalearn.problem import Problem

# Steps are solved for as exactly as the residual is small, within these bounds: fast
# convergence at the least price.
_LOOSEST, _TIGHTEST, _TIGHTEST_SINGLE = 1e-2, 1e-10, 1e-5
_CG_STEPS = 400
# Against the mean square of the labels, the size of what a step of a factor's entry changes.
_DAMPING = 1e-3
ROUNDING = 1e-28
# Below this loss steps converge fast, and one that leaves more than this of it was too inexact.
_NEAR, _LITTLE = 1e-6, 0.1


# Factors make a layer to this precision, and a singular value this far below the largest is none.
_EXACT, _DEFICIENT = 1e-9, 1e-6
# Attention unknowns from which on heads of known rank are better moved by their factors.
_LARGE = 30_000


def is_narrow(n_heads: int, d: int, head_dim: int | None) -> bool:
    """Whether heads are so many and of so low a rank that their factors are fewer by far."""
    return head_dim is not None and 2 * head_dim <= d and n_heads * d**2 > _LARGE


class NarrowHeads(NamedTuple):
    """Heads by their factors, in solver units."""

    query: Float[Array, "m q h"]
    key: Float[Array, "m d h"]
    value: Float[Array, "m d h"]
    out: Float[Array, "m h e"]
    bias: Float[Array, "c e"]  # one row, or none without an output bias


class Attended(NamedTuple):
    """What heads make of a chunk, up to their outputs; and all that their derivative needs."""

    p: Float[Array, "*c b k m k"]
    queries: Float[Array, "*c b k m h"]
    keys: Float[Array, "*c b k m h"]
    values: Float[Array, "*c b k m h"]
    mixed: Float[Array, "*c b k m h"]


def attend_heads(heads: NarrowHeads, chunk: Chunk) -> Attended:
    """Cost: O(b k m h (d + k))."""
    queries = jnp.einsum("brq,mqh->brmh", chunk.queries, heads.query)
    keys = jnp.einsum("bjd,mdh->bjmh", chunk.tokens, heads.key)
    values = jnp.einsum("bjd,mdh->bjmh", chunk.tokens, heads.value)
    scores = jnp.einsum("brmh,bjmh->brmj", queries, keys)
    p = jax.nn.softmax(jnp.where(chunk.allowed[:, :, None], scores, -jnp.inf), axis=-1)
    return Attended(p, queries, keys, values, jnp.einsum("brmj,bjmh->brmh", p, values))


def apply_heads(heads: NarrowHeads, chunk: Chunk) -> Float[Array, "b k e"]:
    """Outputs on a chunk, zero where rows do not count. Cost: O(b k m h (d + k + e))."""
    mixed = attend_heads(heads, chunk).mixed
    outputs = jnp.einsum("brmh,mhe->bre", mixed, heads.out) + chunk.constant @ heads.bias
    return outputs * chunk.weight[..., None]


def push_heads(
    heads: NarrowHeads, at: Attended, chunk: Chunk, step: NarrowHeads
) -> Float[Array, "b k e"]:
    """The derivative of the outputs along a step. Cost: about `apply_heads`."""
    queries = jnp.einsum("brq,mqh->brmh", chunk.queries, step.query)
    keys = jnp.einsum("bjd,mdh->bjmh", chunk.tokens, step.key)
    values = jnp.einsum("bjd,mdh->bjmh", chunk.tokens, step.value)
    scores = jnp.einsum("brmh,bjmh->brmj", queries, at.keys)
    scores += jnp.einsum("brmh,bjmh->brmj", at.queries, keys)
    p = at.p * (scores - jnp.sum(at.p * scores, axis=-1, keepdims=True))
    mixed = jnp.einsum("brmj,bjmh->brmh", p, at.values)
    mixed += jnp.einsum("brmj,bjmh->brmh", at.p, values)
    outputs = jnp.einsum("brmh,mhe->bre", mixed, heads.out) + chunk.constant @ step.bias
    outputs += jnp.einsum("brmh,mhe->bre", at.mixed, step.out)
    return outputs * chunk.weight[..., None]


def to_layer(heads: NarrowHeads, problem: Problem) -> AttentionLayer:
    """The layer in the user's units."""
    query, key, value, out, bias = (np.asarray(part, np.float64) for part in heads)
    w = (value @ out).reshape(-1, problem.out_dim)
    return problem.layer(query @ key.swapaxes(1, 2), np.concatenate([w, bias]))


@in_float64
def to_heads(layer: AttentionLayer, problem: Problem, head_dim: int) -> NarrowHeads:
    """The nearest balanced factors. Cost: two singular value decompositions a head."""
    theta, w = problem.theta(layer), problem.w(layer)
    m, d = layer.n_heads, problem.d
    query, key = _halves(theta, head_dim)
    value, out = _halves(w[: m * d].reshape(m, d, -1), head_dim)
    parts = query, np.swapaxes(key, 1, 2), value, out, w[m * d :]
    return NarrowHeads(*map(jnp.asarray, parts))


def _halves(product: Any, rank: int) -> tuple[Any, Any]:
    u, s, vt = np.linalg.svd(product, full_matrices=False)
    root = np.sqrt(s[:, :rank])
    return u[:, :, :rank] * root[:, None], root[:, :, None] * vt[:, :rank]


def has_full_rank(heads: NarrowHeads, layer: AttentionLayer, problem: Problem) -> bool:
    """Whether balanced factors make the layer, with no column of them near zero.

    Only then do changes of the factors make all changes of heads of their rank.
    """
    made = to_layer(heads, problem)
    for matrices, others in (
        (problem.theta(layer), problem.theta(made)),
        (layer.w, made.w),
    ):
        off = np.linalg.norm(matrices - others, axis=(1, 2))
        if np.any(off > _EXACT * np.linalg.norm(matrices, axis=(1, 2))):
            return False
    sizes = [np.sum(np.asarray(part) ** 2, axis=1) for part in (heads.query, heads.value)]
    return all(bool(np.all(size.min(axis=1) > _DEFICIENT * size.max(axis=1))) for size in sizes)


@in_float64
def merge_heads(heads: NarrowHeads, tolerance: float, most: int | None = None) -> NarrowHeads:
    """The canonical form by factors, which come out balanced; at most so many of the largest heads.

    Cost: O(m^2 d h^2): no matrix of d x d is made. W of merged heads is cut to rank h.
    """
    query, key, value, out, bias = (np.asarray(part, np.float64) for part in heads)
    key, value_t = key.swapaxes(1, 2), value.swapaxes(1, 2)
    theta = _inner_products(query.swapaxes(1, 2), key)
    squares = np.diag(theta)
    apart = np.sqrt(np.maximum(squares[:, None] + squares[None, :] - 2 * theta, 0.0))
    sizes = np.sqrt(np.diag(_inner_products(value_t, out)))
    merged = []
    for group in group_heads(apart, sizes, tolerance * np.sqrt(squares.max())):
        summed = _balanced(np.concatenate(value_t[group]).T, np.concatenate(out[group]))
        width = out.shape[1]
        attention = _balanced(query[group[0]], key[group[0]])
        merged.append((*attention, summed[0][:, :width], summed[1][:width]))
    norms = np.array([np.sqrt(np.sum((v.T @ v) * (o @ o.T))) for _, _, v, o in merged])
    order = [g for g in np.argsort(-norms, kind="stable") if norms[g] > tolerance * sizes.max()]
    chosen = [merged[g] for g in (order or [0])[:most]]
    a, b, c, o = (np.stack(parts) for parts in zip(*chosen, strict=True))
    return NarrowHeads(*map(jnp.asarray, (a, b.swapaxes(1, 2), c, o, bias)))


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


@in_float64
def polish_heads(
    heads: NarrowHeads, problem: Problem, trace: Trace, *, stage: str, max_steps: int = 60
) -> tuple[NarrowHeads, float]:
    """Descend by damped Gauss-Newton steps until nothing improves; the factors and their loss.

    Steps are solved for in single precision until one gains little, then in double.
    Cost: some hundred forward passes over the examples a step. Memory: as much again as they take.
    Trust: a stationary point of the training loss, to rounding. Not a certificate.
    """
    data, energy = problem.data, jnp.asarray(problem.energy)
    loss, damping, idle, single = np.inf, 1.0, 0, True
    for step in range(max_steps):
        trial, *losses = known(
            _gauss_newton(heads, data, energy, jnp.asarray(damping), problem.devices, single=single)
        )
        loss, after = map(float, losses)
        damping = max(damping * (0.1 if after < loss else 10.0), 1e-12)
        idle = 0 if after < 0.9 * loss else idle + 1
        if single and (idle == 4 or _LITTLE * loss < after < _NEAR):
            single, idle = False, 0
        if after < loss:
            heads, loss = trial, after
        trace.emit(stage, step, loss)
        if loss < ROUNDING or idle == 4 or trace.expired:
            break
    return heads, loss


@partial(compiled, static_argnames=("single", "devices"))
def _gauss_newton(
    heads: NarrowHeads,
    data: Chunk,
    energy: Array,
    damping: Array,
    devices: int = 1,
    *,
    single: bool,
) -> tuple[NarrowHeads, Array, Array]:
    """Heads one step on, and the relative loss before and after it."""

    def slope(chunk: Chunk) -> tuple[NarrowHeads, Array]:
        outputs, pull = jax.vjp(partial(apply_heads, chunk=chunk), heads)
        wrong = chunk.labels - outputs
        return pull(wrong)[0], jnp.sum(wrong**2)

    downhill, wrong = total(slope, data, devices)
    level = jnp.sqrt(jnp.minimum(1.0, wrong / energy))
    tolerance = jnp.clip(level, _TIGHTEST_SINGLE if single else _TIGHTEST, _LOOSEST)
    damping = damping * level * _DAMPING * energy
    step = _solve(heads, data, downhill, damping, tolerance, single=single, devices=devices)
    trial = jax.tree.map(jnp.add, heads, step)

    def squared(chunk: Chunk) -> Array:
        return jnp.sum((chunk.labels - apply_heads(trial, chunk)) ** 2)

    return trial, wrong / energy, total(squared, data, devices) / energy


def _solve(
    heads: NarrowHeads,
    data: Chunk,
    right: NarrowHeads,
    damping: Array,
    tolerance: Array,
    *,
    single: bool,
    devices: int,
) -> NarrowHeads:
    """(J^T J + damping) step = right, by conjugate gradients."""
    flat, unflatten = ravel_pytree(right)
    if single:  # labels are not needed: their precision stays
        heads, data = in_single(heads), in_single(data)
    size = jnp.linalg.norm(flat)
    kind = heads.query.dtype
    scaled = jnp.where(size > 0, flat / size, flat).astype(kind)

    with jax.default_matmul_precision("highest"):
        product = curvature(heads, data, devices)
        solved = conjugate_gradients(
            lambda step: product(step) + damping.astype(kind) * step,
            lambda v: v,
            scaled,
            tolerance.astype(kind),
            _CG_STEPS,
        )
    return unflatten(size * solved.step.astype(flat.dtype))


def curvature(heads: NarrowHeads, data: Chunk, devices: int = 1) -> Callable[[Array], Array]:
    """J^T J as a function of flat steps, at these heads, in their precision.

    Cost: a forward pass here, and about four each time it is called. Memory: O(n k m (k + h)).
    """
    unflatten = ravel_pytree(heads)[1]
    at = jax.lax.map(partial(attend_heads, heads), data)

    def product(step: Array) -> Array:
        parts = unflatten(step)

        def on(one: tuple[Chunk, Attended]) -> NarrowHeads:
            chunk, there = one
            push = partial(push_heads, heads, there, chunk)
            back: NarrowHeads = jax.linear_transpose(push, parts)(push(parts))[0]
            return back

        return ravel_pytree(total(on, (data, at), devices))[0]

    return product


def in_single(tree: Any) -> Any:
    """Doubles as floats; what is no floating-point number stays."""

    def lower(leaf: Array) -> Array:
        return leaf.astype(jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(lower, tree)
