"""What heads write, by variable projection over attention patterns: no Theta is asked for.

A row of an example X is y = c + sum_i p_i X W_i with patterns p_i that sum to one. Whatever Theta
is, a row that sees k tokens lies in an affine space of m (k - 1) dimensions, which X, W and c alone
decide. While these are fewer than e, and k - 1 is less than the rank of every W_i, the part of a
row outside of that space is a residual without patterns in it (Golub & Pereyra 1973), and its
minimum is the true W and c. Patterns are eliminated row by row, however sharp attention is, and
read off in the end.

The directions of an example are orthonormalised token by token, so that those of the first tokens,
which are all that an early row of a causal layer sees, come first.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from numpy.typing import NDArray

from mhalearn._runtime.programs import compiled, in_float64, in_single, on_device
from mhalearn._runtime.threads import one_lapack_thread
from mhalearn._runtime.types import Array, Float, Float64, Int
from mhalearn.layer.batches import sum_over_chunks
from mhalearn.run.run import Run
from mhalearn.solvers.cg import CGResult, conjugate_gradients
from mhalearn.solvers.damping import IDLE_STEPS, update_damping

# What is added to the Gram matrix of an example's directions, over their mean square.
_RIDGE = 1e-13
# The share of a singular value's square from which on that decides it, and an example says nothing.
_DECIDED = 0.1
UNKNOWN = 1e100
# Times that projections on them are refined: the ridge and the Gram matrix's rounding go out.
_REFINED = 3
# Entries of the bases of these spaces, in single precision, or of patterns, that are held at most:
# 1 GiB on a CPU.
_HELD = 2**28
# Doubles of a chunk, and of the dimensions of what is written those that patterns may take.
_CHUNK, _FILLED = 2**25, 0.8
# Equations over the unknowns of W that it is found from, and those that go with the patterns of
# which Theta is found: sharp ones say little each.
_EQUATIONS, _OF_PATTERNS = 6.0, 24.0
# Damping at first, over the root of what is left; conjugate-gradient steps of a step.
_DAMPING, _CG_STEPS = 1e-2, 100
# What these may leave of the right side.
_FINEST, _COARSEST = 1e-4, 1e-2
# Shares of the label energy: what is rounding, and from where on a step without a gain is the last.
_ROUNDING, _NEAR = 1e-26, 1e-18
# A step that gains less than this part is idle: heads too many make the way long.
_SLOW = 0.5


class Writers(NamedTuple):
    """Heads without their attention: W_i = value_g out_i, and the bias; as many heads in a row as
    there are for each value share it."""

    value: Float[Array, "g d h"]
    out: Float[Array, "m h e"]
    bias: Float[Array, "x e"]


class Sequences(NamedTuple):
    """Examples in chunks of the same size, with how many tokens each row sees."""

    tokens: Float[Array, "c b k d"]
    labels: Float[Array, "c b k e"]
    visible: Int[Array, "c b r"]  # 0 for padding

    @property
    def k(self) -> int:
        return int(self.tokens.shape[2])


class Decoded(NamedTuple):
    """Every row's patterns, and where it is asked for what they leave."""

    patterns: Float[Array, "c b r m j"]
    # Variance of a pattern's entry in units of the labels' noise; more than `UNKNOWN`: not known.
    spread: Float[Array, "c b r m j"]
    squared: float  # sum of the squares of what no patterns explain
    bases: Float[Array, "c b s e"] | None  # orthonormal, in single precision
    left: Float[Array, "c b r e"] | None


class Step(NamedTuple):
    """A step in W and c, by how much it lowers the squares, and the search that found it."""

    change: Writers
    predicted: Array
    search: CGResult


class Written(NamedTuple):
    """Where the projection ended."""

    writers: Writers
    decoded: Decoded
    loss: float  # what is left over the label energy


def longest(n_heads: int, outputs: int, rank: int) -> int:
    """Tokens of the longest sequences whose rows have more outputs than patterns can explain, and
    whose heads write in more dimensions than a pattern has, by a margin."""
    return 1 + int(_FILLED * min(outputs / n_heads, rank))


