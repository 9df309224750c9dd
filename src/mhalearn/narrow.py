"""Many narrow heads: numerics in the factors of heads, with no matrix of d x d unknowns a head.

Theta_i = A_i B_i^T and W_i = C_i D_i with h columns each. The factors have a freedom that the layer
does not see, an invertible h x h matrix a pair; damping makes Gauss-Newton steps indifferent to it.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from mhalearn._types import Array, Float
from mhalearn.attention import Chunk, in_float64, total
from mhalearn.layer import AttentionLayer
from mhalearn.normal import conjugate_gradients
from mhalearn.outcome import Trace
from mhalearn.problem import Problem

_CG_STEPS, _CG_TOLERANCE = 100, 1e-5
# Against the mean square of the labels, the size of what a step of a factor's entry changes.
_DAMPING = 1e-3
ROUNDING = 1e-28


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


def apply_heads(heads: NarrowHeads, chunk: Chunk) -> Float[Array, "b k e"]:
    """Outputs on a chunk, zero where rows do not count. Cost: O(b k m (d h + k h + h e))."""
    queries = jnp.einsum("brq,mqh->brmh", chunk.queries, heads.query)
    keys = jnp.einsum("bjd,mdh->bjmh", chunk.tokens, heads.key)
    values = jnp.einsum("bjd,mdh->bjmh", chunk.tokens, heads.value)
    scores = jnp.einsum("brmh,bjmh->brmj", queries, keys)
    p = jax.nn.softmax(jnp.where(chunk.allowed[:, :, None], scores, -jnp.inf), axis=-1)
    mixed = jnp.einsum("brmj,bjmh->brmh", p, values)
    outputs = jnp.einsum("brmh,mhe->bre", mixed, heads.out) + chunk.constant @ heads.bias
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


@in_float64
def polish_heads(
    heads: NarrowHeads, problem: Problem, trace: Trace, *, stage: str, max_steps: int = 30
) -> tuple[NarrowHeads, float]:
    """Descend by damped Gauss-Newton steps until nothing improves; the factors and their loss.

    Cost: some hundred forward passes over the examples a step.
    Trust: a stationary point of the training loss, to rounding. Not a certificate.
    """
    data, energy = problem.data, jnp.asarray(problem.energy)
    loss, damping, idle = float(_loss(heads, data, energy)), 1.0, 0
    for step in range(max_steps):
        if loss < ROUNDING or idle == 4 or trace.expired:
            break
        trial, after = _gauss_newton(heads, data, energy, jnp.asarray(damping))
        better = float(after) < loss
        idle = 0 if float(after) < 0.9 * loss else idle + 1
        damping = max(damping * (0.1 if better else 10.0), 1e-12)
        if better:
            heads, loss = trial, float(after)
        trace.emit(stage, step, loss)
    return heads, loss


@jax.jit
def _loss(heads: NarrowHeads, data: Chunk, energy: Array) -> Array:
    def wrong(chunk: Chunk) -> Array:
        return jnp.sum((apply_heads(heads, chunk) - chunk.labels) ** 2)

    return jnp.asarray(total(wrong, data)) / energy


@jax.jit
def _gauss_newton(
    heads: NarrowHeads, data: Chunk, energy: Array, damping: Array
) -> tuple[NarrowHeads, Array]:
    flat, unflatten = ravel_pytree(heads)
    level = jnp.sqrt(jnp.minimum(1.0, _loss(heads, data, energy)))

    def of(chunk: Chunk) -> Any:
        return partial(apply_heads, chunk=chunk)

    def slope(chunk: Chunk) -> NarrowHeads:
        outputs, pull = jax.vjp(of(chunk), heads)
        return pull(chunk.labels - outputs)[0]

    def product(step: NarrowHeads, chunk: Chunk) -> NarrowHeads:
        _, pull = jax.vjp(of(chunk), heads)
        return pull(jax.jvp(of(chunk), (heads,), (step,))[1])[0]

    def summed(function: Any) -> Array:
        return ravel_pytree(total(function, data))[0]

    def apply(step: Array) -> Array:
        damped = damping * level * _DAMPING * energy * step
        return summed(partial(product, unflatten(step))) + damped

    tolerance = jnp.asarray(_CG_TOLERANCE)
    step = conjugate_gradients(apply, lambda v: v, summed(slope), tolerance, _CG_STEPS)
    trial = unflatten(flat + step)
    return trial, _loss(trial, data, energy)
