"""The same feed-forward part by fewer neurons, found from what it puts out alone.

A student holds a true neuron as several whose inputs are near to each other but not alike. Without
one of them the others, with the best output weights, make up for little; moved, for all of it.
Heads need not be known for that: what the student's neurons put out on the tokens that they see is
the target of a small problem of its own, whose normal matrix is cheap. There it shows how many
neurons are needed: one too few leaves far more than the student is off by.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg

from mhalearn._runtime.programs import compiled, in_float64
from mhalearn._runtime.types import Array, Float64
from mhalearn.data import Examples
from mhalearn.layer.batches import Chunk
from mhalearn.layer.block.block import Block
from mhalearn.layer.block.feed_forward import FeedForward, choose_neurons
from mhalearn.layer.block.parametrisation import BlockParametrisation, BlockParams
from mhalearn.layer.parametrisation import Parametrisation
from mhalearn.learners.blocks.neuron_model import (
    NeuronModel,
    Tokens,
    columns_of,
    count_parameters,
    measure,
    move,
    outputs_of,
    squared_error,
    stack_outputs,
)
from mhalearn.learners.blocks.padding import pad_neurons, with_neurons
from mhalearn.run.run import Run
from mhalearn.solvers.damping import update_damping

# Parameters up to which it is tried: the normal matrix is inverted.
_MOST_PARAMETERS = 4000
# Relative squared error up to which a block shows how many neurons are needed: without a true one,
# most is a hundred times more. What fewer may leave, over that error; of a small one, this.
_CLEAR, _OVER, _MOST_OVER, _SMALL = 1e-6, 3.0, 1e3, 1e-9
# Equations a parameter.
_EQUATIONS = 16
# Share of neurons that are left out at once, at most.
_AT_ONCE = 6
# What the diagonal is raised by where costs are asked: neurons are not to move far.
_RIDGE = 1e-4
# What keeps a factor of the normal matrix, over its mean diagonal.
_FLOOR = 1e-12
# Steps after neurons were left out, and so many in a row that leave more than this are the end.
_STEPS, _SLOW_STEPS, _SLOW = 30, 4, 0.8
# Neurons that are tried where only one is to be left out.
_LIKELY = 4


class _Seen(NamedTuple):
    tokens: Tokens
    energy: float  # of the stream that the neurons' outputs are added to, and of these


def can_distil(block: Block) -> bool:
    return block.hidden > 1 and count_parameters(block.feed_forward) <= _MOST_PARAMETERS


@in_float64
def distil(
    block: Block, loss: float, examples: Examples, run: Run, at_once: int | None = None
) -> Block:
    """A block of as few neurons as put out the same, up to some times its relative squared error.

    at_once: neurons that are left out at once at first; fewer where they were needed.
    Cost: a dozen normal matrices of the feed-forward part, for each sixth of the neurons that it
    can do without. Trust: a heuristic, which may keep more neurons than are needed, or fewer.
    """
    ff = block.feed_forward
    if not can_distil(block) or not loss < _CLEAR:
        return block
    seen = _look(block, examples)
    most = max(_OVER * loss, min(_MOST_OVER * loss, _SMALL)) * seen.energy
    at_once = at_once or max(1, ff.hidden // _AT_ONCE)
    skip = 0  # of neurons that look cheaper than they are: those that are bent a little
    while ff.hidden > 1 and skip < min(_LIKELY, ff.hidden) and not run.is_over():
        tried, squared = _fit(_leave_out(ff, seen.tokens, at_once, skip), seen.tokens, most)
        if squared < most:
            ff, skip = tried, 0
        elif at_once > 1:
            at_once = (ff.hidden - tried.hidden) // 2
        else:
            skip += 1
    return with_neurons(block, ff)


def _look(block: Block, examples: Examples) -> _Seen:
    """Tokens as neurons see them, and what these put out."""
    ff = block.feed_forward
    count = -(-_EQUATIONS * count_parameters(ff) // (ff.d * examples.k))
    x, _, lengths = examples.subset(slice(0, min(examples.n, count))).arrays()
    rows, streams = [], []
    for part, (z, stream) in pad_neurons(block).over_chunks(_streams, x, lengths):
        inside = np.arange(z.shape[1]) < lengths[part, None]
        rows.append(np.asarray(z)[: len(inside)][inside])
        streams.append(np.asarray(stream)[: len(inside)][inside])
    seen = np.concatenate(rows)
    target: Float64 = columns_of(ff, seen, moving=False)[1] @ stack_outputs(ff)
    return _Seen(Tokens(seen, target), float(np.sum(np.concatenate(streams) ** 2)))


@partial(compiled, static_argnums=0)
def _streams(
    parametrisation: Parametrisation, params: BlockParams, chunk: Chunk
) -> tuple[Array, Array]:
    assert isinstance(parametrisation, BlockParametrisation)
    chunk = jax.tree.map(jnp.asarray, chunk)
    z = parametrisation.neuron_inputs(params, chunk)
    return z, parametrisation.final_stream(params, chunk)


def _leave_out(ff: FeedForward, tokens: Tokens, count: int, skip: int = 0) -> FeedForward:
    """Without so many neurons, one after the other the one that the quadratic model can do without
    at least cost, the others moved. skip: of the first so many are cheaper."""
    model = measure(ff, tokens)
    inverse, change = _inverse(model), np.zeros(len(model.slope))
    alive = list(range(ff.hidden))
    for turn in range(min(count, ff.hidden - 1)):
        costs = [_cost(ff, inverse, change, neuron) for neuron in alive]
        chosen = alive.pop(int(np.argsort(costs)[0 if turn else skip]))
        own = outputs_of(ff, chosen)
        column = np.linalg.solve(inverse[own, own], inverse[own]).T
        change -= column @ (ff.down[chosen] + change[own])
        inverse -= column @ inverse[own]
    return choose_neurons(move(ff, change), alive)


def _cost(ff: FeedForward, inverse: Float64, change: Float64, neuron: int) -> float:
    own = outputs_of(ff, neuron)
    left = ff.down[neuron] + change[own]
    return float(left @ np.linalg.solve(inverse[own, own], left))


def _inverse(model: NeuronModel) -> Float64:
    inverse: Float64 = scipy.linalg.cho_solve(_factor(model, _RIDGE), np.eye(len(model.slope)))
    return inverse


def _factor(model: NeuronModel, ridge: float) -> tuple[Float64, bool]:
    diagonal = np.diag(model.gram)
    raised = model.gram.copy()
    raised.flat[:: len(raised) + 1] += ridge * diagonal + _FLOOR * float(diagonal.mean())
    factor: tuple[Float64, bool] = scipy.linalg.cho_factor(raised, lower=True, overwrite_a=True)
    return factor


def _fit(ff: FeedForward, tokens: Tokens, most: float) -> tuple[FeedForward, float]:
    """Damped Gauss-Newton until so little is left, or nothing improves."""
    damping, slow = 1e-4, 0
    model = measure(ff, tokens)
    for _ in range(_STEPS):
        if model.squared < most or slow >= _SLOW_STEPS:
            break
        try:
            step = scipy.linalg.cho_solve(_factor(model, damping), model.slope)
        except np.linalg.LinAlgError:  # neurons that are alike to rounding
            damping = float(update_damping(damping, -1.0, np))
            continue
        tried, predicted = move(ff, step), float(step @ model.slope)
        now = squared_error(tried, tokens)
        ratio = (model.squared - now) / max(predicted, 1e-300)
        damping = float(update_damping(damping, ratio if np.isfinite(ratio) else -1.0, np))
        slow = slow + 1 if now > _SLOW * model.squared else 0
        if now < model.squared:
            ff, model = tried, measure(tried, tokens)
    return ff, model.squared
