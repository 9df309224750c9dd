"""Attention matrices from attention patterns: a regression of log-odds, without softmax.

Where a row attends to tokens a and b, log(p_a / p_b) = x_r Theta (x_a - x_b) is linear in Theta.
Each head is a problem of its own, of recovering a matrix of low rank from linear measurements: it
begins at the matrix whose singular vectors the measurements themselves show.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from mhalearn._runtime.programs import compiled, in_float64, in_single
from mhalearn._runtime.types import Array, Float, Float64
from mhalearn.layer.batches import sum_over_chunks
from mhalearn.run.run import Run
from mhalearn.solvers.cg import CGResult, conjugate_gradients
from mhalearn.solvers.damping import IDLE, IDLE_STEPS, update_damping
from mhalearn.solvers.free_patterns import Decoded, Sequences

# Entries below so many standard deviations say nothing. What no arithmetic in doubles decodes.
_SEEN, _ROUNDING = 3.0, 1e-15
# Standard deviations at which entries count half, one after the other. Counted by their precision
# from the first, few entries would say everything, slowly. The last are for all examples.
HALVES, LAST_HALVES = (1e3, 1e6, 1e9), (1e12, 1e13)
_DAMPING, _CG_STEPS, _TINY = 1e-3, 100, 1e-30
# What these may leave of the right side.
_FINEST, _COARSEST = 1e-4, 1e-2
# Of the squares of logits: what is left where joint steps on examples go on.
_CLOSE = 1e-6


class Readers(NamedTuple):
    """Theta_i = query_i key_i^T, by head."""

    query: Float[Array, "*m q h"]
    key: Float[Array, "*m d h"]


class Measured(NamedTuple):
    """Logits of each head up to a constant a row, and what each is worth, by chunk."""

    queries: Float[Array, "c b r q"]
    tokens: Float[Array, "c b j d"]
    logits: Float[Array, "*m c b r j"]
    worth: Float[Array, "*m c b r j"]


_BY_HEAD = Measured(None, None, 0, 0)  # type: ignore[arg-type]


@in_float64
def measure_logits(decoded: Decoded, data: Sequences, key_vector: bool, half: float) -> Measured:
    """What decoded patterns say of logits, with entries of `half` standard deviations counted half.

    True patterns are not negative: how far decoded ones fall below zero tells each head's errors.
    """
    rows = max(1, int(jnp.sum(data.visible > 0)) * data.labels.shape[-1])
    noise = decoded.squared / rows
    logits, worth = _measure(decoded.patterns, decoded.spread, data.visible, noise, half)
    return Measured(list_queries(data, key_vector), data.tokens, logits, worth)


def list_queries(data: Sequences, key_vector: bool) -> Float[Array, "c b r q"]:
    """The tokens, with a constant where keys have a vector of their own."""
    if not key_vector:
        return data.tokens
    return jnp.concatenate([data.tokens, jnp.ones((*data.tokens.shape[:3], 1))], axis=-1)


@compiled
def attend(readers: Readers, queries: Array, data: Sequences) -> Float[Array, "c b r m j"]:
    """Patterns; none of padding."""

    def of_chunk(part: tuple[Array, Sequences]) -> Array:
        queries, chunk = part
        asked = jnp.einsum("brq,mqh->brmh", queries, readers.query)
        keys = jnp.einsum("bjd,mdh->bjmh", chunk.tokens, readers.key)
        seen = jnp.arange(chunk.tokens.shape[1]) < chunk.visible[..., None]
        scores = jnp.einsum("brmh,bjmh->brmj", asked, keys)
        found = jax.nn.softmax(scores, axis=-1, where=seen[:, :, None])
        return jnp.where(seen[:, :, None], found, 0.0)

    found: Array = jax.lax.map(of_chunk, (queries, data))
    return found


@compiled
def _measure(
    patterns: Array, spread: Array, visible: Array, noise: Array, half: Array
) -> tuple[Array, Array]:
    patterns, spread = (jnp.moveaxis(part, 3, 0) for part in (patterns, spread))
    inside = jnp.arange(patterns.shape[-1]) < visible[..., None]
    below = inside & (patterns < 0)
    squares = jnp.where(below, patterns**2 / jnp.maximum(spread, 1e-300), 0.0)
    axes = 1, 2, 3, 4
    seen_below = jnp.sum(squares, axes) / jnp.maximum(jnp.sum(below, axes), 1)
    variance = jnp.maximum(seen_below, noise)[:, None, None, None, None] * spread
    deviation = jnp.sqrt(variance) + _ROUNDING
    seen = inside & (patterns > _SEEN * deviation)
    worth = jnp.where(seen, patterns**2 / (patterns**2 + (half * deviation) ** 2), 0.0)
    worth /= jnp.maximum(jnp.max(worth, axes, keepdims=True), 1e-300)
    return _centred(jnp.log(jnp.where(seen, patterns, 1.0)), worth), worth


def _centred(logits: Array, worth: Array) -> Array:
    """Without the constant of each row, which attention does not see."""
    total = jnp.maximum(jnp.sum(worth, axis=-1, keepdims=True), 1e-30)
    return logits - jnp.sum(worth * logits, axis=-1, keepdims=True) / total


@in_float64
def regress_logits(
    start: Readers,
    measured: Measured,
    run: Run,
    *,
    stage: str,
    max_steps: int = 40,
    idle_gain: float = IDLE,
) -> tuple[Readers, Float64]:
    """Theta of the start's rank by head, and what is left of the squares of each head's logits.

    idle_gain: the share of these of which a step that gains less is idle.

    Cost: some tens of forward passes a step. Trust: a heuristic, whose landscape is benign where
    measurements are several times the unknowns.
    """
    at = start
    total, size = (np.maximum(np.asarray(part), 1e-300) for part in _sizes(measured))
    here = np.asarray(_squares(at, measured))
    damping, idle = np.full(len(here), _DAMPING), np.zeros(len(here))
    for number in range(max_steps):
        run.emit(stage, number, float(np.max(here / size)))
        going = (here > _TINY * size) & (idle < np.where(here < _CLOSE * size, 1, IDLE_STEPS))
        if not going.any() or run.is_over():
            break
        level = np.minimum(1.0, np.sqrt(here / size))
        tolerance = np.where(going, np.clip(level, _FINEST, _COARSEST), 1.0)
        left = score_residual(at, measured)
        step = solve_scores(at, measured, left, damping * level * total, tolerance)
        trial = jax.tree.map(jnp.add, at, step.change)
        there = np.asarray(_squares(trial, measured))
        gain = here - there
        ratio = gain / np.maximum(np.asarray(step.predicted), 1e-300)
        damping = np.asarray(update_damping(damping, ratio, np))
        idle = np.where(gain > idle_gain * here, 0, idle + 1)
        taken = jnp.asarray(gain > 0)[:, None, None]
        at = jax.tree.map(partial(jnp.where, taken), trial, at)
        here = np.where(gain > 0, there, here)
    return at, here / size


@in_float64
def spectral_start(measured: Measured, rank: int) -> Readers:
    """The singular vectors of sum_r x_r (sum_j w_rj l_rj x_j)^T, scaled to the logits."""
    sums = np.asarray(_correlate(measured), np.float64)
    left, values, right = np.linalg.svd(sums, full_matrices=False)
    root = np.sqrt(values[:, None, :rank])
    found = Readers(jnp.asarray(left[:, :, :rank] * root), jnp.asarray(right[:, :rank].mT * root))
    scale = np.sqrt(np.maximum(np.asarray(_best_scale(found, measured)), 0.0))[:, None, None]
    return Readers(found.query * scale, found.key * scale)


@compiled
def _correlate(measured: Measured) -> Float[Array, "m q d"]:
    @partial(jax.vmap, in_axes=(_BY_HEAD,))
    def of_head(measured: Measured) -> Array:
        def correlate(part: Measured) -> Array:
            keys = jnp.einsum("brj,bjd->brd", part.worth * part.logits, part.tokens)
            return jnp.einsum("brq,brd->qd", part.queries, keys)

        found: Array = sum_over_chunks(correlate, measured)
        return found

    return of_head(measured)


def _scores(readers: Readers, part: Measured) -> Array:
    queries = jnp.einsum("brq,qh->brh", part.queries, readers.query)
    keys = jnp.einsum("bjd,dh->bjh", part.tokens, readers.key)
    return _centred(jnp.einsum("brh,bjh->brj", queries, keys), part.worth)


@compiled
def _best_scale(readers: Readers, measured: Measured) -> Float[Array, " m"]:
    @partial(jax.vmap, in_axes=(0, _BY_HEAD))
    def of_head(readers: Readers, measured: Measured) -> Array:
        def sums(part: Measured) -> tuple[Array, Array]:
            scores = _scores(readers, part)
            return jnp.sum(part.worth * scores * part.logits), jnp.sum(part.worth * scores**2)

        along, squares = sum_over_chunks(sums, measured)
        return along / jnp.maximum(squares, 1e-300)

    return of_head(readers, measured)


@compiled
def _sizes(measured: Measured) -> tuple[Array, Array]:
    """What all logits of a head are worth together, and their squares."""
    axes = tuple(range(1, measured.worth.ndim))
    return jnp.sum(measured.worth, axes), jnp.sum(measured.worth * measured.logits**2, axes)


@compiled
def _squares(readers: Readers, measured: Measured) -> Float[Array, " m"]:
    @partial(jax.vmap, in_axes=(0, _BY_HEAD))
    def of_head(readers: Readers, measured: Measured) -> Array:
        def squares(part: Measured) -> Array:
            return jnp.sum(part.worth * (part.logits - _scores(readers, part)) ** 2)

        found: Array = sum_over_chunks(squares, measured)
        return found

    return of_head(readers, measured)


class ScoreStep(NamedTuple):
    """A step of each head, by how much it lowers its squares, and the search that found it."""

    change: Readers
    predicted: Float[Array, " m"]
    search: CGResult


@compiled
def score_residual(readers: Readers, measured: Measured) -> Float[Array, "m c b r j"]:
    """Logits less those of Theta, times their worth."""

    @partial(jax.vmap, in_axes=(0, _BY_HEAD))
    def of_head(readers: Readers, measured: Measured) -> Array:
        found: Array = jax.lax.map(
            lambda part: part.worth * (part.logits - _scores(readers, part)), measured
        )
        return found

    return of_head(readers, measured)


@compiled
def score_change(readers: Readers, measured: Measured, change: Readers) -> Array:
    """How a change of the factors changes the logits, times their worth."""

    @partial(jax.vmap, in_axes=(0, _BY_HEAD, 0))
    def of_head(readers: Readers, measured: Measured, change: Readers) -> Array:
        found: Array = jax.lax.map(
            lambda part: part.worth * _score_change(readers, part, change), measured
        )
        return found

    return of_head(readers, measured, change)


def _score_change(readers: Readers, part: Measured, change: Readers) -> Array:
    return jax.jvp(partial(_scores, part=part), (readers,), (change,))[1]


@compiled
def solve_scores(
    readers: Readers, measured: Measured, left: Array, damping: Array, tolerance: Array
) -> ScoreStep:
    """The damped Gauss-Newton step of each head towards what is left of its logits, times their
    worth. In single precision: what it leaves is for another."""
    logits, worth = measured.logits, measured.worth

    def of_head(part: tuple[Array, ...]) -> tuple[Readers, Array, CGResult]:
        query, key, logits, worth, *rest = part
        return _solve_head(
            Readers(query, key), measured._replace(logits=logits, worth=worth), *rest
        )

    # An accelerator takes all heads at once; on a CPU each ends when it is solved.
    at_once = len(worth) if jax.default_backend() != "cpu" else 1
    parts = (*readers, logits, worth, left, damping, tolerance)
    return ScoreStep(*jax.lax.map(of_head, parts, batch_size=at_once))


def _solve_head(
    readers: Readers, measured: Measured, left: Array, damping: Array, tolerance: Array
) -> tuple[Readers, Array, CGResult]:
    exact, unflatten = ravel_pytree(jax.tree.map(jnp.zeros_like, readers))
    scale = jnp.max(jnp.abs(left)) + 1e-300
    rough, light_data = in_single(readers), in_single(measured)
    light = ravel_pytree(rough)[1]

    def pull(part: Measured, scores: Array) -> Readers:
        found: Readers = jax.vjp(partial(_scores, part=part), rough)[1](scores)[0]
        return found

    def apply(step: Array) -> Array:
        parts = light(step)
        total = sum_over_chunks(
            lambda part: pull(part, part.worth * _score_change(rough, part, parts)), light_data
        )
        return ravel_pytree(total)[0] + damping.astype(step.dtype) * step

    with jax.default_matmul_precision("highest"):
        scaled = (left / scale).astype(jnp.float32)
        slope = sum_over_chunks(lambda part: pull(part[0], part[1]), (light_data, scaled))
        right = ravel_pytree(slope)[0]
        found = conjugate_gradients(
            apply, lambda v: v, right, tolerance.astype(right.dtype), _CG_STEPS
        )
    step = found.solution.astype(exact.dtype)
    predicted = jnp.vdot(step, right.astype(exact.dtype)) + damping * jnp.vdot(step, step)
    return unflatten(scale * step), scale**2 * predicted, found
