"""Rotary positions: queries and keys turned by angles that grow with the position.

Dimensions come in pairs, each with its own frequency w_f. As complex numbers, a pair of a query at
position r and of a key at position s meet as Re(q_f conj(k_f) e^{i w_f (r - s)}): logits depend on
positions by their difference alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from mhalearn._runtime.types import Array, Float, Float64
from mhalearn._runtime.validation import is_number
from mhalearn.layer.rope_scaling import Scaling, geometric_frequencies, read_scaling

LAYOUTS = ("half", "interleaved")


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al., 2021).

    base: frequencies are base^(-2 f / rotated dimensions).
    fraction: the share of a head's dimensions that are rotated, the first ones.
    layout: which dimensions are pairs: "half" f and f + half of them, as in Llama; "interleaved"
        2 f and 2 f + 1, as in GPT-J.
    scaling: None, or one of `layer.rope_scaling`, or a mapping as config.json has it:
        {"rope_type": "linear", "factor": 8.0}.
    """

    base: float | int = 10000.0
    fraction: float | int = 1.0
    layout: str = "half"
    scaling: Scaling | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not (is_number(self.base) and 1 < self.base < math.inf):
            raise ValueError(f"base={self.base!r}: pass a number above 1, such as 10000.0")
        if not (is_number(self.fraction) and 0 < self.fraction <= 1):
            raise ValueError(f"fraction={self.fraction!r}: pass a share above 0, at most 1")
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout={self.layout!r}: pass 'half' or 'interleaved'")
        if isinstance(self.scaling, Mapping):
            object.__setattr__(self, "scaling", read_scaling(self.scaling))
        object.__setattr__(self, "base", float(self.base))
        object.__setattr__(self, "fraction", float(self.fraction))

    @property
    def _scaling(self) -> Scaling | None:
        assert not isinstance(self.scaling, Mapping)
        return self.scaling

    def rotated(self, head_dim: int) -> int:
        """How many of a head's dimensions are rotated."""
        size = int(head_dim * self.fraction + 1e-9)  # of a share that was a quotient, all of it
        if size < 2 or size % 2:
            raise ValueError(
                f"fraction={self.fraction:g} of head_dim={head_dim} rotates {size} dimensions: "
                "they come in pairs"
            )
        return size

    def frequencies(self, head_dim: int) -> Float64:
        """Angles a position, one a pair; those of short sequences, where lengths matter."""
        size = self.rotated(head_dim)
        if self._scaling is None:
            return geometric_frequencies(self.base, size)
        return self._scaling.frequencies(self.base, size)

    @property
    def magnitude(self) -> float:
        """What rotated queries, and rotated keys, are multiplied by."""
        return 1.0 if self._scaling is None else self._scaling.magnitude

    def pairs(self, head_dim: int) -> tuple[Any, Any]:
        """The dimensions of the pairs' real and imaginary parts."""
        index = np.arange(self.rotated(head_dim))
        if self.layout == "interleaved":
            return index[0::2], index[1::2]
        first, second = np.split(index, 2)
        return first, second

    def rotate(
        self,
        vectors: Float[Array, "b k m h"],
        positions: Float[Array, "b k"],
        length: Float[Array, " b"],
    ) -> Float[Array, "b k m h"]:
        """Queries or keys, turned by their positions; length: of each sequence."""
        head_dim = vectors.shape[-1]
        size = self.rotated(head_dim)
        stretched = None
        if self._scaling is not None:
            stretched = self._scaling.stretched(self.base, size, length)
        frequencies = self.frequencies(head_dim) if stretched is None else stretched[:, None]
        angles = (positions[..., None] * frequencies)[:, :, None]
        cosine, sine = (
            (self.magnitude * part).astype(vectors.dtype)
            for part in (jnp.cos(angles), jnp.sin(angles))
        )
        real, imaginary = self.pairs(head_dim)
        x, y = vectors[..., real], vectors[..., imaginary]
        turned = vectors.at[..., real].set(x * cosine - y * sine)
        return turned.at[..., imaginary].set(y * cosine + x * sine)
