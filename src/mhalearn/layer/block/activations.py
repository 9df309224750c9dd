"""What neurons do with their input, by name; gated ones multiply it by a second one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax

from mhalearn._runtime.types import Array

_FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
}
# Gated linear units, by what their gate does.
_GATES = {
    "glu": "sigmoid",
    "reglu": "relu",
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "swiglu": "silu",
}
NAMES = ("relu", "gelu", "gelu_tanh", "silu", *_GATES)


@dataclass(frozen=True)
class Activation:
    """relu, gelu (by the error function), gelu_tanh, silu; or a gated linear unit: glu (sigmoid),
    reglu, geglu, geglu_tanh, swiglu, whose neurons are act(gate) * up."""

    name: str

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(f"activation={self.name!r}: pass one of {', '.join(NAMES)}")

    @property
    def is_gated(self) -> bool:
        return self.name in _GATES

    @property
    def function_name(self) -> str:
        """Of the gate, where there is one."""
        return _GATES.get(self.name, self.name)

    @property
    def scales(self) -> bool:
        """Whether act(t z) = t act(z) for t > 0."""
        return self.function_name == "relu"

    @property
    def reflects(self) -> bool:
        """Whether act(z) - act(-z) = z: all of ReLU, GELU and SiLU, without a gate."""
        return not self.is_gated

    @property
    def mirrors(self) -> bool:
        """Whether a neuron is its mirror image and an affine map: those that reflect, and sigmoid
        gates, for which act(z) + act(-z) = 1."""
        return self.reflects or self.name == "glu"

    def __call__(self, z: Array) -> Array:
        return _FUNCTIONS[self.function_name](z)
