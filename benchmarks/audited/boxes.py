"""Attention as a port would write it: head by head, in NumPy, in a precision of one's choice.

Nothing here is imported from mhalearn's layers, so that a mistake there cannot hide here too. Every
setting is one number or one number a head; a fault is another setting, or another weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Hook = Callable[[Array, int, Array], Array]

DTYPES: dict[str, Any] = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}


@dataclass(frozen=True)
class Box:
    """A function from tokens (n, k, d) to outputs (n, k, e).

    weights: query (m, d, h), key and value (g, d, h), out (m, h, e), and biases or gains by name;
    where keys and values are read from a latent, latent (d, r), its gain, and rotary_key (d, h').
    """

    weights: Mapping[str, Array]
    scale: Array  # (m,)
    kv_of: tuple[int, ...]
    ahead: int | None = 0  # keys up to r + ahead are seen; None: all
    inverted: bool = False  # keys from r on
    window: int | None = None
    window_kind: str = "last"  # or "first": the first tokens; "far": those beyond it
    sink: Array | None = None  # (m,); -inf where a head has none
    cap: float | None = None
    cap_after_mask: bool = False
    frequencies: Array | None = None  # (pairs,)
    pairs: tuple[Array, Array] | None = None
    magnitude: float = 1.0
    query_shift: float = 0.0
    rotated: tuple[str, ...] = ("query", "key")
    norm: str | None = None  # "rms", "l2"
    epsilon: float = 0.0
    norm_last: bool = False
    norm_across: bool = False  # one root mean square for all heads
    latent_norm: bool = False
    slopes: Array | None = None  # (m,)
    table: Array | None = None  # (distances, m): a number a distance, as T5's buckets say
    attends_padding: bool = False
    idle_keys: int = 0
    joined_as_is: bool = False  # (heads, tokens) read as (tokens, heads)
    over_queries: bool = False
    adds_tokens: bool = False  # the input is added to the output
    round_values: str | None = None
    accumulate: str | None = None
    precision: str = "float64"
    hooks: Mapping[str, Hook] = field(default_factory=dict)

    def with_(self, **changes: Any) -> Box:
        return replace(self, **changes)

    def with_weight(self, name: str, value: Array | None) -> Box:
        kept = {key: array for key, array in self.weights.items() if key != name}
        return replace(self, weights=kept if value is None else kept | {name: value})

    def rounded(self, a: Array) -> Array:
        return np.asarray(a).astype(DTYPES[self.precision])

    def wide(self, a: Array) -> Array:
        """As matrix products see it: low precisions are summed in float32."""
        return a.astype(np.float64 if self.precision == "float64" else np.float32)

    def product(self, a: Array, b: Array) -> Array:
        return self.rounded(self.wide(a) @ self.wide(b))

    def __call__(self, x: Array, lengths: Array | None = None) -> Array:
        tokens = self.rounded(x)
        n, k, _ = tokens.shape
        lengths = np.full(n, k) if lengths is None else lengths
        heads = range(len(self.kv_of))
        values = [self._mixed(tokens, lengths, head) for head in heads]
        joined = np.concatenate([self.wide(v) for v in values], axis=-1)
        if self.joined_as_is:
            joined = np.stack([self.wide(v) for v in values], axis=1).reshape(joined.shape)
        out = np.concatenate([self.wide(self.rounded(self.weights["out"][i])) for i in heads])
        y = self.rounded(joined @ out)
        if "out_bias" in self.weights:
            y = self.rounded(y + self.rounded(self.weights["out_bias"]))
        if self.adds_tokens:
            y = self.rounded(y + tokens)
        return self._hooked("output", y, -1, x)

    def _hooked(self, place: str, a: Array, head: int, x: Array) -> Array:
        return self.hooks[place](a, head, x) if place in self.hooks else a

    def _project(self, side: str, head: int, tokens: Array) -> Array:
        index = head if side == "query" else self.kv_of[head]
        weight = self.rounded(self.weights[side][index])
        source = self._latents(tokens) if side != "query" and "latent" in self.weights else tokens
        vectors = self.product(source, weight)
        if side == "key" and "rotary_key" in self.weights:
            first = self.product(tokens, self.rounded(self.weights["rotary_key"]))
            vectors = np.concatenate([first, vectors], axis=-1)
        if f"{side}_bias" in self.weights:
            vectors = self.rounded(vectors + self.rounded(self.weights[f"{side}_bias"][index]))
        return self._hooked(side, vectors, head, tokens)

    def _latents(self, tokens: Array) -> Array:
        wide = self.wide(self.product(tokens, self.rounded(self.weights["latent"])))
        if self.latent_norm:
            square = (wide**2).mean(-1, keepdims=True)
            wide = wide / np.sqrt(square + wide.dtype.type(self.epsilon))
        return self.rounded(self.wide(self.rounded(wide)) * self.wide(self.weights["latent_gain"]))

    def _normalised(self, side: str, v: Array, tokens: Array) -> Array:
        wide = self.wide(v)
        square = (wide**2).mean(-1, keepdims=True)
        if self.norm_across:
            heads = range(len(self.weights[side]))
            alone = {"query": list(heads), "key": [self.kv_of.index(g) for g in heads]}[side]
            each = [self.wide(self._project(side, i, tokens)) ** 2 for i in alone]
            square = np.mean([one.mean(-1, keepdims=True) for one in each], axis=0)
        if self.norm == "l2":
            square = (wide**2).sum(-1, keepdims=True)
        found = wide / np.sqrt(square + wide.dtype.type(self.epsilon))
        gain = self.weights.get(f"{side}_gain")
        return self.rounded(found if gain is None else found * self.wide(self.rounded(gain)))

    def _turned(self, v: Array, shift: float) -> Array:
        """Pairs as complex numbers times e^(i w t)."""
        assert self.frequencies is not None
        assert self.pairs is not None
        first, second = self.pairs
        angle = (np.arange(v.shape[1]) + shift)[:, None] * self.frequencies
        cosine, sine = (self.wide(self.rounded(f(angle))) for f in (np.cos, np.sin))
        wide = self.wide(v)
        turned = (wide[..., first] + 1j * wide[..., second]) * (cosine + 1j * sine)
        found = wide.copy()
        found[..., first] = turned.real * self.magnitude
        found[..., second] = turned.imag * self.magnitude
        return self.rounded(found)

    def _vectors(self, side: str, head: int, tokens: Array) -> Array:
        v = self._project(side, head, tokens)
        shift = self.query_shift if side == "query" else 0.0
        turns = self.frequencies is not None and side in self.rotated
        if self.norm is not None and not self.norm_last:
            v = self._normalised(side, v, tokens)
        if turns:
            v = self._turned(v, shift)
        if self.norm is not None and self.norm_last:
            v = self._normalised(side, v, tokens)
        return v

    def _seen(self, k: int, length: int) -> Array:
        r, j = np.arange(k)[:, None], np.arange(k)[None]
        seen = np.ones((k, k), bool) if self.ahead is None else j <= r + self.ahead
        if self.inverted:
            seen = j >= r
        if self.window is not None:
            near = np.abs(r - j) < self.window
            if self.window_kind == "first":
                near = j < self.window
            if self.window_kind == "far":
                near = (np.abs(r - j) >= self.window) | (r == j)
            seen = seen & near
        return seen if self.attends_padding else seen & (j < length)

    def _logits(self, head: int, tokens: Array) -> Array:
        query, key = (self._vectors(side, head, tokens) for side in ("query", "key"))
        logits = self.product(query, np.swapaxes(key, 1, 2))
        logits = self.rounded(self.wide(logits) * np.float32(self.scale[head]))
        return (
            logits
            if self.precision != "float64"
            else (query @ np.swapaxes(key, 1, 2) * self.scale[head])
        )

    def _weights(self, head: int, tokens: Array, lengths: Array) -> Array:
        k = tokens.shape[1]
        logits = self.wide(self._hooked("logits", self._logits(head, tokens), head, tokens))
        seen = np.stack([self._seen(k, int(length)) for length in lengths])
        if self.cap is not None and self.cap_after_mask:
            logits = np.where(seen, logits, -1e9)
        if self.cap is not None:
            logits = self.cap * np.tanh(logits / self.cap)
        distance = np.arange(k)[None] - np.arange(k)[:, None]
        if self.slopes is not None:
            logits = logits - self.slopes[head] * np.abs(distance)
        if self.table is not None:
            logits = logits + self.table[distance + len(self.table) // 2, head]
        if self.cap is None or not self.cap_after_mask:
            logits = np.where(seen, logits, -1e30)
        return self._hooked("weights", self._softmax(logits, head), head, tokens)

    def _softmax(self, logits: Array, head: int) -> Array:
        axis = 1 if self.over_queries else 2
        top = logits.max(axis, keepdims=True)
        shares = np.exp(logits - top)
        total = shares.sum(axis, keepdims=True)
        if self.sink is not None:
            total = total + np.exp(np.minimum(self.sink[head] - top, 80.0))
        if self.idle_keys:
            total = total + self.idle_keys * np.exp(np.minimum(-top, 80.0))
        return shares / total

    def _mixed(self, tokens: Array, lengths: Array, head: int) -> Array:
        p = self.rounded(self._weights(head, tokens, lengths))
        v = self._project("value", head, tokens)
        if self.round_values == "int8":
            step = np.abs(self.wide(v)).max(-1, keepdims=True) / 127  # of each token
            v = self.rounded(np.round(self.wide(v) / step) * step)
        elif self.round_values is not None:
            v = self.rounded(v.astype(DTYPES[self.round_values]).astype(np.float64))
        if self.accumulate is not None:
            total = np.zeros((*v.shape[:2], v.shape[2]), DTYPES[self.accumulate])
            for j in range(v.shape[1]):
                term = self.wide(p[:, :, j, None]) * self.wide(v[:, None, j])
                total = (total.astype(np.float32) + term).astype(total.dtype)
            return self._hooked("mixed", self.rounded(total.astype(np.float32)), head, tokens)
        return self._hooked("mixed", self.product(p, v), head, tokens)
