"""Of a student with surplus heads, those that do something: copies made one, idle ones dropped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.types import Float64
from mhalearn.layer.architecture import Architecture

# Parameters that each query head has, and that each group of heads shares.
_OF_HEADS = (
    *("query", "out", "query_bias", "sink", "slope", "meet", "query_epsilon"),
    *("reach", "sink_weight"),
)
_OF_GROUPS = ("key", "value", "key_bias", "value_bias", "turn", "key_epsilon", "spin")


class Heads(NamedTuple):
    """Projections of some heads, and the class they belong to."""

    architecture: Architecture
    params: dict[str, Float64]


def keep_distinct_heads(
    architecture: Architecture,
    params: Mapping[str, Float64],
    patterns: Float64,
    *,
    alike: float,
    small: float,
    most: int | None,
) -> Heads:
    """Groups of heads that do something, the largest first; at most so many.

    patterns: (n, k, m, k), what heads do on some examples. Heads whose patterns differ by less than
    `alike`, relative to how they vary, are one: it gets the sum of their W, cut to its rank. Groups
    with a W below `small` of the largest are dropped. Where keys are shared, copies stay: which
    heads of one group are copies of which of another is not looked at.
    """
    found = {name: np.array(leaf, np.float64) for name, leaf in params.items()}
    each = architecture.heads // architecture.groups
    if each == 1:
        _merge_copies(found, patterns, alike, small)
    sizes = np.linalg.norm(_norms(found, each).reshape(-1, each), axis=1)
    order = np.argsort(-sizes, kind="stable")
    groups = [int(g) for g in order if sizes[g] > small * sizes.max()] or [int(order[0])]
    return _choose(architecture, found, np.array(groups[:most]), each)


def fill_with_heads(heads: Heads, params: Mapping[str, Float64], groups: int) -> Heads:
    """With groups of `params`, a start, added until there are so many."""
    a = heads.architecture
    each, missing = a.heads // a.groups, groups - a.groups
    if missing <= 0:
        return heads
    added = _choose(a, dict(params), np.arange(missing), each).params
    filled = {
        name: _join(name, leaf, added[name]) if name in added else leaf
        for name, leaf in heads.params.items()
    }
    return Heads(_with_groups(a, groups, each), filled)


def _join(name: str, leaf: Float64, added: Float64) -> Float64:
    if name == "position_table":
        return np.concatenate([leaf, added], axis=1)
    return np.concatenate([leaf, added]) if name in _OF_HEADS + _OF_GROUPS else leaf


def _with_groups(a: Architecture, groups: int, each: int) -> Architecture:
    return replace(a, n_heads=groups * each, kv_heads=groups if each > 1 else None)


def _choose(
    a: Architecture, params: dict[str, Float64], groups: NDArray[np.int64], each: int
) -> Heads:
    heads = (groups[:, None] * each + np.arange(each)).ravel()
    chosen = dict(params)
    for name, leaf in params.items():
        if name in _OF_GROUPS:
            chosen[name] = leaf[groups]
        elif name in _OF_HEADS:
            chosen[name] = leaf[heads]
        elif name == "position_table":
            chosen[name] = leaf[:, heads]
    return Heads(_with_groups(a, len(groups), each), chosen)


def _norms(params: dict[str, Float64], each: int) -> Float64:
    value = np.repeat(params["value"], each, axis=0)
    return np.linalg.norm(value @ params["out"], axis=(1, 2))


def _merge_copies(
    params: dict[str, Float64], patterns: Float64, alike: float, small: float
) -> None:
    """The largest of heads that attend alike gets the sum of their W, the others nothing."""
    sizes = _norms(params, 1)
    order = [int(i) for i in np.argsort(-sizes, kind="stable") if sizes[i] > small * sizes.max()]
    flat = np.moveaxis(patterns, 2, 0).reshape(len(sizes), -1)
    varied = flat - flat.mean(axis=0)
    scale = max(float(np.mean(np.sum(varied[order] ** 2, axis=1))), 1e-300)
    kept: list[int] = []
    for i in order:
        near = [j for j in kept if np.sum((flat[i] - flat[j]) ** 2) < alike * scale]
        if not near:
            kept.append(i)
            continue
        _add_w(params, near[0], i)
        params["out"][i] = 0.0


def _add_w(params: dict[str, Float64], to: int, what: int) -> None:
    """W of two heads in one, cut to the rank that a head has; value biases with it."""
    rows = [params["value"][i] for i in (to, what)]
    if "value_bias" in params:
        rows = [
            np.concatenate([row, params["value_bias"][i][None]])
            for row, i in zip(rows, (to, what), strict=True)
        ]
    summed = rows[0] @ params["out"][to] + rows[1] @ params["out"][what]
    left, values, right = np.linalg.svd(summed, full_matrices=False)
    h = params["out"].shape[1]
    rank = min(h, len(values))
    root = np.sqrt(values[:rank])
    value, out = np.zeros_like(rows[0]), np.zeros_like(params["out"][to])
    value[:, :rank], out[:rank] = left[:, :rank] * root, root[:, None] * right[:rank]
    d = params["value"].shape[1]
    params["value"][to], params["out"][to] = value[:d], out
    if "value_bias" in params:
        params["value_bias"][to] = value[d]


def params_of_head(params: Mapping[str, Any], i: int, each: int) -> dict[str, Any]:
    """Those of one query head: its own, its group's, and what all share."""
    group, own = i // each, {}
    for name, leaf in params.items():
        if name in _OF_GROUPS:
            leaf = leaf[group : group + 1]
        elif name in _OF_HEADS:
            leaf = leaf[i : i + 1]
        elif name == "position_table":
            leaf = leaf[:, i : i + 1]
        own[name] = leaf
    return own


def own_groups(a: Architecture, params: Mapping[str, Any]) -> Heads:
    """The same heads, each with keys and values of its own."""
    each = a.heads // a.groups
    found = {
        name: np.repeat(leaf, each, axis=0) if name in _OF_GROUPS else np.asarray(leaf)
        for name, leaf in params.items()
    }
    return Heads(replace(a, kv_heads=None), found)


def split_by_group(params: Mapping[str, Any], a: Architecture) -> dict[str, Any]:
    """With a first axis of groups of heads before the axes that parameters of one group have."""

    def split(name: str, leaf: Any) -> Any:
        if name == "position_table":
            return leaf.reshape(len(leaf), a.groups, -1).swapaxes(0, 1)
        return leaf.reshape(a.groups, -1, *leaf.shape[1:])

    return {name: split(name, leaf) for name, leaf in params.items()}


def join_groups(params: Mapping[str, Any]) -> dict[str, Any]:
    """What `split_by_group` has split."""

    def join(name: str, leaf: Any) -> Any:
        if name == "position_table":
            return leaf.swapaxes(0, 1).reshape(leaf.shape[1], -1)
        return leaf.reshape(-1, *leaf.shape[2:])

    return {name: join(name, leaf) for name, leaf in params.items()}
