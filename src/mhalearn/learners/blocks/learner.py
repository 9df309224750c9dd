"""From examples to a block: surplus student, pruning, Gauss-Newton; held-out examples choose."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mhalearn._runtime.programs import in_float64
from mhalearn._runtime.seeds import Stream, generator
from mhalearn.data import Examples
from mhalearn.layer.block.block import Block
from mhalearn.layer.block.design import BlockDesign
from mhalearn.layer.block.parametrisation import BlockParametrisation
from mhalearn.layer.units import Units
from mhalearn.learners.blocks.options import BlockClass, BlockOptions
from mhalearn.learners.blocks.rounds import refine
from mhalearn.learners.blocks.settling import (
    HOPELESS,
    is_large,
    settle,
    shrink,
    starts,
    turn_over,
)
from mhalearn.learners.blocks.subsets import Subsets, split
from mhalearn.run.outcome import Candidate, Outcome
from mhalearn.run.run import Run
from mhalearn.solvers.first_order import FirstOrderOptions, Schedule, anneal, cosine_rates
from mhalearn.solvers.scaled_problem import make_problem

# Heads and neurons that the first student has where their number is open (neurons: over features);
# the next has twice as many where pruning leaves none out.
_OPEN_HEADS, _OPEN_NEURONS = 3, 3
# Of more features than these, as many as transformers have and half of that.
_FEW_FEATURES, _MORE_HEADS, _MORE_NEURONS = 12, 6, 6
# And at least so many neurons more than asked for: of few neurons a half is too little.
_LEAST_SURPLUS = 8
# Features that the rate and the penalty are for: of more the rate is less by their root, and the
# penalty by their number, for each neuron explains that much less.
_WIDTH = 8
# Tokens a step that keep an accelerator busy.
_TOKENS = 4096
# The penalty falls by this much.
_FADE = 1e-5


class Sizes(NamedTuple):
    """Heads and neurons of a student."""

    heads: int
    neurons: int

    def doubled(self) -> Sizes:
        return Sizes(2 * self.heads, 2 * self.neurons)


@in_float64
def learn_block(
    examples: Examples, wanted: BlockClass, run: Run, options: BlockOptions
) -> Candidate:
    """Attempts, each with another student and more patience, until one is exact.

    Cost: of an attempt, `steps` passes over a batch, and some tens of Gauss-Newton steps over a few
    hundred examples. Trust: a heuristic; what it returns is for the judge.
    """
    data = split(examples, run.seed)
    train, exact = data.train, data.exact
    sizes = _student_sizes(wanted, options)
    best: Block | None = None
    best_loss, linear = math.inf, True
    for attempt, strength in enumerate(options.strengths):
        if run.is_over():
            break
        student = anneal_student(train, wanted, sizes, attempt, strength, run, options, linear)
        loss = data.error(student)
        run.emit("student", attempt, loss, detail=f"{student!r}, on held-out examples")
        stage, large = f"Gauss-Newton {attempt + 1}", is_large(student)
        find = _refine if large else _settle
        found, now = find(student, loss, data, wanted, run, options, stage)
        if now < best_loss or best is None:
            best, best_loss = found, now
        if now < exact:
            linear = linear and found.feed_forward.linear is None
        if best_loss < exact and best.feed_forward.linear is None:
            break
        if loss < HOPELESS or not large:  # of a large one that is not, more patience comes first
            sizes = _next_sizes(sizes, found, wanted)
    if best is None:
        kind = BlockParametrisation(_design(wanted, sizes).architecture)
        best = kind.to_layer(kind.init(np.random.default_rng(run.seed)), Units())
        best_loss = data.error(best)
    run.emit("model selection", loss=best_loss, detail="error on held-out examples")
    late = run.is_over() and not best_loss < exact
    return Candidate(best, Outcome.TIME_LIMIT if late else Outcome.FITTED, loss=best_loss)


@in_float64
def try_class(examples: Examples, wanted: BlockClass, run: Run, options: BlockOptions) -> float:
    """How well a short descent in a class does on held-out examples: to order classes by.

    Cost: a quarter of a first student. Trust: a heuristic, which decides about no more than order.
    """
    data = split(examples, run.seed)
    short = replace(options, steps=max(1, options.steps // 4))
    sizes, strength = _student_sizes(wanted, options), options.strengths[0]
    student = anneal_student(data.train, wanted, sizes, 0, strength, run, short, linear=True)
    loss = data.error(student)
    run.emit("candidate", loss=loss, detail=f"{student!r}, on held-out examples")
    return loss if math.isfinite(loss) else math.inf


def _settle(
    student: Block,
    loss: float,
    data: Subsets,
    wanted: BlockClass,
    run: Run,
    options: BlockOptions,
    stage: str,
) -> tuple[Block, float]:
    """The best that becomes of a student, from one start after the other, and its error."""
    best, best_loss = student, math.inf
    for start in starts(student, loss, data, wanted, run):
        found, now = settle(start, loss, data, run, options, stage)
        if now < best_loss or best is student:
            best, best_loss = found, now
        if now < data.exact or run.is_over():
            break
    return best, best_loss


def _refine(
    student: Block,
    loss: float,
    data: Subsets,
    wanted: BlockClass,
    run: Run,
    options: BlockOptions,
    stage: str,
) -> tuple[Block, float]:
    """A large student made small and exact, where it is worth that, and its error."""
    if not loss < HOPELESS:
        return student, loss
    found = refine(student, data, run, options, stage)
    if data.is_met(found):
        found = turn_over(shrink(found, data, run, options), data, run, options)
    return found, data.error(found)


def _student_sizes(wanted: BlockClass, options: BlockOptions) -> Sizes:
    d = wanted.design.attention.d
    heads, neurons = _OPEN_HEADS, _OPEN_NEURONS * d
    if d > _FEW_FEATURES:
        heads, neurons = _MORE_HEADS, _MORE_NEURONS * d
    if wanted.design.attention.head_dim is not None:
        usual = wanted.design.attention.usual_heads()
        heads = max(usual + 1, math.ceil(options.surplus * usual))
    if wanted.n_heads is not None:
        heads = max(wanted.n_heads + 1, math.ceil(options.surplus * wanted.n_heads))
    if wanted.hidden is not None:
        neurons = max(wanted.hidden + _LEAST_SURPLUS, math.ceil(options.surplus * wanted.hidden))
    return Sizes(heads, neurons)


def _next_sizes(sizes: Sizes, found: Block, wanted: BlockClass) -> Sizes:
    """Of the next student, where numbers are open: twice as many where pruning left nothing out;
    else nearer to what was left, for little surplus settles sooner than much."""
    heads, neurons = sizes.doubled()
    is_full = found.n_heads >= sizes.heads or found.hidden > 0.9 * sizes.neurons
    if not is_full:
        heads, neurons = found.n_heads + 1, math.ceil(1.1 * found.hidden)
    return Sizes(
        heads if wanted.n_heads is None else sizes.heads,
        neurons if wanted.hidden is None else sizes.neurons,
    )


def _design(wanted: BlockClass, sizes: Sizes, linear: bool = False) -> BlockDesign:
    attention = wanted.design.attention.with_heads(sizes.heads)
    return replace(wanted.design, attention=attention, hidden=sizes.neurons, linear=linear)


def anneal_student(
    train: Examples,
    wanted: BlockClass,
    sizes: Sizes,
    attempt: int,
    strength: float,
    run: Run,
    options: BlockOptions,
    linear: bool = False,
) -> Block:
    """A student with surplus heads and neurons, by Adam under a fading penalty.

    linear: with a linear map beside its neurons, so that a neuron that it finds turned over needs
    no others to make up for that.
    """
    kind = BlockParametrisation(_design(wanted, sizes, linear).architecture)
    problem = make_problem(train, kind)
    start = kind.init(generator(run.seed, Stream.BLOCK_STARTS, attempt))
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], start)
    steps = options.steps * (attempt + 1)
    d = wanted.design.attention.d
    rate, strength = options.rate * min(1.0, _WIDTH / d) ** 0.5, strength * min(1.0, _WIDTH / d)
    schedule = Schedule(cosine_rates(rate, steps), np.geomspace(strength, _FADE * strength, steps))
    tokens = options.batch * train.k
    if jax.default_backend() != "cpu":
        tokens = max(tokens, _TOKENS)
    # Tensor cores' products in single precision have three digits, and gradients then no more.
    with jax.default_matmul_precision("highest"):
        walk = anneal(
            params,
            problem,
            run,
            schedule,
            FirstOrderOptions(block=500, batch=-(-tokens // train.k), single=True),
            stage=f"student {attempt + 1}",
            weights={name: float("norm" not in name) for name in params},
            rng=generator(run.seed, Stream.BLOCK_STARTS, attempt, 1),
        )
    found = jax.tree.map(lambda leaf: np.asarray(leaf[0], np.float64), walk.params)
    finite = all(np.isfinite(leaf).all() for leaf in found.values())
    return problem.to_layer(found if finite else start)