@in_float64
def make_sequences(
    tokens: NDArray[np.float64],
    labels: NDArray[np.float64],
    lengths: NDArray[np.int64],
    *,
    heads: int,
    rank: int,
    causal: bool,
    groups: int | None = None,
    first: int | None = None,
    sink: bool = False,
    only_patterns: bool = False,
) -> Sequences | None:
    """Examples that are short enough, as many from the first on as W needs, or patterns only,
    and there is room for; None: they are too few. Of a causal layer's examples the first rows.

    groups: of heads that share values. first: tokens of a causal layer that are looked at, at most.
    sink: whether the first of these is there to be attended to, and its row says nothing.
    """
    e = labels.shape[2]
    most = longest(heads, e, rank)
    most = most if first is None else min(most, first)
    lengths = np.minimum(lengths, most) if causal else lengths
    short = (lengths >= 2) & (lengths <= most)
    tokens, labels, lengths = tokens[short], labels[short], lengths[short]
    if not len(lengths):
        return None
    k, d = int(lengths.max()), tokens.shape[2]
    visible = np.minimum(np.arange(1, k + 1), lengths[:, None]) if causal else lengths[:, None]
    visible = np.where(np.arange(k) < lengths[:, None], visible, 0)
    visible[:, : int(sink)] = 0
    unknowns = rank * ((groups or heads) * d + heads * e)
    equations = np.cumsum(np.where(visible > 0, e - heads * (visible - 1), 0).sum(axis=1))
    if equations[-1] < unknowns:
        return None
    width = heads * (k - 1)
    enough = _OF_PATTERNS if only_patterns else _EQUATIONS
    n = 1 + int(np.searchsorted(equations, enough * unknowns))
    held = 4 * heads * k * k if only_patterns else width * e
    n = min(n, len(lengths), max(1, on_device(_HELD) // held))
    row = width * (width + heads * k + e) + k * (heads * (2 * k + d) + e)
    size = max(1, min(n, on_device(_CHUNK) // row))
    chunks = -(-n // size)
    size = -(-n // chunks)

    def cut(array: NDArray[Any]) -> Array:
        whole = np.zeros((chunks * size, *array.shape[1:]), array.dtype)
        whole[:n] = array[:n]
        return jnp.asarray(whole.reshape(chunks, size, *array.shape[1:]))

    inside = (visible > 0)[..., None]
    return Sequences(
        cut(np.where(inside, tokens[:, :k], 0.0)),
        cut(np.where(inside, labels[:, :k], 0.0)),
        cut(visible),
    )


@in_float64
def project_patterns(
    start: Writers, data: Sequences, run: Run, *, stage: str, max_steps: int = 40
) -> Written:
    """Damped Gauss-Newton steps in W and c, patterns eliminated (Kaufman's approximation).

    Cost: a Cholesky factor of m (k - 1) rows an example and some tens of forward passes a step.
    Memory: n m (k - 1) e numbers in single precision.
    Trust: a heuristic with a wide basin; patterns that it decodes are any with the sum of one, and
    nothing says that attention made them.
    """
    energy = float(jnp.sum(data.labels**2)) or 1.0
    here, damping, idle = decode(start, data), _DAMPING, 0
    at = start
    for number in range(max_steps):
        run.emit(stage, number, here.squared / energy)
        near = here.squared < _NEAR * energy
        ended = idle >= (1 if near else IDLE_STEPS) or here.squared < _ROUNDING * energy
        if ended or run.is_over() or not np.isfinite(here.squared):
            break
        level = min(1.0, (here.squared / energy) ** 0.5)
        rough = here.patterns, here.bases
        tolerance = min(max(level, _FINEST), _COARSEST)
        step = solve_step(at, data, *rough, here.left, damping * level * energy, tolerance)
        trial = jax.tree.map(jnp.add, at, step.change)
        there = decode(trial, data)
        gain = here.squared - there.squared
        damping = float(update_damping(damping, gain / max(float(step.predicted), 1e-300), np))
        idle = 0 if gain > _SLOW * here.squared else idle + 1
        if gain > 0:
            at, here = trial, there
    return Written(at, here, here.squared / energy)


@in_float64
def decode(writers: Writers, data: Sequences, *, only_patterns: bool = False) -> Decoded:
    """The best patterns of every row, chunk by chunk; and, where steps in W are to follow, in which
    directions they may move and what they leave."""
    kept, squared = [], 0.0
    for chunk, half in _each(writers, data):
        found, squares = _decode(writers, chunk, half)
        kept.append(found[:2] if only_patterns else found)
        squared += float(squares)
    patterns, spread, *rest = (jnp.stack(each) for each in zip(*kept, strict=True))
    bases, left = rest or (None, None)
    return Decoded(patterns, spread, squared, bases, left)


@in_float64
def outside(writers: Writers, data: Sequences, patterns: Array, change: Writers) -> Array:
    """What a change of W and c changes, at fixed patterns, outside of the spaces of patterns."""
    chunks = zip(patterns, _each(writers, data), strict=True)
    parts = [_outside(writers, change, chunk, given, half) for given, (chunk, half) in chunks]
    return jnp.stack(parts)


def _each(writers: Writers, data: Sequences) -> Iterator[tuple[Sequences, Array]]:
    """The chunks, each with what makes its directions orthonormal."""
    for number in range(data.tokens.shape[0]):
        chunk = jax.tree.map(lambda leaf, number=number: leaf[number], data)
        yield chunk, _half_inverse(_gram(writers, chunk))


def _contrasts(k: int) -> Float64:
    """(k, k - 1): orthonormal differences of a token from the mean of those before it (Helmert)."""
    found = np.tril(-np.ones((k - 1, k))) + np.diag(np.arange(1.0, k), 1)[: k - 1]
    return (found / np.linalg.norm(found, axis=1, keepdims=True)).T


def _seen(chunk: Sequences, heads: int) -> Array:
    """(b, r, s): which of an example's directions a row may move along."""
    contrasts = jnp.repeat(jnp.arange(chunk.tokens.shape[1] - 1), heads)
    return contrasts < chunk.visible[..., None] - 1


def _directions(writers: Writers, chunk: Sequences) -> Float[Array, "b s e"]:
    """Along which an example's rows move with their patterns, token by token."""
    b, k, _ = chunk.tokens.shape
    apart = jnp.einsum("js,bjd->bsd", _contrasts(k), chunk.tokens)
    values = jnp.einsum("bsd,gdh->bsgh", apart, writers.value)
    found = jnp.einsum("bsgh,gnhe->bsgne", values, _by_value(writers, writers.out))
    some = jnp.any(_seen(chunk, len(writers.out)), axis=1)
    return jnp.where(some[..., None], found.reshape(b, -1, found.shape[-1]), 0.0)


def _by_value(writers: Writers, of_heads: Array) -> Array:
    """(g, n, ...): what heads have, by the value that they share."""
    return of_heads.reshape(len(writers.value), -1, *of_heads.shape[1:])


@compiled
def _gram(writers: Writers, chunk: Sequences) -> Float[Array, "b s s"]:
    along = _directions(writers, chunk)
    gram = along @ along.mT
    squares = jnp.diagonal(gram, axis1=1, axis2=2)
    mean = jnp.mean(squares, axis=1, keepdims=True)
    none = jnp.where(squares > 0, 0.0, 1.0)  # of shorter sequences
    return gram + jax.vmap(jnp.diag)(none + _RIDGE * mean)


def _half_inverse(gram: Float[Array, "b s s"]) -> Float[Array, "b s s"]:
    """Lower triangular H with H gram H^T = 1. On a CPU by NumPy: batches of LAPACK calls were seen
    to hang in XLA's thread pool."""
    if jax.default_backend() != "cpu":
        return _half_inverse_on_device(gram)
    with one_lapack_thread():
        return jnp.asarray(np.linalg.inv(np.linalg.cholesky(np.asarray(gram))))


@compiled
def _half_inverse_on_device(gram: Array) -> Array:
    factor = jnp.linalg.cholesky(gram)
    ones = jnp.broadcast_to(jnp.eye(gram.shape[-1], dtype=gram.dtype), gram.shape)
    return jax.scipy.linalg.solve_triangular(factor, ones, lower=True)


@compiled
def _decode(
    writers: Writers, chunk: Sequences, half: Array
) -> tuple[tuple[Array, Array, Array, Array], Array]:
    b, k, _ = chunk.tokens.shape
    m, contrasts = len(writers.out), _contrasts(k)
    seen, inside = _seen(chunk, m), chunk.visible > 0
    directions = _directions(writers, chunk)
    base = half @ directions
    even = (jnp.arange(k) < chunk.visible[..., None]) / jnp.maximum(chunk.visible, 1)[..., None]
    mean = jnp.einsum("brj,bjd->brd", even, chunk.tokens)
    summed = jnp.sum(_by_value(writers, writers.out), axis=1)
    middle = jnp.einsum("brd,gdh,ghe->bre", mean, writers.value, summed, optimize=True)
    middle = middle + jnp.sum(writers.bias, axis=0)
    right = (chunk.labels - middle) * inside[..., None]
    along, left = _split(right, base, seen)
    found = (along @ half).reshape(b, k, k - 1, m)
    patterns = even[:, :, None] + jnp.einsum("brtm,jt->brmj", found, contrasts)
    single = jnp.einsum("bstm,jt->bsmj", half.reshape(b, -1, k - 1, m), contrasts)
    spread = jnp.einsum("brs,bsmj->brmj", seen.astype(half.dtype), single**2)
    spread = jnp.where(_is_decided(directions, half)[:, None, None, None], spread, 10 * UNKNOWN)
    return (patterns, spread, base.astype(jnp.float32), left), jnp.sum(left**2)


def _is_decided(directions: Array, half: Array) -> Array:
    """(b,): whether the directions, and not the ridge, decide the smallest singular value, by the
    Frobenius norm of the inverse, which is no less than one over that."""
    some = jnp.any(directions != 0, axis=2)
    ridge = _RIDGE * jnp.mean(jnp.sum(directions**2, axis=2), axis=1)
    return jnp.sum(jnp.where(some[:, None], half, 0.0) ** 2, axis=(1, 2)) * ridge < _DECIDED


def _split(right: Array, base: Array, seen: Array) -> tuple[Array, Array]:
    """Coefficients of rows along their directions, and what is outside of these."""
    along, left = jnp.zeros((*right.shape[:2], base.shape[1])), right
    for _ in range(_REFINED):
        more = jnp.where(seen, left @ base.mT, 0.0)
        along, left = along + more, left - more @ base
    return along, left


@compiled
def _outside(
    writers: Writers, change: Writers, chunk: Sequences, patterns: Array, half: Array
) -> Array:
    base = half @ _directions(writers, chunk)
    rows = _move(writers, change, chunk, patterns)
    return _split(rows, base, _seen(chunk, len(writers.out)))[1]


def _move(writers: Writers, step: Writers, chunk: Sequences, patterns: Array) -> Array:
    """How a step changes the rows, at fixed patterns."""

    b, r, m, j = patterns.shape
    shared = patterns.reshape(b, r, len(writers.value), -1, j)

    def mix(value: Array) -> Array:
        values = jnp.einsum("bjd,gdh->bjgh", chunk.tokens, value)
        return jnp.einsum("brgnj,bjgh->brgnh", shared, values).reshape(b, r, m, -1)

    outputs = jnp.einsum("brmh,mhe->bre", mix(step.value), writers.out)
    outputs += jnp.einsum("brmh,mhe->bre", mix(writers.value), step.out)
    outputs += jnp.sum(step.bias, axis=0)
    return outputs * (chunk.visible > 0)[..., None]


@compiled
def solve_step(
    writers: Writers,
    data: Sequences,
    patterns: Array,
    bases: Array,
    left: Array,
    damping: Array | float,
    tolerance: Array | float,
) -> Step:
    """The step that changes the rows, outside of the spaces of patterns, as `left` says. In single
    precision: what it leaves is for another."""
    exact, unflatten = ravel_pytree(jax.tree.map(jnp.zeros_like, writers))
    writers, data, patterns = in_single(writers), in_single(data), in_single(patterns)
    light = ravel_pytree(writers)[1]
    parts = data, patterns, bases

    def change(part: tuple[Sequences, Array, Array], step: Writers) -> Array:
        chunk, patterns, base = part
        outputs = _move(writers, step, chunk, patterns)
        along = jnp.where(_seen(chunk, len(writers.out)), outputs @ base.mT, 0.0)
        return outputs - along @ base

    def pull(part: tuple[Sequences, Array, Array], outputs: Array) -> Writers:
        found: Writers = jax.linear_transpose(partial(change, part), writers)(outputs)[0]
        return found

    def apply(step: Array) -> Array:
        moved = light(step)
        total = sum_over_chunks(lambda part: pull(part, change(part, moved)), parts)
        return ravel_pytree(total)[0] + jnp.asarray(damping, step.dtype) * step

    scale = jnp.sqrt(jnp.mean(left**2)) + 1e-300
    with jax.default_matmul_precision("highest"):
        scaled = (left / scale).astype(jnp.float32)
        slope = sum_over_chunks(lambda part: pull(part[0], part[1]), (parts, scaled))
        right = ravel_pytree(slope)[0]
        found = conjugate_gradients(
            apply, lambda v: v, right, jnp.asarray(tolerance, right.dtype), _CG_STEPS
        )
    step = found.solution.astype(exact.dtype)
    predicted = jnp.vdot(step, right.astype(exact.dtype)) + damping * jnp.vdot(step, step)
    return Step(unflatten(scale * step), scale**2 * predicted, found)
