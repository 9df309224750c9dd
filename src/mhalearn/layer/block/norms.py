"""LayerNorm and RMSNorm."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from mhalearn._runtime.types import Array, Float, Float64
from mhalearn._runtime.validation import check_array, is_number

KINDS = ("layer", "rms")
PLACES = ("pre", "post")


@dataclass(frozen=True, eq=False)
class Norm:
    """LayerNorm ("layer") or RMSNorm ("rms"), with its gain (d,) and, of LayerNorm, its bias."""

    gain: Float64
    bias: Float64 | None = None
    kind: str = "layer"
    epsilon: float = 1e-5

    def __post_init__(self) -> None:
        check_kind(self.kind, self.epsilon)
        for name in ("gain", "bias"):
            if getattr(self, name) is None:
                continue
            array = np.array(check_array(name, getattr(self, name), 1), np.float64)
            if array.shape != np.shape(self.gain):
                raise ValueError(f"{name} has shape {array.shape}: expected {np.shape(self.gain)}")
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        if self.kind == "rms" and self.bias is not None:
            raise ValueError("an RMSNorm has no bias: leave it out")


def check_kind(kind: str, epsilon: float) -> None:
    if kind not in KINDS:
        raise ValueError(f"norm_kind={kind!r}: pass 'layer' or 'rms'")
    if not (is_number(epsilon) and 0 <= epsilon < math.inf):
        raise ValueError(f"epsilon={epsilon!r} of a norm: pass 0 or a small number")


def scale_of(z: Float[Array, "*b d"], kind: str, epsilon: float) -> Float[Array, "*b 1"]:
    """What a norm multiplies by: one over the standard deviation, or the root mean square."""
    centred = z - jnp.mean(z, axis=-1, keepdims=True) if kind == "layer" else z
    scale: Array = jax.lax.rsqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + epsilon)
    return scale


def normalise(z: Float[Array, "*b d"], kind: str, epsilon: float) -> Float[Array, "*b d"]:
    """Before gain and bias."""
    centred = z - jnp.mean(z, axis=-1, keepdims=True) if kind == "layer" else z
    return centred * scale_of(z, kind, epsilon)
