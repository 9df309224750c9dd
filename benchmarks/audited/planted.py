"""Faults planted in boxes, one for each entry of the catalogue, with the head they concern.

A fault that a layer has no place for (a window that it has not) gives None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.audited.boxes import DTYPES, Box
from benchmarks.audited.right import bucket_table, dealt, halves

Array = NDArray[Any]


@dataclass(frozen=True)
class Planted:
    """name: what an audit should call it. said: words that its sentence should have."""

    name: str
    make: Callable[[Box], Box | None]
    heads: tuple[int, ...] = ()
    said: str = ""

    @property
    def is_scale(self) -> bool:
        return self.name.startswith("scale-")


def _heads(box: Box) -> int:
    return len(box.kv_of)


def _one(values: Array, head: int, value: float) -> Array:
    found = values.astype(np.float64).copy()
    found[head] = value
    return found


def _scale(box: Box, factor: float) -> Box:
    return box.with_(scale=box.scale * factor)


def _h(box: Box) -> int:
    return int(box.weights["query"].shape[2])


def _d(box: Box) -> int:
    return int(box.weights["query"].shape[1])


def _residual(box: Box) -> Box | None:
    return box.with_(adds_tokens=True) if box.weights["out"].shape[-1] == _d(box) else None


def _rope(change: Callable[[Box], Box]) -> Callable[[Box], Box | None]:
    return lambda box: None if box.frequencies is None else change(box)


def _with(there: str, change: Callable[[Box], Box]) -> Callable[[Box], Box | None]:
    return lambda box: None if getattr(box, there) is None else change(box)


def _causal(change: Callable[[Box], Box]) -> Callable[[Box], Box | None]:
    return lambda box: None if box.ahead is None else change(box)


def _gains(change: Callable[[Array], Array]) -> Callable[[Box], Box | None]:
    def make(box: Box) -> Box | None:
        if "query_gain" not in box.weights:
            return None
        for side in ("query_gain", "key_gain"):
            box = box.with_weight(side, change(box.weights[side]))
        return box

    return make


def _without(name: str) -> Callable[[Box], Box | None]:
    def make(box: Box) -> Box | None:
        if name not in box.weights:
            return None
        if name == "key_bias" and box.frequencies is None and box.norm is None:
            return None  # it cancels
        return box.with_weight(name, None)

    return make


def _layout(box: Box) -> Box:
    assert box.pairs is not None
    size = 2 * len(box.pairs[0])
    is_half = box.pairs[0][1] == 1
    return box.with_(pairs=dealt(size) if is_half else halves(size))


def _fraction(box: Box) -> Box | None:
    """Half of the dimensions where all were claimed, all where a part was."""
    assert box.frequencies is not None
    assert box.pairs is not None
    if box.magnitude != 1.0 or "rotary_key" in box.weights:
        return None
    h = _h(box)
    size = h // 2 if 2 * len(box.frequencies) == h else h
    base = 10000.0
    is_half = len(box.pairs[0]) < 2 or box.pairs[0][1] == 1
    return box.with_(
        frequencies=base ** (-np.arange(0, size, 2) / size),
        pairs=halves(size) if is_half else dealt(size),
    )


def _base(box: Box) -> Box | None:
    assert box.frequencies is not None
    if len(box.frequencies) < 2 or box.magnitude != 1.0:
        return None
    return box.with_(frequencies=box.frequencies ** (np.log(5e5) / np.log(1e4)))


def _scaling(box: Box) -> Box:
    """Positions divided by four; where YaRN was claimed, nothing of it."""
    assert box.frequencies is not None
    if box.magnitude == 1.0:
        return box.with_(frequencies=box.frequencies / 4)
    size = 2 * len(box.frequencies)
    return box.with_(frequencies=10000.0 ** (-np.arange(0, size, 2) / size), magnitude=1.0)


def _interleaved(box: Box) -> Box | None:
    groups = len(box.weights["key"])
    if not 1 < groups < _heads(box):
        return None
    return box.with_(kv_of=tuple(i % groups for i in range(_heads(box))))


def _exchange(one: str, other: str) -> Callable[[Box], Box | None]:
    def make(box: Box) -> Box | None:
        if box.weights[one].shape != box.weights[other].shape:
            return None
        weights = dict(box.weights)
        ends = ("", "_bias") if "value" in (one, other) else ("", "_bias", "_gain")
        for end in ends:
            a, b = weights.pop(one + end, None), weights.pop(other + end, None)
            weights |= {one + end: b} if b is not None else {}
            weights |= {other + end: a} if a is not None else {}
        return box.with_(weights=weights)

    return make


def _swap(i: int, j: int) -> Callable[[Box], Box | None]:
    def make(box: Box) -> Box:
        out = box.weights["out"].copy()
        out[[i, j]] = out[[j, i]]
        return box.with_weight("out", out)

    return make


def _zero(head: int) -> Callable[[Box], Box | None]:
    """What the head mixes is zero, whatever its output projection is."""

    def hook(a: Array, here: int, _: Array) -> Array:
        return np.zeros_like(a) if here == head else a

    return lambda box: box.with_(hooks={**box.hooks, "mixed": hook})


def _out_transposed(box: Box) -> Box | None:
    m, h, e = box.weights["out"].shape
    if m * h != e:
        return None
    return box.with_weight("out", box.weights["out"].reshape(e, e).T.reshape(m, h, e))


def _conv1d(side: str) -> Callable[[Box], Box | None]:
    def make(box: Box) -> Box | None:
        g, d, h = box.weights[side].shape
        if g * h != d:
            return None
        flat = np.concatenate(list(box.weights[side]), axis=1).T
        return box.with_weight(side, np.stack(np.split(flat, g, axis=1)))

    return make


def _fine(change: Callable[[Box], Box]) -> Callable[[Box], Box | None]:
    """No fault of a box that is as coarse itself."""
    return lambda box: None if box.precision == "bfloat16" else change(box)


def _slopes(box: Box) -> Box | None:
    if box.slopes is None:
        return None
    m = 2 * _heads(box)
    return box.with_(slopes=(2.0 ** (-8.0 / m * np.arange(1, m + 1)))[: _heads(box)])


def _sink_of(head: int, other: int) -> Callable[[Box], Box | None]:
    return _with("sink", lambda b: b.with_(sink=_one(b.sink, head, b.sink[other])))


def _whole_width(box: Box) -> Box | None:
    assert box.frequencies is not None
    size, h = 2 * len(box.frequencies), _h(box)
    if size == h or "rotary_key" in box.weights:
        return None
    return box.with_(frequencies=10000.0 ** (-np.arange(0, size, 2) / h))


def _rotated(box: Box) -> Box | None:
    if box.frequencies is not None or _h(box) % 2:
        return None
    h = _h(box)
    return box.with_(frequencies=10000.0 ** (-np.arange(0, h, 2) / h), pairs=halves(h))


def _layout_of_heads(box: Box) -> Box | None:
    """Heads take every so-many-th feature: their biases too."""
    weights = dict(box.weights)
    if "latent" in weights:
        return None
    for side in ("query", "key", "value"):
        for name in (side, f"{side}_bias"):
            if name in weights:
                whole = np.concatenate(list(weights[name]), axis=-1)
                g = len(weights[name])
                weights[name] = np.stack([whole[..., i::g] for i in range(g)])
    return box.with_(weights=weights)


def _misread(box: Box) -> Box | None:
    """q, k, v of each head in turn, read as three blocks."""
    weights = dict(box.weights)
    if len({weights[side].shape for side in ("query", "key", "value")}) > 1:
        return None
    m = _heads(box)
    for end in ("", "_bias"):
        if not all(f"{side}{end}" in weights for side in ("query", "key", "value")):
            continue
        rows = [weights[f"{side}{end}"][i] for i in range(m) for side in ("query", "key", "value")]
        for at, side in enumerate(("query", "key", "value")):
            weights[f"{side}{end}"] = np.stack(rows[at * m : (at + 1) * m])
    return box.with_(weights=weights)


def _swap_key_heads(box: Box) -> Box | None:
    groups = len(box.weights["key"])
    if groups < 2:
        return None
    sides = ("key",) if groups == _heads(box) else ("key", "value")
    for name in (f"{side}{end}" for side in sides for end in ("", "_bias")):
        if name in box.weights:
            leaf = box.weights[name].copy()
            leaf[[0, 1]] = leaf[[1, 0]]
            box = box.with_weight(name, leaf)
    return box


def _as_head_one(head: int) -> Callable[[Box], Box | None]:
    def make(box: Box) -> Box:
        for name in ("query", "query_bias"):
            if name in box.weights:
                leaf = box.weights[name].copy()
                leaf[head] = leaf[0]
                box = box.with_weight(name, leaf)
        met = tuple(box.kv_of[0] if i == head else g for i, g in enumerate(box.kv_of))
        return box.with_(kv_of=met)

    return make


def _one_direction(box: Box) -> Box | None:
    """Buckets that are for one direction alone."""
    if box.table is None:
        return None
    return box.with_(table=bucket_table(box.weights["position_table"], both=False))


def _rounded_weights(box: Box) -> Box:
    def hook(p: Array, _: int, __: Array) -> Array:
        return np.asarray(p.astype(DTYPES["bfloat16"]).astype(p.dtype))

    return box.with_(hooks={**box.hooks, "weights": hook})


def _no_bias_by_distance(box: Box) -> Box | None:
    none = box.slopes is None and box.table is None
    return None if none else box.with_(slopes=None, table=None)


def _of_head(box: Box) -> Box | None:
    usual = _h(box) ** -0.5
    return None if np.isclose(box.scale[0], usual) else box.with_(scale=np.full(_heads(box), usual))


PLANTED = (
    Planted("scale-missing", lambda b: b.with_(scale=np.ones(_heads(b)))),
    Planted("scale-doubled", lambda b: b.with_(scale=b.scale**2)),
    Planted("scale-of-width", lambda b: b.with_(scale=np.full(_heads(b), _d(b) ** -0.5))),
    Planted("scale-of-head", _of_head),
    Planted("scale-other", lambda b: _scale(b, 1.3)),
    Planted("causal-missing", _causal(lambda b: b.with_(ahead=None))),
    Planted("causal-sees-next", _causal(lambda b: b.with_(ahead=1))),
    Planted("causal-misses-self", _causal(lambda b: b.with_(ahead=-1))),
    Planted("window-missing", _with("window", lambda b: b.with_(window=None))),
    Planted("window-off-by-one", _with("window", lambda b: b.with_(window=b.window + 1))),
    Planted("window-off-by-one", _with("window", lambda b: b.with_(window=b.window - 1))),
    Planted("window-wrong-end", _with("window", lambda b: b.with_(window_kind="first"))),
    Planted("sink-missing", _with("sink", lambda b: b.with_(sink=np.full(_heads(b), -np.inf)))),
    Planted("sink-missing", _with("sink", lambda b: b.with_(sink=_one(b.sink, 1, -np.inf))), (1,)),
    Planted("sink-wrong-head", _sink_of(2, 0), (2,)),
    Planted("softcap-missing", _with("cap", lambda b: b.with_(cap=None))),
    Planted("softcap-after-mask", _with("cap", _causal(lambda b: b.with_(cap_after_mask=True)))),
    Planted("rotary-missing", _rope(lambda b: b.with_(frequencies=None))),
    Planted("rotary-layout", _rope(_layout)),
    Planted("rotary-base", _rope(_base)),
    Planted("rotary-fraction", _rope(_fraction)),
    Planted("rotary-positions", _rope(lambda b: b.with_(query_shift=1.0))),
    Planted("rotary-scaling", _rope(_scaling)),
    Planted("rotary-sign", _rope(lambda b: b.with_(frequencies=-b.frequencies))),
    Planted("groups-interleaved", _interleaved),
    Planted("key-value-exchanged", _exchange("key", "value")),
    Planted("query-key-exchanged", _exchange("query", "key")),
    Planted("heads-swapped", _swap(0, 2), said="heads 1 and 3"),
    Planted("head-zeroed", _zero(1), (1,)),
    Planted("bias-missing", _without("query_bias"), said="query bias"),
    Planted("bias-missing", _without("key_bias"), said="key bias"),
    Planted("bias-missing", _without("value_bias"), said="value bias"),
    Planted("bias-missing", _without("out_bias"), said="output bias"),
    Planted("norm-missing", _with("norm", lambda b: b.with_(norm=None))),
    Planted("norm-after-rotation", _with("norm", _rope(lambda b: b.with_(norm_last=True)))),
    Planted("norm-epsilon", _with("norm", lambda b: b.with_(epsilon=1e-1))),
    Planted("norm-gain-offset", _gains(lambda g: g - 1.0)),
    Planted("alibi-slopes", _slopes),
    Planted("padding-attended", lambda b: b.with_(attends_padding=True)),
    Planted("softmax-too-long", lambda b: b.with_(idle_keys=5)),
    Planted("softmax-over-queries", lambda b: b.with_(over_queries=True)),
    Planted("values-rounded", _fine(lambda b: b.with_(round_values="bfloat16"))),
    Planted("values-rounded", lambda b: b.with_(round_values="int8"), said="int8"),
    Planted("sum-rounded", _fine(lambda b: b.with_(accumulate="bfloat16"))),
    Planted("out-transposed", _out_transposed),
    Planted("weights-transposed", _conv1d("query"), said="query"),
    Planted("weights-transposed", _conv1d("value"), said="value"),
    Planted("scale-inverted", lambda b: b.with_(scale=1 / b.scale)),
    Planted("softcap-other", _with("cap", lambda b: b.with_(cap=b.cap * 1.5))),
    Planted("softcap-added", lambda b: None if b.cap is not None else b.with_(cap=1.5)),
    Planted("causal-added", lambda b: None if b.ahead is not None else b.with_(ahead=0)),
    Planted("causal-inverted", _causal(lambda b: b.with_(inverted=True))),
    Planted("window-other", _with("window", lambda b: b.with_(window=b.window - 3))),
    Planted("window-added", lambda b: None if b.window is not None else b.with_(window=5)),
    Planted("sink-scaled", _with("sink", lambda b: b.with_(sink=b.sink * b.scale))),
    Planted("rotary-added", _rotated),
    Planted("rotary-width", _rope(_whole_width)),
    Planted("rotary-magnitude", lambda b: None if b.magnitude == 1 else b.with_(magnitude=1.0)),
    Planted("rotary-one-side", _rope(lambda b: b.with_(rotated=("query",))), said="keys"),
    Planted("norm-gain-missing", _gains(np.ones_like)),
    Planted("norm-across-heads", _with("norm", lambda b: b.with_(norm_across=True))),
    Planted("latent-norm-missing", lambda b: b.with_(latent_norm=False) if b.latent_norm else None),
    Planted("position-bias-missing", _no_bias_by_distance),
    Planted("t5-buckets", _one_direction),
    Planted("key-heads-swapped", _swap_key_heads, said="key heads 1 and 2"),
    Planted("head-index-lost", _as_head_one(2), (2,)),
    Planted("features-interleaved", _layout_of_heads),
    Planted("fused-misread", _misread),
    Planted("heads-not-transposed", lambda b: b.with_(joined_as_is=True), said="joined"),
    Planted("softmax-rounded", _fine(_rounded_weights)),
    Planted("tokens-added", _residual, said="residual path"),
)
