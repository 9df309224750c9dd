"""A large student made small, and exact: from bold to careful, and then round by round.

A student holds each true neuron as several that are near to each other, and heads likewise. Left
out boldly, they cost more than the student is off by, and Gauss-Newton makes up for that; but of
many neurons some are fainter than that, and then a careful attempt is needed, which leaves out what
costs next to nothing, lowers the error, and does so again.
"""

from __future__ import annotations

import math

import numpy as np

from mhalearn.layer.block.block import Block
from mhalearn.learners.blocks.distilling import distil
from mhalearn.learners.blocks.options import BlockOptions
from mhalearn.learners.blocks.padding import first_neurons, pad_neurons
from mhalearn.learners.blocks.pruning import prune
from mhalearn.learners.blocks.subsets import Subsets
from mhalearn.run.run import Run
from mhalearn.solvers.metric_steps import descend_in_metric
from mhalearn.solvers.scaled_problem import make_problem

# What leaving out a neuron may cost, over the mean of neurons, from bold to careful.
_EACH = (5e-3, 5e-4, 1e-5, 1e-7)
# Error, over the student's, that may be made by leaving out neurons of which nothing is left.
_NOTHING = 1e-2
# An error that rounds do not make up for.
_HOPELESS = 1e-4
# Error that a round may make, over the block's: at first, most, and how it grows where descent
# creeps.
_SHARE, _MOST_SHARE, _BOLDER = 0.1, 1e3, 10.0
# A round that leaves more than this of the error creeps.
_CREEPS = 0.3
# Rounds, and steps in each; in one that leaves nothing out, more.
_ROUNDS, _STEPS, _MORE_STEPS = 24, 8, 24
# Turns of leaving out boldly, and steps after which it is known whether that was too bold.
_TURNS, _FIRST_STEPS = 4, 4
# Distance of neurons that are made one in a round that is bolder, over the largest.
_NEAR = 0.03
# Squared distance of heads that are one is as the error; this at most.
_FAR = 1e-4


def refine(student: Block, data: Subsets, run: Run, options: BlockOptions, stage: str) -> Block:
    """Make a student small and exact, as far as it goes.

    Cost: of a round, `_STEPS` steps of `descend_in_metric` on `options.examples` times the counting
    limit of examples. Trust: a heuristic; held-out examples decide what is kept.
    """
    best, best_loss = student, data.error(student)
    promised = best_loss
    careful = prune(student, data.train, _NOTHING, budget=_NOTHING * best_loss, bold=True)
    fewer = distil(careful, best_loss, data.train, run)
    if fewer.hidden < careful.hidden:
        _tell(fewer, data, run, f"{stage}, distilled")
        found = go_round(fewer, data, run, options, stage)
        if (loss := data.error(found)) < best_loss:
            best, best_loss = found, loss
    for each in _EACH:
        if best_loss < data.exact or run.is_over():
            break
        found = leave_out_boldly(student, each, promised, data, run, options, stage)
        if data.error(found) < promised:
            found = go_round(found, data, run, options, stage)
        if (loss := data.error(found)) < best_loss:
            best, best_loss = found, loss
    return best


def leave_out_boldly(
    student: Block,
    each: float,
    promised: float,
    data: Subsets,
    run: Run,
    options: BlockOptions,
    stage: str,
) -> Block:
    """Leave out neurons that cost no more than a share of the mean one's, descend, and again.

    promised: the student's error, which few steps come to unless a true neuron was left out.
    """
    block, loss = student, math.inf
    for turn in range(_TURNS):
        tried = prune(block, data.train, each / max(1, student.hidden), bold=turn == 0)
        if turn and tried.hidden == block.hidden:
            break
        _tell(tried, data, run, f"{stage}, neurons of {each:g} left out")
        found = descend_with_metric(tried, data, run, options, stage, _FIRST_STEPS)
        if data.error(found) < promised and not run.is_over():
            found = descend_with_metric(found, data, run, options, stage, _STEPS)
        now = data.error(found)
        if turn and not now < loss:
            break
        block, loss = found, now
        if not promised > loss > data.exact or run.is_over():
            break
    return block


def go_round(block: Block, data: Subsets, run: Run, options: BlockOptions, stage: str) -> Block:
    """Leave out what costs no more than a share of the error, descend, and again."""
    loss, share = data.error(block), _SHARE
    for turn in range(_ROUNDS):
        if loss < data.exact or run.is_over() or not loss < _HOPELESS:
            break
        tried = _leave_out(block, loss, share, data)
        _tell(tried, data, run, f"{stage}, round {turn + 1}")
        is_smaller = (tried.n_heads, tried.hidden) != (block.n_heads, block.hidden)
        steps = _STEPS if is_smaller else _MORE_STEPS
        found = descend_with_metric(tried, data, run, options, stage, steps)
        now = data.error(found)
        creeps = now > _CREEPS * loss
        if now < loss or (is_smaller and now < 3 * loss):
            block, loss = found, now
        elif is_smaller:  # what was left out was needed
            break
        if creeps and share >= _MOST_SHARE:
            break
        share = min(share * _BOLDER, _MOST_SHARE) if creeps else share
    return block


def _tell(block: Block, data: Subsets, run: Run, stage: str) -> None:
    said = f"{block.n_heads} heads, {block.hidden} neurons, on held-out examples"
    run.emit(stage, loss=data.error(block), detail=said)


def _leave_out(block: Block, loss: float, share: float, data: Subsets) -> Block:
    """Heads and neurons that cost no more than a share of the error."""
    if not math.isfinite(loss):
        return block
    heads = min(_FAR, max(loss, 1e-16))
    near = _NEAR if share > 1 else 0.0
    return prune(block, data.train, heads, budget=share * loss, near=near)


def descend_with_metric(
    block: Block,
    data: Subsets,
    run: Run,
    options: BlockOptions,
    stage: str,
    max_steps: int,
) -> Block:
    """Gauss-Newton on as many examples as the block needs, without the normal matrix."""
    padded = pad_neurons(block)
    kind = padded.parametrisation.straightened()
    limit = data.train.counting_limit(block.design.without_linear)
    count = min(data.train.n, max(64, math.ceil(options.examples * limit)))
    problem = make_problem(data.train.sample(count, run.seed), kind)
    start = kind.from_layer(padded, problem.units)
    found = descend_in_metric(start, problem, run, stage=stage, max_steps=max_steps)
    if not np.isfinite(found.loss):
        return block
    return first_neurons(problem.to_layer(found.params), block.hidden)
