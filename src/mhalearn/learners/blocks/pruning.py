"""From a student with surplus to a small block: heads merged, neurons left out.

A neuron is left out where the others, with the best output weights, make up for it: of all
linear functions of the neurons that is the nearest (optimal brain surgeon, one layer refitted).
A linear map beside them, where the student has one, helps to: neurons that are turned over, or that
only make up for such, then cost nothing.
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
from mhalearn.layer.block.neurons import canonical_neurons, merge_neurons
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
    near: float = 0.0,
) -> Block:
    """A block of fewer heads and neurons that changes outputs by little.

    tolerance: of the energy of what neurons put out, the share that leaving one out may change.
    near: distance of inputs, over the largest, of neurons that are made one before.
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
        ff = canonical_neurons(ff, tolerance**0.5)
    elif near > 0:
        ff = merge_neurons(ff, near)
    ff = _like(ff, block.feed_forward)
    block = block.replace(attention=merged, feed_forward=ff)
    if not ff.hidden:
        return block
    columns = _columns(block, examples)
    return block.replace(feed_forward=_leave_out(ff, columns, tolerance, most_neurons))


def _like(ff: FeedForward, given: FeedForward) -> FeedForward:
    """With a linear map where the other has one, and without where not."""
    if given.linear is None:
        return ff.replace(linear=None)
    return ff.replace(linear=np.zeros((ff.d, ff.d))) if ff.linear is None else ff


def _leave_out(
    ff: FeedForward, columns: Float64, tolerance: float, most: int | None
) -> FeedForward:
    """Take the cheapest neuron away again and again, and refit the outputs of the others.

    columns: values of neurons, then what the linear map sees, if there is one, and a one.
    """
    gram = columns.T @ columns
    bias = np.zeros(ff.d) if ff.down_bias is None else ff.down_bias
    linear = np.zeros((0, ff.d)) if ff.linear is None else ff.linear
    outputs = np.vstack([ff.down, linear, bias])
    right = gram @ outputs  # what the student itself puts out
    put_out = columns[:, : ff.hidden] @ ff.down
    energy = float(np.sum((put_out - put_out.mean(axis=0)) ** 2)) or 1.0
    kept, always = list(range(ff.hidden)), list(range(ff.hidden, len(gram)))
    while len(kept) > 1:
        inverse = np.linalg.inv(_regular(gram, kept + always))
        found = (inverse @ right[kept + always])[: len(kept)]
        costs = np.sum(found**2, axis=1) / np.diag(inverse)[: len(kept)] / energy
        cheapest = int(np.argmin(costs))
        if costs[cheapest] > tolerance and (most is None or len(kept) <= most):
            break
        kept.pop(cheapest)
    if len(kept) < ff.hidden:
        outputs = np.linalg.solve(_regular(gram, kept + always), right[kept + always])
    return ff.replace(
        up=ff.up[:, kept],
        up_bias=None if ff.up_bias is None else ff.up_bias[kept],
        gate=None if ff.gate is None else ff.gate[:, kept],
        gate_bias=None if ff.gate_bias is None else ff.gate_bias[kept],
        down=outputs[: len(kept)],
        linear=None if ff.linear is None else outputs[len(kept) : -1],
        down_bias=None if ff.down_bias is None else outputs[-1],
    )


def _regular(gram: Float64, which: list[int]) -> Float64:
    """Of some columns, with so much on the diagonal that it can be inverted."""
    matrix: Float64 = gram[np.ix_(which, which)]
    return matrix + 1e-13 * np.trace(matrix) / len(which) * np.eye(len(which))


@in_float64
def _columns(block: Block, examples: Examples) -> Float64:
    """What outputs are linear in, on rows of some examples: neurons first, a one last."""
    n = min(examples.n, -(-_ROWS * block.hidden // examples.k))
    x, _, lengths = examples.subset(slice(0, n)).arrays()
    inside = np.arange(examples.k) < lengths[:, None]
    walked = block.over_chunks(_values, x, lengths)
    parts = [values[: part.stop - part.start] for part, values in walked]
    return np.concatenate(parts)[inside]


@partial(compiled, static_argnums=0)
def _values(
    parametrisation: Parametrisation, params: BlockParams, chunk: Chunk
) -> Float[Array, "b k c"]:
    assert isinstance(parametrisation, BlockParametrisation)
    chunk = jax.tree.map(jnp.asarray, chunk)
    parts = [parametrisation.neuron_values(params, chunk)]
    if parametrisation.design.linear:
        parts.append(parametrisation.neuron_inputs(params, chunk))
    return jnp.concatenate([*parts, jnp.ones_like(parts[0][..., :1])], axis=-1)
