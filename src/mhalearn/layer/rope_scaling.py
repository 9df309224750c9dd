"""Rotary frequencies stretched for sequences longer than those a model was trained on.

Fields have the names of a model's config.json, so that a mapping from one is read as it is.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from mhalearn._runtime.types import Array, Float, Float64
from mhalearn._runtime.validation import is_number


def geometric_frequencies(base: float, size: int) -> Float64:
    """base^(-2 f / size) for f = 0 .. size/2 - 1: angles a position, fastest first."""
    return np.asarray(base ** (-np.arange(0, size, 2) / size), np.float64)


@dataclass(frozen=True)
class Scaling(ABC):
    """How the frequencies of rotary positions are changed."""

    name: ClassVar[str]
    factor: float | int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or (value is None and field.default is None):
                continue
            if not (is_number(value) and 0 < value < math.inf):
                raise ValueError(
                    f"{field.name}={value!r} in a {self.name} scaling: pass a positive number"
                )
            object.__setattr__(self, field.name, float(value))

    @property
    def magnitude(self) -> float:
        """What rotated queries, and rotated keys, are multiplied by."""
        return 1.0

    @abstractmethod
    def frequencies(self, base: float, size: int) -> Float64:
        """Angles a position, for `size` rotated dimensions."""

    def stretched(
        self, base: float, size: int, length: Float[Array, " b"]
    ) -> Float[Array, "b f"] | None:
        """Those of sequences by their lengths; None where lengths do not matter."""
        return None

    def describe(self) -> dict[str, Any]:
        """As config.json has it."""
        return {"rope_type": self.name} | asdict(self)


@dataclass(frozen=True)
class LinearScaling(Scaling):
    """Positions divided by a factor."""

    name = "linear"

    def frequencies(self, base: float, size: int) -> Float64:
        return geometric_frequencies(base, size) / self.factor


@dataclass(frozen=True)
class DynamicNTK(Scaling):
    """A base that grows with the length of a sequence, once it is past the trained one.

    The length is the largest position of the sequence's own tokens, plus one.
    """

    name = "dynamic"
    max_position_embeddings: float | int

    def frequencies(self, base: float, size: int) -> Float64:
        return geometric_frequencies(base, size)

    def stretched(
        self, base: float, size: int, length: Float[Array, " b"]
    ) -> Float[Array, "b f"] | None:
        if size <= 2:  # its one frequency is 1, whatever the base
            return None
        ratio = jnp.maximum(length / self.max_position_embeddings, 1.0)
        grown = base * (self.factor * ratio - (self.factor - 1.0)) ** (size / (size - 2))
        return grown[:, None] ** (-jnp.arange(0, size, 2) / size)


@dataclass(frozen=True)
class Yarn(Scaling):
    """Low frequencies divided by a factor, high ones kept, a ramp between (Peng et al., 2023).

    The ramp lies between the frequencies that turn `beta_fast` and `beta_slow` times over the
    trained length; truncate: its ends are rounded outward to whole frequencies.
    attention_factor: the magnitude; from `factor`, with `mscale` where given, if None.
    """

    name = "yarn"
    original_max_position_embeddings: float | int
    beta_fast: float | int = 32.0
    beta_slow: float | int = 1.0
    attention_factor: float | int | None = None
    mscale: float | int | None = None
    mscale_all_dim: float | int | None = None
    truncate: bool = True

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        growth = 0.1 * math.log(max(self.factor, 1.0))
        if self.mscale and self.mscale_all_dim:
            return (growth * self.mscale + 1.0) / (growth * self.mscale_all_dim + 1.0)
        return growth + 1.0

    def frequencies(self, base: float, size: int) -> Float64:
        low, high = (self._place(turns, base, size) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        width = high - low if high != low else 1e-3
        ramp = np.clip((np.arange(size // 2) - low) / width, 0.0, 1.0)
        plain = geometric_frequencies(base, size)
        return plain / self.factor * ramp + plain * (1.0 - ramp)

    def _place(self, turns: float, base: float, size: int) -> float:
        """Which frequency turns so often over the trained length; no whole number."""
        turned = self.original_max_position_embeddings / (turns * 2 * math.pi)
        return size * math.log(turned) / (2 * math.log(base))


@dataclass(frozen=True)
class Llama3(Scaling):
    """Long wavelengths times a factor, short ones kept, a smooth step between (Llama 3.1)."""

    name = "llama3"
    low_freq_factor: float | int
    high_freq_factor: float | int
    original_max_position_embeddings: float | int

    def frequencies(self, base: float, size: int) -> Float64:
        plain = geometric_frequencies(base, size)
        turns = self.original_max_position_embeddings * plain / (2 * math.pi)
        smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = np.clip(smooth, 0.0, 1.0)
        return plain * (kept + (1.0 - kept) / self.factor)


SCALINGS: dict[str, type[Scaling]] = {
    kind.name: kind for kind in (LinearScaling, DynamicNTK, Yarn, Llama3)
}


def read_scaling(said: Mapping[str, Any]) -> Scaling:
    """A scaling by a mapping with `rope_type` and its fields; anything else in it is refused."""
    given = dict(said)
    name = given.pop("rope_type", None)
    kind = SCALINGS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(f"rope_type={name!r}: rotary scalings are {', '.join(SCALINGS)}")
    names = [field.name for field in fields(kind)]
    for other in given:
        if other not in names:
            raise ValueError(f"{other!r} is no part of a {name} scaling: it has {', '.join(names)}")
    try:
        return kind(**given)
    except TypeError:
        missing = [one.name for one in fields(kind) if one.name not in given]
        raise ValueError(f"a {name} scaling needs {missing[0]}") from None
