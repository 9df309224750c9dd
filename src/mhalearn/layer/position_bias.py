"""Numbers added to logits by the distance between query and key."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.types import Array, Float, Float64
from mhalearn._runtime.validation import check_count

# Distances are enumerated.
_FARTHEST = 2**20


class PositionBias(ABC):
    """A function of the distance, for each head."""

    name: ClassVar[str]

    def table_shape(self, heads: int) -> tuple[int, ...] | None:
        """Of what is learned about it; None where nothing is."""
        return None

    @abstractmethod
    def __call__(
        self, distance: Float[Array, "b k j"], table: Float[Array, "t m"] | None, heads: int
    ) -> Float[Array, "b k m j"]:
        """What is added; distance: the key's position less the query's."""

    def unknowns(self, distances: Float64) -> int:
        """What these distances show of it, a head, up to a constant."""
        return 0


@dataclass(frozen=True)
class Alibi(PositionBias):
    """A penalty that grows with the distance, with a slope of its own for each head (Press et al.).

    Slopes are the powers of 2^(-8/m) for m heads; for other numbers than powers of two, those of
    the next lower one and every second of the next higher.
    """

    name = "alibi"

    def slopes(self, heads: int) -> Float64:
        whole = 2 ** int(math.log2(heads))
        slopes = 2.0 ** (-8.0 / whole * np.arange(1, whole + 1))
        between = 2.0 ** (-4.0 / whole * np.arange(1, 2 * (heads - whole), 2))
        return np.concatenate([slopes, between])

    def __call__(
        self, distance: Float[Array, "b k j"], table: Float[Array, "t m"] | None, heads: int
    ) -> Float[Array, "b k m j"]:
        return -jnp.abs(distance)[:, :, None] * self.slopes(heads)[:, None]


@dataclass(frozen=True)
class T5Bias(PositionBias):
    """A learned number a head for every range of distances (Raffel et al.), as T5 has them.

    buckets: ranges in all. Near distances have one each, farther ones share, on a logarithmic
    scale, up to max_distance. bidirectional: half of them are for keys after the query; otherwise
    those all count as distance zero.
    """

    name = "t5"
    buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = True

    def __post_init__(self) -> None:
        sides = 2 if self.bidirectional else 1
        if check_count("buckets", self.buckets, least=2 * sides) % (2 * sides):
            raise ValueError(f"buckets={self.buckets}: pass a multiple of {2 * sides}")
        least = self.buckets // (2 * sides) + 1
        if check_count("max_distance", self.max_distance, least=least) > _FARTHEST:
            raise ValueError(f"max_distance={self.max_distance}: pass at most {_FARTHEST}")

    def table_shape(self, heads: int) -> tuple[int, ...] | None:
        return (self.buckets, heads)

    def bucket(self, distance: Float[Array, "..."]) -> Array:
        """Which number a distance has."""
        side = self.buckets // 2 if self.bidirectional else self.buckets
        away = jnp.abs(distance) if self.bidirectional else jnp.maximum(-distance, 0.0)
        near = side // 2
        stretch = jnp.log(self.max_distance / near)
        # Rounding must not put a distance that ends a range into the next one.
        place = jnp.log(jnp.maximum(away, 1.0) / near) / stretch * (side - near)
        far = jnp.minimum(near + jnp.floor(place + 1e-9), side - 1.0)
        found = jnp.where(away < near, away, far)
        after = side * (distance > 0) if self.bidirectional else 0
        return (found + after).astype(jnp.int32)

    def __call__(
        self, distance: Float[Array, "b k j"], table: Float[Array, "t m"] | None, heads: int
    ) -> Float[Array, "b k m j"]:
        assert table is not None
        return jnp.swapaxes(table[self.bucket(distance)], 2, 3)

    def unknowns(self, distances: Float64) -> int:
        return len(self._buckets(distances)) - 1

    def used(self, causal: bool) -> NDArray[Any]:
        """The buckets that some distance has."""
        farthest = float(self.max_distance)
        return self._buckets(np.arange(-farthest, 1.0 if causal else farthest + 1.0))

    def _buckets(self, distances: Float64) -> NDArray[Any]:
        return np.unique(np.asarray(self.bucket(jnp.asarray(distances))))


def read_position_bias(said: PositionBias | str | None, causal: bool) -> PositionBias | None:
    """What a caller may pass as position_bias: None, 'alibi', 't5', or the object."""
    if said == "alibi":
        return Alibi()
    if said == "t5":
        return T5Bias(bidirectional=not causal)
    if not isinstance(said, PositionBias | None):
        raise ValueError(f"position_bias={said!r}: pass 'alibi', 't5', or an object of the two")
    return said
