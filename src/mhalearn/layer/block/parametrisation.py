"""Blocks as numbers that can be moved: one `forward`, derivatives by automatic differentiation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from mhalearn._runtime.types import Array, Float
from mhalearn.layer import attention
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.batches import Chunk
from mhalearn.layer.block.design import BlockDesign
from mhalearn.layer.block.feed_forward import feed_forward, neurons, shapes_of
from mhalearn.layer.block.matrices import from_matrices, to_matrices
from mhalearn.layer.block.norms import normalise, scale_of
from mhalearn.layer.parametrisation import Parametrisation, Params
from mhalearn.layer.projected import Projected

if TYPE_CHECKING:
    from mhalearn.layer.base import Layer
    from mhalearn.layer.block.block import Block
    from mhalearn.layer.units import Units

BlockParams = Mapping[str, Array]
_T = TypeVar("_T")


class _Stream(NamedTuple):
    """The residual stream where neurons begin."""

    change: Float[Array, "b k d"]  # what heads added
    h: Float[Array, "b k d"]  # what the neurons' outputs are added to
    z: Float[Array, "b k d"]  # what neurons see


@dataclass(frozen=True)
class BlockParametrisation(Parametrisation):
    """Arrays by the names of its parts: "attention.theta", "feed_forward.up", "norm_1.gain" ...

    Heads of any rank are held by theta (m, d, d), w (m, d, d), key_vector (m, d) and out_bias (d,);
    others by projections, as `layer.projected` has them.
    """

    architecture: Architecture

    @property
    def design(self) -> BlockDesign:
        design = self.architecture.attention
        assert isinstance(design, BlockDesign)
        return design

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        design, d = self.design, self.architecture.d
        parts = {"attention": attention_shapes(design.attention)}
        parts["feed_forward"] = shapes_of(d, design.hidden, design.act, design.bias, design.linear)
        if design.norm is not None:
            one: dict[str, tuple[int, ...]] = dict.fromkeys(["gain"], (d,))
            if design.norm_bias:
                one["bias"] = (d,)
            parts |= {"norm_1": one, "norm_2": one}
        return join(parts)

    def init(self, rng: np.random.Generator) -> dict[str, Array]:
        """Logits and outputs of about unit size on tokens of unit size; gains near one."""
        sizes = _sizes(self.design)
        drawn = {
            name: sizes.get(name, 0.1) * rng.standard_normal(shape)
            for name, shape in self.shapes().items()
        }
        return {name: jnp.asarray(leaf + name.endswith("gain")) for name, leaf in drawn.items()}

    def forward(self, params: BlockParams, chunk: Chunk) -> Float[Array, "b k d"]:
        """Cost: that of the heads, and O(b k d hidden)."""
        y = self.final_stream(params, chunk)
        return self._norm(split(params)["norm_2"], y) if self.design.norm == "post" else y

    def final_stream(self, params: BlockParams, chunk: Chunk) -> Float[Array, "b k d"]:
        """Before a norm that comes last."""
        stream = self._stream(params, chunk)
        return stream.h + feed_forward(split(params)["feed_forward"], stream.z, self.design.act)

    def neuron_values(self, params: BlockParams, chunk: Chunk) -> Float[Array, "b k n"]:
        """What each neuron hands to its output weights."""
        z = self.neuron_inputs(params, chunk)
        return neurons(split(params)["feed_forward"], z, self.design.act)

    def neuron_inputs(self, params: BlockParams, chunk: Chunk) -> Float[Array, "b k d"]:
        """What neurons see."""
        return self._stream(params, chunk).z

    def _stream(self, params: BlockParams, chunk: Chunk) -> _Stream:
        """What is there when neurons begin."""
        design, x, parts = self.design, chunk.tokens, split(params)
        first = self._norm(parts.get("norm_1"), x) if design.norm == "pre" else x
        change = attend(design.attention, parts["attention"], chunk, first)
        h = x + change
        if design.norm == "post":
            h = self._norm(parts["norm_1"], h)
        z = self._norm(parts["norm_2"], h) if design.norm == "pre" else h
        return _Stream(change, h, z)

    def _norm(self, params: BlockParams | None, z: Float[Array, "b k d"]) -> Float[Array, "b k d"]:
        assert params is not None
        scaled = normalise(z, self.design.norm_kind, self.design.epsilon) * params["gain"]
        return scaled + params["bias"] if "bias" in params else scaled

    def term_sizes(self, params: BlockParams, chunk: Chunk) -> Float[Array, "b k d"]:
        """Of the terms that are added up last; of a final norm, after it."""
        design, x, parts = self.design, chunk.tokens, split(params)
        change, h, z = self._stream(params, chunk)
        ff = parts["feed_forward"]
        terms = jnp.abs(neurons(ff, z, design.act)) @ jnp.abs(ff["down"])
        sizes = jnp.abs(h) + terms + jnp.abs(ff.get("down_bias", 0.0))
        if design.norm != "post":
            return (sizes + jnp.abs(x) + jnp.abs(change)) * chunk.weight[..., None]
        y = h + feed_forward(ff, z, design.act)
        gain = parts["norm_2"]["gain"] * scale_of(y, design.norm_kind, design.epsilon)
        bias = jnp.abs(parts["norm_2"].get("bias", 0.0))
        return (sizes * jnp.abs(gain) + bias) * chunk.weight[..., None]

    def to_layer(self, params: Params, units: Units) -> Block:
        from mhalearn.layer.block.block import block_of

        return block_of(self.design, jax.tree.map(np.asarray, params))

    def from_layer(self, layer: Layer, units: Units) -> Params:
        """All parameters of the class: biases that the block is without are zero."""
        zeros = {name: np.zeros(shape) for name, shape in self.shapes().items()}
        return zeros | layer.params

    def straightened(self) -> BlockParametrisation:
        """With scales that hardly show as numbers of their own."""
        from mhalearn.layer.block.scaled import ScaledBlock  # which is one of these

        return ScaledBlock(self.architecture)

    def to_matrices(self, params: BlockParams) -> dict[str, Array]:
        """Its linear maps with their biases, and what is no linear map."""
        return to_matrices(params)

    def from_matrices(self, matrices: Mapping[str, Array]) -> dict[str, Array]:
        return from_matrices(matrices, self.shapes())

    def size(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes().values())

    def count(self) -> int:
        """By formula; measured, as of kinds that nothing is known of, where biases are mixed."""
        return self.design.count() if self.design.is_counted else super().count()


def attention_shapes(a: Architecture) -> dict[str, tuple[int, ...]]:
    """Of the arrays that heads are held by."""
    if not holds_matrices(a):
        return dict(Projected(a).shapes())
    m, d = a.heads, a.d
    shapes: dict[str, tuple[int, ...]] = {"theta": (m, d, d), "w": (m, d, d)}
    return shapes | ({"key_vector": (m, d), "out_bias": (d,)} if a.bias else {})


def holds_matrices(a: Architecture) -> bool:
    """Whether heads are held by Theta and W, because they have any rank and nothing beside."""
    return a.is_plain and a.head_dim is None


def attend(
    a: Architecture, params: BlockParams, chunk: Chunk, z: Float[Array, "b k d"]
) -> Float[Array, "b k d"]:
    """What heads make of tokens z that stand where those of the chunk do."""
    there = chunk._replace(tokens=z)
    if not holds_matrices(a):
        return Projected(a).forward(dict(params), there)
    theta, w = params["theta"], params["w"]
    stacked = w.reshape(-1, w.shape[-1])
    ones = jnp.ones_like(z[..., :1])
    queries, constant = z, ones[..., :0]
    if "key_vector" in params:
        theta = jnp.concatenate([theta, params["key_vector"][:, None]], axis=1)
        queries = jnp.concatenate([z, ones], axis=-1)
    if "out_bias" in params:
        stacked, constant = jnp.concatenate([stacked, params["out_bias"][None]]), ones
    return attention.forward(theta, stacked, there._replace(queries=queries, constant=constant))


def join(parts: Mapping[str, Mapping[str, _T]]) -> dict[str, _T]:
    """One dictionary of the arrays of several parts."""
    return {f"{part}.{name}": leaf for part, named in parts.items() for name, leaf in named.items()}


def split(params: Mapping[str, _T]) -> dict[str, dict[str, _T]]:
    """Its inverse."""
    parts: dict[str, dict[str, _T]] = {}
    for name, leaf in params.items():
        part, inner = name.split(".", 1)
        parts.setdefault(part, {})[inner] = leaf
    return parts


def _sizes(design: BlockDesign) -> dict[str, float]:
    d, a = design.attention.d, design.attention
    wide = d**-0.5
    named = dict.fromkeys(("query", "key", "value"), wide) | {"theta": 1.0 / d}
    named |= {"w": (a.heads * d) ** -0.5, "out": (a.heads * a.qk_rank) ** -0.5}
    sizes = {f"attention.{name}": size for name, size in named.items()}
    sizes |= {"feed_forward.up": wide, "feed_forward.gate": wide}
    return sizes | {"feed_forward.down": max(design.hidden, 1) ** -0.5}
