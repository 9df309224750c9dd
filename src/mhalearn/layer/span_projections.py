"""Projected heads in coordinates of their tokens' span, and back.

With x = o + z S a projection x A + a is z (S A) + (o A + a), and back, with z = (x - o) P, one of
z, z B + b, is x (P B) + (b - o P B). Nothing behind the projections knows of it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mhalearn._runtime.types import Float64
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.projected_layer import ProjectedLayer

_SIDES = ("query", "key", "value")


def may_change_coordinates(architecture: Architecture) -> bool:
    """Whether all that meets tokens is queries, keys and values of them."""
    return architecture.memory is None and architecture.latent is None


def move_projections(
    layer: ProjectedLayer, to: Architecture, matrix: Float64, shift: Float64
) -> ProjectedLayer:
    """The layer of a class that makes of y what this one makes of y matrix + shift.

    to: has biases, unless the shift is zero. Cost: O(m d^2 h).
    """
    params = dict(layer.params)
    for side in _SIDES:
        weight = params[side]
        params[side] = matrix @ weight
        if to.bias:
            old = params.get(f"{side}_bias", np.zeros((len(weight), weight.shape[2])))
            params[f"{side}_bias"] = old + shift @ weight
    if to.bias and "out_bias" not in params:
        params["out_bias"] = np.zeros(to.outputs)
    return layer.replace(architecture=replace(to, n_heads=layer.n_heads), params=params)
