"""Never fooled: small fits on data made to mislead, and not one false RECOVERED.

    python benchmarks/fails_safely.py --seeds 0:25              all traps, appended to the JSON
    python benchmarks/fails_safely.py --traps "mirror images,noise" --seeds 0:3 --methods adam,lbfgs
    python benchmarks/fails_safely.py --seeds 4:5 --out part4.json       a file of its own
    python benchmarks/fails_safely.py --merge part*.json        merged into the default file
    python benchmarks/fails_safely.py --table                   print what the JSON holds

A trap draws inputs, labels and settings from a seed, and knows what is true. A few resume from a
checkpoint that is all but right: the verdict must be honest however good the start. The judge
shares no code with the library but the layer itself and the comparison of two.

RECOVERED is right only where the truth is an attention layer, the inputs determine it, and the
learned layer is that one: every parameter of the canonical form within 1e-6, or within what the
rounding of the labels allows (its norm times the sensitivity of the worst parameter, from the
Jacobian at the truth), but never beyond 1e-2. Heads may be dropped or merged where the function
on fresh inputs stays the same to the last place of the labels; for doubles to 1e-12, what computing
a layer loses. With two tokens other layers are the same function, and that is compared instead.
Labels in float16 or float32 of something that is no layer may be those of a layer all the same:
it must meet them, as they were before rounding, to less than a unit in the last place.

Where labels are exact doubles and the Jacobian at the truth, taken by complex steps, has null
directions, a family of layers fits: NOT_IDENTIFIED is due (below the counting limit
TOO_FEW_EXAMPLES will do), with its dimension. That is checked twice: against the Jacobian at the
layer returned, and against the truth with as many heads as were asked for. Only clear ranks count,
on which thresholds of 1e-6 and 1e-13 agree.
"""

import argparse
import math
import re
import tempfile
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from ledger import RESULTS, Ledger, Record, console, finite, say_bar
from rich.table import Table

import mhalearn as mha

# Heads, features, tokens: one shape a seed, so that programs are compiled once for all traps.
SHAPES = [(2, 4, 4), (1, 6, 3), (3, 3, 5), (2, 5, 2), (2, 6, 3), (1, 8, 6), (3, 5, 4)]
N = 96  # examples
LIMIT = 20.0  # seconds a fit, compilation included
Array = np.ndarray
Layer = mha.AttentionLayer


@dataclass(frozen=True)
class Trap:
    """Data made to mislead, and what is true about them."""

    x: Array
    y: Array
    truth: Layer | None  # None: no layer of the form asked for makes these labels
    heads: int | str
    settings: dict[str, Any] = field(default_factory=dict)
    lengths: Array | None = None
    start: Layer | None = None  # a checkpoint to resume from
    unit: float = 0.0  # the last place of labels rounded more coarsely than their type
    made: Array | None = None  # labels before they were rounded, where no layer makes them

    @property
    def last_place(self) -> float:
        return max(self.unit, float(np.finfo(self.y.dtype).eps))


class Draw:
    """The random choices of one seed and trap, all from one stream."""

    def __init__(self, name: str, seed: int) -> None:
        self.rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        self.m, self.d, self.k = SHAPES[seed % len(SHAPES)]

    def layer(self, **changes: Any) -> Layer:
        settings = {"n_heads": self.m, "d": self.d, "scale": self.pick(1.0, 2.0, 2.0, 5.0)}
        return mha.random_layer(**settings | {"seed": int(self.rng.integers(2**31))} | changes)

    def inputs(self, n: int = N, k: int | None = None, d: int | None = None) -> Array:
        shape = (n, k or self.k, d or self.d)
        kinds = {
            "boolean": lambda: self.rng.choice([-1.0, 1.0], shape),
            "gaussian": lambda: self.normal(*shape),
            "uniform": lambda: self.rng.uniform(-1.5, 1.5, shape),
            "shifted": lambda: self.normal(*shape) + 0.7,
            "heavy tails": lambda: np.clip(self.rng.standard_t(4, shape), -6, 6),
            "ternary": lambda: self.rng.integers(-1, 2, shape).astype(float),
        }
        return kinds[self.pick("boolean", "gaussian", "gaussian", *kinds)]()

    def normal(self, *shape: int) -> Array:
        return self.rng.standard_normal(shape)

    def pick(self, *choices: Any) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def size(self, low: float, high: float) -> float:
        return float(10 ** self.rng.uniform(math.log10(low), math.log10(high)))

    def rounded(self, y: Array) -> Array:
        return y.astype(self.pick("float64", "float64", "float32", "float16"))

    def asked(self, m: int | None = None) -> int | str:
        return self.pick(m or self.m, m or self.m, "auto")

    def network(self, x: Array) -> Array:
        """A function of each token, of size one, that no attention layer computes."""
        out = np.tanh(x @ self.normal(self.d, 30)) @ self.normal(30, self.d)
        return out / rms(out)


