"""The canonical form of a block: one choice of numbers for each function.

Gains and biases of norms go into the linear maps that follow them; what a LayerNorm does not see or
show is zero; the output bias of attention is with the neurons where it cannot be told from theirs.
Heads as in their own canonical form, neurons as `canonical_neurons` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from mhalearn._runtime.types import Float64
from mhalearn.layer.block.block import Block, block_of
from mhalearn.layer.block.design import SHOWN
from mhalearn.layer.block.feed_forward import FeedForward
from mhalearn.layer.block.heads import (
    Heads,
    fold_input,
    output_bias,
    project_output,
    with_output_bias,
)
from mhalearn.layer.block.neurons import canonical_neurons, choose_turned, turn_neurons
from mhalearn.layer.block.norms import Norm
from mhalearn.layer.layer import AttentionLayer


class _Parts(NamedTuple):
    heads: Heads
    feed_forward: FeedForward
    norms: tuple[Norm, Norm] | None


def canonical_form(block: Block, tolerance: float = 1e-8) -> Block:
    """The same function by the numbers that stand for all of its gauge.

    Trust: unique for generic blocks. It compares neurons as functions, not on data: groups that
    are linear only where tokens lie stay neurons. An epsilon below 1e-9 is taken for zero where it
    alone shows a scale, of post-norms, which changes outputs by as much.
    """
    parts = _Parts(_canonical_heads(block.attention, tolerance), block.feed_forward, block.norms)
    fold = {None: _fold_bias, "pre": _fold_before, "post": _fold_after}[block.norm]
    heads, feed_forward, norms = fold(parts)
    return block.replace(
        attention=_canonical_heads(heads, tolerance),
        feed_forward=canonical_neurons(feed_forward, tolerance),
        norms=norms,
    )


def fold_inputs(block: Block) -> Block:
    """The same block with gains and biases of pre-norms in the maps that follow; others as they
    are. Heads may have any rank: their arrays are multiplied, and keep it."""
    if block.norm != "pre" or block.norms is None:
        return block
    first, second = block.norms
    ff = _multiply_input(_shift_input(block.feed_forward, _bias(second)), np.diag(second.gain))
    params = dict(block.params) | _fold_heads(block.params, first.gain, _bias(first))
    params |= {f"feed_forward.{name}": leaf for name, leaf in ff.parts().items()}
    for number, one in enumerate((_plain(first), _plain(second)), 1):
        params[f"norm_{number}.gain"] = one.gain
        if one.bias is not None:
            params[f"norm_{number}.bias"] = one.bias
    return block_of(block.design, params, metadata=block.metadata, seen=block.seen)


def _fold_heads(params: Mapping[str, Float64], gain: Float64, shift: Float64) -> dict[str, Float64]:
    """Arrays of heads that see n where the others saw gain n + shift."""
    named = {
        name.removeprefix("attention."): leaf
        for name, leaf in params.items()
        if name.startswith("attention.")
    }
    if "theta" in named:
        theta, w = named["theta"], named["w"]
        if "key_vector" in named:
            named["key_vector"] = gain * (named["key_vector"] + shift @ theta)
        if "out_bias" in named:
            named["out_bias"] = named["out_bias"] + np.einsum("a,mae->e", shift, w)
        named["theta"], named["w"] = gain[:, None] * theta * gain, gain[:, None] * w
    for side in ("query", "key", "value"):
        if f"{side}_bias" in named:
            moved = np.einsum("a,gah->gh", shift, named[side])
            named[f"{side}_bias"] = named[f"{side}_bias"] + moved
        if side in named:
            named[side] = gain[:, None] * named[side]
    return {f"attention.{name}": leaf for name, leaf in named.items()}


def _canonical_heads(heads: Heads, tolerance: float) -> Heads:
    if isinstance(heads, AttentionLayer):
        return heads.canonical(tolerance=tolerance)
    return heads.canonical()


def _fold_bias(parts: _Parts) -> _Parts:
    """Without norms, what heads add to every token."""
    bias = output_bias(parts.heads)
    if not bias.any():
        return parts
    heads = with_output_bias(parts.heads, np.zeros_like(bias))
    return _Parts(heads, _add_output(_shift_input(parts.feed_forward, bias), bias), None)


def _fold_before(parts: _Parts) -> _Parts:
    assert parts.norms is not None
    first, second = parts.norms
    d = len(first.gain)
    seen = hyperplane(first.kind, d)
    heads = fold_input(parts.heads, seen * first.gain, _bias(first))
    ff = _multiply_input(_shift_input(parts.feed_forward, _bias(second)), seen * second.gain)
    bias = output_bias(heads)
    mean = bias - bias @ seen  # which the second norm takes away
    if mean.any():
        heads, ff = with_output_bias(heads, bias - mean), _add_output(ff, mean)
    return _Parts(heads, ff, (_plain(first), _plain(second)))


def _fold_after(parts: _Parts) -> _Parts:
    assert parts.norms is not None
    first, second = parts.norms
    shown = hyperplane(first.kind, len(first.gain))
    heads = project_output(parts.heads, shown)
    ff = _add_output(_shift_input(parts.feed_forward, _bias(first)), _bias(first))
    gain, last = first.gain, second.gain
    gain, ff = _turn_over(ff, gain, shown)
    if first.kind == "layer" and gain.all():
        ff = _multiply_input(ff, shown * gain / gain[:, None])
    ff = _multiply_output(ff, shown)
    if gain.sum() < 0:  # a sign that the second norm's gain takes up
        gain, last, ff = -gain, -last, _scale_within(ff, -1.0)
    if first.epsilon < SHOWN and gain.all():
        size = float(np.exp(np.mean(np.log(np.abs(gain)))))
        gain, ff = gain / size, _scale_within(ff, size)
    zero = None if first.bias is None else np.zeros_like(gain)
    kept = Norm(gain, zero, first.kind, first.epsilon)
    return _Parts(heads, ff, (kept, Norm(last, second.bias, second.kind, second.epsilon)))


def _turn_over(ff: FeedForward, gain: Float64, shown: Float64) -> tuple[Float64, FeedForward]:
    """Without a linear map beside neurons that stand between two norms, where that can be.

    Of the stream before its gain, gain and linear map are one matrix: with the right neurons turned
    over it is diagonal, and the gain."""
    if ff.linear is None or not ff.act.mirrors or not gain.all():
        return gain, ff
    d, inputs = len(gain), shown @ (gain[:, None] * ff.up)
    matrix = shown @ (gain[:, None] * (np.eye(d) + ff.linear)) @ shown
    which, found = choose_turned(inputs.T, ff.down @ shown, matrix, shown, 1e-7)
    if which is None or not found.all():
        return gain, ff
    ff = _multiply_input(turn_neurons(ff, which), np.diag(gain / found))
    return found, ff.replace(linear=None)


def hyperplane(kind: str, d: int) -> Float64:
    """The projection on what a norm sees: a LayerNorm takes means away."""
    return np.eye(d) - (1.0 / d if kind == "layer" else 0.0)


def _bias(norm: Norm) -> Float64:
    return np.zeros_like(norm.gain) if norm.bias is None else norm.bias


def _plain(norm: Norm) -> Norm:
    bias = None if norm.bias is None else np.zeros_like(norm.gain)
    return Norm(np.ones_like(norm.gain), bias, norm.kind, norm.epsilon)


def _shift_input(ff: FeedForward, shift: Float64) -> FeedForward:
    """The same neurons of z that saw z + shift."""
    if not shift.any():
        return ff
    moved = {"up_bias": shift @ ff.up + (0.0 if ff.up_bias is None else ff.up_bias)}
    if ff.gate is not None:
        moved["gate_bias"] = shift @ ff.gate + (0.0 if ff.gate_bias is None else ff.gate_bias)
    if ff.linear is not None:
        return _add_output(ff.replace(**moved), shift @ ff.linear)
    return ff.replace(**moved)


def _multiply_input(ff: FeedForward, matrix: Float64) -> FeedForward:
    """The same neurons of z that saw z matrix."""
    return ff.replace(
        up=matrix @ ff.up,
        gate=None if ff.gate is None else matrix @ ff.gate,
        linear=None if ff.linear is None else matrix @ ff.linear,
    )


def _multiply_output(ff: FeedForward, matrix: Float64) -> FeedForward:
    return ff.replace(
        down=ff.down @ matrix,
        down_bias=None if ff.down_bias is None else ff.down_bias @ matrix,
        linear=None if ff.linear is None else ff.linear @ matrix,
    )


def _add_output(ff: FeedForward, shift: Float64) -> FeedForward:
    return ff.replace(down_bias=shift + (0.0 if ff.down_bias is None else ff.down_bias))


def _scale_within(ff: FeedForward, size: float) -> FeedForward:
    """Neurons of z and outputs for a stream, both of which are divided by `size`."""
    return ff.replace(
        up=ff.up * size,
        gate=None if ff.gate is None else ff.gate * size,
        down=ff.down / size,
        down_bias=None if ff.down_bias is None else ff.down_bias / size,
    )
