"""A right box: the numbers of a layer, and none of its code."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.audited.boxes import Box
from mhalearn.layer.layer import AttentionLayer

Array = NDArray[Any]
# Distances that a table by buckets is written out for.
REACH = 64


def box_of(layer: Any, precision: str = "float64") -> Box:
    """A right box: the numbers of a layer, and none of its code."""
    if isinstance(layer, AttentionLayer):
        return _matrices(layer, precision)
    a = layer.architecture
    m, h = a.n_heads, a.head_dim
    groups = m if a.kv_heads is None else a.kv_heads
    frequencies = pairs = None
    magnitude = 1.0
    if a.rope is not None:
        size = int(h * a.rope.fraction)
        frequencies = a.rope.base ** (-np.arange(0, size, 2) / size)
        if a.rope.scaling is not None:
            frequencies, magnitude = _yarn(frequencies, a.rope.scaling, a.rope.base)
        pairs = halves(size) if a.rope.layout == "half" else dealt(size)
    slopes = table = None
    if a.position_bias is not None and a.position_bias.name == "alibi":
        slopes = 2.0 ** (-8.0 / m * np.arange(1, m + 1))
    elif a.position_bias is not None:
        table = bucket_table(layer.params["position_table"], both=not a.causal)
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
        magnitude=magnitude,
        table=table,
        latent_norm=a.latent is not None,
        norm=None if not a.qk_norm else a.qk_norm.kind,
        epsilon=a.latent.epsilon if a.latent else a.qk_norm.epsilon if a.qk_norm else 0.0,
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


def _yarn(frequencies: Array, scaling: Any, base: float) -> tuple[Array, float]:
    """As YaRN's authors write it: between the dimensions that turn 32 times and once."""
    size, length = 2 * len(frequencies), scaling.original_max_position_embeddings
    ends = [
        size * np.log(length / (turns * 2 * np.pi)) / (2 * np.log(base))
        for turns in (scaling.beta_fast, scaling.beta_slow)
    ]
    low, high = max(np.floor(ends[0]), 0), min(np.ceil(ends[1]), size - 1)
    slow = np.clip((np.arange(size // 2) - low) / max(high - low, 1e-3), 0, 1)
    mixed = frequencies / scaling.factor * slow + frequencies * (1 - slow)
    return mixed, 0.1 * float(np.log(scaling.factor)) + 1.0


def bucket_table(table: Array, *, both: bool) -> Array:
    """Numbers (distances, m) for keys from REACH - 1 before a row to as many after it."""
    buckets = len(table)
    ahead = np.arange(-REACH + 1, REACH)  # of a key, seen from its row
    start = np.zeros(len(ahead), int)
    if both:
        buckets //= 2
        start = np.where(ahead > 0, buckets, 0)
        far = np.abs(ahead)
    else:
        far = np.maximum(-ahead, 0)
    exact = buckets // 2
    with np.errstate(divide="ignore"):
        rising = np.log(far / exact) / np.log(128 / exact) * (buckets - exact)
    large = np.minimum(exact + np.where(far < exact, 0, rising).astype(int), buckets - 1)
    return np.asarray(table[start + np.where(far < exact, far, large)])
