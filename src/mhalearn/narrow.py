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
def merge_heads(
    heads: NarrowHeads, alike: float, small: float, most: int | None = None
) -> NarrowHeads:
    """The canonical form by factors, which come out balanced; at most so many of the largest heads.

    Thetas are one head's if they differ by less than `alike` of the larger, or by less than `small`
    of the largest of all: it gets their mean, by their shares in the sum of W, which to first
    order changes no output. Heads with a W below `small` of the largest are dropped.
    Cost: O(m^2 d h^2): no matrix of d x d is made. What is merged is cut to rank h.
    """
    query, key, value, out, bias = (np.asarray(part, np.float64) for part in heads)
    key, value_t = key.swapaxes(1, 2), value.swapaxes(1, 2)
    theta = _inner_products(query.swapaxes(1, 2), key)
    w = _inner_products(value_t, out)
    squares = np.diag(theta)
    apart = np.sqrt(np.maximum(squares[:, None] + squares[None, :] - 2 * theta, 0.0))
    near = np.sqrt(np.maximum(squares[:, None], squares[None, :]))
    near = np.maximum(alike * near, small * near.max())
    sizes = np.sqrt(np.diag(w))
    merged = []
    for group in group_heads(apart - near, sizes, 0.0):
        shares = w[np.ix_(group, group)].sum(axis=1)
        shares = shares / shares.sum() if shares.sum() > 0 else shares
        mean = np.concatenate(shares[:, None, None] * query[group], axis=1)
        attention = _balanced(mean, np.concatenate(key[group]))
        summed = _balanced(np.concatenate(value_t[group]).T, np.concatenate(out[group]))
        width = out.shape[1]
        merged.append(tuple(f for a, b in (attention, summed) for f in (a[:, :width], b[:width])))
    norms = np.array([np.sqrt(np.sum((v.T @ v) * (o @ o.T))) for _, _, v, o in merged])
    order = [g for g in np.argsort(-norms, kind="stable") if norms[g] > small * sizes.max()]
    chosen = [merged[g] for g in (order or [0])[:most]]
    a, b, c, o = (np.stack(parts) for parts in zip(*chosen, strict=True))
    return NarrowHeads(*_placed(a, b.swapaxes(1, 2), c, o, bias))


@in_float64
def with_zeros(heads: NarrowHeads, count: int) -> NarrowHeads:
    """As many heads, those that are missing zero: they change nothing, and no slope moves them."""
    missing = ((0, count - len(heads.query)), (0, 0), (0, 0))
    wider = [np.pad(np.asarray(part), missing) for part in heads[:4]]
    return NarrowHeads(*_placed(*wider, heads.bias))


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


@in_float64
def polish_heads(
    heads: NarrowHeads,
    problem: Problem,
    trace: Trace,
    *,
    stage: str,
    max_steps: int = 60,
    whole: Problem | None = None,
) -> tuple[NarrowHeads, float]:
    """Descend by damped Gauss-Newton steps until nothing improves; the factors and their loss.

    Steps are solved for in single precision until one gains little, then in double. Where the
    examples of `problem` say too little to solve for steps, those of `whole` take over.
    Cost: some hundred forward passes over the examples a step. Memory: as much again as they take.
    Trust: a stationary point of the training loss, to rounding. Not a certificate.
    """
    loss, damping, idle, single = np.inf, 1.0, 0, True
    for step in range(max_steps):
        made = known(
            _gauss_newton(
                heads,
                problem.data,
                jnp.asarray(problem.energy),
                jnp.asarray(damping),
                problem.devices,
                single=single,
            )
        )
        loss, after, promised = map(float, (made.loss, made.after, made.promised))
        damping = max(damping * _redamped(loss - after, promised), 1e-12)
        idle = 0 if after < 0.9 * loss else idle + 1
        if single and (idle == 4 or _LITTLE * loss < after < _NEAR):
            single, idle = False, 0
        if after < loss:
            heads, loss = made.heads, after
        trace.emit(stage, step, loss)
        if whole is not None and whole.rows > problem.rows and not made.solved:
            problem, single, idle = whole, True, 0
        if loss < ROUNDING or idle == 4 or trace.expired:
            break
    return heads, loss


class Stepped(NamedTuple):
    """Heads one step on, and what it did to the relative loss."""

    heads: NarrowHeads
    loss: Float[Array, ""]
    after: Float[Array, ""]
    promised: Float[Array, ""]  # the gain, by the model that was solved
    solved: Array  # whether it was, to the tolerance asked for


def _redamped(gained: float, promised: float) -> float:
    """What the damping is multiplied by: only a model that keeps its promise is trusted further."""
    if not gained > 0:
        return 10.0
    kept = gained / promised if promised > 0 else 0.0
    return 0.1 if kept > 0.75 else 0.5 if kept > 0.5 else 1.0 if kept > 0.25 else 3.0


@partial(compiled, static_argnames=("single", "devices"))
def _gauss_newton(
    heads: NarrowHeads,
    data: Chunk,
    energy: Array,
    damping: Array,
    devices: int = 1,
    *,
    single: bool,
) -> Stepped:

    def slope(chunk: Chunk) -> tuple[NarrowHeads, Array]:
        outputs, pull = jax.vjp(partial(apply_heads, chunk=chunk), heads)
        wrong = chunk.labels - outputs
        return pull(wrong)[0], jnp.sum(wrong**2)

    downhill, wrong = total(slope, data, devices)
    level = jnp.sqrt(jnp.minimum(1.0, wrong / energy))
    tolerance = jnp.clip(level, _TIGHTEST_SINGLE if single else _TIGHTEST, _LOOSEST)
    damping = damping * level * _DAMPING * energy
    step, solved = _solve(heads, data, downhill, damping, tolerance, single=single, devices=devices)
    trial = jax.tree.map(jnp.add, heads, step)

    def squared(chunk: Chunk) -> Array:
        return jnp.sum((chunk.labels - apply_heads(trial, chunk)) ** 2)

    # Conjugate gradients from zero leave a residual at right angles to the step.
    moved, sloping = ravel_pytree(step)[0], ravel_pytree(downhill)[0]
    promised = jnp.vdot(moved, sloping) + damping * jnp.vdot(moved, moved)
    after = total(squared, data, devices)
    return Stepped(trial, wrong / energy, after / energy, promised / energy, solved)


def _solve(
    heads: NarrowHeads,
    data: Chunk,
    right: NarrowHeads,
    damping: Array,
    tolerance: Array,
    *,
    single: bool,
    devices: int,
) -> tuple[NarrowHeads, Array]:
    """(J^T J + damping) step = right, by conjugate gradients; and whether they arrived."""
    flat, unflatten = ravel_pytree(right)
    if single:  # labels are not needed: their precision stays
        heads, data = in_single(heads), in_single(data)
    size = jnp.linalg.norm(flat)
    kind = heads.query.dtype
    scaled = jnp.where(size > 0, flat / size, flat).astype(kind)

    with jax.default_matmul_precision("highest"):
        product = curvature(heads, data, devices)
        found = conjugate_gradients(
            lambda step: product(step) + damping.astype(kind) * step,
            lambda v: v,
            scaled,
            tolerance.astype(kind),
            _CG_STEPS,
        )
    return unflatten(size * found.step.astype(flat.dtype)), jnp.isnan(found.lengths[-1])


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
