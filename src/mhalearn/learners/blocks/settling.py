"""A student's block made small and exact, where it has few enough parameters for a normal matrix.

Which neurons it needs is asked of what its feed-forward part puts out (`distilling`), then, where
that does not end, by what leaving out one costs, from bold to careful. Gauss-Newton in all
parameters follows; where it creeps, neurons are still held as two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from mhalearn.layer.block.block import Block
from mhalearn.learners.blocks.distilling import can_distil, distil
from mhalearn.learners.blocks.options import BlockClass, BlockOptions
from mhalearn.learners.blocks.padding import first_neurons, pad_neurons
from mhalearn.learners.blocks.pruning import prune
from mhalearn.learners.blocks.rounds import descend_with_metric
from mhalearn.learners.blocks.subsets import Subsets
from mhalearn.run.run import Run
from mhalearn.solvers.dense_normal_equations import descend_densely
from mhalearn.solvers.scaled_problem import make_problem

# A student this bad is not worth pruning.
HOPELESS = 1e-2
# What a linear map may be off where neurons are turned over, over the root of the error.
_OFF = 30.0
# What leaving out a neuron may change, from bold to careful; of an exact block, next to nothing.
_TOLERANCES, _SURELY_NOTHING = (3e-5, 1e-7), 1e-14
# Error up to which an exact block's neurons are asked for fewer: what is left is for descent.
_CLEARLY = 1e-12
# Steps of Gauss-Newton before it is looked whether fewer neurons do, and where none can go.
_FIRST_STEPS, _STEPS = 20, 60
# How often it is looked.
_LOOKS = 4
# Parameters up to which the normal matrix is formed.
_MOST_UNKNOWNS = 2500
# How often examples are joined by those that a block fits worst.
_WORST = 3


def is_large(block: Block) -> bool:
    return block.parametrisation.straightened().size() > _MOST_UNKNOWNS


def starts(
    student: Block, loss: float, data: Subsets, wanted: BlockClass, run: Run
) -> Iterator[Block]:
    """Blocks of fewer heads and neurons, the likeliest first."""
    most = wanted.n_heads, wanted.hidden
    careful = prune(student, data.train, _TOLERANCES[-1], *most)
    if loss < HOPELESS:
        near = prune(student, data.train, _TOLERANCES[-1], *most, bold=True)
        yield distil(near, loss, data.train, run)
        yield prune(student, data.train, _TOLERANCES[0], *most)
    yield careful


def settle(
    block: Block, promised: float, data: Subsets, run: Run, options: BlockOptions, stage: str
) -> tuple[Block, float]:
    """Gauss-Newton to rounding, and without what an exact block does not need.

    promised: the student's error, which a block that has all true neurons comes to.
    """
    if not promised < HOPELESS:
        return block, data.error(block)
    block = descend(block, data, run, options, stage)
    loss = data.error(block)
    for _ in range(_LOOKS):
        if not promised > loss > data.exact or run.is_over():
            break
        fewer = distil(prune(block, data.train, _TOLERANCES[-1]), loss, data.train, run)
        is_fewer = not _is_as_large(fewer, block)
        steps = _FIRST_STEPS if is_fewer else _STEPS
        found = descend(fewer, data, run, options, stage, steps)
        if not (now := data.error(found)) < loss:
            if not is_fewer:
                break
            found = descend(block, data, run, options, stage, _STEPS)
            now = data.error(found)
        if now < loss:
            block, loss = found, now
    if loss < data.exact:
        block = turn_over(shrink(block, data, run, options), data, run, options)
        loss = data.error(block)
    return block, loss


def descend(
    block: Block,
    data: Subsets,
    run: Run,
    options: BlockOptions,
    stage: str,
    max_steps: int = _FIRST_STEPS,
) -> Block:
    """Gauss-Newton on as many examples as the block needs; then, if that was exact, no more.

    Where it meets these to rounding and others not (a kink of ReLU lies between few tokens), they
    are joined by those that it fits worst.
    """
    if is_large(block):
        return descend_with_metric(block, data, run, options, stage, max_steps)
    train = data.train
    limit = train.counting_limit(block.design.without_linear)
    count = min(train.n, max(64, math.ceil(options.examples * limit)))
    chosen, padded = train.sample(count, run.seed), pad_neurons(block)
    kind = padded.parametrisation.straightened()
    for turn in range(_WORST + 1):
        problem = make_problem(chosen, kind)
        params = kind.from_layer(padded, problem.units)
        found = descend_densely(params, problem, run, stage=stage, max_steps=max_steps)
        if not np.isfinite(found.loss):
            break
        padded = problem.to_layer(found.params)
        overfits = found.loss < data.exact and not data.is_met(padded)
        if not overfits or chosen.n >= train.n or turn == _WORST or run.is_over():
            break
        chosen = data.with_worst(chosen, padded)
    return first_neurons(padded, block.hidden)


def shrink(block: Block, data: Subsets, run: Run, options: BlockOptions) -> Block:
    """Leave out what an exact block does not need, as long as it stays exact."""
    while not run.is_over():
        smaller = prune(block, data.train, _SURELY_NOTHING)
        if _is_as_large(smaller, block):
            if can_distil(block):
                smaller = distil(block, max(data.exact, _CLEARLY), data.train, run, at_once=1)
            else:
                smaller = prune(block, data.train, _TOLERANCES[0])
        if _is_as_large(smaller, block):
            return block
        found = descend(smaller, data, run, options, "Gauss-Newton, smaller")
        if not data.is_met(found):
            return block
        block = found
    return block


def _is_as_large(block: Block, other: Block) -> bool:
    return (block.n_heads, block.hidden) == (other.n_heads, other.hidden)


def turn_over(block: Block, data: Subsets, run: Run, options: BlockOptions) -> Block:
    """The same block without a linear map beside its neurons, where some of them turned over
    leave none; else as it was."""
    turned = block.canonical(tolerance=max(1e-8, _OFF * data.error(block) ** 0.5))
    if block.feed_forward.linear is None or turned.feed_forward.linear is not None:
        return block
    found = descend(turned, data, run, options, "Gauss-Newton, turned over")
    return found if data.is_met(found) else block
