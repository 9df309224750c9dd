"""Post-norm blocks with the scale of their inner stream as a number of its own.

Between two norms the stream may be scaled, and neurons with it, for no more than what epsilon shows:
a valley so bent that Gauss-Newton creeps along it, and a direction so faint among the others that
it passes for none. By its own number it is straight, and as large as any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from mhalearn._runtime.types import Array, Float
from mhalearn.layer.batches import Chunk
from mhalearn.layer.block.parametrisation import BlockParametrisation, BlockParams
from mhalearn.layer.parametrisation import Params

if TYPE_CHECKING:
    from mhalearn.layer.block.block import Block
    from mhalearn.layer.units import Units

_SCALE = "norm_1.log_scale"
# What grows with the inner stream, and what shrinks.
_GROWS = ("norm_1.gain", "norm_1.bias", "feed_forward.down", "feed_forward.down_bias")
_SHRINKS = ("feed_forward.up", "feed_forward.gate")


@dataclass(frozen=True)
class ScaledBlock(BlockParametrisation):
    """The arrays of a post-norm block, and the logarithm of what they are to be scaled by."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return dict(super().shapes()) | {_SCALE: ()}

    def forward(self, params: BlockParams, chunk: Chunk) -> Float[Array, "b k d"]:
        return super().forward(_scaled(params), chunk)

    def to_layer(self, params: Params, units: Units) -> Block:
        return super().to_layer(_scaled(params), units)

    def invariants(self, params: Params) -> Params:
        return _scaled(params)


def _scaled(params: Mapping[str, Any]) -> dict[str, Any]:
    """The block's own arrays."""
    found = dict(params)
    scale = jnp.exp(found.pop(_SCALE))
    for name in found:
        if name in _GROWS:
            found[name] = found[name] * scale
        elif name in _SHRINKS:
            found[name] = found[name] / scale
    return found
