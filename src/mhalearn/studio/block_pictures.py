"""A block beside the hidden one: each true head and neuron, and what a search has in its place."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mhalearn._runtime.types import Float64
from mhalearn.layer.block.block import Block
from mhalearn.layer.block.comparison import match_neurons
from mhalearn.layer.block.feed_forward import FeedForward
from mhalearn.layer.block.neurons import turn_neurons
from mhalearn.layer.comparison import match_heads
from mhalearn.layer.layer import AttentionLayer
from mhalearn.studio.pictures import draw_heads, draw_matrix, scales

# Error of what goes into a head's weights, or into a neuron, below which it counts as found.
_NEAR = 0.1


class Beside(NamedTuple):
    """A block's heads and neurons in the order of the true ones, with their errors; of a block that
    has fewer, zeros stand in the others' place, with error one."""

    heads: AttentionLayer
    neurons: FeedForward
    theta_errors: Float64
    w_errors: Float64
    key_errors: Float64
    input_errors: Float64
    output_errors: Float64

    @property
    def worst(self) -> float:
        """The largest error of a head or neuron."""
        return max(float(errors.max(initial=0.0)) for errors in self[2:])

    @property
    def found(self) -> dict[str, int]:
        """Heads by their Theta and neurons by their inputs, which settle before their outputs."""
        near = {"heads": self.theta_errors, "neurons": self.input_errors}
        return {name: int(np.sum(errors < _NEAR)) for name, errors in near.items()}


def put_beside(block: Block, truth: Block) -> Beside:
    """Match a block with the truth, which is in its canonical form.

    A neuron is matched by its mirror image too, where a linear map beside them tells the two apart.
    Cost: O(hidden^2 d + hidden^3).
    """
    block = block.canonical()
    heads, true = block.attention, truth.attention
    assert isinstance(heads, AttentionLayer)
    assert isinstance(true, AttentionLayer)
    heads = _with_heads(heads, true.n_heads)
    order, *head_errors = match_heads(heads, true)
    neurons = _candidates(block.feed_forward, truth.feed_forward.hidden)
    which, *neuron_errors = match_neurons(neurons, truth.feed_forward)
    return Beside(
        heads.replace(theta=heads.theta[order], w=heads.w[order], key_vector=None),
        _take(neurons, which),
        *head_errors,
        *neuron_errors,
    )


def draw_truth(truth: Block) -> dict[str, Any]:
    """What is hidden, as a run begins with it."""
    heads = truth.attention
    assert isinstance(heads, AttentionLayer)
    return {
        "heads": draw_heads(heads, None, scales(heads)),
        "limits": scales(heads),
        "neurons": _draw_neurons(truth.feed_forward, truth.feed_forward),
    }


def draw_block(block: Block, truth: Block) -> dict[str, Any]:
    """A moment of a run: pictures, errors, and what is found."""
    beside, true = put_beside(block, truth), truth.attention
    assert isinstance(true, AttentionLayer)
    heads = draw_heads(beside.heads, None, scales(true))
    for i, head in enumerate(heads):
        head["theta_error"] = float(beside.theta_errors[i])
        head["w_error"] = float(beside.w_errors[i])
    errors = {"in": beside.input_errors, "out": beside.output_errors}
    return {
        "heads": heads,
        "limits": scales(true),
        "neurons": _draw_neurons(beside.neurons, truth.feed_forward),
        "neuron_errors": {name: float(one.max(initial=0.0)) for name, one in errors.items()},
        "sizes": {"heads": block.n_heads, "neurons": block.hidden},
        "found": beside.found,
        "worst": beside.worst,
    }


def _draw_neurons(ff: FeedForward, truth: FeedForward) -> list[dict[str, Any]]:
    """Matrices with a column for each neuron; colours are as strong as the truth's."""
    pictures = []
    for name in ("up", "gate", "down"):
        shown, true = getattr(ff, name), getattr(truth, name)
        if shown is not None:
            limit = float(np.abs(true).max()) or 1.0
            columns = shown.T if name == "down" else shown
            pictures.append({"name": name, **draw_matrix(columns, limit), "limit": limit})
    return pictures


def _with_heads(heads: AttentionLayer, least: int) -> AttentionLayer:
    missing = max(0, least - heads.n_heads)

    def pad(leaf: Float64 | None) -> Float64 | None:
        if leaf is None:
            return None
        return np.concatenate([leaf, np.zeros((missing, *leaf.shape[1:]))])

    named = {name: pad(getattr(heads, name)) for name in ("theta", "w", "key_vector")}
    return heads.replace(**named)


def _candidates(ff: FeedForward, least: int) -> FeedForward:
    """Neurons, their mirror images where they have such, and zeros until there are enough."""
    parts = [ff]
    if ff.act.mirrors and ff.hidden:
        parts.append(turn_neurons(ff, np.arange(ff.hidden)))
    if ff.hidden < least:
        parts.append(_empty(ff, least - ff.hidden))
    return _join(parts)


def _empty(like: FeedForward, hidden: int) -> FeedForward:
    gate = None if like.gate is None else np.zeros((like.d, hidden))
    up, down = np.zeros((like.d, hidden)), np.zeros((hidden, like.d))
    return FeedForward(up, down, gate=gate, activation=like.activation)


def _join(parts: list[FeedForward]) -> FeedForward:
    def bias(ff: FeedForward, name: str) -> Float64:
        found = getattr(ff, name)
        return np.zeros(ff.hidden) if found is None else np.asarray(found)

    gates = [ff.gate for ff in parts if ff.gate is not None]
    return FeedForward(
        up=np.concatenate([ff.up for ff in parts], axis=1),
        down=np.concatenate([ff.down for ff in parts]),
        up_bias=np.concatenate([bias(ff, "up_bias") for ff in parts]),
        gate=np.concatenate(gates, axis=1) if gates else None,
        gate_bias=np.concatenate([bias(ff, "gate_bias") for ff in parts]) if gates else None,
        activation=parts[0].activation,
    )


def _take(ff: FeedForward, which: Any) -> FeedForward:
    return FeedForward(
        up=ff.up[:, which],
        down=ff.down[which],
        gate=None if ff.gate is None else ff.gate[:, which],
        activation=ff.activation,
    )
