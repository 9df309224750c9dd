"""The heads of a block: between layers of heads and the arrays that a block holds of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mhalearn._runtime.types import Float64
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.block.parametrisation import attention_shapes, holds_matrices
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.projected_canonical import fold_value_biases
from mhalearn.layer.projected_layer import ProjectedLayer

Heads = AttentionLayer | ProjectedLayer


def params_of_heads(layer: Heads, architecture: Architecture) -> dict[str, Float64]:
    """The arrays that a block holds of a layer: zeros where a bias of the class is missing.

    Heads of low rank that have nothing beside Theta and W are held by balanced factors.
    """
    zeros = {name: np.zeros(shape) for name, shape in attention_shapes(architecture).items()}
    if isinstance(layer, ProjectedLayer):
        return zeros | layer.params
    if holds_matrices(architecture):
        return zeros | layer.parameters()
    rank, root = architecture.qk_rank, architecture.qk_rank**0.5
    query, key = _factors(layer.query_theta, rank)
    value, out = _factors(layer.w, rank)
    found = {"query": query[:, : layer.d] * root, "key": key, "value": value}
    found["out"] = out.swapaxes(1, 2)
    if layer.key_vector is not None:
        found["query_bias"] = query[:, layer.d] * root
    if layer.out_bias is not None:
        found["out_bias"] = layer.out_bias
    return zeros | found


def heads_of(architecture: Architecture, params: Mapping[str, Any]) -> Heads:
    """The layer of a block's heads."""
    arrays: dict[str, Any] = {name: np.asarray(leaf) for name, leaf in params.items()}
    if holds_matrices(architecture):
        return AttentionLayer(**arrays, causal=architecture.causal)
    if not architecture.is_plain:
        return ProjectedLayer(architecture, arrays)
    scale = architecture.qk_rank**-0.5
    vector = out_bias = None
    if architecture.bias:
        vector = np.einsum("mh,mdh->md", arrays["query_bias"], arrays["key"]) * scale
        folded = np.einsum("mh,mhe->e", arrays["value_bias"], arrays["out"])
        out_bias = arrays["out_bias"] + folded
    return AttentionLayer(
        arrays["query"] @ arrays["key"].swapaxes(1, 2) * scale,
        arrays["value"] @ arrays["out"],
        vector,
        out_bias,
        architecture.causal,
        metadata={"head_dim": str(architecture.head_dim)},
    )


def fold_input(layer: Heads, matrix: Float64, shift: Float64) -> Heads:
    """Heads that see n where the others saw n matrix + shift: the same function of n.

    Biases are there in the result unless the shift is zero and they were not before.
    """
    if isinstance(layer, AttentionLayer):
        vector = (
            np.zeros((layer.n_heads, layer.d)) if layer.key_vector is None else layer.key_vector
        )
        out_bias = np.zeros(layer.d) if layer.out_bias is None else layer.out_bias
        moved = np.einsum("a,mab->mb", shift, layer.theta) + vector
        constant = out_bias + np.einsum("a,mae->e", shift, layer.w)
        has = layer.key_vector is not None or layer.out_bias is not None or bool(shift.any())
        return layer.replace(
            theta=matrix @ layer.theta @ matrix.T,
            w=matrix @ layer.w,
            key_vector=moved @ matrix.T if has else None,
            out_bias=constant if has else None,
        )
    params, a = dict(layer.params), layer.architecture
    for side in ("query", "key", "value"):
        if shift.any():
            bias = params.get(f"{side}_bias", 0.0)
            params[f"{side}_bias"] = np.einsum("a,gah->gh", shift, params[side]) + bias
        params[side] = matrix @ params[side]
    fold_value_biases(a, params)
    return layer.replace(architecture=replace(a, bias=a.bias or bool(shift.any())), params=params)


def project_output(layer: Heads, matrix: Float64) -> Heads:
    """Heads whose outputs are multiplied by a matrix."""
    if isinstance(layer, AttentionLayer):
        out_bias = None if layer.out_bias is None else layer.out_bias @ matrix
        return layer.replace(w=layer.w @ matrix, out_bias=out_bias)
    params = dict(layer.params)
    params["out"] = params["out"] @ matrix
    if "out_bias" in params:
        params["out_bias"] = params["out_bias"] @ matrix
    return layer.replace(params=params)


def output_bias(layer: Heads) -> Float64:
    """What heads add to every output, value biases included where weights sum to one."""
    if isinstance(layer, AttentionLayer):
        return np.zeros(layer.d) if layer.out_bias is None else layer.out_bias
    return layer.params.get("out_bias", np.zeros(layer.d))


def with_output_bias(layer: Heads, bias: Float64) -> Heads:
    if isinstance(layer, AttentionLayer):
        return layer.replace(out_bias=bias)
    return layer.replace(params=dict(layer.params) | {"out_bias": bias})


def _factors(matrices: Float64, rank: int) -> tuple[Float64, Float64]:
    """left (m, rows, rank) and right (m, columns, rank) with left right^T the matrices."""
    u, s, vt = np.linalg.svd(matrices, full_matrices=False)
    root = np.sqrt(s[:, None, :rank])
    left, right = u[..., :rank] * root, vt[:, :rank].swapaxes(1, 2) * root
    missing = ((0, 0), (0, 0), (0, rank - left.shape[2]))
    return np.pad(left, missing), np.pad(right, missing)
