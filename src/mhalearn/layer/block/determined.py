"""What the outputs of a block determine of its arrays, as a differentiable function of these.

The folding of the canonical form (`layer.block.canonical`), without its order and its decisions: so
that of a small change of the arrays it can be told whether it changes more than the gauge.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from mhalearn._runtime.types import Array
from mhalearn.layer.block.canonical import hyperplane
from mhalearn.layer.block.design import SHOWN, BlockDesign
from mhalearn.layer.block.parametrisation import holds_matrices, split

Arrays = dict[str, Any]


def determined(params: Mapping[str, Array], design: BlockDesign) -> dict[str, Array]:
    """Arrays whose first axis counts heads, neurons, or nothing (one row).

    Trust: tested against the ranks of Jacobians that `BlockDesign.count` was."""
    parts = split(params)
    heads, ff = _heads(parts["attention"], design), dict(parts["feed_forward"])
    seen = jnp.asarray(hyperplane(design.norm_kind, design.attention.d))
    norms: Arrays = {}
    if design.norm is None:
        ff = _add_output(_shift_input(ff, heads["bias"]), heads.pop("bias"))
    elif design.norm == "pre":
        heads, ff = _fold_before(heads, ff, parts, seen)
    else:
        heads, ff, norms = _fold_after(heads, ff, parts, seen, design)
    found = heads | _neurons(ff, design) | norms
    return {name: leaf if leaf.ndim > 1 else leaf[None] for name, leaf in found.items()}


def _heads(part: Mapping[str, Array], design: BlockDesign) -> Arrays:
    if holds_matrices(design.attention):
        theta, w = part["theta"], part["w"]
        vector = part.get("key_vector", jnp.zeros(theta.shape[:2]))
        bias = part.get("out_bias", jnp.zeros(design.attention.d))
        return {"theta": theta, "vector": vector, "w": w, "bias": bias}
    scale, key, out = design.attention.qk_rank**-0.5, part["key"], part["out"]
    theta = scale * jnp.einsum("mah,mbh->mab", part["query"], key)
    w = jnp.einsum("mah,mhe->mae", part["value"], out)
    vector, bias = jnp.zeros(theta.shape[:2]), jnp.zeros(design.attention.d)
    if design.attention.bias:
        vector = scale * jnp.einsum("mh,mbh->mb", part["query_bias"], key)
        bias = part["out_bias"] + jnp.einsum("mh,mhe->e", part["value_bias"], out)
    return {"theta": theta, "vector": vector, "w": w, "bias": bias}


def _fold_before(
    heads: Arrays, ff: Arrays, parts: Mapping[str, Any], seen: Array
) -> tuple[Arrays, Arrays]:
    first, second = parts["norm_1"], parts["norm_2"]
    shift = first.get("bias", jnp.zeros(len(seen)))
    into = seen * first["gain"]
    bias = heads["bias"] + jnp.einsum("a,mae->e", shift, heads["w"])
    folded = {
        "theta": into @ heads["theta"] @ into.T,
        "vector": (heads["vector"] + jnp.einsum("a,mab->mb", shift, heads["theta"])) @ into.T,
        "w": into @ heads["w"],
        "bias": bias @ seen,
    }
    ff = _multiply_input(_shift_input(ff, second.get("bias")), seen * second["gain"])
    return folded, _add_output(ff, bias - bias @ seen)


def _fold_after(
    heads: Arrays, ff: Arrays, parts: Mapping[str, Any], seen: Array, design: BlockDesign
) -> tuple[Arrays, Arrays, Arrays]:
    first, second = parts["norm_1"], parts["norm_2"]
    heads = heads | {"w": heads["w"] @ seen, "bias": heads["bias"] @ seen}
    gain, shift = first["gain"], first.get("bias")
    ff = _shift_input(ff, shift)
    ff = ff if shift is None else _add_output(ff, shift)
    ff = _multiply_input(ff, seen * gain / gain[:, None])
    ff = {name: leaf @ seen if "down" in name else leaf for name, leaf in ff.items()}
    if "linear" in ff:
        ff["linear"] = ff["linear"] @ seen
    if design.epsilon < SHOWN:
        size = jnp.exp(jnp.mean(jnp.log(jnp.abs(gain))))
        gain = gain / size
        grows = {name: ff[name] * size for name in ("up", "gate") if name in ff}
        ff |= grows | {name: ff[name] / size for name in ("down", "down_bias") if name in ff}
    norms = {"first_gain": gain, "second_gain": second["gain"]}
    return heads, ff, norms | ({"second_bias": second["bias"]} if "bias" in second else {})


def _shift_input(ff: Arrays, shift: Array | None) -> Arrays:
    if shift is None:
        return ff
    moved = {
        f"{side}_bias": ff.get(f"{side}_bias", 0.0) + shift @ ff[side]
        for side in ("up", "gate")
        if side in ff
    }
    ff = ff | moved
    return _add_output(ff, shift @ ff["linear"]) if "linear" in ff else ff


def _multiply_input(ff: Arrays, matrix: Array) -> Arrays:
    sides = [side for side in ("up", "gate", "linear") if side in ff]
    return ff | {side: matrix @ ff[side] for side in sides}


def _add_output(ff: Arrays, shift: Array) -> Arrays:
    return ff | {"down_bias": ff.get("down_bias", 0.0) + shift}


def _neurons(ff: Arrays, design: BlockDesign) -> Arrays:
    """With scales that no function shows taken out."""
    rows = {
        side: jnp.concatenate([ff[side], ff[f"{side}_bias"][None]]).T
        if f"{side}_bias" in ff
        else ff[side].T
        for side in ("up", "gate")
        if side in ff
    }
    down = ff["down"]
    sides: list[Any] = ["up"] if design.act.is_gated else []
    if design.act.scales:
        sides.append("gate" if design.act.is_gated else "up")
    for side in sides:
        size = jnp.linalg.norm(rows[side], axis=1, keepdims=True)
        rows[side], down = rows[side] / size, down * size
    kept = {name: ff[name] for name in ("linear", "down_bias") if name in ff}
    if "linear" in kept:
        kept["linear"] = kept["linear"].reshape(1, -1)
    return rows | {"down": down} | kept
