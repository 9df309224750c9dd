"""Faults of which head meets which: groups, exchanges, orders, and biases that are dropped."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

import numpy as np

from mhalearn._runtime.types import Float64
from mhalearn.auditing.fault import Context, Edit, Fault
from mhalearn.auditing.reading import Reading

# Heads that are tried in pairs: those in whose outputs most of the residual lies.
_SUSPECTS = 5
_BIASES = {"query": "query", "key": "key", "value": "value", "out": "output"}


def _interleaved_groups(r: Reading, _: Context) -> Iterable[Edit]:
    if not 1 < r.groups < r.n_heads:
        return
    other = tuple(i % r.groups for i in range(r.n_heads))
    said = f"heads meet the {r.groups} key heads in turn instead of in blocks"
    yield Edit("groups-interleaved", said, lambda q: q.with_(kv_of=other))


def _kv_exchanged(r: Reading, _: Context) -> Iterable[Edit]:
    if not r.factored or r.params["key"].shape != r.params["value"].shape:
        return
    said = "key and value projections are exchanged"
    weights = {"key": r.params["value"], "value": r.params["key"]}
    biases = {"key_bias": r.params.get("value_bias"), "value_bias": r.params.get("key_bias")}
    both = weights | biases
    yield Edit("key-value-exchanged", said, lambda q: q.with_params(**both))
    if any(bias is not None for bias in biases.values()):
        words = f"{said}, their biases not"
        yield Edit("key-value-exchanged", words, lambda q: q.with_params(**weights))


def _qk_exchanged(r: Reading, _: Context) -> Iterable[Edit]:
    said = "queries and keys are exchanged"
    if not r.factored:
        if "query_bias" not in r.params:
            theta = np.ascontiguousarray(r.params["query"].swapaxes(1, 2))
            yield Edit("query-key-exchanged", said, lambda q: q.with_params(query=theta))
        return
    if r.params["key"].shape != r.params["query"].shape:
        return
    pairs = (("query", "key"), ("query_bias", "key_bias"), ("query_gain", "key_gain"))
    changes: dict[str, Float64 | None] = {}
    for one, other in pairs:
        changes |= {one: r.params.get(other), other: r.params.get(one)}
    yield Edit("query-key-exchanged", said, lambda q: q.with_params(**changes))


def _exchange(leaf: Float64, i: int, j: int) -> Float64:
    order = np.arange(len(leaf))
    order[[i, j]] = j, i
    return leaf[order]


def _swapped(r: Reading, context: Context) -> Iterable[Edit]:
    for i, j in combinations(sorted(context.suspects[:_SUSPECTS]), 2):
        said = f"heads {i + 1} and {j + 1} go through each other's output projection"
        out = _exchange(r.params["out"], i, j)
        yield Edit("heads-swapped", said, lambda q, out=out: q.with_params(out=out), by_head=False)  # type: ignore[misc]
        if r.groups == r.n_heads or not r.factored or r.kv_of[i] == r.kv_of[j]:
            continue
        said = f"the queries of heads {i + 1} and {j + 1} are exchanged"
        names = [name for name in ("query", "query_bias") if name in r.params]
        changes = {name: _exchange(r.params[name], i, j) for name in names}
        yield Edit("heads-swapped", said, lambda q, c=changes: q.with_params(**c), by_head=False)  # type: ignore[misc]


def _swapped_groups(r: Reading, context: Context) -> Iterable[Edit]:
    """Key heads, value heads, or both, in another order."""
    if not r.factored or r.groups < 2:
        return
    suspected = sorted({r.kv_of[i] for i in context.suspects[:_SUSPECTS]})
    for i, j in combinations(suspected, 2):
        for sides in (("key",), ("value",), ("key", "value")):
            if r.groups == r.n_heads and len(sides) == 2:
                continue
            which = " and ".join(sides)
            said = f"the {which} projections of key heads {i + 1} and {j + 1} are exchanged"
            names = [f"{side}{end}" for side in sides for end in ("", "_bias")]
            changes = {n: _exchange(r.params[n], i, j) for n in names if n in r.params}
            yield Edit(
                "key-heads-swapped",
                said,
                lambda q, c=changes: q.with_params(**c),  # type: ignore[misc]
                by_head=False,
            )


def _zeroed(r: Reading, _: Context) -> Iterable[Edit]:
    none = np.zeros_like(r.params["out"])
    yield Edit("head-zeroed", "the head's output is zero", lambda q: q.with_params(out=none))


def _first_head(r: Reading, _: Context) -> Iterable[Edit]:
    """Attention of head 1 in the place of another's, with the other's output projection."""
    if r.n_heads == 1:
        return
    names = [name for name in ("query", "query_bias") if name in r.params]
    changes = {name: np.broadcast_to(r.params[name][:1], r.params[name].shape) for name in names}
    first = (r.kv_of[0],) * r.n_heads
    said = "the head computes what head 1 does"
    yield Edit("head-index-lost", said, lambda q: q.with_params(**changes).with_(kv_of=first))


def _bias(r: Reading, _: Context) -> Iterable[Edit]:
    for side, word in _BIASES.items():
        name = f"{side}_bias"
        if name in r.params and r.params[name].any():
            changes = {name: None}
            yield Edit(
                "bias-missing",
                f"the {word} bias is missing",
                lambda q, changes=changes: q.with_params(**changes),  # type: ignore[misc]
                by_head=False,
            )


FAULTS = (
    Fault(
        "groups-interleaved",
        "groups",
        ("onnx/onnx#7274", "apple/axlearn#842"),
        _interleaved_groups,
        "heads of a group interleaved instead of blocked",
    ),
    Fault(
        "key-value-exchanged",
        "exchange",
        ("jsbaan/transformer-from-scratch#1",),
        _kv_exchanged,
        "keys for values",
    ),
    Fault("query-key-exchanged", "exchange", (), _qk_exchanged, "queries for keys"),
    Fault(
        "heads-swapped",
        "heads",
        ("karpathy/llm.c#795",),
        _swapped,
        "two heads in each other's place",
    ),
    Fault(
        "key-heads-swapped",
        "groups",
        ("alibaba/ChatLearn#277",),
        _swapped_groups,
        "two key heads in each other's place",
    ),
    Fault("head-zeroed", "heads", ("vllm-project/vllm-ascend#3571",), _zeroed, "a head gives zero"),
    Fault(
        "head-index-lost",
        "heads",
        ("BobMcDear/attorch#14",),
        _first_head,
        "a head computes what head 1 does",
    ),
    Fault(
        "bias-missing",
        "bias",
        ("sbryngelson/ANEForge#253", "OminiX-ai/OminiX-MLX#7", "ServiceNow/Fast-LLM#398"),
        _bias,
        "one of the four biases is dropped",
    ),
)