def rms(y: Array) -> float:
    return float(np.sqrt(np.mean(np.square(y))))


# Labels of a layer, exact but for their precision


def exact(
    layer: Callable[[Draw], Layer], inputs: Callable[[Draw], Array] = Draw.inputs
) -> Callable[[Draw], Trap]:
    def trap(d: Draw) -> Trap:
        truth, x = layer(d), inputs(d)
        return Trap(x, d.rounded(truth(x)), truth, d.asked(truth.n_heads))

    return trap


def with_small_head(d: Draw, size: float) -> Layer:
    layer = d.layer(n_heads=d.m + 1)
    return layer.replace(w=layer.w * np.append(np.ones(d.m), size)[:, None, None])


def nearly_equal_heads(d: Draw) -> Layer:
    one, apart = d.layer(n_heads=1), d.size(1e-9, 1e-1) * d.normal(d.d, d.d)
    other = d.pick(one.w[0], d.normal(d.d, d.d))
    return Layer(np.stack([one.theta[0], one.theta[0] + apart]), np.stack([one.w[0], other]))


def weak_feature(d: Draw) -> Array:
    x = d.inputs()
    x[..., -1] *= d.size(1e-8, 1e-1)
    return x


def nearly_equal_tokens(d: Draw) -> Array:
    x = d.inputs()
    return x[:, :1] + d.size(1e-6, 1e-1) * x


def lengths_vary(d: Draw) -> Trap:
    truth, x, lengths = d.layer(), d.inputs(), d.rng.integers(1, d.k + 1, N)
    return Trap(x, truth(x, lengths), truth, d.asked(), lengths=lengths)


def other_units(d: Draw) -> Trap:
    size = d.pick(1e200, 1e-200, 1e30, 1e-30, 1e6, 1e-6)
    truth, x = d.layer(), d.inputs()
    return Trap(x, size * truth(x), truth.replace(w=size * truth.w), d.asked())


def around_the_limit(low: float, high: float) -> Callable[[Draw], Trap]:
    def trap(d: Draw) -> Trap:
        truth, x = d.layer(), d.inputs()
        limit = mha.Examples(x, truth(x)).counting_limit(d.m)
        x = x[: max(1, int(d.rng.uniform(low, high) * limit))]
        return Trap(x, truth(x), truth, d.m)

    return trap


EXACT = {
    "a plain layer": exact(Draw.layer),
    "lengths vary": lengths_vary,
    "other units": other_units,
    "saturated attention": exact(lambda d: d.layer(scale=d.pick(15.0, 30.0, 60.0))),
    "faint attention": exact(lambda d: d.layer(scale=d.size(1e-9, 1e-1))),
    "a small head": exact(lambda d: with_small_head(d, d.size(1e-9, 1e-3))),
    "nearly equal heads": exact(nearly_equal_heads),
    "a weak feature": exact(Draw.layer, weak_feature),
    "nearly equal tokens": exact(Draw.layer, nearly_equal_tokens),
    "below the counting limit": around_the_limit(0.3, 1.0),
    "just above the counting limit": around_the_limit(1.0, 2.2),
}


# Families of layers: exact labels, in doubles


def on_inputs(change: Callable[[Draw, Array], Array]) -> Callable[[Draw], Trap]:
    def trap(d: Draw) -> Trap:
        truth, x = d.layer(), change(d, d.inputs())
        return Trap(x, truth(x), truth, d.asked(), d.pick({}, {}, {"bias": True}))

    return trap


def subspace(d: Draw, x: Array) -> Array:
    r = int(d.rng.integers(1, d.d))
    return x[..., :r] @ d.normal(r, d.d)


