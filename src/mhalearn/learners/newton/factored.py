"""Layers of many narrow heads: Adam on a student with surplus heads, then Gauss-Newton.

A penalty on the factors, which is the nuclear norm of Theta and W, starts where it keeps all heads
at zero and fades. Heads then appear as the examples ask for them, and those too many stay at zero
or become copies of another: the canonical form merges them and tells the number of heads.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from mhalearn._runtime.devices import replicate
from mhalearn._runtime.programs import compiled, in_float64
from mhalearn._runtime.seeds import Stream, generator
from mhalearn._runtime.types import Array, Float, Float64
from mhalearn.data import Examples
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.batches import Chunk, sum_over_chunks
from mhalearn.layer.factored import Factored, Factors, merge_heads
from mhalearn.layer.layer import AttentionLayer
from mhalearn.learners.newton.decoding import (
    ALIKE,
    SAME,
    decode_heads,
    is_decodable,
    refine_attention,
)
from mhalearn.learners.newton.model_selection import ModelSelection, split_for_selection
from mhalearn.learners.newton.penalty_path import follow_penalty
from mhalearn.run.outcome import Candidate, Outcome
from mhalearn.run.run import Run
from mhalearn.solvers.damping import NOTHING_LEFT
from mhalearn.solvers.first_order import FirstOrderOptions, Schedule, Walk, anneal, cosine_rates
from mhalearn.solvers.gauss_newton import loss_of
from mhalearn.solvers.polish import descend_eliminated, may_eliminate, minimise, polish
from mhalearn.solvers.scaled_problem import Problem, make_problem

# Adam's rate times the root of d, the share of steps in which the penalty fades, and by how much:
# the rest of the way is that of Gauss-Newton steps.
_RATE, _FADING, _FADED = 0.08, 0.7, 1e-3
_BLOCK = 100
# Steps for so many features, on a CPU and on an accelerator; more features need as many times more.
_STEPS_CPU, _WIDTH_CPU = 4000, 192
_STEPS, _WIDTH = 8000, 384
# Steps of the first attempt on an accelerator where heads can be decoded, for which rough ones do.
_ROUGH_STEPS = 3000
# Up to this many times the counting limit of examples, a penalty that fades so many times slower
# finds heads that are else lost among surplus ones.
_SCARCE, _PATIENCE = 12.0, 4
# Tokens a step; more keep an accelerator busy.
_BATCH_CPU, _BATCH = 2**10, 2**13
# A head whose factors' norms have a smaller product attends evenly, or writes nothing.
_DEAD = 0.03
# Steps before the rank is looked at, and singular values that count as none, over the largest.
_FIRST_STEPS, _NO_RANK = 12, 0.02
# A student that leaves more than this share of the labels is hardly worth polish.
_PROMISING = 1e-2
# One that leaves less than this has found its heads: more steps would do slowly what those of
# Gauss-Newton do fast.
_FOUND = 1e-5
# Heads of this loss were decoded: nothing is left to fade.
_DECODED = 1e-6
# Losses at which heads are merged while Gauss-Newton steps fade the penalty; at the last it ends.
_FOLLOWED = (1e-5, 1e-12)
# Attempts, and times the counting limit of examples that polish the layer.
_ATTEMPTS, _POLISHED = 4, 24.0


def learn_factored(
    examples: Examples,
    architecture: Architecture,
    exact: float,
    run: Run,
) -> Candidate:
    """Attempts with ever more surplus heads, until one explains held-out examples exactly.

    `run.start` is a layer to polish before any of them.
    """
    start = run.start
    guess = architecture.with_heads(architecture.n_heads or architecture.usual_heads())
    limit = examples.counting_limit(guess)
    train, select = split_for_selection(examples, guess, run.seed)
    few = train.subset(slice(0, int(np.ceil(_POLISHED * limit))))
    problem, part = (make_problem(given, Factored(guess)) for given in (train, few))
    selection = ModelSelection(problem, select, run)
    if problem.energy == 0.0:
        selection.offer(problem.zero_layer(guess.heads))
        return selection.candidate(Outcome.FITTED)
    if start is not None and architecture.n_heads in (None, start.n_heads):
        selection.offer(polish(start, part, run, stage="resumed").layer)
    checkpoint = run.checkpoint
    on_cpu = jax.default_backend() == "cpu"
    usual = _STEPS_CPU if on_cpu else _STEPS
    counts = [usual * (attempt + 1) for attempt in range(_ATTEMPTS)]
    if not on_cpu and is_decodable(few, guess):
        counts = [_ROUGH_STEPS, *counts[:-1]]
    longer = max(1.0, examples.d / (_WIDTH_CPU if on_cpu else _WIDTH))
    longer *= 1 if train.n >= _SCARCE * limit else _PATIENCE
    for attempt, steps in enumerate(counts):
        name = f"attempt {attempt + 1}"
        if checkpoint.recall(name) is not None:
            continue
        if not checkpoint.begun(name) and (selection.loss < exact or run.is_over()):
            break
        with checkpoint.within(name):
            layer = learn_once(
                problem,
                part,
                few,
                run,
                most=architecture.n_heads,
                attempt=attempt,
                steps=round(longer * steps / _BLOCK) * _BLOCK,
            )
            if layer is not None:
                selection.offer(layer)
        checkpoint.record(name, 1, now=True)
    if selection.layer is None:
        selection.offer(problem.zero_layer(guess.heads))
        return selection.candidate(Outcome.TIME_LIMIT if run.is_over() else Outcome.NONFINITE)
    late = run.is_over() and selection.loss >= exact
    candidate = selection.candidate(Outcome.TIME_LIMIT if late else Outcome.FITTED)
    if selection.loss < exact and is_decodable(examples, guess):
        refined = refine_attention(candidate.layer, examples, architecture, run)
        candidate = replace(candidate, layer=refined)
    return candidate


def learn_once(
    problem: Problem,
    part: Problem,
    examples: Examples,
    run: Run,
    *,
    most: int | None,
    attempt: int,
    steps: int = _STEPS_CPU,
) -> AttentionLayer | None:
    """One attempt: a student, its descent, its canonical form, and that polished; None: diverged.

    part, examples: some of the examples, enough for polish. most: heads to keep at most, None where
    the count is open. Later attempts have more heads.
    Cost: O(k m (d h + k h)) an example and step. Trust: a heuristic.
    """
    guess = problem.architecture.heads
    student = guess + max(2, guess // 4) * (attempt + 1)
    rng = generator(run.seed, Stream.FACTORED_STARTS, attempt)
    heads = Factored(problem.architecture.with_heads(student)).init(rng)
    stage = f"attempt {attempt + 1}"
    penalty = critical_penalty(problem)
    heads, loss = anneal_factors(heads, problem, run, steps, rng, penalty, stage=stage)
    if not all(np.isfinite(part).all() for part in heads):
        return None
    heads = merge_heads(heads, ALIKE, SAME, most=most)
    run.emit(stage, detail=f"{len(heads.query)} of {student} heads are distinct")
    if loss > _PROMISING:
        return problem.to_layer(heads)
    if not is_decodable(examples, problem.architecture.with_heads(len(heads.query))):
        heads, loss = eliminate_writers(heads, part, run, most=most, stage=stage)
    if loss > NOTHING_LEFT:
        heads, loss = decode_heads(heads, examples, part, run, stage=stage)
    strength, name = _FADED * penalty, f"{stage}, fading"
    for goal in _FOLLOWED:
        if loss < _DECODED:
            break
        counted = len(heads.query)
        heads, strength = follow_penalty(heads, part, run, strength, goal=goal, stage=name)
        heads = merge_heads(heads, ALIKE, SAME, most=most)
        if len(heads.query) < counted:  # a head too many leaves W open, and nothing is decoded
            heads, loss = decode_heads(heads, examples, part, run, stage=stage)
    if loss < NOTHING_LEFT:
        return problem.to_layer(heads)
    return _polish(heads, part, problem, run, f"{stage}, polish")


def eliminate_writers(
    heads: Factors, problem: Problem, run: Run, *, most: int | None, stage: str
) -> tuple[Factors, float]:
    """Theta by steps that eliminate W of any rank, where rows are many enough, and their loss.

    What directions tokens spread least along, or outputs, is then W's matter, and no descent's. As
    long as heads turn out to be too many the rest is solved for again.
    """
    loss = loss_of(heads, problem)
    while loss > NOTHING_LEFT and not run.is_over():
        kind = Factored(problem.architecture.with_heads(len(heads.query)))
        given = replace(problem, parametrisation=kind)
        if not may_eliminate(given):
            break
        found = descend_eliminated(heads, given, run, stage=f"{stage}, W eliminated")
        counted = len(heads.query)
        heads = merge_heads(found.params, ALIKE, SAME, most=most)
        loss = loss_of(heads, problem)
        if found.loss < NOTHING_LEFT < loss:  # small or similar, and true all the same
            return found.params, found.loss
        if len(heads.query) == counted:
            break
    return heads, loss


def _polish(
    heads: Factors, part: Problem, problem: Problem, run: Run, stage: str
) -> AttentionLayer:
    """Descend on some of the examples; where heads turn out to have less rank than they may, with
    factors of that rank.

    Factors of more columns than a matrix has rank have a singular Jacobian, on which Gauss-Newton
    steps gain a constant factor each and no more.
    """
    found = minimise(heads, part, run, stage=stage, max_steps=_FIRST_STEPS, whole=problem)
    layer: AttentionLayer = problem.to_layer(found.params)
    if found.converged or run.is_over():
        return layer
    rank = _numerical_rank(layer)
    if rank >= problem.architecture.qk_rank:
        rest = minimise(found.params, part, run, stage=stage, whole=problem)
        return problem.to_layer(rest.params)
    narrower = Factored(replace(problem.architecture, head_dim=rank))
    small, whole = (replace(each, parametrisation=narrower) for each in (part, problem))
    start = narrower.from_layer(_truncate(layer, rank), problem.units)
    trimmed = minimise(start, small, run, stage=f"{stage}, rank {rank}", whole=whole)
    if trimmed.loss < found.loss:
        return whole.to_layer(trimmed.params)
    return problem.to_layer(minimise(found.params, part, run, stage=stage, whole=problem).params)


def _numerical_rank(layer: AttentionLayer) -> int:
    """The largest rank of a head's Theta or W."""
    values = [
        np.linalg.svd(matrix, compute_uv=False) for heads in _matrices(layer) for matrix in heads
    ]
    return max(1, *(int(np.sum(each > _NO_RANK * each[0])) for each in values))


