"""The feed-forward part of a block: neurons, as they are held and as they are computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike

from mhalearn._runtime.types import Array, Float, Float64
from mhalearn._runtime.validation import check_array
from mhalearn.layer.block.activations import Activation

PARTS = ("up", "down", "up_bias", "down_bias", "gate", "gate_bias", "linear")


@dataclass(frozen=True, eq=False)
class FeedForward:
    """act(z up + up_bias) down + down_bias, or (act(z gate + gate_bias) * (z up + up_bias)) down +
    down_bias where the activation is gated; immutable, in float64.

    up, gate: (d, hidden); down: (hidden, d). Biases may be None.
    linear: (d, d), a linear map beside the neurons: what groups of neurons sum to whose parts
    beyond it cancel. Networks have none; canonical forms may.
    """

    up: Float64
    down: Float64
    up_bias: Float64 | None = None
    down_bias: Float64 | None = None
    gate: Float64 | None = None
    gate_bias: Float64 | None = None
    linear: Float64 | None = None
    activation: str = "gelu"

    def __post_init__(self) -> None:
        d = check_array("up", self.up, 2).shape[0]
        shapes = _shapes(d, np.shape(self.up)[1])
        for name in PARTS:
            if (given := getattr(self, name)) is None:
                continue
            object.__setattr__(self, name, _parameter(name, given, shapes[name]))
        if Activation(self.activation).is_gated != (self.gate is not None):
            needs = "needs a gate" if self.gate is None else "has no gate"
            raise ValueError(f"activation={self.activation!r} {needs}: see FeedForward")
        if self.gate is None and self.gate_bias is not None:
            raise ValueError("gate_bias without a gate: leave it out")

    @property
    def d(self) -> int:
        return self.up.shape[0]

    @property
    def hidden(self) -> int:
        """Neurons."""
        return self.up.shape[1]

    @property
    def act(self) -> Activation:
        return Activation(self.activation)

    @property
    def has_bias(self) -> bool:
        return any(part is not None for part in (self.up_bias, self.down_bias, self.gate_bias))

    def parts(self) -> dict[str, Float64]:
        """Its arrays by name, those that are there."""
        named = {name: getattr(self, name) for name in PARTS}
        return {name: part for name, part in named.items() if part is not None}

    def replace(self, **changes: ArrayLike | str | None) -> FeedForward:
        kept = {one.name: getattr(self, one.name) for one in fields(self)}
        return FeedForward(**(kept | changes))

    def __repr__(self) -> str:
        return f"FeedForward(d={self.d}, hidden={self.hidden}, activation={self.activation!r})"


def choose_neurons(ff: FeedForward, which: Sequence[int]) -> FeedForward:
    """Some of the neurons only."""
    return ff.replace(
        up=ff.up[:, which],
        down=ff.down[which],
        up_bias=None if ff.up_bias is None else ff.up_bias[which],
        gate=None if ff.gate is None else ff.gate[:, which],
        gate_bias=None if ff.gate_bias is None else ff.gate_bias[which],
    )


def shapes_of(
    d: int, hidden: int, activation: Activation, bias: bool, linear: bool
) -> dict[str, tuple[int, ...]]:
    """Of the arrays that a feed-forward part of this kind has."""
    named = ["up", "down"]
    if activation.is_gated:
        named.append("gate")
    if bias:
        named += ["up_bias", "down_bias"] + ["gate_bias"] * activation.is_gated
    if linear:
        named.append("linear")
    shapes = _shapes(d, hidden)
    return {name: shapes[name] for name in named}


def neurons(
    params: Mapping[str, Array], z: Float[Array, "b k d"], activation: Activation
) -> Float[Array, "b k h"]:
    """What neurons hand to `down`. Cost: O(b k d hidden)."""
    up = z @ params["up"] + params.get("up_bias", 0.0)
    if not activation.is_gated:
        return activation(up)
    return activation(z @ params["gate"] + params.get("gate_bias", 0.0)) * up


def feed_forward(
    params: Mapping[str, Array], z: Float[Array, "b k d"], activation: Activation
) -> Float[Array, "b k d"]:
    outputs = neurons(params, z, activation) @ params["down"] + params.get("down_bias", 0.0)
    return outputs + z @ params["linear"] if "linear" in params else outputs


def _shapes(d: int, hidden: int) -> dict[str, tuple[int, ...]]:
    return {
        "up": (d, hidden),
        "down": (hidden, d),
        "up_bias": (hidden,),
        "down_bias": (d,),
        "gate": (d, hidden),
        "gate_bias": (hidden,),
        "linear": (d, d),
    }


def _parameter(name: str, value: ArrayLike, shape: tuple[int, ...]) -> Float64:
    array = np.array(check_array(name, value, len(shape)), np.float64)
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}: expected {shape}")
    array.setflags(write=False)
    return array