def plane(d: Draw, x: Array) -> Array:
    normal = d.normal(d.d)
    return x + (1 - x @ normal)[..., None] * normal / (normal @ normal)


def features(*numbers: float) -> Callable[[Draw, Array], Array]:
    """The first features replaced: by a constant, or the second by a multiple of the first."""

    def change(d: Draw, x: Array) -> Array:
        if len(numbers) == 1:
            x[..., 0] = numbers[0]
        else:
            x[..., 1] = d.pick(*numbers) * x[..., 0]
        return x

    return change


def repeated(d: Draw, x: Array) -> Array:
    return reordered(d, x[d.rng.integers(0, d.pick(1, 3, 6), N)])


def reordered(d: Draw, rows: Array) -> Array:
    """The rows of every example in another order."""
    return np.take_along_axis(rows, d.rng.random(rows.shape[:2]).argsort(axis=1)[..., None], axis=1)


def equal_heads(d: Draw) -> Trap:
    layer, x = d.layer(n_heads=d.m + 1), d.inputs()
    truth = layer.replace(theta=np.concatenate([layer.theta[:-1], layer.theta[:1]]))
    return Trap(x, truth(x), truth, d.asked(d.m + 1))


def heads_that_cancel(d: Draw) -> Trap:
    one, x = d.layer(n_heads=1), d.inputs()
    y = Layer(one.theta[[0, 0]], np.stack([one.w[0], -one.w[0]]))(x)
    return Trap(x, d.pick(0.0, 1.0) * y, Layer(0 * one.theta, 0 * one.w), d.asked(2))


def too_many_heads(d: Draw) -> Trap:
    truth, x = d.layer(), d.inputs()
    return Trap(x, d.rounded(truth(x)), truth, d.m + d.pick(1, 1, 2))


def twins(d: Draw) -> Trap:
    """With two tokens, opposite attention and equal W make the mean token: one head is enough."""
    one, x = d.layer(n_heads=1), d.inputs(k=2)
    y = Layer(np.stack([one.theta[0], -one.theta[0]]), one.w[[0, 0]])(x)
    return Trap(x, y, Layer(0 * one.theta, 2 * one.w), d.asked(2))


def tokens_in_pairs(d: Draw) -> Trap:
    """Two tokens, each twice, are as two: (Theta, W) and (-Theta, -W) differ by a mean token."""
    truth = d.layer(n_heads=2)
    theta = d.pick(truth.theta, np.stack([truth.theta[0], -truth.theta[0]]))
    truth = Layer(theta, np.stack([truth.w[0], d.pick(1, -1) * truth.w[0]]))
    x = np.repeat(d.inputs(k=2), 2, axis=1)
    return Trap(x, truth(x), truth, d.asked(2))


def low_rank(d: Draw) -> Trap:
    truth, x = d.layer(rank=1), subspace(d, d.inputs())
    return Trap(x, truth(x), truth, d.m, {"head_dim": 1})


FAMILIES = {
    "tokens in a subspace": on_inputs(subspace),
    "tokens in a plane": on_inputs(plane),
    "constant tokens": on_inputs(lambda d, x: np.repeat(x[:, :1], d.k, axis=1)),
    "one-hot tokens": on_inputs(lambda d, x: np.eye(d.d)[d.rng.integers(0, d.d, (N, d.k))]),
    "a constant feature": on_inputs(features(1.0)),
    "a zero feature": on_inputs(features(0.0)),
    "a feature twice": on_inputs(features(1.0, -2.0)),
    "repeated examples": on_inputs(repeated),
    "low rank, in a subspace": low_rank,
    "equal heads": equal_heads,
    "heads that cancel": heads_that_cancel,
    "too many heads asked for": too_many_heads,
    "twins of two tokens": twins,
    "tokens in pairs": tokens_in_pairs,
}


# As many equations as unknowns, however many examples: labels off the layer are fitted exactly


