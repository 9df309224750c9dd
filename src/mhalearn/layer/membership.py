"""Whether a layer belongs to a class of layers."""

from dataclasses import replace

import numpy as np

from mhalearn._runtime.types import Float64
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.base import Layer
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.projected_layer import ProjectedLayer

# A singular value this far below the largest does not count for the rank.
_RANK = 1e-9


def belongs(layer: Layer, to: Architecture) -> bool:
    """By sizes, mask, biases, what heads have beside their matrices, and ranks up to rounding."""
    if isinstance(layer, ProjectedLayer):
        if to.is_plain and layer.architecture.shares_only:
            return belongs(layer.to_attention_layer(), to)
        return _includes(to, layer.architecture)
    if not to.is_plain:
        if not (to.shares_only and isinstance(layer, AttentionLayer)):
            return False
        plain = replace(to, kv_heads=None, logit_scale=None, value_dim=None, head_dim=None)
        return belongs(layer, plain) and _has_ranks(layer, to) and _shares(layer, to)
    sizes = (layer.d, layer.out_dim, layer.causal) == (to.d, to.outputs, to.causal)
    heads = to.n_heads is None or layer.n_heads == to.n_heads
    if to.attention is not None or not isinstance(layer, AttentionLayer):
        return sizes and heads and layer.architecture.attention == to.attention
    biases = to.bias or (layer.key_vector is None and layer.out_bias is None)
    return sizes and heads and biases and _has_ranks(layer, to)


def _has_ranks(layer: AttentionLayer, to: Architecture) -> bool:
    return _has_rank(layer.query_theta, to.qk_rank) and _has_rank(layer.w, to.ov_rank)


def _includes(wider: Architecture, other: Architecture) -> bool:
    """Whether all layers of a class of projected heads belong to another: one with fewer keys to
    share has copies of them."""
    if wider.n_heads not in (None, other.n_heads) or (other.bias and not wider.bias):
        return False
    groups = wider.kv_heads or other.heads
    if groups % other.groups or other.heads % groups:
        return False
    same = replace(other, kv_heads=wider.kv_heads, bias=wider.bias)
    return same == replace(wider, n_heads=other.n_heads)


def _shares(layer: AttentionLayer, architecture: Architecture) -> bool:
    """Whether heads in a row share keys and values, as their matrices side by side show."""
    m, d, e, groups = layer.n_heads, layer.d, layer.out_dim, architecture.kv_heads or layer.n_heads
    if m % groups:
        return False
    queries = layer.query_theta.reshape(groups, -1, d)
    outs = layer.w.reshape(groups, m // groups, d, e).swapaxes(1, 2).reshape(groups, d, -1)
    return _has_rank(queries, architecture.qk_rank) and _has_rank(outs, architecture.values)


def _has_rank(matrices: Float64, rank: int) -> bool:
    """Whether all matrices have at most this rank, up to rounding."""
    if rank >= min(matrices.shape[1:]):
        return True
    values = np.linalg.svd(matrices, compute_uv=False)
    return bool(np.all(values[:, rank:] <= _RANK * values[:, :1]))
