"""Faults planted in boxes, one for each entry of the catalogue, with the head they concern.

A fault that a layer has no place for (a window that it has not) gives None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.audited.boxes import Box
from mhalearn.layer.layer import AttentionLayer

Array = NDArray[Any]


@dataclass(frozen=True)
class Planted:
    """name: what an audit should call it. said: words that its sentence should have."""

    name: str
    make: Callable[[Box], Box | None]
    heads: tuple[int, ...] = ()
    said: str = ""


def box_of(layer: Any, precision: str = "float64") -> Box:
    """A right box: the numbers of a layer, and none of its code."""
    if isinstance(layer, AttentionLayer):
        return _matrices(layer, precision)
    a = layer.architecture
    m, h = a.n_heads, a.head_dim
    groups = m if a.kv_heads is None else a.kv_heads
    frequencies = pairs = None
    if a.rope is not None:
        size = int(h * a.rope.fraction)
        frequencies = a.rope.base ** (-np.arange(0, size, 2) / size)
        if a.rope.scaling is not None:
            frequencies = frequencies / a.rope.scaling.factor
        pairs = halves(size) if a.rope.layout == "half" else dealt(size)
    slopes = None
    if a.position_bias is not None:
        slopes = 2.0 ** (-8.0 / m * np.arange(1, m + 1))
    return Box(
        {name: np.asarray(leaf) for name, leaf in layer.params.items()},
        np.full(m, h**-0.5 if a.logit_scale is None else a.logit_scale),
        tuple(i * groups // m for i in range(m)),
        ahead=0 if a.causal else None,
        window=a.window,
        sink=layer.params.get("sink"),
        cap=a.softcap,
        frequencies=frequencies,
        pairs=pairs,
        norm=None if not a.qk_norm else a.qk_norm.kind,
        epsilon=0.0 if not a.qk_norm else a.qk_norm.epsilon,
        slopes=slopes,
        precision=precision,
    )


def _matrices(layer: AttentionLayer, precision: str) -> Box:
    """A layer that carries its factors: (m, h, d) of queries, keys and values."""
    assert layer.factors is not None
    weights = {name: leaf.astype(np.float64) for name, leaf in layer.factors.items()}
    for side in ("query", "key", "value"):
        weights[side] = np.swapaxes(weights[side], 1, 2)
    m, _, h = weights["query"].shape
    ahead = 0 if layer.causal else None
    return Box(weights, np.full(m, h**-0.5), tuple(range(m)), ahead=ahead, precision=precision)


def halves(size: int) -> tuple[Array, Array]:
    return np.arange(size // 2), np.arange(size // 2, size)


def dealt(size: int) -> tuple[Array, Array]:
    return np.arange(0, size, 2), np.arange(1, size, 2)


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
    if len(box.frequencies) < 2:
        return None
    return box.with_(frequencies=box.frequencies ** (np.log(5e5) / np.log(1e4)))


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
    def make(box: Box) -> Box:
        out = box.weights["out"].copy()
        out[head] = 0
        return box.with_weight("out", out)

    return make


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


PLANTED = (
    Planted("scale-missing", lambda b: b.with_(scale=np.ones(_heads(b)))),
    Planted("scale-doubled", lambda b: b.with_(scale=b.scale**2)),
    Planted("scale-of-width", lambda b: _scale(b, (_h(b) / _d(b)) ** 0.5)),
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
    Planted("rotary-scaling", _rope(lambda b: b.with_(frequencies=b.frequencies / 4))),
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
)