def square_system(d: Draw) -> tuple[Array, Array, Layer]:
    widths = range(1, min(d.d, d.m * (d.k - 1)) + 1)
    fitting = [e for e in widths if d.m * d.d * (d.d + e) % (d.k * e) == 0]
    layer = d.layer(out_dim=max(fitting, default=1))
    x = d.inputs(n=d.m * d.d * (d.d + layer.out_dim) // (d.k * layer.out_dim))
    y = layer(x)
    return x, y + d.size(1e-5, 1e-2) * rms(y) * d.normal(*y.shape), layer


def mirror_images(d: Draw) -> Trap:
    """A layer without biases is odd: the example (-X, -Y) says what (X, Y) says."""
    x, y, layer = square_system(d)
    return Trap(np.concatenate([x, -x]), np.concatenate([y, -y]), None, d.m, start=layer)


def near_copies(d: Draw) -> Trap:
    x, y, layer = square_system(d)
    x = np.concatenate([x + 1e-14 * d.normal(*x.shape) for _ in range(6)])
    return Trap(x, np.concatenate([y] * 6), None, d.m, start=layer)


def few_tell(d: Draw) -> Trap:
    """Most examples have one token k times; the few others have arbitrary attention."""
    d.d, d.k = d.pick((6, 4), (6, 3), (4, 2))
    x, telling = d.inputs(), d.d**2 // (d.k * (d.k - 1))
    x[telling:] = x[telling:, :1]
    p = d.rng.dirichlet(np.full(d.k, 3.0), (N, d.k))
    order = d.rng.permutation(N)
    return Trap(x[order], (p @ x @ d.normal(d.d, d.d))[order], None, d.asked(1))


SQUARE = {
    "mirror images": mirror_images,
    "near copies": near_copies,
    "few examples tell": few_tell,
}


# What no layer of the form asked for makes


def too_few_heads(d: Draw) -> Trap:
    truth, x = d.layer(n_heads=d.m + d.pick(1, 2)), d.inputs()
    return Trap(x, d.rounded(truth(x)), truth, d.m)


def small_head_missing(d: Draw) -> Trap:
    size = d.pick(d.size(1e-9, 1e-1), d.size(1e-7, 1e-5), d.size(1e-3, 1e-2))
    truth, x = with_small_head(d, size), d.inputs()
    return Trap(x, d.rounded(truth(x)), truth, d.m)


def time_runs_out(d: Draw) -> Trap:
    """The head that is missing would be found by a test that needs time."""
    dtype, size = d.pick(("float32", d.size(3e-7, 1e-5)), ("float16", d.size(1e-3, 1e-2)))
    truth, x = with_small_head(d, size), d.inputs()
    start = truth.replace(theta=truth.theta[:-1], w=truth.w[:-1])
    limit = {"max_seconds": d.size(1e-3, 0.3)}
    return Trap(x, truth(x).astype(dtype), truth, d.m, limit, start=start)


def without(settings: Callable[[Draw], dict[str, Any]]) -> Callable[[Draw], Trap]:
    """A generic layer, and settings that do not allow it."""

    def trap(d: Draw) -> Trap:
        x = d.inputs()
        return Trap(x, d.rounded(d.layer()(x)), None, d.m, settings(d))

    return trap


def labels(make: Callable[[Draw, Layer, Array], Array]) -> Callable[[Draw], Trap]:
    """Labels made from a layer and inputs that no layer makes."""

    def trap(d: Draw) -> Trap:
        layer, x = d.layer(), d.inputs()
        made = make(d, layer, x)
        return Trap(x, d.rounded(made), None, d.asked(), made=made)

    return trap


def network_of_example(d: Draw, layer: Layer, x: Array) -> Array:
    flat = x.reshape(N, -1)
    hidden = np.maximum(flat @ d.normal(flat.shape[1], 40), 0)
    return (hidden @ d.normal(40, flat.shape[1])).reshape(x.shape)


def small_network(d: Draw) -> Trap:
    """From three units in the last place of the labels on; of doubles, above what is computable."""
    layer, x, dtype = d.layer(), d.inputs(), d.pick("float64", "float32", "float16")
    size = d.size(max(3 * float(np.finfo(dtype).eps), 1e-11), 1e-1)
    y = layer(x)
    return Trap(x, (y + size * rms(y) * d.network(x)).astype(dtype), None, d.asked())


def small_column(d: Draw, layer: Layer, x: Array) -> Array:
    y = layer(x)
    y[..., 0] = d.size(1e-9, 1e-1) * d.network(x)[..., 0]
    return y


def softmax(logits: Array) -> Array:
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def attention(weigh: Callable[[Draw, Array], Array]) -> Callable[[Draw], Trap]:
    """Weights (n, m, k, k) that are another function of the logits than the softmax."""

    def make(d: Draw, layer: Layer, x: Array) -> Array:
        logits = np.einsum("nra,mab,njb->nmrj", x, layer.theta, x)
        return np.einsum("nmrj,njd,mde->nre", weigh(d, logits), x, layer.w)

    return labels(make)


def linearised(d: Draw, logits: Array) -> Array:
    """The softmax to first order, close to it where logits are small."""
    small = d.size(1e-5, 1.0) * logits
    return (1 + small - small.mean(axis=-1, keepdims=True)) / d.k


def with_a_sink(d: Draw, logits: Array) -> Array:
    weights = np.exp(logits)
    return weights / (d.size(1e-6, 1.0) + weights.sum(axis=-1, keepdims=True))


def rotary(d: Draw, layer: Layer, x: Array) -> Array:
    angle, turned = d.pick(0.01, 0.3) * np.arange(d.k), x.copy()
    turned[..., 0] = np.cos(angle) * x[..., 0] - np.sin(angle) * x[..., 1]
    turned[..., 1] = np.sin(angle) * x[..., 0] + np.cos(angle) * x[..., 1]
    p = softmax(np.einsum("nra,mab,njb->nmrj", turned, layer.theta, turned))
    return np.einsum("nmrj,njd,mde->nre", p, x, layer.w)


def two_layers(d: Draw, layer: Layer, x: Array) -> Array:
    chosen = d.pick(x[:, 0, 0] > 0, d.rng.random(N) < 0.5, np.arange(N) == 5)
    return np.where(chosen[:, None, None], layer(x), d.layer()(x))


NO_LAYER = {
    "too few heads asked for": too_few_heads,
    "a small head missing": small_head_missing,
    "time runs out": time_runs_out,
    "a needless mask": without(lambda d: {"causal": True}),
    "a rank too low": without(lambda d: {"head_dim": d.pick(1, d.d - 1)}),
    "a mask unknown": labels(lambda d, layer, x: layer.replace(causal=True)(x)),
    "an output bias unknown": labels(lambda d, layer, x: layer(x) + d.size(1e-3, 1.0)),
    "a key vector unknown": labels(
        lambda d, layer, x: layer.replace(key_vector=d.size(1e-3, 1.0) * d.normal(d.m, d.d))(x)
    ),
    "a residual path": labels(lambda d, layer, x: layer(x) + d.size(1e-3, 1.0) * x),
    "squashed outputs": labels(lambda d, layer, x: np.tanh(d.size(1e-3, 1.0) * layer(x))),
    "two layers": labels(two_layers),
    "a network of the token": labels(lambda d, layer, x: d.network(x)),
    "a network of the example": labels(network_of_example),
    "a layer and a small network": small_network,
    "a small column of a network": labels(small_column),
    "linear attention": attention(lambda d, logits: logits / d.k),
    "linearised attention": attention(linearised),
    "sigmoid attention": attention(lambda d, logits: 1 / (1 + np.exp(-logits)) / d.k),
    "attention with a sink": attention(with_a_sink),
    "temperature by position": attention(
        lambda d, logits: softmax(logits * (1 + d.size(1e-6, 1.0) * np.arange(d.k)[:, None]))
    ),
    "distance matters": attention(
        lambda d, logits: softmax(
            logits - d.size(1e-6, 1.0) * np.abs(np.arange(d.k)[:, None] - np.arange(d.k))
        )
    ),
    "rotary positions": labels(rotary),
    "labels shuffled": labels(lambda d, layer, x: d.rng.permutation(layer(x))),
    "rows shuffled": labels(lambda d, layer, x: reordered(d, layer(x))),
    "labels of noise": labels(lambda d, layer, x: d.normal(*x.shape)),
}


# Labels of a layer that were marred: whoever still finds it to 1e-6 says nothing false


def marred(mar: Callable[[Draw, Array], Array]) -> Callable[[Draw], Trap]:
    def trap(d: Draw) -> Trap:
        truth, x = d.layer(), d.inputs()
        return Trap(x, d.rounded(mar(d, truth(x))), truth, d.asked())

    return trap


def quantised(d: Draw, y: Array) -> Array:
    step = d.pick(10.0, 2.0) ** -int(d.rng.integers(1, 8))
    return np.round(y / step) * step


def coarse(d: Draw) -> Trap:
    truth, x, bits = d.layer(), d.inputs(), int(d.rng.integers(3, 22))
    mantissa, exponent = np.frexp(truth(x))
    y = np.ldexp(np.round(mantissa * 2**bits) / 2**bits, exponent)
    return Trap(x, y, truth, d.asked(), unit=2.0 ** (1 - bits))


def corrupted(d: Draw, y: Array) -> Array:
    """An entry, a row or an example is off, in one place or in a few."""
    by = d.size(1e-6, 10.0) * rms(y)
    for example in d.rng.integers(0, N, d.pick(1, 1, 3, 8)):
        y[(example, *d.pick((1, 0), (1,), ()))] += by
    return y


def exchanged(d: Draw, y: Array) -> Array:
    y[[3, 40]] = y[[40, 3]]
    return y


MARRED = {
    "noise": marred(lambda d, y: y + d.size(1e-13, 1e-1) * rms(y) * d.normal(*y.shape)),
    "quantised labels": marred(quantised),
    "coarse labels": coarse,
    "corrupted labels": marred(corrupted),
    "two labels exchanged": marred(exchanged),
}

TRAPS: dict[str, Callable[[Draw], Trap]] = EXACT | FAMILIES | SQUARE | NO_LAYER | MARRED


# The judge


def jacobian(layer: Layer, trap: Trap) -> tuple[Array, list[slice]]:
    """dF / d(Theta, v, W, c), a column each, by complex steps; Theta's columns head by head."""
    n, k, d = trap.x.shape
    bias = int(trap.settings.get("bias", False))
    inside = np.arange(k) < (np.full(n, k) if trap.lengths is None else trap.lengths)[:, None]
    seen = inside[:, None, :] | (~inside[:, :, None] & np.eye(k, dtype=bool))
    seen = seen & np.tri(k, dtype=bool) if layer.causal else seen
    queries = np.concatenate([trap.x, np.ones((n, k, bias))], axis=-1)
    vector = np.zeros((layer.n_heads, d)) if layer.key_vector is None else layer.key_vector
    thetas = np.concatenate([layer.theta, vector[:, None]], axis=1)[:, : d + bias].astype(complex)

    def mean_tokens(theta: Array) -> Array:
        logits = np.where(seen, queries @ theta @ trap.x.swapaxes(1, 2), -np.inf)
        p = np.exp(logits - logits.real.max(axis=-1, keepdims=True))
        return (p / p.sum(axis=-1, keepdims=True) @ trap.x)[inside]

    columns, heads, step = [], [], 1e-30  # a complex step has no cancellation to fear
    for theta, w in zip(thetas, layer.w, strict=True):
        directions = tangent_basis(theta.real, trap.settings.get("head_dim"))
        heads.append(slice(len(columns), len(columns) + len(directions)))
        moved = [mean_tokens(theta + 1j * step * b).imag / step for b in directions]
        columns += [(means @ w).ravel() for means in moved]
    means = [mean_tokens(theta).real for theta in thetas]
    means += [np.ones((len(means[0]), 1))] * bias
    of_w = np.kron(np.concatenate(means, axis=1), np.eye(layer.out_dim)).T
    return np.stack([*columns, *of_w], axis=1), heads


def tangent_basis(theta: Array, head_dim: int | None) -> Array:
    """An orthonormal basis of the directions a head may move in: all, or those that keep a rank."""
    q, d = theta.shape
    if head_dim is None:
        return np.eye(q * d).reshape(-1, q, d)
    u, _, vt = np.linalg.svd(theta)
    left = np.einsum("ah,bc->hcab", u[:, :head_dim], np.eye(d)).reshape(-1, q * d)
    right = np.einsum("ac,hb->hcab", np.eye(q), vt[:head_dim]).reshape(-1, q * d)
    _, values, basis = np.linalg.svd(np.concatenate([left, right]), full_matrices=False)
    return basis[values > 1e-9].reshape(-1, q, d)


def null_dimension(layer: Layer, trap: Trap) -> int | None:
    """Directions the inputs leave open at a layer; None where that is a matter of thresholds."""
    columns, heads = jacobian(layer, trap)
    sizes = np.linalg.norm(columns, axis=0)
    kinds = np.arange(len(sizes)) < heads[-1].stop  # Theta's have other units than W's
    largest = np.array([np.max(sizes, where=kinds == kind, initial=0.0) for kind in kinds])

    def rank(least: float, relative: float) -> int:
        there = sizes > least * largest
        if not there.any():
            return 0
        values = np.linalg.svd(columns[:, there] / sizes[there], compute_uv=False)
        return int(np.sum(values > relative * values[0]))

    strict, generous = rank(1e-10, 1e-6), rank(1e-15, 1e-13)
    return len(sizes) - strict if strict == generous else None


def family_dimension(trap: Trap) -> int | None:
    """Of the layers that fit with the heads asked for: the largest of the family's pieces.

    Heads beyond the truth's have any attention and no W, or share the attention of another.
    """
    truth = trap.truth.canonical(tolerance=1e-14)
    extra = 0 if trap.heads == "auto" else int(trap.heads) - truth.n_heads
    if extra < 0:
        return None
    rng = np.random.default_rng(0)
    shape = (extra, *truth.w.shape[1:])
    free = rng.standard_normal((extra, truth.d, truth.d)), np.zeros(shape)
    shared = np.repeat(truth.theta[:1], extra, axis=0), rng.standard_normal(shape)
    found = []
    for theta, w in (free, shared):
        least = truth.w - np.eye(truth.n_heads)[0][:, None, None] * w.sum(axis=0)
        layer = Layer(np.concatenate([truth.theta, theta]), np.concatenate([least, w]))
        found.append(null_dimension(layer, trap))
    return None if None in found else max(found)


def allowed_error(trap: Trap) -> float:
    """What the rounding of the labels can do to the worst parameter, relative to its head."""
    columns, heads = jacobian(trap.truth, trap)
    r = np.linalg.qr(columns, mode="r")
    if np.min(np.abs(np.diag(r))) <= 1e-14 * np.max(np.abs(r)):
        return 1e-6
    rounding = trap.last_place * np.linalg.norm(trap.y.astype(float))
    reach = rounding * np.linalg.norm(np.linalg.inv(r), axis=1)
    of_theta, of_w = reach[: heads[-1].stop], reach[heads[-1].stop :]
    worst = max(of_theta.max() / size_of(trap.truth.theta), of_w.max() / size_of(trap.truth.w))
    return float(np.clip(worst, 1e-6, 1e-2))


def size_of(heads: Array) -> float:
    return float(np.sqrt(np.mean(np.sum(heads**2, axis=(1, 2))))) or 1.0


def compare(learned: Layer, trap: Trap) -> tuple[bool, float]:
    """Whether the learned layer is the truth, and its error."""
    truth = trap.truth
    if truth is None and trap.made is not None:
        error = rms(trap.made - learned(trap.x)) / rms(trap.made)
        return trap.y.dtype != np.float64 and error <= trap.last_place, error
    if truth is None:
        return False, math.inf
    allowed = allowed_error(trap)
    if trap.x.shape[1] == 2:
        error = apart_on_fresh_inputs(learned, trap)
        return error <= allowed, error
    canonical = truth.canonical(tolerance=1e-14)
    if learned.n_heads < canonical.n_heads:
        error = apart_on_fresh_inputs(learned, trap)
        return error <= max(1e-12, trap.last_place), error
    error = mha.compare(learned, canonical).max_error
    return error <= allowed, error


def apart_on_fresh_inputs(learned: Layer, trap: Trap) -> float:
    """Relative distance of two functions; Gaussian inputs stand in for all of this size."""
    x = np.random.default_rng(0).standard_normal((500, *trap.x.shape[1:])) * rms(trap.x)
    true = trap.truth(x)
    return rms(learned(x) - true) / (rms(true) or 1.0)


def judge(trap: Trap, learner: mha.AttentionRegressor) -> Record:
    outcome, layer, reason = learner.outcome_.name, learner.layer_, learner.solution_.reason
    family = None
    if trap.truth is not None and trap.y.dtype == np.float64:
        true = trap.truth(trap.x, trap.lengths)
        seen_exactly = rms(trap.y - true) <= 1e-14 * rms(true)
        family = family_dimension(trap) if seen_exactly else None
    found: Record = {"outcome": outcome, "reason": reason, "family": family, "false": False}
    if outcome == "RECOVERED":
        right, error = compare(layer, trap)
        found |= {"false": not right or bool(family), "error": finite(error)}
    stated = re.search(r"dimension (at least )?(\d+)", reason)
    if outcome == "NOT_IDENTIFIED" and stated:
        found["stated"] = int(stated[2])
        if not stated[1]:
            found["of_layer"] = null_dimension(layer, trap)
        if trap.heads != "auto":
            found["of_asked"] = family
    return found


def fit(name: str, method: str, seed: int) -> Record:
    trap = TRAPS[name](Draw(name, seed))
    if method != "newton" and trap.heads == "auto":
        m = trap.truth.canonical().n_heads if trap.truth else SHAPES[seed % len(SHAPES)][0]
        trap = replace(trap, heads=m)
    found: Record = {"heads": trap.heads, "dtype": str(trap.y.dtype), "shape": list(trap.x.shape)}
    settings = {"max_seconds": LIMIT, "random_state": seed} | trap.settings
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        if trap.start is not None and method == "newton":
            settings |= {"checkpoint": Path(folder) / "start.safetensors", "resume": True}
            trap.start.save(settings["checkpoint"])
        learner = mha.AttentionRegressor(trap.heads, method, **settings)
        try:
            learner.fit(trap.x, trap.y, trap.lengths)
        except ValueError as refusal:
            if "rescale it" not in str(refusal):
                raise  # the data are valid: this is a crash
            return found | {"outcome": "REFUSED", "reason": str(refusal), "false": False}
    found |= {"seconds": time.perf_counter() - began, "heads_found": learner.n_heads_}
    return found | judge(trap, learner)


# The table


def table(records: list[Record]) -> None:
    groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        groups[record["method"], record["trap"]].append(record)
    shown = Table(title=f"Data made to mislead: {len(records)} fits")
    for column in ("method", "trap", "fits", "outcomes", "false RECOVERED", "family said / due"):
        shown.add_column(column)
    shown.add_column("dimension right: layer returned, heads asked for")
    for (method, name), mine in groups.items():
        outcomes = Counter(r.get("outcome", "CRASHED") for r in mine)
        listed = ", ".join(f"{outcome} {count}" for outcome, count in outcomes.most_common())
        due = [r for r in mine if r.get("family")]
        said = [r for r in due if r["outcome"] in ("NOT_IDENTIFIED", "TOO_FEW_EXAMPLES")]
        false = sum(r.get("false", False) for r in mine)
        right = [rights(mine, "of_layer"), rights(mine, "of_asked")]
        family = f"{len(said)} / {len(due)}" if due else ""
        shown.add_row(method, name, str(len(mine)), listed, str(false), family, ", ".join(right))
    console.print(shown)
    false, crashed = (sum(bool(r.get(name)) for r in records) for name in ("false", "crashed"))
    say_bar(f"at least 1,000 fits: {len(records)}", len(records) >= 1000)
    say_bar(f"no false RECOVERED: {false}", false == 0)
    say_bar(f"no crash: {crashed}", crashed == 0)


def rights(records: list[Record], name: str) -> str:
    clear = [r for r in records if r.get(name) is not None]
    return f"{sum(r[name] == r['stated'] for r in clear)} of {len(clear)}" if clear else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0:25", help="start:stop")
    parser.add_argument("--traps", default=",".join(TRAPS), help="names, with commas between")
    parser.add_argument("--methods", default="newton", help="newton, adam, lbfgs")
    parser.add_argument("--out", type=Path, default=RESULTS / "fails_safely.json")
    parser.add_argument("--merge", nargs="+", type=Path, default=[])
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    ledger = Ledger(options.out)
    if options.merge:
        ledger.absorb(options.merge)
    elif not options.table:
        for seed in range(*map(int, options.seeds.split(":"))):
            for name in re.split(r",(?! )", options.traps):
                for method in options.methods.split(","):
                    key = {"trap": name, "method": method, "seed": seed}
                    ledger.run(key, partial(fit, name, method, seed))
    table(ledger.records)


if __name__ == "__main__":
    main()
