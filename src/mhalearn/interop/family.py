"""A family of models whose attention is read as projected heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from mhalearn.interop.family_settings import Beside
from mhalearn.interop.naming import Naming
from mhalearn.interop.projections import Sizes
from mhalearn.interop.rotary_config import Config


class Family(NamedTuple):
    """A kind of model, by the `model_type` of its config."""

    name: str
    naming: Naming
    sizes: Callable[[Config], Sizes]
    beside: Callable[[Config, int, int], Beside]  # of config, layer_index, head_dim
    # Settings of the config that it knows; others that change logits are refused.
    knows: tuple[str, ...] = ()
    gain_offset: float = 0.0  # norms multiply by this plus the gain
    # What depends on where in the model a layer stands, by what its names begin with.
    by_place: Callable[[str], Beside] | None = None
    cross: Naming | None = None  # of layers whose keys and values are an encoder's
