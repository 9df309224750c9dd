"""The canonical form of projected heads: one choice of projections for each function.

What no function shows is fixed: of values, and of dimensions that are not rotated, the basis
(balanced singular vectors); of a rotary frequency a complex number (queries as large as keys, the
largest entry of a key real); under a norm scales, signs, and the order of dimensions. Biases that
cancel are zero, and heads come in the order of their W.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mhalearn._runtime.types import Float64
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.gauge import balanced, phase, ratio, sign
from mhalearn.layer.latent import unfold
from mhalearn.layer.latent_canonical import fix_latents
from mhalearn.layer.position_bias import Alibi, T5Bias
from mhalearn.layer.projected_layer import ProjectedLayer

Params = dict[str, Float64]


def canonical_form(layer: ProjectedLayer) -> ProjectedLayer:
    """The same function by the projections that stand for all of its gauge.

    Trust: unique for generic heads; where singular values, gains or norms of W are equal, as they
    are of copied heads, it is one of several.
    """
    a = layer.architecture
    params = {name: leaf.copy() for name, leaf in layer.params.items()}
    _fold_biases(a, params)
    _centre_table(a, params)
    if a.latent is not None:
        fix_latents(a, params)
    for g in range(a.groups if a.latent is None else 0):
        heads = slice(g * (a.heads // a.groups), (g + 1) * (a.heads // a.groups))
        _balance_values(params, g, heads)
        if a.norm is None:
            _fix_keys(a, params, g, heads)
    if a.norm is not None:
        _fix_normalised(a, params)
    if not isinstance(a.distance_bias, Alibi):  # whose slopes give heads their places
        _order_heads(a, params)
    return layer.replace(params=params)


def _fold_biases(a: Architecture, params: Params) -> None:
    """Value biases into that of the outputs; key biases that cancel to zero."""
    fold_value_biases(a, params)
    if "key_bias" in params and not (a.sinks or a.softcap is not None or a.norm is not None):
        first = 0 if a.rope is None else a.rope.rotated(a.qk_rank)
        params["key_bias"][:, first:] = 0.0
        if first == 0:
            del params["key_bias"]


def fold_value_biases(a: Architecture, params: Params) -> None:
    """Value biases into that of the outputs, where weights sum to one."""
    if "value_bias" in params and not a.sinks:
        shared = np.repeat(params.pop("value_bias"), a.heads // a.groups, axis=0)
        folded = np.einsum("mh,mhe->e", shared, params["out"])
        params["out_bias"] = folded + params.get("out_bias", 0.0)


def _centre_table(a: Architecture, params: Params) -> None:
    """Biases by distance of mean zero; a sink takes what all logits lose."""
    if not isinstance(a.distance_bias, T5Bias):
        return
    used, table = a.distance_bias.used(a.causal), params["position_table"]
    mean = table[used].mean(axis=0)
    centred = np.zeros_like(table)
    centred[used] = table[used] - mean
    params["position_table"] = centred
    if a.sinks:
        params["sink"] = params["sink"] - mean


def _balance_values(params: Params, g: int, heads: slice) -> None:
    value, outs = rows_of(params, "value", slice(g, g + 1)), params["out"][heads]
    n, h, e = outs.shape
    left, right = balanced(value[0], outs.swapaxes(0, 1).reshape(h, n * e).T)
    put_rows(params, "value", slice(g, g + 1), left[None])
    params["out"][heads] = right.T.reshape(h, n, e).swapaxes(0, 1)


def _fix_keys(a: Architecture, params: Params, g: int, heads: slice) -> None:
    """Of one group without norms."""
    group = slice(g, g + 1)
    query, key = rows_of(params, "query", heads), rows_of(params, "key", group)
    first = 0
    if a.rope is not None:
        first = a.rope.rotated(a.qk_rank)
        real, imaginary = a.rope.pairs(a.qk_rank)
        ours, theirs = (side[..., real] + 1j * side[..., imaginary] for side in (query, key))
        sizes = [np.linalg.norm(side, axis=(0, 1)) for side in (ours, theirs)]
        factor = np.sqrt(ratio(sizes[0], sizes[1])) * phase(theirs[0])
        for side, turned in ((query, ours / factor.conj()), (key, theirs * factor)):
            side[..., real], side[..., imaginary] = turned.real, turned.imag
    if first < a.qk_rank:
        rows = query.shape[1]
        right, left = balanced(key[0, :, first:], query[..., first:].reshape(-1, a.qk_rank - first))
        key[0, :, first:], query[..., first:] = right, left.reshape(-1, rows, a.qk_rank - first)
    put_rows(params, "query", heads, query)
    put_rows(params, "key", group, key)


def _fix_normalised(a: Architecture, params: Params) -> None:
    """Scales, which no epsilon shows where it is zero; gains; then bases, as far as norms let."""
    norm = a.norm
    assert norm is not None
    query, key = (rows_of(params, side, slice(None)) for side in ("query", "key"))
    if norm.epsilon == 0:
        axes = None if norm.across_heads else (1, 2)
        query, key = (_of_size(side, axes, a.qk_rank) for side in (query, key))
    if norm.has_gains:
        fix_gains(a, params, query, key)
    each = a.heads // a.groups
    real, imaginary, first = np.zeros(0, int), np.zeros(0, int), 0
    if a.rope is not None:
        real, imaginary = a.rope.pairs(a.qk_rank)
        first = a.rope.rotated(a.qk_rank)
    for g in range(a.groups):
        heads, still = slice(g * each, (g + 1) * each), slice(first, None)
        if not norm.has_gains:
            basis = np.linalg.svd(key[g, :, still], full_matrices=False).Vh.T
            key[g, :, still] = key[g, :, still] @ basis
            query[heads, :, still] = query[heads, :, still] @ basis
        flip = np.ones(a.qk_rank)
        flip[first:] = sign(key[g, :, still])
        if a.rope is not None:
            pairs = key[g][:, real] + 1j * key[g][:, imaginary]
            if norm.has_gains:  # which leave half turns
                flip[real] = flip[imaginary] = sign(key[g][:, real])
            else:
                turn = phase(pairs)
                for side in (query[heads], key[g : g + 1]):
                    turned = (side[..., real] + 1j * side[..., imaginary]) * turn
                    side[..., real], side[..., imaginary] = turned.real, turned.imag
        query[heads] *= flip
        key[g] *= flip
    put_rows(params, "query", slice(None), query)
    put_rows(params, "key", slice(None), key)


def fix_gains(a: Architecture, params: Params, query: Float64, key: Float64) -> None:
    """Positive, as large for queries as for keys, in order where dimensions can be exchanged."""
    assert a.norm is not None
    each = a.heads // a.groups
    wide = a.norm.across_heads
    ours, theirs = params["query_gain"], params["key_gain"]
    for side, gain in ((query, ours), (key, theirs)):
        side *= np.sign(gain)[:, None] if wide else np.sign(gain)
    ours, theirs = np.abs(ours), np.abs(theirs)
    real, imaginary, first = np.zeros(0, int), np.zeros(0, int), 0
    if a.rope is not None:
        real, imaginary = a.rope.pairs(a.qk_rank)
        first = a.rope.rotated(a.qk_rank)
    # Gains of one group, or of all heads, which share theirs.
    for g in range(a.groups if wide else 1):
        heads = slice(g * each, (g + 1) * each) if wide else slice(None)
        mine, yours = (ours[heads], theirs[g : g + 1]) if wide else (ours[None], theirs[None])
        squares = [np.mean(np.log(part), axis=0) for part in (mine, yours)]
        apart = (squares[0] - squares[1]) / 2
        if a.rope is not None:  # both dimensions of a pair by one number
            mean = (apart[real] + apart[imaginary]) / 2
            apart[real], apart[imaginary] = mean, mean
        mine, yours = mine / np.exp(apart), yours * np.exp(apart)
        order = np.arange(a.qk_rank)
        weight = np.mean(np.log(mine), axis=0) + np.mean(np.log(yours), axis=0)
        order[first:] = first + np.argsort(-weight[first:], kind="stable")
        flip = np.ones(a.qk_rank)
        for x, y in zip(real, imaginary, strict=True):
            if weight[y] > weight[x]:  # a quarter turn exchanges them
                order[x], order[y], flip[x] = y, x, -1.0
        groups = slice(g, g + 1) if wide else slice(None)
        query[heads], key[groups] = query[heads][..., order] * flip, key[groups][..., order] * flip
        mine, yours = mine[:, order], yours[:, order]
        if wide:
            ours[heads], theirs[g : g + 1] = mine, yours
        else:
            ours, theirs = mine[0], yours[0]
    params["query_gain"], params["key_gain"] = ours, theirs


def _order_heads(a: Architecture, params: Params) -> None:
    """Groups, and heads in a group, by decreasing size of W."""
    each = a.heads // a.groups
    whole = params if a.latent is None else unfold(params, a.latent, a.heads)
    value = np.repeat(whole["value"], each, axis=0)
    sizes = np.linalg.norm(value @ params["out"], axis=(1, 2)).reshape(a.groups, each)
    groups = np.argsort(-np.linalg.norm(sizes, axis=1), kind="stable")
    inside = np.argsort(-sizes[groups], axis=1, kind="stable")
    heads = (groups[:, None] * each + inside).ravel()
    wide = a.norm is not None and a.norm.across_heads
    for name, leaf in params.items():
        if name in ("key", "value", "key_bias", "value_bias") or (name == "key_gain" and wide):
            params[name] = leaf[groups]
        elif name in ("query", "out", "query_bias", "sink") or (name == "query_gain" and wide):
            params[name] = leaf[heads]
        elif name == "position_table":
            params[name] = leaf[:, heads]


def rows_of(params: Params, side: str, which: slice) -> Float64:
    """Projections, with their bias, where there is one, as a last row."""
    weight, bias = params[side][which], params.get(f"{side}_bias")
    return weight.copy() if bias is None else np.concatenate([weight, bias[which, None]], axis=1)


def put_rows(params: Params, side: str, which: slice, rows: Float64) -> None:
    d = params[side].shape[1]
    params[side][which] = rows[:, :d]
    if f"{side}_bias" in params:
        params[f"{side}_bias"][which] = rows[:, d]


def _of_size(side: Float64, axes: Any, head_dim: int) -> Float64:
    """Scaled to a mean square of one a dimension, over a head or over all."""
    size = np.linalg.norm(side, axis=axes, keepdims=True) if axes else np.linalg.norm(side)
    count = head_dim if axes else head_dim * len(side)
    return side * np.sqrt(count) / np.where(size > 0, size, 1.0)
