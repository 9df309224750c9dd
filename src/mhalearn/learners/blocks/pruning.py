"""From a student with surplus to a small block: heads merged, neurons left out.

A neuron is left out where the others, with the best output weights, make up for it: of all
linear functions of the neurons that is the nearest (optimal brain surgeon, one layer refitted).
A linear map beside them, where the student has one, helps to: neurons that are turned over, or that
only make up for such, then cost nothing.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mhalearn._runtime.programs import compiled, in_float64
from mhalearn._runtime.types import Array, Float, Float64
from mhalearn.data import Examples
from mhalearn.layer.batches import Chunk
from mhalearn.layer.block.block import Block
from mhalearn.layer.block.factors import merge_block_heads
from mhalearn.layer.block.feed_forward import FeedForward
from mhalearn.layer.block.neurons import canonical_neurons, merge_neurons
from mhalearn.layer.block.parametrisation import (
    BlockParametrisation,
    BlockParams,
    holds_matrices,
)
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.parametrisation import Parametrisation
from mhalearn.learners.blocks.padding import pad_neurons, with_neurons

# Rows of examples that neurons are compared on, over their number.
_ROWS = 64
# Neurons up to which an inverse is made anew after each that is left out; of more, after so many.
_FEW, _ANEW = 128, 64
# Distance of heads that are taken for one, over the square root of what neurons may change: heads
# that are alike are far nearer to each other than others are, and settle late.
_HEADS = 20.0
# Heads of a large student that are farther from each other than this, over their size, are two; and
# one whose W is smaller than this, over the largest, is none.
_ALIKE, _SMALL = 0.3, 0.02


def prune(
    block: Block,
    examples: Examples,
    tolerance: float,
    most_heads: int | None = None,
    most_neurons: int | None = None,
    near: float = 0.0,
    budget: float | None = None,
    bold: bool = False,
) -> Block:
    """A block of fewer heads and neurons that changes outputs by little.

    tolerance: of the energy of what neurons put out, the share that leaving one out may change.
    budget: relative squared error of outputs that leaving out may make in all, instead.
    near: distance of inputs, over the largest, of neurons that are made one before.
    bold: of heads that are merely near, make one; they then need descent.
    most_heads, most_neurons: leave out more, until no more than these are left.
    Cost: O(hidden^3) beside a pass over some examples. Trust: a heuristic; what is left is judged
    by how well it then fits.
    """
    if bold:
        block = merge_block_heads(block, _ALIKE, _SMALL, most_heads)
    else:
        block = _merge_heads(block, _HEADS * tolerance**0.5, most_heads)
    ff = block.feed_forward
    if ff.gate is not None:
        ff = canonical_neurons(ff, tolerance**0.5)
    elif near > 0:
        ff = merge_neurons(ff, near)
    block = with_neurons(block, _like(ff, block.feed_forward))
    if not block.hidden:
        return block
    ff, moments = block.feed_forward, _measure(block, examples)
    each, room = tolerance * _energy(ff, moments.gram), math.inf
    if budget is not None:
        each = room = budget * moments.energy
    return with_neurons(block, _leave_out(ff, moments.gram, each, most_neurons, room))


def _merge_heads(block: Block, tolerance: float, most: int | None) -> Block:
    """Heads that are alike as one, and at most so many of the largest."""
    if not holds_matrices(block.design.attention):
        return merge_block_heads(block, min(tolerance, _ALIKE), min(tolerance, _SMALL), most)
    heads = block.attention
    assert isinstance(heads, AttentionLayer)
    merged = heads.canonical(tolerance=tolerance)
    if most is not None and merged.n_heads > most:
        kept = slice(most)  # the largest come first
        vectors = None if merged.key_vector is None else merged.key_vector[kept]
        merged = merged.replace(theta=merged.theta[kept], w=merged.w[kept], key_vector=vectors)
    return block.replace(attention=merged)


def _like(ff: FeedForward, given: FeedForward) -> FeedForward:
    """With a linear map where the other has one, and without where not."""
    if given.linear is None:
        return ff.replace(linear=None)
    return ff.replace(linear=np.zeros((ff.d, ff.d))) if ff.linear is None else ff


class _Moments(NamedTuple):
    """Of what outputs are linear in: neurons first, then what a linear map sees, a one last."""

    gram: Float64
    energy: float  # of the stream that the neurons' outputs are added to, and of these


def _energy(ff: FeedForward, gram: Float64) -> float:
    """Of what neurons put out, its mean taken away."""
    among, sums = gram[: ff.hidden, : ff.hidden], gram[-1, : ff.hidden] @ ff.down
    whole = float(np.sum((among @ ff.down) * ff.down))
    return max(whole - float(sums @ sums) / gram[-1, -1], 0.0) or 1.0


def _leave_out(
    ff: FeedForward, gram: Float64, most_each: float, most: int | None, room: float
) -> FeedForward:
    """Take the cheapest neuron away again and again, and refit the outputs of the others.

    most_each: that one may cost. room: that all may. most: neurons that may stay at most.
    """
    bias = np.zeros(ff.d) if ff.down_bias is None else ff.down_bias
    linear = np.zeros((0, ff.d)) if ff.linear is None else ff.linear
    outputs = np.vstack([ff.down, linear, bias])
    right = gram @ outputs  # what the student itself puts out
    columns = places = list(range(len(gram)))
    hidden, gone = ff.hidden, 0
    inverse: Float64 = np.zeros((0, 0))
    found: Float64 = inverse
    while hidden > 1:
        if not len(inverse) or hidden <= _FEW or gone >= _ANEW:
            inverse, gone = np.linalg.inv(_regular(gram, columns)), 0  # type: ignore[assignment]
            found, places = inverse @ right[columns], columns.copy()
        among = len(places) - (len(columns) - hidden)  # of these places, the neurons
        alive = np.isin(places[:among], columns)
        costs = np.full(among, np.inf)
        np.divide(np.sum(found[:among] ** 2, 1), np.diag(inverse)[:among], costs, where=alive)
        cheapest = int(np.argmin(costs))
        is_dear = costs[cheapest] > most_each or costs[cheapest] > room
        if is_dear and (most is None or hidden <= most):
            break
        room -= float(costs[cheapest])
        column = inverse[:, cheapest] / inverse[cheapest, cheapest]
        found -= np.outer(column, found[cheapest])
        inverse -= np.outer(column, inverse[cheapest])
        columns.remove(places[cheapest])
        hidden, gone = hidden - 1, gone + 1
    if hidden < ff.hidden:
        outputs = np.linalg.solve(_regular(gram, columns), right[columns])
    kept = columns[:hidden]
    return ff.replace(
        up=ff.up[:, kept],
        up_bias=None if ff.up_bias is None else ff.up_bias[kept],
        gate=None if ff.gate is None else ff.gate[:, kept],
        gate_bias=None if ff.gate_bias is None else ff.gate_bias[kept],
        down=outputs[:hidden],
        linear=None if ff.linear is None else outputs[hidden:-1],
        down_bias=None if ff.down_bias is None else outputs[-1],
    )


def _regular(gram: Float64, which: list[int]) -> Float64:
    """Of some columns, with so much on the diagonal that it can be inverted."""
    matrix: Float64 = gram[np.ix_(which, which)]
    return matrix + 1e-13 * np.trace(matrix) / len(which) * np.eye(len(which))


@in_float64
def _measure(block: Block, examples: Examples) -> _Moments:
    """On rows of some examples. Memory: that of a chunk, and hidden^2."""
    padded = pad_neurons(block)
    n = min(examples.n, -(-_ROWS * padded.hidden // examples.k))
    x, _, lengths = examples.subset(slice(0, n)).arrays()
    found = [sums for _, sums in padded.over_chunks(_moments, x, lengths)]
    gram = np.sum([gram for gram, _ in found], axis=0)
    there = np.r_[: block.hidden, padded.hidden : len(gram)]
    return _Moments(gram[np.ix_(there, there)], float(sum(e for _, e in found)))


@partial(compiled, static_argnums=0)
def _moments(
    parametrisation: Parametrisation, params: BlockParams, chunk: Chunk
) -> tuple[Float[Array, "c c"], Float[Array, ""]]:
    assert isinstance(parametrisation, BlockParametrisation)
    chunk = jax.tree.map(jnp.asarray, chunk)
    parts = [parametrisation.neuron_values(params, chunk)]
    if parametrisation.design.linear:
        parts.append(parametrisation.neuron_inputs(params, chunk))
    columns = jnp.concatenate([*parts, jnp.ones_like(parts[0][..., :1])], axis=-1)
    columns *= chunk.weight[..., None]
    columns = columns.reshape(-1, columns.shape[-1])
    stream = parametrisation.final_stream(params, chunk) * chunk.weight[..., None]
    return columns.T @ columns, jnp.sum(stream**2)
