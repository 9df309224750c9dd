"""Queries and keys normalised before they meet."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mhalearn._runtime.types import Array, Float
from mhalearn._runtime.validation import is_number

KINDS = ("rms", "l2")


@dataclass(frozen=True)
class QKNorm:
    """Queries and keys divided by their own size, before rotation.

    kind: "rms" divides by the root mean square of the entries and multiplies each by a learned
        gain; "l2" divides by the Euclidean norm, without gains.
    epsilon: added to the mean square, or to the square of the norm.
    across_heads: one size for the entries of all heads together, as in OLMo 2, with a gain for
        each; otherwise each head has its own, and gains are shared by the heads.
    """

    kind: str = "rms"
    epsilon: float | int = 1e-6
    across_heads: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"qk_norm of kind {self.kind!r}: pass 'rms' or 'l2'")
        if not (is_number(self.epsilon) and 0 <= self.epsilon < math.inf):
            raise ValueError(f"epsilon={self.epsilon!r} of a qk_norm: pass 0 or a small number")
        object.__setattr__(self, "epsilon", float(self.epsilon))

    @property
    def has_gains(self) -> bool:
        return self.kind == "rms"

    def gain_shape(self, heads: int, head_dim: int) -> tuple[int, ...]:
        return (heads, head_dim) if self.across_heads else (head_dim,)

    def __call__(
        self,
        vectors: Float[Array, "b k m h"],
        gain: Float[Array, "..."] | None,
        epsilon: Float[Array, " m"] | None = None,
    ) -> Float[Array, "b k m h"]:
        """Normalised vectors of all heads; epsilon: of each head, in place of the one of all."""
        axes = (-2, -1) if self.across_heads else (-1,)
        over = jnp.mean if self.kind == "rms" else jnp.sum
        size = over(vectors**2, axis=axes, keepdims=True)
        size = size + (self.epsilon if epsilon is None else epsilon[:, None])
        scaled = vectors * jax.lax.rsqrt(size)
        return scaled if gain is None else scaled * gain


def read_norm(said: QKNorm | bool | str | None) -> QKNorm | None:
    """What a caller may pass as qk_norm: False, True, the name of a kind, or a QKNorm."""
    if said is None or said is False:
        return None
    if said is True:
        return QKNorm()
    if isinstance(said, str):
        return QKNorm(said)
    if not isinstance(said, QKNorm):
        raise ValueError(f"qk_norm={said!r}: pass True, 'rms', 'l2' or a QKNorm")
    return said
