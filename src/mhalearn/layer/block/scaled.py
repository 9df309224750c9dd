"""Blocks with scales that hardly show as numbers of their own.

Between two norms the stream may be scaled, and neurons with it, for no more than epsilon shows. And
a neuron that is only bent a little is known by its curvature, the size of its input squared times
that of its output, where a linear map beside it takes what it has of that. Both are valleys so bent
that Gauss-Newton creeps along them, and directions so faint among the others that they pass for
none. By their own numbers they are straight, and as large as any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from mhalearn._runtime.types import Array, Float
from mhalearn.layer.batches import Chunk
from mhalearn.layer.block.parametrisation import BlockParametrisation, BlockParams
from mhalearn.layer.parametrisation import Params

if TYPE_CHECKING:
    from mhalearn.layer.block.block import Block
    from mhalearn.layer.units import Units

# Logarithms: of the stream's scale, and of the size of each neuron's input.
_STREAM, _NEURONS = "norm_1.log_scale", "feed_forward.log_scales"
# What grows with the inner stream, and what shrinks.
_GROWS = ("norm_1.gain", "norm_1.bias", "feed_forward.down", "feed_forward.down_bias")
_SHRINKS = ("feed_forward.up", "feed_forward.gate")


@dataclass(frozen=True)
class ScaledBlock(BlockParametrisation):
    """The arrays of a block, and the logarithms of what they are to be scaled by."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes = dict(super().shapes())
        if self.design.norm == "post":
            shapes[_STREAM] = ()
        if self._has_faint_neurons:
            shapes[_NEURONS] = (self.design.hidden,)
        return shapes

    @property
    def _has_faint_neurons(self) -> bool:
        """ReLU has no scale at all, and gates other than a sigmoid's no linear part."""
        act = self.design.act
        return self.design.linear and act.mirrors and not act.scales

    def forward(self, params: BlockParams, chunk: Chunk) -> Float[Array, "b k d"]:
        return super().forward(_scaled(params), chunk)

    def to_layer(self, params: Params, units: Units) -> Block:
        # In NumPy, whose doubles stay doubles wherever this is called.
        return super().to_layer(_scaled(jax.tree.map(np.asarray, params), np), units)

    def invariants(self, params: Params) -> Params:
        return _scaled(params)


def _scaled(params: Mapping[str, Any], xp: Any = jnp) -> dict[str, Any]:
    """The block's own arrays."""
    found = dict(params)
    if _NEURONS in found:
        scales = xp.exp(found.pop(_NEURONS))
        found = _scale_neurons(found, scales)
    if _STREAM not in found:
        return found
    scale = xp.exp(found.pop(_STREAM))
    for name in found:
        if name in _GROWS:
            found[name] = found[name] * scale
        elif name in _SHRINKS:
            found[name] = found[name] / scale
    return found


def _scale_neurons(params: dict[str, Any], scales: Any) -> dict[str, Any]:
    """Larger inputs and smaller outputs: of neurons that are bent a little the curvature stays, and
    the linear map takes what changes of half their slope."""
    ff = {name.rpartition(".")[2]: leaf for name, leaf in params.items() if "feed_" in name}
    gated = "gate" in ff
    side, power = ("gate", 1) if gated else ("up", 2)
    changed = {side: ff[side] * scales, "down": ff["down"] / (scales**power)[:, None]}
    if f"{side}_bias" in ff:
        changed[f"{side}_bias"] = ff[f"{side}_bias"] * scales
    there = ff | changed
    changed["linear"] = ff["linear"] + (ff["up"] @ ff["down"] - there["up"] @ there["down"]) / 2
    if "up_bias" in ff:
        lost = ff["up_bias"] @ ff["down"] - there["up_bias"] @ there["down"]
        changed["down_bias"] = ff["down_bias"] + lost / 2
    return params | {f"feed_forward.{name}": leaf for name, leaf in changed.items()}
