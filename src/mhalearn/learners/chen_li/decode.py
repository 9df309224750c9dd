"""Past phase 6: decode every row.

Certification asks whether a label is p X W_sum for one p, which is luck. With rough W_i the same
linear problem with a pattern a head, y_r = sum_i p_i X W_i, has m (k - 1) unknowns and e equations,
and every row answers it. The log-odds of the decoded patterns regress to Theta_i, least squares
gives W, and again: regressions alone, each linear.
Source: ours, after the certification of Chen & Li.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mhalearn._runtime.programs import in_float64, in_single
from mhalearn._runtime.types import Array, Float, Float64
from mhalearn.layer.attention import fit_projections, residual, stacked_heads
from mhalearn.layer.batches import Chunk, join_chunks, sum_over_chunks
from mhalearn.layer.dense import Dense
from mhalearn.layer.layer import AttentionLayer
from mhalearn.learners.chen_li.task import Task
from mhalearn.learners.options import Constants
from mhalearn.solvers.cg import conjugate_gradients
from mhalearn.solvers.scaled_problem import Problem, make_problem

# An iterate is better if it has at most this part of the error; three in a row that are not end it.
_BETTER, _PATIENCE = 0.9, 3
# Residual of a regression's conjugate gradients, over the right side's: each decoding gains more.
_TOLERANCE = 1e-4
# Pivot of a design, over its longest image's square, below which its images are not independent.
_SINGULAR = 1e-10


@dataclass(frozen=True)
class Decoded:
    """The best iterate on the examples that select, and the error of each, the start's first.

    used: share of the rows and heads whose log-odds were used last.
    """

    layer: AttentionLayer
    error: float
    errors: Float64
    used: float
    examples: int


class _Patterns(NamedTuple):
    """Decoded patterns of a chunk as a regression sees them: weights over the tokens of each row
    and head, which sum to one where a row is used; log-weights; a weight of the row."""

    q: Float[Array, "b k m k"]
    z: Float[Array, "b k m k"]
    rho: Float[Array, "b k m"]


class _Rule(NamedTuple):
    """Which decoded weights are used, in units of their own standard errors and in their own."""

    usable: tuple[float, float]
    outside: tuple[float, float]


def decode_patterns(
    w: Float[Array, "m d e"], chunk: Chunk
) -> tuple[Float[Array, "b k m j"], Float[Array, "b m"], Float[Array, "b k"]]:
    """The patterns p with y_r = sum_i p_i X W_i, each summing to one; the standard error of a
    head's weights for residuals of size one; and the squared residuals.

    The design of an example is the same for all its rows. Trust: exact for exact W while the
    m (k - 1) images of an example are independent; where they are not, the error is infinite.
    """
    b, k, _ = chunk.tokens.shape
    m = w.shape[0]
    images = jnp.einsum("bjd,mde->bmje", chunk.tokens, w)
    design = (images[:, :, :-1] - images[:, :, -1:]).reshape(b, m * (k - 1), -1)
    apart = chunk.labels - images[:, :, -1].sum(axis=1)[:, None]
    inverse, regular = _invert(jnp.einsum("bae,bce->bac", design, design))
    onto = jnp.einsum("bre,bae->bra", apart, design)
    found = jnp.einsum("bra,bac->brc", onto, inverse)
    left = jnp.sum((apart - jnp.einsum("bra,bae->bre", found, design)) ** 2, axis=-1)
    variance = jnp.diagonal(inverse, axis1=1, axis2=2).reshape(b, m, k - 1).max(axis=-1)
    spread = jnp.where(regular[:, None], jnp.sqrt(jnp.maximum(variance, 0.0)), jnp.inf)
    first = found.reshape(b, k, m, k - 1)
    p = jnp.concatenate([first, 1 - first.sum(axis=-1, keepdims=True)], axis=-1)
    return p, spread, left


def _invert(matrices: Float[Array, "b a a"]) -> tuple[Float[Array, "b a a"], Array]:
    """Inverses of many small Gram matrices by the sweep operator, and which of them are regular;
    zero where one is not. Element by element, so that a singular one spoils no other."""
    size = matrices.shape[-1]
    scale = jnp.maximum(jnp.max(jnp.diagonal(matrices, axis1=1, axis2=2), axis=-1), 1e-300)

    def sweep(place: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        a, regular = state
        row = jax.lax.dynamic_index_in_dim(a, place, axis=1, keepdims=False)
        pivot = jax.lax.dynamic_index_in_dim(row, place, axis=1, keepdims=False)
        regular = regular & (pivot > _SINGULAR)
        pivot = jnp.where(pivot > _SINGULAR, pivot, 1.0)
        here = jnp.arange(size) == place
        swept = a - row[:, :, None] * row[:, None, :] / pivot[:, None, None]
        edge = row / pivot[:, None]
        swept = jnp.where(here[:, None], edge[:, None, :], swept)
        swept = jnp.where(here[None, :], edge[:, :, None], swept)
        corner = here[:, None] & here[None, :]
        return jnp.where(corner, -1 / pivot[:, None, None], swept), regular

    start = (matrices / scale[:, None, None], jnp.ones(len(matrices), bool))
    swept, regular = jax.lax.fori_loop(0, size, sweep, start)
    inverse = -swept / scale[:, None, None]
    return jnp.where(regular[:, None, None], inverse, 0.0), regular


@partial(jax.jit, static_argnames="rule")
def _decode(w: Float[Array, "m d e"], data: Chunk, rule: _Rule) -> tuple[_Patterns, Array]:
    """Decoded patterns of all chunks, and the share of rows and heads that is used.

    The variance of log p is that of p over p^2, so that tokens weigh p^2. Weights near zero have no
    logarithm worth the name, and rows far off the simplex were not decoded: both are left out, the
    more the larger the weights' own standard error is.
    """
    m, (_, _, k, e) = w.shape[0], data.labels.shape
    p, spread, left = jax.lax.map(lambda chunk: decode_patterns(w, chunk), data)
    counts = data.weight > 0
    freedom = max(e - m * (k - 1), 1)
    sigma = jnp.sqrt(jnp.nanmedian(jnp.where(counts, left, jnp.nan)) / freedom)
    error = (sigma * spread)[:, :, None]  # (c, b, 1, m)
    least = jnp.clip(3 * error, *rule.usable)[..., None]
    slack = jnp.clip(2 * error, *rule.outside)
    beyond = jnp.maximum(jnp.max(p - 1, axis=-1), jnp.max(-p, axis=-1))
    usable = p > least
    good = (usable.sum(axis=-1) > 1) & (beyond < slack) & counts[..., None]
    squares = jnp.where(usable & good[..., None], p, 0.0) ** 2
    mass = squares.sum(axis=-1)
    q = squares / jnp.maximum(mass, 1e-300)[..., None]
    z = jnp.log(jnp.where(squares > 0, p, 1.0))
    typical = jnp.nanmedian(jnp.where(good, jnp.broadcast_to(error, good.shape), jnp.nan))
    steady = 1 / (1 + (error / jnp.maximum(typical, 1e-300)) ** 2)
    rho = jnp.where(good, mass * steady, 0.0)
    share = jnp.sum(good) / jnp.maximum(m * jnp.sum(counts), 1)
    return _Patterns(q, z, rho), share


def _logits(theta: Float[Array, "m d d"], chunk: Chunk) -> Float[Array, "b k m j"]:
    keyed = jnp.einsum("brd,mde->brme", chunk.tokens, theta)
    return jnp.einsum("brme,bje->brmj", keyed, chunk.tokens)


def _centred(q: Array, values: Array) -> Array:
    return q * (values - jnp.sum(q * values, axis=-1, keepdims=True))


@partial(jax.jit, static_argnames=("reweightings", "products"))
def _regress(
    theta: Float[Array, "m d d"], patterns: _Patterns, data: Chunk, reweightings: int, products: int
) -> Float[Array, "m d d"]:
    """Weighted least squares of the log-odds, by conjugate gradients from the current matrices;
    rows that disagree weigh less each time. The Gram matrix is not formed.

    Products are in single precision, which is more exact than what conjugate gradients are asked
    for; what they solve for, the step from the current matrices, is not."""
    rough_data, rough_q = in_single(data), in_single(patterns.q)

    def pulled(values: Array, chunk: Chunk) -> Array:
        keys = jnp.einsum("brmj,bjd->brmd", values, chunk.tokens)
        return jnp.einsum("brd,brme->mde", chunk.tokens, keys)

    def product(rho: Array, step: Array) -> Array:
        def one(parts: tuple[Chunk, Array, Array]) -> Array:
            chunk, q, weight = parts
            return pulled(weight[..., None] * _centred(q, _logits(step, chunk)), chunk)

        return sum_over_chunks(one, (rough_data, rough_q, rho))

    def solve(theta: Array, rho: Array) -> Array:
        def right(parts: tuple[Chunk, _Patterns, Array]) -> Array:
            chunk, known, weight = parts
            apart = known.z - _logits(theta, chunk)
            return pulled(weight[..., None] * _centred(known.q, apart), chunk)

        wanted = sum_over_chunks(right, (data, patterns, rho)).ravel()
        size = jnp.maximum(jnp.linalg.norm(wanted), 1e-300)
        rough_rho = in_single(rho / jnp.maximum(jnp.max(rho), 1e-300))
        with jax.default_matmul_precision("highest"):
            found = conjugate_gradients(
                lambda flat: product(rough_rho, flat.reshape(theta.shape)).ravel(),
                lambda flat: flat,
                in_single(wanted / size),
                jnp.asarray(_TOLERANCE, jnp.float32),
                products,
            ).solution
        scale = size / jnp.maximum(jnp.max(rho), 1e-300)
        return theta + scale * found.astype(theta.dtype).reshape(theta.shape)

    def disagreement(parts: tuple[Chunk, _Patterns]) -> Array:
        chunk, known = parts
        apart = known.z - _logits(theta, chunk)
        return jnp.sum(_centred(known.q, apart) * apart, axis=-1) * known.rho

    rho = patterns.rho
    for _ in range(reweightings):
        theta = solve(theta, rho)
        doubt = jax.lax.map(disagreement, (data, patterns))
        usual = jnp.nanmedian(jnp.where(patterns.rho > 0, doubt, jnp.nan), axis=(0, 1, 2))
        rho = patterns.rho / (1 + doubt / jnp.maximum(usual, 1e-300))
    return theta


@jax.jit
def _relative_error(theta: Array, w: Array, data: Chunk) -> Float[Array, ""]:
    energy = jnp.sum((data.labels * data.weight[..., None]) ** 2)
    left = sum_over_chunks(lambda chunk: jnp.sum(residual(theta, w, chunk) ** 2), data)
    return left / energy


@jax.jit
def _fit_w(theta: Array, data: Chunk) -> Array:
    return fit_projections(theta, data, jnp.zeros(())).w


@in_float64
def decode_rows(task: Task, start: AttentionLayer) -> Decoded:
    """Decode, regress, refit, while it gets better on the examples that select.

    Cost: a step is about as many passes over the decoded examples as conjugate gradients need,
    O(n k m d^2) each. Memory: theirs.
    Trust: a contraction near the truth, by measurement a factor of 20 and more a step; from random
    starts it does not converge. The start is among what is chosen from, so nothing gets worse on
    the examples that select.
    """
    constants, few = task.constants, task.few
    spared = min(constants.select, few.n // 4)
    count = max(constants.decoded * task.d**2, constants.decoded_least)
    count = min(count, constants.decoded_most, few.n - spared)
    kind = Dense(few.architecture(start.n_heads))
    fit = make_problem(few.subset(slice(0, count)), kind)
    select = make_problem(few.subset(slice(few.n - spared, None)), kind)
    return _iterate(task, start, fit, select, constants)


def _iterate(
    task: Task, start: AttentionLayer, fit: Problem, select: Problem, constants: Constants
) -> Decoded:
    rule = _Rule(constants.usable, constants.outside)
    data = join_chunks(fit.data, _group(fit.data, start.n_heads))
    m, d, run = start.n_heads, start.d, task.run

    def measure(theta: Array, w: Array) -> float:
        # Units of the two problems may differ by a power of two.
        x, y = (
            getattr(select.units, f"{name}_scale") / getattr(fit.units, f"{name}_scale")
            for name in ("x", "y")
        )
        return float(_relative_error(theta * x**2, w * x / y, select.data))

    theta, w = jnp.asarray(fit.theta(start)), jnp.asarray(fit.w(start))
    errors = [measure(theta, w)]
    best, used, waited = (errors[0], theta, w), 0.0, 0
    for step in range(constants.decode_steps):
        if waited >= _PATIENCE or best[0] < constants.decode_goal or run.is_over():
            break
        patterns, share = _decode(stacked_heads(w, m, d), data, rule)
        theta = _regress(
            theta, patterns, data, constants.decode_reweightings, constants.decode_products
        )
        w, used = _fit_w(theta, fit.data), float(share)
        errors.append(measure(theta, w))
        run.emit("decode", step, errors[-1])
        waited = 0 if errors[-1] < _BETTER * best[0] else waited + 1
        if errors[-1] < best[0]:
            best = (errors[-1], theta, w)
        if not np.isfinite(errors[-1]):
            _, theta, w = best
    layer = fit.layer(np.asarray(best[1]), np.asarray(best[2]))
    return Decoded(layer, best[0], np.array(errors), used, fit.rows // fit.k)


def _group(data: Chunk, n_heads: int) -> int:
    """How many chunks to join: what is held a row here is far less than a normal matrix needs."""
    count, b, k, e = data.labels.shape
    held = b * k * n_heads * (2 * k + e + data.tokens.shape[-1])
    most = max(1, 2**25 // held)
    return max(g for g in range(1, count + 1) if count % g == 0 and g <= most)
