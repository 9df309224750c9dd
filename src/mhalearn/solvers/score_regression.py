"""Attention matrices from attention patterns: a regression of log-odds, without softmax.

Where a row attends to tokens a and b, log(p_a / p_b) = x_r Theta (x_a - x_b) is linear in Theta.
Each head is a problem of its own, of recovering a matrix of low rank from linear measurements: it
begins at the matrix whose singular vectors the measurements themselves show. Heads of another kind
have other scores, and log-odds are differences of these.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from mhalearn._runtime.programs import compiled, in_float64, in_single
from mhalearn._runtime.types import Array, Bool, Float, Float64
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
    """Logits of each head up to a constant a row, and what each is worth, by chunk. Heads that
    share something are one problem: their logits are side by side, as (m, c, b, r, n, j), and the
    patterns that they are the logs of are at hand."""

    queries: Float[Array, "c b r q"]
    tokens: Float[Array, "c b j d"]
    logits: Float[Array, "*m j"]
    worth: Float[Array, "*m j"]
    patterns: Float[Array, "*m j"] | None = None


# Logits of a part of the measurements, by what decides them.
Scores = Callable[[Any, Measured], Array]


_BY_HEAD = Measured(None, None, 0, 0, 0)  # type: ignore[arg-type]
_with_scores = partial(compiled, static_argnames="scores")


@in_float64
def measure_logits(
    decoded: Decoded, data: Sequences, key_vector: bool, half: float, *, by_sign: bool = True
) -> Measured:
    """What decoded patterns say of logits, with entries of `half` standard deviations counted half.

    True patterns are not negative: how far decoded ones fall below zero tells each head's errors,
    where this is asked for.
    """
    noise = label_noise(decoded, data)
    below = 1.0 if by_sign else 0.0
    logits, worth = _measure(decoded.patterns, decoded.spread, data.visible, noise, below, half)
    return Measured(list_queries(data, key_vector), data.tokens, logits, worth)


def label_noise(decoded: Decoded, data: Sequences) -> float:
    """The mean square of what no patterns explain."""
    return decoded.squared / max(1, int(jnp.sum(data.visible > 0)) * data.labels.shape[-1])


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
    patterns: Array, spread: Array, visible: Array, noise: Array, by_sign: Array, half: Array
) -> tuple[Array, Array]:
    patterns, spread = (jnp.moveaxis(part, 3, 0) for part in (patterns, spread))
    inside = jnp.arange(patterns.shape[-1]) < visible[..., None]
    below = inside & (patterns < 0)
    squares = jnp.where(below, patterns**2 / jnp.maximum(spread, 1e-300), 0.0)
    axes = 1, 2, 3, 4
    seen_below = jnp.sum(squares, axes) / jnp.maximum(jnp.sum(below, axes), 1)
    variance = jnp.maximum(by_sign * seen_below, noise)[:, None, None, None, None] * spread
    deviation = jnp.sqrt(variance) + _ROUNDING
    seen = inside & (patterns > _SEEN * deviation)
    worth = jnp.where(seen, patterns**2 / (patterns**2 + (half * deviation) ** 2), 0.0)
    worth /= jnp.maximum(jnp.max(worth, axes, keepdims=True), 1e-300)
    return centre(jnp.log(jnp.where(seen, patterns, 1.0)), worth), worth


def centre(logits: Array, worth: Array) -> Array:
    """Logits without the constant of each row, which attention does not see."""
    total = jnp.maximum(jnp.sum(worth, axis=-1, keepdims=True), 1e-30)
    return logits - jnp.sum(worth * logits, axis=-1, keepdims=True) / total


def bilinear_scores(readers: Readers, part: Measured) -> Array:
    queries = jnp.einsum("brq,qh->brh", part.queries, readers.query)
    keys = jnp.einsum("bjd,dh->bjh", part.tokens, readers.key)
    return jnp.einsum("brh,bjh->brj", queries, keys)


@in_float64
def regress_logits(
    start: Any,
    measured: Measured,
    run: Run,
    *,
    stage: str,
    max_steps: int = 40,
    idle_gain: float = IDLE,
    scores: Scores = bilinear_scores,
) -> tuple[Any, Float64]:
    """Theta of the start's rank by head, and what is left of the squares of each head's logits.

    idle_gain: the share of these of which a step that gains less is idle. scores: of heads that
    have no Theta, by parameters with a first axis of problems.

    Cost: some tens of forward passes a step. Trust: a heuristic, whose landscape is benign where
    measurements are several times the unknowns.
    """
    at = start
    total, size = (np.maximum(np.asarray(part), 1e-300) for part in _sizes(measured))
    here = np.asarray(_squares(at, measured, scores))
    damping, idle = np.full(len(here), _DAMPING), np.zeros(len(here))
    for number in range(max_steps):
        run.emit(stage, number, float(np.max(here / size)))
        going = (here > _TINY * size) & (idle < np.where(here < _CLOSE * size, 1, IDLE_STEPS))
        if not going.any() or run.is_over():
            break
        level = np.minimum(1.0, np.sqrt(here / size))
        tolerance = np.where(going, np.clip(level, _FINEST, _COARSEST), 1.0)
        left = score_residual(at, measured, scores)
        step = solve_scores(at, measured, left, damping * level * total, tolerance, scores)
        trial = jax.tree.map(jnp.add, at, step.change)
        there = np.asarray(_squares(trial, measured, scores))
        gain = here - there
        ratio = gain / np.maximum(np.asarray(step.predicted), 1e-300)
        damping = np.asarray(update_damping(damping, ratio, np))
        idle = np.where(gain > idle_gain * here, 0, idle + 1)
        at = choose_by_head(gain > 0, trial, at)
        here = np.where(gain > 0, there, here)
    return at, here / size


def choose_by_head(first: Bool[np.ndarray, " m"], one: Any, other: Any) -> Any:
    """The parameters of `one` where it says so, those of `other` elsewhere."""

    def choose(one: Array, other: Array) -> Array:
        return jnp.where(first.reshape(-1, *(1,) * (one.ndim - 1)), one, other)

    return jax.tree.map(choose, one, other)


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


def _centred_scores(scores: Scores, readers: Any, part: Measured) -> Array:
    return centre(scores(readers, part), part.worth)


@compiled
def _best_scale(readers: Readers, measured: Measured) -> Float[Array, " m"]:
    @partial(jax.vmap, in_axes=(0, _BY_HEAD))
    def of_head(readers: Readers, measured: Measured) -> Array:
        def sums(part: Measured) -> tuple[Array, Array]:
            scores = _centred_scores(bilinear_scores, readers, part)
            return jnp.sum(part.worth * scores * part.logits), jnp.sum(part.worth * scores**2)

        along, squares = sum_over_chunks(sums, measured)
        return along / jnp.maximum(squares, 1e-300)

    return of_head(readers, measured)


@compiled
def _sizes(measured: Measured) -> tuple[Array, Array]:
    """What all logits of a head are worth together, and their squares."""
    axes = tuple(range(1, measured.worth.ndim))
    return jnp.sum(measured.worth, axes), jnp.sum(measured.worth * measured.logits**2, axes)


@_with_scores
def _squares(readers: Any, measured: Measured, scores: Scores) -> Float[Array, " m"]:
    @partial(jax.vmap, in_axes=(0, _BY_HEAD))
    def of_head(readers: Any, measured: Measured) -> Array:
        def squares(part: Measured) -> Array:
            left = part.logits - _centred_scores(scores, readers, part)
            return jnp.sum(part.worth * left**2)

        found: Array = sum_over_chunks(squares, measured)
        return found

    return of_head(readers, measured)


class ScoreStep(NamedTuple):
    """A step of each head, by how much it lowers its squares, and the search that found it."""

    change: Any  # as the readers are
    predicted: Float[Array, " m"]
    search: CGResult


@_with_scores
def score_residual(
    readers: Any, measured: Measured, scores: Scores = bilinear_scores
) -> Float[Array, "m c b r *n j"]:
    """Logits less those of Theta, times their worth."""

    @partial(jax.vmap, in_axes=(0, _BY_HEAD))
    def of_head(readers: Any, measured: Measured) -> Array:
        def left(part: Measured) -> Array:
            return part.worth * (part.logits - _centred_scores(scores, readers, part))

        found: Array = jax.lax.map(left, measured)
        return found

    return of_head(readers, measured)


@_with_scores
def score_change(
    readers: Any, measured: Measured, change: Any, scores: Scores = bilinear_scores
) -> Array:
    """How a change of the factors changes the logits, times their worth."""

    @partial(jax.vmap, in_axes=(0, _BY_HEAD, 0))
    def of_head(readers: Any, measured: Measured, change: Any) -> Array:
        found: Array = jax.lax.map(
            lambda part: part.worth * _score_change(scores, readers, part, change), measured
        )
        return found

    return of_head(readers, measured, change)


def _score_change(scores: Scores, readers: Any, part: Measured, change: Any) -> Array:
    moved = partial(_centred_scores, scores, part=part)
    return jax.jvp(moved, (readers,), (change,))[1]


@_with_scores
def solve_scores(
    readers: Any,
    measured: Measured,
    left: Array,
    damping: Array,
    tolerance: Array,
    scores: Scores = bilinear_scores,
) -> ScoreStep:
    """The damped Gauss-Newton step of each head towards what is left of its logits, times their
    worth. In single precision: what it leaves is for another."""
    logits, worth, patterns = measured[2:]

    def of_head(part: tuple[Any, ...]) -> tuple[Any, Array, CGResult]:
        readers, own, left, damping, tolerance = part
        own = Measured(*measured[:2], *own)
        return _solve_head(readers, own, left, damping, tolerance, scores)

    # An accelerator takes all heads at once; on a CPU each ends when it is solved.
    at_once = len(worth) if jax.default_backend() != "cpu" else 1
    parts = (readers, (logits, worth, patterns), left, damping, tolerance)
    return ScoreStep(*jax.lax.map(of_head, parts, batch_size=at_once))


def _solve_head(
    readers: Any,
    measured: Measured,
    left: Array,
    damping: Array,
    tolerance: Array,
    scores: Scores,
) -> tuple[Any, Array, CGResult]:
    exact, unflatten = ravel_pytree(jax.tree.map(jnp.zeros_like, readers))
    scale = jnp.max(jnp.abs(left)) + 1e-300
    rough, light_data = in_single(readers), in_single(measured)
    light = ravel_pytree(rough)[1]

    def pull(part: Measured, of_logits: Array) -> Any:
        moved = partial(_centred_scores, scores, part=part)
        return jax.vjp(moved, rough)[1](of_logits)[0]

    def apply(step: Array) -> Array:
        parts = light(step)
        total = sum_over_chunks(
            lambda part: pull(part, part.worth * _score_change(scores, rough, part, parts)),
            light_data,
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
