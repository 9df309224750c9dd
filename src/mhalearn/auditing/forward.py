"""The forward pass of a reading, in NumPy: every fault is another branch of one short program.

Compiled programs would cost a second for each of hundreds of readings; here a reading costs its
multiplications, and projections that two readings share are made once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.programs import float64
from mhalearn._runtime.types import Float64
from mhalearn.auditing.reading import Reading

_FORMATS: dict[str, Any] = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float32": np.float32,
}


def round_to(name: str, a: Float64) -> Float64:
    """As stored in a format; int8 with steps by the largest entry of a token, head or sequence."""
    if name == "float64":
        return a
    if name.startswith("int8"):
        axes = {"int8 token": (3,), "int8 head": (2, 3), "int8 sequence": (1, 2, 3)}[name]
        step = np.abs(a).max(axis=axes, keepdims=True) / 127
        step = np.where(step > 0, step, 1.0)
        return np.asarray(np.round(a / step) * step, np.float64)
    with np.errstate(over="ignore"):
        return np.asarray(a.astype(_FORMATS[name]), np.float64)


class Forward:
    """Readings computed on some sequences. Arrays of heads are (b, m, k, h).

    precision: a format that every step is rounded to, as a box of that precision would.
    memory: the tokens that keys and values are of, (b, k, d'), where these are a second sequence's,
    and memory_rows (b, k): which of them are none that pad. longest: tokens of the longest one, of
    all sequences: those past it are there for no box.
    """

    def __init__(
        self,
        x: Float64,
        lengths: NDArray[Any],
        precision: str = "float64",
        positions: Float64 | None = None,
        memory: Float64 | None = None,
        memory_rows: NDArray[np.bool_] | None = None,
        longest: int | None = None,
    ) -> None:
        self.precision = precision
        self.x = self._round(np.asarray(x, np.float64))
        self.memory = None if memory is None else self._round(memory)
        self.lengths = lengths
        b, k, _ = self.x.shape
        self.placed = positions is not None
        self.positions = np.broadcast_to(np.arange(k, dtype=np.float64), (b, k))
        if positions is not None:
            self.positions = positions
        self.rows = np.arange(k) < lengths[:, None]
        self.keys = self.rows if memory_rows is None else memory_rows
        self.longest = longest or int(self.keys.sum(1).max(initial=0))
        self._kept: dict[Any, tuple[Any, Float64]] = {}

    def some(self, chosen: Any, precision: str = "float64") -> Forward:
        """Of some of the sequences."""
        places = self.positions[chosen] if self.placed else None
        beside = None if self.memory is None else self.memory[chosen]
        there = None if self.memory is None else self.keys[chosen]
        return Forward(
            self.x[chosen], self.lengths[chosen], precision, places, beside, there, self.longest
        )

    def _round(self, a: Float64) -> Float64:
        return a if self.precision == "float64" else round_to(self.precision, a)

    def _once(self, key: Any, held: Any, make: Callable[[], Float64]) -> Float64:
        """Made once for each key; `held` keeps alive what the key's ids stand for."""
        if key not in self._kept:
            if len(self._kept) > 48:
                self._kept.clear()
            self._kept[key] = (held, make())
        return self._kept[key][1]

    def outputs(self, reading: Reading, heads: Sequence[int] | None = None) -> Float64:
        """(b, k, e); of some heads, without what is added beside, where they are given."""
        mixed, out = self.mixed(reading), self._round(np.asarray(reading.params["out"]))
        if heads is not None:
            mixed, out = mixed[:, list(heads)], out[list(heads)]
        b, m, k, v = mixed.shape
        joined = mixed.transpose(0, 2, 1, 3).reshape(b * k, m * v)
        found = self._round(joined @ out.reshape(m * v, -1)).reshape(b, k, -1)
        return found if heads is not None else self.with_beside(reading, found)

    def with_beside(self, reading: Reading, outputs: Float64) -> Float64:
        """Outputs of heads with what is added to them: a bias, the tokens on a residual path."""
        bias = reading.params.get("out_bias")
        if bias is not None:
            outputs = self._round(outputs + self._round(bias))
        return self._round(outputs + self.x) if reading.adds_tokens else outputs

    def contributions(self, reading: Reading, onto: Float64) -> Float64:
        """What each head adds to the outputs, times a matrix (e, s): (m, b k, s)."""
        mixed, out = self.mixed(reading), reading.params["out"]
        seen = self._once(("out", id(out), id(onto)), (out, onto), lambda: out @ onto)
        b, m, k, v = mixed.shape
        return mixed.transpose(1, 0, 2, 3).reshape(m, b * k, v) @ seen

    def mixed(self, reading: Reading) -> Float64:
        """Means of the values by the weights, of every head."""
        found = self._mixed(reading)
        if reading.untransposed != "joined":
            return found
        b, m, k, v = found.shape
        return np.ascontiguousarray(found.reshape(b, k, m, v).transpose(0, 2, 1, 3))

    def _mixed(self, reading: Reading) -> Float64:
        p, values = self._round(self.weights(reading)), self.values(reading)
        if "weights" in reading.rounding:
            p = round_to(reading.rounding["weights"], p)
        if "sum" not in reading.rounding:
            return self._round(p @ values)
        name, total = reading.rounding["sum"], np.zeros(values.shape)
        for j in range(values.shape[2]):
            total = round_to(name, total + p[..., j : j + 1] * values[:, :, j : j + 1])
        return total

    def values(self, reading: Reading) -> Float64:
        """Of every head, (b, m, k, v); of one key head for all, (b, 1, k, v)."""
        made_in = reading.rounding.get("made in", self.precision)
        found = self._heads(reading, self._project(reading, "value", made_in))
        name = reading.rounding.get("values")
        return found if name is None else round_to(name, found)

    def weights(self, reading: Reading) -> Float64:
        """Attention weights (b, m, k, k)."""
        logits = self._logits(reading)
        seen = self._seen(reading)[:, None]
        if reading.softcap is not None:
            if reading.cap_after_mask:
                logits = np.where(seen, logits, -1e9)
            logits = reading.softcap * np.tanh(logits / reading.softcap)
        bias = self._bias(reading)
        logits = logits if bias is None else logits + bias
        if reading.softcap is None or not reading.cap_after_mask:
            logits = np.where(seen, logits, -np.inf)
        return self._softmax(reading, logits)

    def _softmax(self, reading: Reading, logits: Float64) -> Float64:
        axis = 2 if reading.over_queries else 3
        top = logits.max(axis=axis, keepdims=True)
        sinks = reading.params.get("sink")
        if sinks is not None:
            top = np.maximum(top, sinks[:, None, None])
        if reading.idle_keys:
            top = np.maximum(top, 0.0)
        top = np.where(np.isfinite(top), top, 0.0)
        shares = np.exp(logits - top)
        total = shares.sum(axis=axis, keepdims=True)
        if sinks is not None:
            total = total + np.exp(sinks[:, None, None] - top)
        if reading.idle_keys:
            total = total + reading.idle_keys * np.exp(-top)
        p = shares / np.where(total > 0, total, 1.0)
        if reading.empty == "uniform":
            none = (total == 0) & np.ones_like(p, bool)
            p = np.where(none, 1.0 / p.shape[-1], p)
        return p

    def _logits(self, reading: Reading) -> Float64:
        query = self._vectors(reading, "query")
        key = self._heads(reading, self._vectors(reading, "key"))
        return self._round(self._round(query @ key.swapaxes(2, 3)) * reading.scale)

    def _heads(self, reading: Reading, grouped: Float64) -> Float64:
        """Keys or values of every head, (b, g, k, h) -> (b, m, k, h)."""
        if reading.kv_of == tuple(range(grouped.shape[1])):
            return grouped
        if grouped.shape[1] == 1:
            return grouped
        return grouped[:, list(reading.kv_of)]

    def _project(self, reading: Reading, side: str, precision: str | None = None) -> Float64:
        weight, bias = reading.params[side], reading.params.get(f"{side}_bias")
        name = precision or self.precision

        tokens = self._tokens(reading, side)
        shared = reading.params.get("rotary_key") if side == "key" else None

        def make() -> Float64:
            g, d, h = weight.shape
            b, k, _ = tokens.shape
            flat = round_to(name, weight).transpose(1, 0, 2).reshape(d, g * h)
            found = round_to(name, round_to(name, tokens).reshape(b * k, d) @ flat)
            found = found.reshape(b, k, g, h)
            found = found if bias is None else round_to(name, found + round_to(name, bias))
            if shared is not None:
                source = round_to(name, self.x if self.memory is None else self.memory)
                first = round_to(name, source @ round_to(name, shared))[:, :, None]
                found = np.concatenate([np.repeat(first, g, axis=2), found], axis=-1)
            if reading.untransposed == "split":
                return np.ascontiguousarray(found.reshape(b, found.shape[2], k, -1))
            return np.ascontiguousarray(found.transpose(0, 2, 1, 3))

        held = (weight, bias, shared, tokens)
        return self._once(("project", name, reading.untransposed, *map(id, held)), held, make)

    def _tokens(self, reading: Reading, side: str) -> Float64:
        """What a side is projected from: tokens, those of the memory, or latents of either."""
        source = self.x if side == "query" or self.memory is None else self.memory
        name = "query_latent" if side == "query" else "latent"
        down, gain = reading.params.get(name), reading.params.get(f"{name}_gain")
        if down is None:
            return source
        latent = reading.latent
        assert latent is not None
        normed = latent.norm and name in reading.latents_normed

        def make() -> Float64:
            found = self._round(source @ self._round(down))
            if normed:
                square = np.mean(found**2, axis=-1, keepdims=True) + latent.epsilon
                found = self._round(found / np.sqrt(square))
            return found if gain is None else self._round(found * gain)

        return self._once((name, id(down), id(gain), normed), (down, gain), make)

    def _vectors(self, reading: Reading, side: str) -> Float64:
        """Queries or keys, normalised and rotated."""
        gain = reading.params.get(f"{side}_gain")
        rope, norm, last = reading.rope, reading.norm, reading.norm_last
        turns = rope is not None and side in reading.rotated
        if side not in reading.normed:
            norm = None
        if not turns and norm is None:
            return self._project(reading, side)

        def make() -> Float64:
            vectors = self._project(reading, side)
            if norm is not None and not last:
                vectors = self._normalise(reading, vectors, gain)
            if turns:
                vectors = self._rotate(reading, vectors, reading.query_shift * (side == "query"))
            if norm is not None and last:
                vectors = self._normalise(reading, vectors, gain)
            return vectors

        weight, bias = reading.params[side], reading.params.get(f"{side}_bias")
        turn = (reading.sign, reading.query_shift, reading.magnitude, turns, rope)
        how = (*turn, last, norm, reading.untransposed)
        shared = reading.params.get("rotary_key")
        held = (weight, bias, gain, reading.frequencies, shared, self._tokens(reading, side))
        return self._once((side, *map(id, held), how), held, make)

    def _normalise(self, reading: Reading, vectors: Float64, gain: Any) -> Float64:
        norm = reading.norm
        assert norm is not None
        axes = (1, 3) if norm.across_heads else (3,)
        over = np.mean if norm.kind == "rms" else np.sum
        found = vectors / np.sqrt(over(vectors**2, axis=axes, keepdims=True) + norm.epsilon)
        if gain is not None:
            found = found * (gain if gain.ndim == 1 else gain[:, None])
        return self._round(found)

    def _rotate(self, reading: Reading, vectors: Float64, shift: float) -> Float64:
        rope = reading.rope
        assert rope is not None
        h = vectors.shape[-1]
        frequencies = reading.frequencies
        if frequencies is None:
            frequencies = self._frequencies(reading, h)
        angles = ((self.positions + shift)[..., None] * frequencies * reading.sign)[:, None]
        magnitude = rope.magnitude if reading.magnitude is None else reading.magnitude
        cosine, sine = self._round(np.cos(angles)), self._round(np.sin(angles))
        real, imaginary = rope.pairs(h)
        x, y = vectors[..., real] * magnitude, vectors[..., imaginary] * magnitude
        turned = vectors.copy()
        turned[..., real] = x * cosine - y * sine
        turned[..., imaginary] = y * cosine + x * sine
        return self._round(turned)

    def _frequencies(self, reading: Reading, h: int) -> Float64:
        """(pairs,), or (b, 1, pairs) where they depend on the length."""
        rope = reading.rope
        assert rope is not None
        scaling = rope.scaling
        if scaling is not None and not isinstance(scaling, dict):
            with float64():
                last = np.where(self.rows, self.positions, 0.0).max(1)
                lengths = jnp.asarray(last + 1.0)
                found = scaling.stretched(rope.base, rope.rotated(h), lengths)  # type: ignore[union-attr]
            if found is not None:
                return np.asarray(found, np.float64)[:, None]
        return rope.frequencies(h)

    def _bias(self, reading: Reading) -> Float64 | None:
        """What is added to logits by distance, (b or 1, m, k, k)."""
        kind = reading.position_bias
        places = self.positions if self.placed else self.positions[:1]
        distance = places[:, None, :] - places[:, :, None]
        if reading.slopes is not None:
            return np.asarray(-np.abs(distance)[:, None] * reading.slopes[:, None, None])
        if kind is None:
            return None
        table = reading.params.get("position_table")

        def make() -> Float64:
            with float64():
                found = kind(
                    jnp.asarray(distance),
                    None if table is None else jnp.asarray(table),
                    reading.n_heads,
                )
            return np.asarray(found, np.float64).transpose(0, 2, 1, 3)

        return self._once(("bias", kind, id(table)), table, make)

    def _seen(self, reading: Reading) -> NDArray[np.bool_]:
        """(b or 1, k, k): which keys a row sees."""
        k = self.x.shape[1]
        row, key = np.arange(k)[:, None], np.arange(k)[None]
        seen = np.ones((k, k), bool)
        if reading.causal:
            seen = key >= row if reading.inverted else key <= row + reading.ahead
        if reading.window is not None:
            near = np.abs(row - key) < reading.window
            if reading.window_kind == "first":
                near = key < reading.window
            elif reading.window_kind == "far":
                near = ~near | (row == key)
            seen = seen & near
        if reading.attends_padding:
            return np.asarray(seen[None] & (key < self.longest))
        if self.keys.all():
            return np.asarray(seen[None])
        return np.asarray(seen & self.keys[:, None, :])
