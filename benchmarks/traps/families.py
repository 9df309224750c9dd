"""Labels that a whole family of layers makes, or two layers far from each other."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.traps.boxes import Array, forward
from benchmarks.traps.draw import Draw, Layer, Make, N, Trap

Change = Callable[[Draw, Array], Array]


def on_inputs(change: Change) -> Make:
    def trap(d: Draw) -> Trap:
        truth, x = d.layer(), change(d, d.inputs())
        return Trap(x, forward(truth, x), truth, d.asked(), d.pick({}, {}, {"bias": True}))

    return trap


def subspace(d: Draw, x: Array) -> Array:
    r = int(d.rng.integers(1, d.d))
    return x[..., :r] @ d.normal(r, d.d)


def plane(d: Draw, x: Array) -> Array:
    normal = d.normal(d.d)
    return x + (1 - x @ normal)[..., None] * normal / (normal @ normal)


def features(*numbers: float) -> Change:
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
    return Trap(x, forward(truth, x), truth, d.asked(d.m + 1))


def heads_that_cancel(d: Draw) -> Trap:
    one, x = d.layer(n_heads=1), d.inputs()
    y = forward(Layer(one.theta[[0, 0]], np.stack([one.w[0], -one.w[0]])), x)
    return Trap(x, d.pick(0.0, 1.0) * y, Layer(0 * one.theta, 0 * one.w), d.asked(2))


def too_many_heads(d: Draw) -> Trap:
    truth, x = d.layer(), d.inputs()
    return Trap(x, d.rounded(forward(truth, x)), truth, d.m + d.pick(1, 1, 2))


def twins_of_two_tokens(d: Draw) -> Trap:
    """With two tokens, opposite attention and equal W make the mean token: one head is enough."""
    one, x = d.layer(n_heads=1), d.inputs(k=2)
    y = forward(Layer(np.stack([one.theta[0], -one.theta[0]]), one.w[[0, 0]]), x)
    return Trap(x, y, Layer(0 * one.theta, 2 * one.w), d.asked(2))


def tokens_in_pairs(d: Draw) -> Trap:
    """Two tokens, each twice, are as two: (Theta, W) and (-Theta, -W) differ by a mean token."""
    truth = d.layer(n_heads=2)
    theta = d.pick(truth.theta, np.stack([truth.theta[0], -truth.theta[0]]))
    truth = Layer(theta, np.stack([truth.w[0], d.pick(1, -1) * truth.w[0]]))
    x = np.repeat(d.inputs(k=2), 2, axis=1)
    return Trap(x, forward(truth, x), truth, d.asked(2))


def distant_twins(d: Draw) -> Trap:
    """Tokens (a, a, a, b), b marked by a feature: with weight p on b and W opposite in two heads,
    (-Theta, -v + 2 log 3 at the mark, -W) puts 1 - p there and makes the same labels."""
    d.d = max(4, d.d)
    truth = opposite_pair(d, key_vector=True)
    a, b = d.inputs_of("gaussian", k=2).transpose(1, 0, 2)
    a[:, 0], b[:, 0] = 0.0, 1.0
    x = np.stack([a, a, a, b], axis=1)
    start = d.pick(None, truth, distant_twin(truth))
    return Trap(x, forward(truth, x), truth, 2, {"bias": True}, start=start, twins=True)


def opposite_pair(d: Draw, **settings: Any) -> Layer:
    layer = d.layer(n_heads=2, scale=2.0, **settings)
    return layer.replace(w=np.stack([layer.w[0], -layer.w[0]]))


def distant_twin(layer: Layer) -> Layer:
    vector = -layer.key_vector
    vector[:, 0] += 2 * math.log(3)
    return layer.replace(theta=-layer.theta, w=-layer.w, key_vector=vector)


def mirrored_tokens(d: Draw) -> Trap:
    """Tokens c + t and c - t, for two t: opposite attention mirrors the mean token about c, and
    what that changes cancels between heads of opposite W."""
    truth = opposite_pair(d)
    t, c = d.inputs_of("gaussian", k=2), d.normal(N, 1, d.d)
    x = np.concatenate([c + t, c - t], axis=1)
    return Trap(x, forward(truth, x), truth, 2, twins=True)


def low_rank(d: Draw) -> Trap:
    truth, x = d.layer(rank=1), subspace(d, d.inputs())
    return Trap(x, forward(truth, x), truth, d.m, {"head_dim": 1})


FAMILIES: dict[str, Make] = {
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
    "twins of two tokens": twins_of_two_tokens,
    "tokens in pairs": tokens_in_pairs,
    "distant twins": distant_twins,
    "mirrored tokens": mirrored_tokens,
}
