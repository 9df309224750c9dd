"""Block: a whole transformer block as one function of sequences."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime import storage
from mhalearn._runtime.types import Float64
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.base import ParametrisedLayer, check_seen
from mhalearn.layer.block.design import BlockDesign
from mhalearn.layer.block.feed_forward import PARTS, FeedForward
from mhalearn.layer.block.heads import heads_of, params_of_heads
from mhalearn.layer.block.norms import Norm
from mhalearn.layer.block.parametrisation import BlockParametrisation, join, split
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.projected_layer import ProjectedLayer


class Block(ParametrisedLayer):
    """A transformer block, immutable, in float64.

        norm=None      h = x + attention(x)             y = h + feed_forward(h)
        norm="pre"     h = x + attention(norm_1(x))     y = h + feed_forward(norm_2(h))
        norm="post"    h = norm_1(x + attention(x))     y = norm_2(h + feed_forward(h))

    attention: an AttentionLayer or a ProjectedLayer with as many outputs as features.
    feed_forward: a `FeedForward`. norms: two `Norm`, of one kind, where `norm` is not None.
    metadata, seen: as in every layer.
    """

    def __init__(
        self,
        attention: AttentionLayer | ProjectedLayer,
        feed_forward: FeedForward,
        norm: str | None = None,
        norms: tuple[Norm, Norm] | None = None,
        *,
        metadata: Mapping[str, str] | None = None,
        seen: NDArray[Any] | None = None,
    ) -> None:
        if not isinstance(attention, AttentionLayer | ProjectedLayer):
            raise ValueError(f"attention is a {type(attention).__name__}: pass an AttentionLayer")
        if (norm is None) != (norms is None):
            raise ValueError(f"norm={norm!r} with norms={norms!r}: give both, or neither")
        design = _design(attention, feed_forward, norm, norms)
        parts = {"attention": params_of_heads(attention, design.attention)}
        parts["feed_forward"] = _with_zeros(design, feed_forward)
        for number, one in enumerate(norms or (), 1):
            named = {"gain": one.gain}
            if design.norm_bias:
                named["bias"] = np.zeros(attention.d) if one.bias is None else one.bias
            parts[f"norm_{number}"] = named
        kind = BlockParametrisation(design.architecture)
        super().__init__(kind, _checked(kind, join(parts)), metadata=metadata, seen=seen)
        check_seen(self.seen)
        for leaf in self._params.values():
            leaf.setflags(write=False)

    @property
    def design(self) -> BlockDesign:
        """The class of blocks it belongs to."""
        design = self.architecture.attention
        assert isinstance(design, BlockDesign)
        return design

    @property
    def attention(self) -> AttentionLayer | ProjectedLayer:
        return heads_of(self.design.attention, split(self._params)["attention"])

    @property
    def feed_forward(self) -> FeedForward:
        named: dict[str, Any] = split(self._params)["feed_forward"]
        return FeedForward(**named, activation=self.design.activation)

    @property
    def norm(self) -> str | None:
        return self.design.norm

    @property
    def norms(self) -> tuple[Norm, Norm] | None:
        if self.design.norm is None:
            return None
        parts: dict[str, Any] = split(self._params)
        design = self.design
        first, second = (
            Norm(**parts[name], kind=design.norm_kind, epsilon=design.epsilon)
            for name in ("norm_1", "norm_2")
        )
        return first, second

    @property
    def hidden(self) -> int:
        """Neurons."""
        return self.design.hidden

    def __repr__(self) -> str:
        d, norm = self.design, ""
        if d.norm is not None:
            norm = f", norm={d.norm!r}, norm_kind={d.norm_kind!r}"
        return (
            f"Block(n_heads={self.n_heads}, d={self.d}, hidden={d.hidden}, "
            f"activation={d.activation!r}{norm})"
        )

    def replace(self, **changes: Any) -> Block:
        """A copy with some constructor arguments changed."""
        kept: dict[str, Any] = {"metadata": self.metadata, "seen": self.seen}
        if changes.keys() <= kept.keys():
            return block_of(self.design, self._params, **(kept | changes))
        kept |= {"attention": self.attention, "feed_forward": self.feed_forward}
        kept |= {"norm": self.norm, "norms": self.norms}
        return Block(**(kept | changes))

    def canonical(self, *, tolerance: float = 1e-8) -> Block:
        """The same function by the numbers that it determines; see `layer.block.canonical`."""
        from mhalearn.layer.block.canonical import canonical_form  # which makes blocks

        return canonical_form(self, tolerance)

    def save(self, path: str | Path) -> None:
        """Write the block to a .safetensors file, atomically; `mhalearn.load_layer` reads it."""
        tensors: dict[str, NDArray[Any]] = dict(self._params)
        if self.seen.size:
            tensors["seen"] = self.seen
        storage.write_tensors(path, tensors, self.metadata | describe(self.design))


def block_of(
    design: BlockDesign,
    params: Mapping[str, Any],
    *,
    metadata: Mapping[str, str] | None = None,
    seen: NDArray[Any] | None = None,
) -> Block:
    """The block that parameters of a class stand for, bit by bit."""
    block = Block.__new__(Block)
    kind = BlockParametrisation(design.architecture)
    checked = _checked(kind, params)
    ParametrisedLayer.__init__(block, kind, checked, metadata=metadata, seen=seen)
    check_seen(block.seen)
    for leaf in block.params.values():
        leaf.setflags(write=False)
    return block


def _design(
    attention: AttentionLayer | ProjectedLayer,
    feed_forward: FeedForward,
    norm: str | None,
    norms: tuple[Norm, Norm] | None,
) -> BlockDesign:
    if feed_forward.d != attention.d:
        raise ValueError(
            f"feed_forward has {feed_forward.d} features, the attention d = {attention.d}"
        )
    said: dict[str, Any] = {}
    if norms is not None:
        kinds = {(one.kind, one.epsilon, len(one.gain)) for one in norms}
        if len(kinds) != 1 or {len(one.gain) for one in norms} != {attention.d}:
            raise ValueError(f"both norms must be of one kind, one epsilon and {attention.d} gains")
        said = {"norm_kind": norms[0].kind, "epsilon": float(norms[0].epsilon)}
        said["norm_bias"] = any(one.bias is not None for one in norms)
    return BlockDesign(
        attention.architecture,
        feed_forward.hidden,
        feed_forward.activation,
        feed_forward.has_bias,
        feed_forward.linear is not None,
        norm,
        **said,
    )


def _with_zeros(design: BlockDesign, feed_forward: FeedForward) -> dict[str, Float64]:
    """Its arrays, with zeros for biases that are missing among others."""
    shapes = BlockParametrisation(design.architecture).shapes()
    wanted = [name for name in PARTS if f"feed_forward.{name}" in shapes]
    zeros = {name: np.zeros(shapes[f"feed_forward.{name}"]) for name in wanted}
    return zeros | feed_forward.parts()


def _checked(kind: BlockParametrisation, params: Mapping[str, Any]) -> dict[str, Float64]:
    shapes = kind.shapes()
    if unknown := sorted(set(params) - set(shapes)):
        raise ValueError(f"{unknown[0]!r} is no parameter of this block")
    found = {}
    for name, shape in shapes.items():
        if name not in params:
            raise ValueError(f"{name} is missing: expected shape {shape}")
        array = np.array(params[name], np.float64)
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}: expected {shape}")
        if not np.isfinite(array).all():
            raise ValueError(f"{name} holds NaN or infinity")
        found[name] = array
    return found


# Fields of a design that a file says as JSON; the architecture has a record of its own.
_FIELDS: dict[str, type] = {
    "hidden": int,
    "activation": str,
    "bias": bool,
    "linear": bool,
    "norm": str,
    "norm_kind": str,
    "epsilon": float,
    "norm_bias": bool,
}


def describe(design: BlockDesign) -> dict[str, str]:
    """A design as the metadata of a file."""
    from mhalearn.layer.architecture_record import write_architecture

    said = asdict(replace(design, attention=Architecture(1)))
    told = {name: said[name] for name in _FIELDS}
    architecture = write_architecture(design.attention)
    return {"kind": "layer", "block": json.dumps(told), "architecture": architecture}


def read_block(
    path: str | Path, tensors: dict[str, NDArray[Any]], metadata: dict[str, str]
) -> Block:
    """The block of a file's tensors and metadata; `load_layer` calls it."""
    from mhalearn.layer.architecture_record import read_architecture

    own = ("kind", "block", "architecture")
    kept = {name: text for name, text in metadata.items() if name not in own}
    params = {name: tensor for name, tensor in tensors.items() if name != "seen"}
    try:
        said = _read_fields(metadata["block"])
        design = BlockDesign(read_architecture(metadata.get("architecture", "")), **said)
        return block_of(design, params, metadata=kept, seen=tensors.get("seen"))
    except ValueError as error:
        raise ValueError(f"{storage.show(path)}: {error}") from None


def _read_fields(text: str) -> dict[str, Any]:
    try:
        said = json.loads(text) if len(text) < 10_000 else None
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict) or set(said) != set(_FIELDS):
        raise ValueError("the block in its metadata is not readable: save the block again")
    for name, kind in _FIELDS.items():
        if name == "norm" and said[name] is None:
            continue
        if type(said[name]) is not kind and not (kind is float and type(said[name]) is int):
            raise ValueError(f"{name}={str(said[name])[:40]} in the block: pass {kind.__name__}")
    return said