def _truncate(layer: AttentionLayer, rank: int) -> AttentionLayer:
    """The layer with the nearest Theta and W of that rank."""
    theta, w = (
        np.stack([(left[:, :rank] * values[:rank]) @ right[:rank] for left, values, right in svds])
        for svds in ([np.linalg.svd(matrix) for matrix in heads] for heads in _matrices(layer))
    )
    vectors = None if layer.key_vector is None else theta[:, -1]
    return layer.replace(theta=theta[:, : layer.d], w=w, key_vector=vectors)


def _matrices(layer: AttentionLayer) -> tuple[Float64, Float64]:
    """Theta, with the key vector as its last row, and W."""
    if layer.key_vector is None:
        return layer.theta, layer.w
    return np.concatenate([layer.theta, layer.key_vector[:, None]], axis=1), layer.w


@in_float64
def anneal_factors(
    heads: Factors,
    problem: Problem,
    run: Run,
    steps: int,
    rng: np.random.Generator,
    penalty: float,
    *,
    stage: str,
) -> tuple[Factors, float]:
    """Adam in single precision on random examples, while the penalty fades and then stays.

    Returns the loss on the last of them too.
    """
    progress = np.minimum(np.arange(steps) / steps / _FADING, 1.0)
    top = _RATE / problem.d**0.5
    tokens = _BATCH_CPU if jax.default_backend() == "cpu" else _BATCH
    batch = -(-tokens * problem.count_sequences() // problem.rows)
    walk = anneal(
        jax.tree.map(lambda leaf: leaf[None], heads),
        problem,
        run,
        Schedule(cosine_rates(top, steps), penalty * _FADED**progress),
        FirstOrderOptions(block=_BLOCK, batch=batch, single=True, goal=_FOUND),
        stage=stage,
        weights=Factors(1.0, 1.0, 1.0, 1.0, 0.0),  # type: ignore[arg-type]
        rng=rng,
        mend=lambda walk, step: revive_heads(walk, rng) if step < _FADING * steps else walk,
    )
    return jax.tree.map(lambda leaf: leaf[0], walk.params), float(walk.loss[0])


def revive_heads(walk: Walk, rng: np.random.Generator) -> Walk:
    """The same starts, with small random factors in place of those that have died.

    Under a strong penalty both factors of a product fall towards zero, where neither moves the
    other any more: heads that examples ask for later could not grow again.
    """
    heads: Factors = walk.params
    moments = [walk.memory.mu, walk.memory.nu]
    for left, right in (("query", "key"), ("value", "out")):
        pair = [getattr(heads, side) for side in (left, right)]
        squares = [np.sum(np.asarray(leaf, np.float64) ** 2, axis=(-2, -1)) for leaf in pair]
        dead = (squares[0] * squares[1] < _DEAD**2)[..., None, None]
        if not dead.any():
            continue
        for side, leaf in zip((left, right), pair, strict=True):
            size = (_DEAD / leaf.shape[-1] / leaf.shape[-2]) ** 0.5
            fresh = jnp.asarray(size * rng.standard_normal(leaf.shape), leaf.dtype)
            heads = heads._replace(**{side: jnp.where(dead, fresh, leaf)})
            moments = [
                each._replace(**{side: jnp.where(dead, 0.0, getattr(each, side))})
                for each in moments
            ]
    mu, nu = moments
    return walk._replace(params=heads, memory=walk.memory._replace(mu=mu, nu=nu))


@in_float64
def critical_penalty(problem: Problem) -> float:
    """The penalty up to which heads that attend evenly stay at zero.

    With uniform attention the labels are x_mean C D, and zero is a minimum while the penalty is
    larger than the largest singular value of E[x_mean^T y] / E|y|^2.
    """
    sums = replicate(_correlation(problem.data, devices=problem.devices))
    correlation = np.asarray(sums) / problem.energy
    return float(np.linalg.norm(correlation, 2))


@partial(compiled, static_argnames="devices")
def _correlation(data: Chunk, *, devices: int) -> Float[Array, "d e"]:
    """Sum over rows of the token that even attention makes, times the label."""

    def correlate(chunk: Chunk) -> Array:
        even = chunk.allowed / jnp.sum(chunk.allowed, axis=-1, keepdims=True)
        mean = jnp.einsum("brj,bjd->brd", even, chunk.tokens)
        return jnp.einsum("brd,bre->de", mean * chunk.weight[..., None], chunk.labels)

    return jnp.asarray(sum_over_chunks(correlate, data, devices))
