"""What examples leave open about a layer whose patterns its outputs show, without softmax.

A change of W, c and of the patterns together that no output shows is one of W and c that nothing
shows outside of the spaces of patterns (`free_patterns`). Where only none is, the patterns do not
change either, if their directions are independent; nor then the log-odds, which are linear in Theta
(`score_regression`). A random direction is asked about each of the two, as in
`randomised_rank_test`; sharp attention, which is what makes that one slow, is in neither.

With |J u| <= r, S the part of J of W and c outside of the spaces, and s its smallest singular
value, |dW| <= r / s, and patterns make up for rows of norm r' <= r + |J_W| |dW|. An entry p in a
row of k tokens then moves by the root of its spread v times that row's norm at most, so that

    sum (p^2 / (k v)) (dp / p)^2 <= r'^2,    |dTheta| <= r' / sigma_min(L)

with L the log-odds, each counted by p^2 / (k v) or by less: what is above h counts as h does.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from mhalearn._runtime.programs import in_float64
from mhalearn._runtime.seeds import Stream, generator
from mhalearn._runtime.types import Array, Float64
from mhalearn.data import Examples
from mhalearn.judge.feature_units import layer_in_feature_units, measure_feature_sizes
from mhalearn.judge.randomised_rank_test import (
    NULL_TOLERANCE,
    RankTest,
    norms_of_products,
    smallest_eigenvalue,
)
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.factored import Factored, Factors
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.units import Units
from mhalearn.run.watch import Watch
from mhalearn.solvers.free_patterns import (
    UNKNOWN,
    Sequences,
    Writers,
    decode,
    make_sequences,
    outside,
    solve_step,
)
from mhalearn.solvers.scaled_problem import make_problem
from mhalearn.solvers.score_regression import (
    Measured,
    Readers,
    attend,
    list_queries,
    score_change,
    solve_scores,
)

# Conjugate gradients leave this of a right side, and are repeated on what they leave.
_TOLERANCE, _ROUNDS = 1e-4, 16
# A round that leaves more than this of what was open is the last.
_GAIN = 0.5
# Entries of a pattern that count half, one after the other until a test ends: the smaller they are,
# the better sharp heads are conditioned, and the wider is the bound.
_HALVES = (1e-2, 1e-4, 1e-6)
# A smallest singular value may be this much smaller than what was found.
_MARGIN = 2.0


class Closed(NamedTuple):
    """What a random change leaves: its largest share of any matrix, and the smallest singular value
    that was met."""

    share: float
    weakest: float


@in_float64
def run_pattern_rank_test(
    layer: AttentionLayer,
    examples: Examples,
    architecture: Architecture,
    seed: int = 0,
    *,
    watch: Watch | None = None,
) -> RankTest | None:
    """Ask about one random direction of W and c, and one of every Theta; None where outputs do not
    tell patterns, or a head has less rank than the architecture.

    Features are in units of their own size, and the amplification in common ones.
    Cost: some hundred forward passes. Trust: as of `run_rank_test`; bounds are products of bounds,
    and some orders of magnitude wide.
    """
    architecture = architecture.with_heads(layer.n_heads)
    rng = generator(seed, Stream.RANK_TEST)
    kind = Factored(architecture)
    problem = make_problem(examples, kind)
    sizes = measure_feature_sizes(problem)
    units = Units(1.0, problem.units.y_scale)
    scaled = layer_in_feature_units(layer, sizes)
    at = kind.from_layer(scaled, units)
    if not kind.has_full_rank(at, scaled, units):
        return None
    order = rng.permutation(examples.n)
    x, y, lengths = examples.arrays()
    few, data = (
        make_sequences(
            np.asarray(x, np.float64)[order] / sizes,
            np.asarray(y, np.float64)[order] / units.y_scale,
            lengths[order],
            heads=layer.n_heads,
            rank=architecture.ov_rank,
            causal=architecture.causal,
            only_patterns=only_patterns,
        )
        for only_patterns in (False, True)
    )
    if few is None or data is None:
        return None
    writers, readers = Writers(at.value, at.out, at.bias), Readers(at.query, at.key)
    if watch is not None:
        watch.begin(f"rank test of what heads write, {_count(few)} examples")
    seen = attend(readers, list_queries(few, architecture.bias), few)
    written = _ask_writers(writers, few, seen, rng, watch)
    n = max(_count(few), _count(data))
    if watch is not None:
        watch.begin(f"rank test of log-odds, {_count(data)} examples")
    queries = list_queries(data, architecture.bias)
    patterns = attend(readers, queries, data)
    spread = decode(writers, data, only_patterns=True).spread
    for half in _HALVES:
        counted = _count_entries(patterns, spread, half)
        read = _ask_readers(readers, Measured(queries, data.tokens, *counted), rng, watch)
        if read.share < NULL_TOLERANCE:
            break
    share = max(written.share, read.share)
    if not (share < NULL_TOLERANCE and written.weakest > 0 and read.weakest > 0):
        return RankTest(share, math.inf, n)
    of_w = _MARGIN / written.weakest
    of_rows = 1 + _steepest_rows(writers, data, patterns) * of_w
    of_theta = _MARGIN * of_rows * math.sqrt(data.k) / (half * read.weakest)
    theta, w = _steepest(layer, at, sizes, replace(units, x_scale=problem.units.x_scale))
    return RankTest(share, max(of_theta * theta, of_w * w) / units.y_scale, n)


def _count(data: Sequences) -> int:
    return int(np.sum(np.any(np.asarray(data.visible) > 0, axis=2)))


def _ask_writers(
    writers: Writers,
    data: Sequences,
    patterns: Array,
    rng: np.random.Generator,
    watch: Watch | None,
) -> Closed:
    """About W and c, outside of the spaces of patterns."""
    bases = decode(writers, data).bases
    flat, unflatten = ravel_pytree(writers)
    left, before, weakest = unflatten(jnp.asarray(rng.standard_normal(flat.size))), 1.0, math.inf
    whole = _changes(writers.value, writers.out, left.value, left.out)
    whole_bias = float(jnp.linalg.norm(left.bias))
    for number in range(_ROUNDS):
        if watch is not None:
            watch(number, _ROUNDS)
        rows = outside(writers, data, patterns, left)
        step = solve_step(writers, data, patterns, bases, rows, 0.0, _TOLERANCE)
        left = jax.tree.map(jnp.subtract, left, step.change)
        weakest = min(weakest, smallest_eigenvalue(step.search))
        share = float(np.max(_changes(writers.value, writers.out, left.value, left.out) / whole))
        if whole_bias > 0:
            share = max(share, float(jnp.linalg.norm(left.bias)) / whole_bias)
        if share < NULL_TOLERANCE or not share < _GAIN * before:
            break
        before = share
    return Closed(share, math.sqrt(max(weakest, 0.0)))


def _count_entries(patterns: Array, spread: Array, half: float) -> tuple[Array, Array]:
    """No logits, and by how much entries count: p^2 / (h^2 + p^2) over their spread."""
    patterns, spread = (jnp.moveaxis(part, 3, 0) for part in (patterns, spread))
    worth = patterns**2 / (patterns**2 + half**2)
    worth = jnp.where((spread > 0) & (spread < UNKNOWN), worth / spread, 0.0)
    return jnp.zeros_like(worth), worth


def _ask_readers(
    readers: Readers, measured: Measured, rng: np.random.Generator, watch: Watch | None
) -> Closed:
    """About every Theta, by the log-odds of its own patterns."""
    scale = np.maximum(np.max(np.asarray(measured.worth), axis=(1, 2, 3, 4)), 1e-300)
    measured = measured._replace(worth=measured.worth / scale[:, None, None, None, None])
    left = Readers(*(jnp.asarray(rng.standard_normal(part.shape)) for part in readers))
    whole = _changes(readers.query, readers.key.mT, left.query, left.key.mT)
    share, weakest = np.ones(len(scale)), np.full(len(scale), math.inf)
    for number in range(_ROUNDS):
        if watch is not None:
            watch(number, _ROUNDS)
        logits = score_change(readers, measured, left)
        open_ = share >= NULL_TOLERANCE
        tolerance = jnp.where(open_, _TOLERANCE, 1.0)
        step = solve_scores(readers, measured, logits, jnp.zeros(len(scale)), tolerance)
        left = jax.tree.map(jnp.subtract, left, step.change)
        for head in np.flatnonzero(open_):
            search = jax.tree.map(lambda leaf, head=head: leaf[head], step.search)
            weakest[head] = min(weakest[head], smallest_eigenvalue(search))
        before = share
        share = _changes(readers.query, readers.key.mT, left.query, left.key.mT) / whole
        if np.all((share < NULL_TOLERANCE) | ~(share < _GAIN * before)):
            break
    return Closed(float(np.max(share)), math.sqrt(max(float(np.min(weakest * scale)), 0.0)))


def _changes(left: Array, right: Array, to_left: Array, to_right: Array) -> Float64:
    """By how much changes of two factors change their products, to first order."""
    one, two, of_one, of_two = (np.asarray(part) for part in (left, right, to_left, to_right))
    return norms_of_products([of_one, one], [two, of_two])


def _steepest_rows(writers: Writers, data: Sequences, patterns: Array) -> float:
    """How far a unit step of W and c moves all rows, at most, at fixed patterns."""
    means = jnp.einsum("cbrmj,cbjd->cbrmd", patterns, data.tokens)
    squares = np.asarray(jnp.sum(means**2, axis=(0, 1, 2, 4)))
    sides = _norms(writers.value) ** 2 + _norms(writers.out) ** 2
    return math.sqrt(float(np.sum(squares * sides)) + float(jnp.sum(data.visible > 0)))


def _steepest(
    layer: AttentionLayer, at: Factors, sizes: Float64, units: Units
) -> tuple[float, float]:
    """How far a unit step of the factors moves a Theta, and a W or the bias, at most, in common
    units and relative to the size of a head."""
    bias = at.bias.shape[0] > 0
    theta = float(np.sqrt(np.mean(np.sum(units.theta(layer, bias) ** 2, axis=(1, 2))))) or 1.0
    w = float(np.sqrt(np.sum(units.w(layer, bias) ** 2) / layer.n_heads)) or 1.0
    sizes = sizes / units.x_scale
    of_queries = np.append(sizes, np.ones(at.query.shape[1] - len(sizes)))
    query, key, value, out = (np.asarray(part) for part in at[:4])
    query, key, value = query / of_queries[:, None], key / sizes[:, None], value / sizes[:, None]
    least, of_query = sizes.min(), of_queries.min()
    along = np.hypot(_norms(key) / of_query, _norms(query) / least)
    across = np.hypot(_norms(out) / least, _norms(value))
    return float(along.max()) / theta, max(float(across.max()), float(bias)) / w


def _norms(matrices: Array | Float64) -> Float64:
    """The largest singular value of each."""
    return np.asarray(np.linalg.norm(np.asarray(matrices), 2, axis=(-2, -1)))
