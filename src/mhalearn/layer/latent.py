"""Latent attention: keys and values of all heads out of one narrow vector a token (DeepSeek-V2).

A token is compressed, c = x A with A (d, r), normalised, and every head reads its keys and values
from c alone. Positions cannot be told through c, so that a few rotary dimensions of the keys come
from the token itself, the same for all heads. Queries may have a latent of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mhalearn._runtime.types import Array, Float, Float64
from mhalearn._runtime.validation import check_count, is_number


@dataclass(frozen=True)
class Latent:
    """Low-rank keys and values, as multi-head latent attention (MLA) has them.

    rank: dimensions of the latent that keys and values are read from.
    query_rank: those of the queries' own; None where queries are read from the tokens.
    norm: latents are divided by their root mean square, with a gain for each dimension.
    epsilon: added to the mean square.

    Of a head's dimensions the rotated ones (`Rope.rotated`) are keys that all heads share, read
    from the tokens; the others are read from the latent.
    """

    rank: int
    query_rank: int | None = None
    norm: bool = True
    epsilon: float | int = 1e-6

    def __post_init__(self) -> None:
        check_count("rank", self.rank)
        if self.query_rank is not None:
            check_count("query_rank", self.query_rank)
        if not (is_number(self.epsilon) and 0 <= self.epsilon < math.inf):
            raise ValueError(f"epsilon={self.epsilon!r} of a latent: pass 0 or a small number")
        object.__setattr__(self, "epsilon", float(self.epsilon))

    def shapes(self, d: int, source: int, rotated: int) -> dict[str, tuple[int, ...]]:
        """Of what is beside the heads' projections; source: features of what keys are read from."""
        shapes: dict[str, tuple[int, ...]] = {"latent": (source, self.rank)}
        if self.norm:
            shapes["latent_gain"] = (self.rank,)
        if self.query_rank is not None:
            shapes["query_latent"] = (d, self.query_rank)
            if self.norm:
                shapes["query_latent_gain"] = (self.query_rank,)
        if rotated:
            shapes["rotary_key"] = (source, rotated)
        return shapes

    def compress(
        self, tokens: Float[Array, "b j d"], params: Mapping[str, Any], name: str
    ) -> Float[Array, "b j r"]:
        """The latents of tokens; name: "latent" or "query_latent". An epsilon among the parameters
        stands for the record's."""
        latents = tokens @ params[name]
        if not self.norm:
            return latents
        epsilon = params.get(f"{name}_epsilon", self.epsilon)
        square = jnp.mean(latents**2, axis=-1, keepdims=True) + epsilon
        return latents * jax.lax.rsqrt(square) * params[f"{name}_gain"]


def unfold(params: Mapping[str, Float64], latent: Latent, heads: int) -> dict[str, Float64]:
    """Projections (m, d, h) of tokens that latents factor, the rotary key first. Maps into latents
    that are normalised are given the size at which they are of unit size on tokens of unit size."""

    def through(name: str) -> Float64:
        down = params[name]
        if not latent.norm:
            return down
        size = np.linalg.norm(down)
        unit = math.sqrt(down.shape[1]) / (size if size > 0 else 1.0)
        return down * unit * params[f"{name}_gain"]

    found = dict(params)
    if latent.query_rank is not None:
        found["query"] = through("query_latent") @ params["query"]
    found["key"], found["value"] = (through("latent") @ params[name] for name in ("key", "value"))
    if "rotary_key" in params:
        shared = np.broadcast_to(params["rotary_key"], (heads, *params["rotary_key"].shape))
        found["key"] = np.concatenate([shared, found["key"]], axis=2)
    return found
