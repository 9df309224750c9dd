"""The quadratic model of a feed-forward part: how its outputs change as all its neurons move.

An output is linear in what neurons put out, and in what one of them changes by as its input weights
do: J^T J is made of moments of few numbers a token, times products of output weights, and is formed
for a tenth of what a Jacobian costs.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mhalearn._runtime.programs import compiled, float64
from mhalearn._runtime.types import Array, Float, Float64
from mhalearn.layer.block.feed_forward import FeedForward


class Tokens(NamedTuple):
    """What neurons see, and what they are to put out."""

    z: Float64  # (t, d)
    target: Float64


class NeuronModel(NamedTuple):
    """At a feed-forward part: J^T J and J^T r of the parameters in the order of `move`."""

    gram: Float64
    slope: Float64
    squared: float  # |r|^2


def count_inputs(ff: FeedForward) -> int:
    return ff.hidden * (2 if ff.act.is_gated else 1) * (ff.d + ff.has_bias)


def count_parameters(ff: FeedForward) -> int:
    return count_inputs(ff) + (ff.hidden + ff.d * (ff.linear is not None) + ff.has_bias) * ff.d


def outputs_of(ff: FeedForward, neuron: int) -> slice:
    """Where a neuron's output weights are among the parameters."""
    begun = count_inputs(ff) + neuron * ff.d
    return slice(begun, begun + ff.d)


def measure(ff: FeedForward, tokens: Tokens) -> NeuronModel:
    """The model at a feed-forward part. Cost: O((hidden d)^2) a token."""
    moved, columns = columns_of(ff, tokens.z)
    outputs = stack_outputs(ff)
    residual = tokens.target - columns @ outputs
    inputs, d = moved.shape[1], ff.d
    towards = np.repeat(ff.down, inputs // max(ff.hidden, 1), axis=0)  # (inputs, d)
    gram = np.empty((inputs + outputs.size,) * 2)
    gram[:inputs, :inputs] = (moved.T @ moved) * (towards @ towards.T)
    mixed = (moved.T @ columns)[:, :, None] * towards[:, None]
    gram[:inputs, inputs:] = mixed.reshape(inputs, -1)
    gram[inputs:, :inputs] = gram[:inputs, inputs:].T
    gram[inputs:, inputs:] = np.kron(columns.T @ columns, np.eye(d))
    by_input = np.sum((moved.T @ residual) * towards, axis=1)
    slope = np.concatenate([by_input, (columns.T @ residual).ravel()])
    return NeuronModel(gram, slope, float(np.sum(residual**2)))


def squared_error(ff: FeedForward, tokens: Tokens) -> float:
    """|r|^2 of a feed-forward part."""
    _, columns = columns_of(ff, tokens.z, moving=False)
    return float(np.sum((tokens.target - columns @ stack_outputs(ff)) ** 2))


def columns_of(ff: FeedForward, z: Float64, moving: bool = True) -> tuple[Float64, Float64]:
    """For each token: each neuron's slope by its input weights, then what outputs are linear in.

    Inputs in the order (neuron, side, feature), a one for the bias last.
    """
    ones = np.ones((len(z), int(ff.has_bias)))
    seen = np.hstack([z, ones])
    up = z @ ff.up + (0.0 if ff.up_bias is None else ff.up_bias)
    gate = None if ff.gate is None else z @ ff.gate
    if gate is not None and ff.gate_bias is not None:
        gate = gate + ff.gate_bias
    with float64():
        act, slope = map(np.asarray, _act(jnp.asarray(up if gate is None else gate), ff.act))
    values, slopes = act, slope[:, :, None]
    if gate is not None:
        values, slopes = act * up, np.stack([act, slope * up], axis=-1)
    linear = z if ff.linear is not None else z[:, :0]
    columns = np.hstack([values, linear, ones])
    if not moving:
        return z[:, :0], columns
    moved = slopes[..., None] * seen[:, None, None, :]
    return moved.reshape(len(z), -1), columns


@partial(compiled, static_argnums=1)
def _act(z: Float[Array, "t n"], act: object) -> tuple[Array, Array]:
    assert callable(act)
    return jax.jvp(act, (z,), (jnp.ones_like(z),))


def stack_outputs(ff: FeedForward) -> Float64:
    """Output weights of all that outputs are linear in: neurons, a linear map, a one."""
    parts = [ff.down]
    if ff.linear is not None:
        parts.append(ff.linear)
    if ff.has_bias:
        parts.append((np.zeros(ff.d) if ff.down_bias is None else ff.down_bias)[None])
    return np.vstack(parts)


def move(ff: FeedForward, step: Float64) -> FeedForward:
    """Another feed-forward part, by a step of the parameters."""
    inputs, d = count_inputs(ff), ff.d
    sides = ("up", "gate") if ff.gate is not None else ("up",)
    rows = step[:inputs].reshape(ff.hidden, len(sides), d + ff.has_bias)
    outputs = step[inputs:].reshape(-1, d)
    named = {"down": ff.down + outputs[: ff.hidden]}
    for place, side in enumerate(sides):
        named[side] = getattr(ff, side) + rows[:, place, :d].T
        if ff.has_bias:
            bias = getattr(ff, f"{side}_bias")
            named[f"{side}_bias"] = rows[:, place, d] + (0.0 if bias is None else bias)
    if ff.linear is not None:
        named["linear"] = ff.linear + outputs[ff.hidden : ff.hidden + d]
    if ff.has_bias:
        named["down_bias"] = outputs[-1] + (0.0 if ff.down_bias is None else ff.down_bias)
    return ff.replace(**named)
