"""Heads of a block that are alike made one, by their factors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mhalearn._runtime.programs import in_float64
from mhalearn._runtime.types import Float64
from mhalearn.layer.block.block import Block, block_of
from mhalearn.layer.block.canonical import fold_inputs, hyperplane
from mhalearn.layer.block.design import BlockDesign
from mhalearn.layer.block.parametrisation import holds_matrices
from mhalearn.layer.factored import Factors, merge_heads


@in_float64
def merge_block_heads(block: Block, alike: float, small: float, most: int | None = None) -> Block:
    """The same function, nearly, with heads that are alike made one and small ones dropped.

    Gains and biases before linear maps become part of these, so that what no output shows of two
    heads does not tell them apart. alike, small, most: as in `merge_heads`.
    """
    block = fold_inputs(block)
    params, design = dict(block.params), block.design
    found = merge_heads(_shown(_factors(params, design), design), alike, small, most)
    named, heads = _arrays(found, design), len(found.query)
    params |= {f"attention.{name}": leaf for name, leaf in named.items()}
    wider = replace(design, attention=design.attention.with_heads(heads))
    return block_of(wider, params, metadata=block.metadata, seen=block.seen)


def _factors(params: dict[str, Float64], design: BlockDesign) -> Factors:
    """Query biases as a last row of queries; value biases in the output bias."""
    part = {
        name.removeprefix("attention."): leaf
        for name, leaf in params.items()
        if name.startswith("attention.")
    }
    bias = part.get("out_bias", np.zeros(design.attention.d))[None]
    if holds_matrices(design.attention):
        query, m = part["theta"], len(part["theta"])
        last = part.get("key_vector")
        key = value = np.broadcast_to(np.eye(design.attention.d), (m, *query.shape[1:]))
        out = part["w"]
    else:
        query = part["query"] * design.attention.qk_rank**-0.5
        last = part.get("query_bias")
        last = None if last is None else last * design.attention.qk_rank**-0.5
        key, value, out = part["key"], part["value"], part["out"]
        if "value_bias" in part:
            bias = bias + np.einsum("mh,mhe->e", part["value_bias"], out)
    if last is not None:
        query = np.concatenate([query, last[:, None]], axis=1)
    return Factors(query, key, value, out, bias if design.attention.bias else bias[:0])  # type: ignore[arg-type]


def _shown(heads: Factors, design: BlockDesign) -> Factors:
    """Without what a norm takes away before or after them."""
    if design.norm is None:
        return heads
    d = design.attention.d
    seen = hyperplane(design.norm_kind, d)
    if design.norm == "post":
        return heads._replace(out=np.asarray(heads.out) @ seen)  # type: ignore[arg-type]
    query = np.asarray(heads.query)
    query = np.concatenate([seen @ query[:, :d], query[:, d:]], axis=1)
    key, value = seen @ np.asarray(heads.key), seen @ np.asarray(heads.value)
    return heads._replace(query=query, key=key, value=value)  # type: ignore[arg-type]


def _arrays(heads: Factors, design: BlockDesign) -> dict[str, Float64]:
    query, key, value, out, bias = (np.asarray(part) for part in heads)
    d, biased = design.attention.d, design.attention.bias
    if holds_matrices(design.attention):
        theta = query @ key.swapaxes(1, 2)
        found = {"theta": theta[:, :d], "w": value @ out}
        return found | ({"key_vector": theta[:, d], "out_bias": bias[0]} if biased else {})
    query = query * design.attention.qk_rank**0.5
    found = {"query": query[:, :d], "key": key, "value": value, "out": out}
    if biased:
        none = np.zeros((len(query), query.shape[2]))
        found |= {"query_bias": query[:, d], "key_bias": none, "value_bias": none}
        found["out_bias"] = bias[0]
    return found
