"""Weights of decoders, cut into the projections of their heads and joined again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mhalearn.interop.cutting import Weights, take

Params = dict[str, NDArray[Any]]


class Sizes(NamedTuple):
    """What a config says of a layer's weights."""

    heads: int
    groups: int
    head_dim: int
    value_dim: int | None = None  # head_dim unless given
    rotated: int = 0  # dimensions of the rotary key beside a latent
    rank: int = 0  # of that latent


class Cut(ABC):
    """How weights of all heads lie in a block."""

    @abstractmethod
    def read(self, weights: Weights, sizes: Sizes) -> Params:
        """Projections head by head."""

    @abstractmethod
    def write(self, params: Params) -> Params:
        """The weights again, bit by bit."""


@dataclass(frozen=True)
class Separate(Cut):
    """Queries, keys, values and outputs under a name each, as nn.Linear."""

    query: str
    key: str
    value: str
    out: str

    def read(self, weights: Weights, sizes: Sizes) -> Params:
        names = (self.query, self.key, self.value)
        parts = [take(weights, f"{name}.weight", 2) for name in names]
        biases = [weights.get(f"{name}.bias") for name in names]
        return assemble_heads(parts, biases, weights, self.out, sizes)

    def write(self, params: Params) -> Params:
        found = flat_outputs(params, self.out)
        for name, (weight, bias) in zip(
            (self.query, self.key, self.value), flat_sides(params), strict=True
        ):
            found[f"{name}.weight"] = weight
            if bias is not None:
                found[f"{name}.bias"] = bias
        return found


@dataclass(frozen=True)
class Stacked(Cut):
    """One weight: all queries, then all keys, then all values (Phi-3)."""

    name: str
    out: str

    def read(self, weights: Weights, sizes: Sizes) -> Params:
        packed = take(weights, f"{self.name}.weight", 2)
        ends = np.cumsum([sizes.heads, sizes.groups]) * sizes.head_dim
        bias = weights.get(f"{self.name}.bias")
        biases = [None] * 3 if bias is None else np.split(bias, ends)
        return assemble_heads(np.split(packed, ends), biases, weights, self.out, sizes)

    def write(self, params: Params) -> Params:
        weights, biases = zip(*flat_sides(params), strict=True)
        found = flat_outputs(params, self.out) | {f"{self.name}.weight": np.concatenate(weights)}
        if biases[0] is not None:
            found[f"{self.name}.bias"] = np.concatenate(biases)
        return found


@dataclass(frozen=True)
class Interleaved(Cut):
    """One weight: one group after the other, its queries, then its key and its value (GPT-NeoX,
    BLOOM, where a group is a head; Falcon)."""

    name: str
    out: str

    def read(self, weights: Weights, sizes: Sizes) -> Params:
        packed = take(weights, f"{self.name}.weight", 2)
        m, g, h = sizes.heads, sizes.groups, sizes.head_dim
        rows = (m + 2 * g) * h
        if len(packed) != rows:
            raise ValueError(
                f"{self.name}.weight has shape {packed.shape}: the config says {rows} rows"
            )
        parts = _of_groups(packed.reshape(g, m // g + 2, h, -1))
        biases: list[Any] = [None] * 3
        if (bias := weights.get(f"{self.name}.bias")) is not None:
            split = reshape_as(bias, (g, m // g + 2, h, 1), f"{self.name}.bias")
            biases = [part.ravel() for part in _of_groups(split)]
        return assemble_heads(parts, biases, weights, self.out, sizes)

    def write(self, params: Params) -> Params:
        weights, biases = zip(*flat_sides(params), strict=True)
        groups, d, h = params["key"].shape
        found = flat_outputs(params, self.out)
        by_group = [weight.reshape(groups, -1, h, d) for weight in weights]
        found[f"{self.name}.weight"] = np.concatenate(by_group, axis=1).reshape(-1, d)
        if biases[0] is not None:
            of_groups = [bias.reshape(groups, -1, h) for bias in biases]
            found[f"{self.name}.bias"] = np.concatenate(of_groups, axis=1).ravel()
        return found


def _of_groups(packed: NDArray[Any]) -> list[NDArray[Any]]:
    """(g, n + 2, h, d) as (m h, d) queries, (g h, d) keys and values."""
    sides = (packed[:, :-2], packed[:, -2:-1], packed[:, -1:])
    return [side.reshape(-1, packed.shape[3]) for side in sides]


@dataclass(frozen=True)
class Block:
    """The weights of a block: its cut, and what is kept under another name as it is."""

    cut: Cut
    beside: Mapping[str, str]

    def __call__(self, weights: Weights, sizes: Sizes) -> Params:
        found = self.cut.read(weights, sizes)
        kept = {ours: weights[name] for name, ours in self.beside.items() if name in weights}
        return found | kept

    def write(self, params: Params) -> Params:
        kept = {name: params[ours] for name, ours in self.beside.items() if ours in params}
        return self.cut.write(params) | kept


def flat_sides(params: Params) -> list[tuple[NDArray[Any], Any]]:
    """(m h, d) weights and (m h,) biases of queries, keys and values."""
    found = []
    for side in ("query", "key", "value"):
        weight, bias = params[side], params.get(f"{side}_bias")
        rows = weight.swapaxes(1, 2).reshape(-1, weight.shape[1])
        found.append((rows, None if bias is None else bias.ravel()))
    return found


def flat_outputs(params: Params, name: str) -> Params:
    out = params["out"]
    found = {f"{name}.weight": out.reshape(-1, out.shape[2]).T}
    return found | ({f"{name}.bias": params["out_bias"]} if "out_bias" in params else {})


def assemble_heads(
    parts: list[NDArray[Any]], biases: Any, weights: Weights, out: str, sizes: Sizes
) -> Params:
    """Projections in the library's own layout: (m, d, h) and (m, h, e)."""
    h, params = sizes.head_dim, {}
    for side, part, bias in zip(("query", "key", "value"), parts, biases, strict=True):
        heads = sizes.heads if side == "query" else sizes.groups
        if len(part) != heads * h:
            raise ValueError(
                f"{side} weights have shape {part.shape}: the config says {heads} heads of {h}"
            )
        params[side] = part.reshape(heads, h, -1).swapaxes(1, 2)
        if bias is not None:
            params[f"{side}_bias"] = reshape_as(bias, (heads, h), f"{side} bias")
    weight = take(weights, f"{out}.weight", 2)
    if weight.shape[1] != sizes.heads * h:
        raise ValueError(
            f"{out}.weight has shape {weight.shape}: the config says {sizes.heads} heads of {h}"
        )
    params["out"] = weight.T.reshape(sizes.heads, h, -1)
    if (bias := weights.get(f"{out}.bias")) is not None:
        params["out_bias"] = reshape_as(bias, (len(weight),), f"{out}.bias")
    return params


def reshape_as(array: NDArray[Any], shape: tuple[int, ...], name: str) -> NDArray[Any]:
    if array.size != np.prod(shape):
        raise ValueError(f"{name} has shape {array.shape}: expected {np.prod(shape)} entries")
    return array.reshape(shape)
