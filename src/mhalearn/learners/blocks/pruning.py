"""From a student with surplus to a small block: heads merged, neurons left out.

A neuron is left out where the others, with the best output weights, make up for it: of all
linear functions of the neurons that is the nearest (optimal brain surgeon, one layer refitted).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from mhalearn._runtime.programs import compiled, in_float64
from mhalearn._runtime.types import Array, Float, Float64
from mhalearn.data import Examples
from mhalearn.layer.batches import Chunk
from mhalearn.layer.block.block import Block
from mhalearn.layer.block.feed_forward import FeedForward
from mhalearn.layer.block.neurons import canonical_neurons
from mhalearn.layer.block.parametrisation import BlockParametrisation, BlockParams
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.parametrisation import Parametrisation

# Rows of examples that neurons are compared on, over their number.
_ROWS = 64
# Distance of heads that are taken for one, over the square root of what neurons may change: heads
# that are alike are far nearer to each other than others are, and settle late.
_HEADS = 20.0


def prune(
    block: Block,
    examples: Examples,
    tolerance: float,
    most_heads: int | None = None,
    most_neurons: int | None = None,
) -> Block:
    """A block of fewer heads and neurons that changes outputs by little.

    tolerance: of the energy of what neurons put out, the share that leaving one out may change.
    most_heads, most_neurons: leave out more, until no more than these are left.
    Cost: O(hidden^4) beside a pass over some examples. Trust: a heuristic; what is left is judged
    by how well it then fits.
    """
    heads = block.attention
    assert isinstance(heads, AttentionLayer)
    merged = heads.canonical(tolerance=_HEADS * tolerance**0.5)
    if most_heads is not None and merged.n_heads > most_heads:
        kept = slice(most_heads)  # the largest come first
        vectors = None if merged.key_vector is None else merged.key_vector[kept]
        merged = merged.replace(theta=merged.theta[kept], w=merged.w[kept], key_vector=vectors)
    ff = block.feed_forward
    if ff.gate is not None:
        ff = canonical_neurons(ff, tolerance**0.5).replace(linear=None)
    block = block.replace(attention=merged, feed_forward=ff)
    if not ff.hidden:
        return block
    values = _neuron_values(block, examples)
    return block.replace(feed_forward=_leave_out(ff, values, tolerance, most_neurons))


def _leave_out(ff: FeedForward, values: Float64, tolerance: float, most: int | None) -> FeedForward:
    """Take the cheapest neuron away again and again, and refit the outputs of the others."""
    columns = np.concatenate([values, np.ones((len(values), 1))], axis=1)
    gram = columns.T @ columns
    bias = np.zeros(ff.d) if ff.down_bias is None else ff.down_bias
    outputs = np.vstack([ff.down, bias])
    right = gram @ outputs  # what the student itself puts out
    centred = values @ ff.down - (values @ ff.down).mean(axis=0)
    energy = float(np.sum(centred**2)) or 1.0
    kept = list(range(ff.hidden))
    found = outputs
    while len(kept) > 1:
        now = [*kept, ff.hidden]
        matrix = gram[np.ix_(now, now)]
        matrix = matrix + 1e-13 * np.trace(matrix) / len(now) * np.eye(len(now))
        inverse = np.linalg.inv(matrix)
        found = inverse @ right[now]
        costs = np.sum(found[:-1] ** 2, axis=1) / np.diag(inverse)[:-1] / energy
        cheapest = int(np.argmin(costs))
        if costs[cheapest] > tolerance and (most is None or len(kept) <= most):
            break
        kept.pop(cheapest)
    now = [*kept, ff.hidden]
    matrix = gram[np.ix_(now, now)]
    matrix = matrix + 1e-13 * np.trace(matrix) / len(now) * np.eye(len(now))
    found = np.linalg.solve(matrix, right[now]) if len(kept) < ff.hidden else outputs
    return ff.replace(
        up=ff.up[:, kept],
        up_bias=None if ff.up_bias is None else ff.up_bias[kept],
        gate=None if ff.gate is None else ff.gate[:, kept],
        gate_bias=None if ff.gate_bias is None else ff.gate_bias[kept],
        down=found[:-1],
        down_bias=None if ff.down_bias is None else found[-1],
    )


@in_float64
def _neuron_values(block: Block, examples: Examples) -> Float64:
    """Of every neuron on rows of some examples."""
    n = min(examples.n, -(-_ROWS * block.hidden // examples.k))
    x, _, lengths = examples.subset(slice(0, n)).arrays()
    inside = np.arange(examples.k) < lengths[:, None]
    walked = block.over_chunks(_values, x, lengths)
    parts = [values[: part.stop - part.start] for part, values in walked]
    return np.concatenate(parts)[inside]


@partial(compiled, static_argnums=0)
def _values(
    parametrisation: Parametrisation, params: BlockParams, chunk: Chunk
) -> Float[Array, "b k h"]:
    assert isinstance(parametrisation, BlockParametrisation)
    return parametrisation.neuron_values(params, jax.tree.map(jnp.asarray, chunk))
