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
        return _assemble(parts, biases, weights, self.out, sizes)

    def write(self, params: Params) -> Params:
        found = _outputs(params, self.out)
        for name, (weight, bias) in zip(
            (self.query, self.key, self.value), _flat(params), strict=True
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
        return _assemble(np.split(packed, ends), biases, weights, self.out, sizes)

    def write(self, params: Params) -> Params:
        weights, biases = zip(*_flat(params), strict=True)
        found = _outputs(params, self.out) | {f"{self.name}.weight": np.concatenate(weights)}
        if biases[0] is not None:
            found[f"{self.name}.bias"] = np.concatenate(biases)
        return found


@dataclass(frozen=True)
class Interleaved(Cut):
    """One weight: query, key and value of one head after the other (GPT-NeoX, BLOOM)."""

    name: str
    out: str

    def read(self, weights: Weights, sizes: Sizes) -> Params:
        packed = take(weights, f"{self.name}.weight", 2)
        rows = 3 * sizes.heads * sizes.head_dim
        if len(packed) != rows:
            raise ValueError(
                f"{self.name}.weight has shape {packed.shape}: the config says {rows} rows"
            )
        by_head = packed.reshape(sizes.heads, 3, sizes.head_dim, -1)
        parts = [by_head[:, i].reshape(-1, packed.shape[1]) for i in range(3)]
        biases: list[Any] = [None] * 3
        if (bias := weights.get(f"{self.name}.bias")) is not None:
            split = _reshaped(bias, (sizes.heads, 3, sizes.head_dim), f"{self.name}.bias")
            biases = [split[:, i].ravel() for i in range(3)]
        return _assemble(parts, biases, weights, self.out, sizes)

    def write(self, params: Params) -> Params:
        weights, biases = zip(*_flat(params), strict=True)
        heads, d, h = params["query"].shape
        by_head = np.stack([weight.reshape(heads, h, d) for weight in weights], axis=1)
        found = _outputs(params, self.out) | {f"{self.name}.weight": by_head.reshape(-1, d)}
        if biases[0] is not None:
            split = np.stack([bias.reshape(heads, h) for bias in biases], axis=1)
            found[f"{self.name}.bias"] = split.ravel()
        return found


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


def _flat(params: Params) -> list[tuple[NDArray[Any], Any]]:
    """(m h, d) weights and (m h,) biases of queries, keys and values."""
    found = []
    for side in ("query", "key", "value"):
        weight, bias = params[side], params.get(f"{side}_bias")
        rows = weight.swapaxes(1, 2).reshape(-1, weight.shape[1])
        found.append((rows, None if bias is None else bias.ravel()))
    return found


def _outputs(params: Params, name: str) -> Params:
    out = params["out"]
    found = {f"{name}.weight": out.reshape(-1, out.shape[2]).T}
    return found | ({f"{name}.bias": params["out_bias"]} if "out_bias" in params else {})


def _assemble(
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
            params[f"{side}_bias"] = _reshaped(bias, (heads, h), f"{side} bias")
    weight = take(weights, f"{out}.weight", 2)
    if weight.shape[1] != sizes.heads * h:
        raise ValueError(
            f"{out}.weight has shape {weight.shape}: the config says {sizes.heads} heads of {h}"
        )
    params["out"] = weight.T.reshape(sizes.heads, h, -1)
    if (bias := weights.get(f"{out}.bias")) is not None:
        params["out_bias"] = _reshaped(bias, (len(weight),), f"{out}.bias")
    return params


def _reshaped(array: NDArray[Any], shape: tuple[int, ...], name: str) -> NDArray[Any]:
    if array.size != np.prod(shape):
        raise ValueError(f"{name} has shape {array.shape}: expected {np.prod(shape)} entries")
    return array.reshape(shape)
