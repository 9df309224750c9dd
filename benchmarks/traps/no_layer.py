"""What no layer of the form asked for makes."""

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.traps.bends import BENDS, MORE_HEADS, Bend, tuned, turned
from benchmarks.traps.boxes import Array, Box, Weigh, forward, mix, rms, softmax
from benchmarks.traps.draw import Draw, Layer, Make, N, Trap, boxed, from_box, plain
from benchmarks.traps.exact import with_small_head
from benchmarks.traps.families import reordered


def too_few_heads(d: Draw) -> Trap:
    truth, x = d.layer(n_heads=d.m + d.pick(1, 2)), d.inputs()
    return Trap(x, d.rounded(forward(truth, x)), truth, d.m)


def small_head_missing(d: Draw) -> Trap:
    size = d.pick(d.size(1e-9, 1e-1), d.size(1e-7, 1e-5), d.size(1e-3, 1e-2))
    truth, x = with_small_head(d, size), d.inputs()
    return Trap(x, d.rounded(forward(truth, x)), truth, d.m)


def time_runs_out(d: Draw) -> Trap:
    """The head that is missing would be found by a test that needs time."""
    dtype, size = d.pick(("float32", d.size(3e-7, 1e-5)), ("float16", d.size(1e-3, 1e-2)))
    truth, x = with_small_head(d, size), d.inputs()
    start = truth.replace(theta=truth.theta[:-1], w=truth.w[:-1])
    limit = {"max_seconds": d.size(1e-3, 0.3)}
    return Trap(x, forward(truth, x).astype(dtype), truth, d.m, limit, start=start)


def without(settings: Callable[[Draw], dict[str, Any]]) -> Make:
    """A generic layer, and settings that do not allow it."""

    def trap(d: Draw) -> Trap:
        x = d.inputs()
        return from_box(d, plain(d.layer()), x, d.m, settings=settings(d))

    return trap


def labels(make: Callable[[Draw, Layer, Array], Array], noisy: bool = False) -> Make:
    """Labels that no function of the inputs makes, so that there is no box."""

    def trap(d: Draw) -> Trap:
        layer, x = d.layer(), d.inputs()
        made = make(d, layer, x)
        return Trap(x, d.rounded(made), None, d.asked(), made=made, noisy=noisy)

    return trap


def added(function: Callable[[Draw], Box]) -> Make:
    """Outputs plus a function of the inputs."""

    def make(d: Draw, layer: Layer) -> Box:
        more = function(d)
        return lambda x: forward(layer, x) + more(x)

    return boxed(make)


def attention(weigh: Callable[[Draw], Weigh]) -> Make:
    """Weights that are another function of the logits than the softmax."""

    def make(d: Draw, layer: Layer) -> Box:
        bent = weigh(d)
        return lambda x: forward(layer, x, weigh=bent)

    return boxed(make)


def bent(bend: Bend, low: float, high: float, more_heads: bool = False) -> Make:
    """Off the plain layer by a relative size drawn between two."""

    def trap(d: Draw) -> Trap:
        layer, x = d.layer(), d.inputs()
        box = tuned(bend(d, layer), x, d.size(low, high))
        return from_box(d, box, x, d.m if more_heads else d.asked())

    return trap


def below_1e10(d: Draw) -> Trap:
    """Structure that doubles hold and computing a layer all but hides."""
    name = d.pick(*BENDS)
    trap = bent(BENDS[name], 1e-14, 1e-10, name in MORE_HEADS)(d)
    return from_box(d, trap.box, trap.x, d.m, "float64")


def small_network(d: Draw) -> Trap:
    """From three units in the last place of the labels on; of doubles, above what is computable."""
    layer, x, dtype = d.layer(), d.inputs(), d.pick("float64", "float32", "float16")
    size = d.size(max(3 * float(np.finfo(dtype).eps), 1e-11), 1e-1) * rms(forward(layer, x))
    network = d.network()
    return from_box(d, lambda x: forward(layer, x) + size * network(x), x, d.asked(), dtype)


def small_column(d: Draw, layer: Layer) -> Box:
    size, network = d.size(1e-9, 1e-1), d.network()

    def box(x: Array) -> Array:
        y = forward(layer, x)
        y[..., 0] = size * network(x)[..., 0]
        return y

    return box


def network_of_example(d: Draw, layer: Layer) -> Box:
    inner, outer = d.normal(d.k * d.d, 40), d.normal(40, d.k * d.d)
    return lambda x: (np.maximum(x.reshape(len(x), -1) @ inner, 0) @ outer).reshape(x.shape)


def linearised(d: Draw) -> Weigh:
    """The softmax to first order, close to it where logits are small."""
    size = d.size(1e-5, 1.0)
    return lambda logits: (1 + size * (logits - logits.mean(axis=-1, keepdims=True))) / d.k


def hard_max(d: Draw) -> Weigh:
    def weigh(logits: Array) -> Array:
        first = (logits == logits.max(axis=-1, keepdims=True)).astype(float)
        return first / first.sum(axis=-1, keepdims=True)

    return weigh


def top_two(d: Draw) -> Weigh:
    def weigh(logits: Array) -> Array:
        second = np.sort(logits, axis=-1)[..., -2:-1]
        return softmax(np.where(logits >= second, logits, -np.inf))

    return weigh


def window(d: Draw) -> Weigh:
    """A token sees those at most one or two places away, or before it."""
    apart = np.arange(d.k)[:, None] - np.arange(d.k)
    reach = d.pick(1, 2) if d.k > 3 else 1
    seen = d.pick(np.abs(apart) <= reach, (apart >= 0) & (apart <= reach))
    return lambda logits: softmax(np.where(seen, logits, -np.inf))


def rotary(d: Draw, layer: Layer) -> Box:
    angle = d.pick(0.01, 0.3)
    return BENDS["rotation"](d, layer)(angle)


def grouped_rotary(d: Draw) -> Trap:
    """Two query heads a key head, queries and keys turned by their positions."""
    d.d = max(4, d.d + d.d % 2)
    h, scale = 2, d.pick(1.0, 2.0)
    queries, key = d.normal(2, d.d, h) * scale / d.d**0.5, d.normal(d.d, h) / d.d**0.5
    layer, x = d.layer(n_heads=2), d.inputs()

    def box(x: Array) -> Array:
        keys = turned(x @ key, 1.0)
        logits = [turned(x @ query, 1.0) @ keys.swapaxes(1, 2) for query in queries]
        return mix(layer, softmax(np.stack(logits, axis=1)), x)

    return from_box(d, box, x, 2)


def two_layers(d: Draw, layer: Layer, x: Array) -> Array:
    chosen = d.pick(x[:, 0, 0] > 0, d.rng.random(N) < 0.5, np.arange(N) == 5)
    return np.where(chosen[:, None, None], forward(layer, x), forward(d.layer(), x))


def rare(examples: bool) -> Make:
    """Another layer, or one more head, for about one example in a hundred: above a threshold."""

    def trap(d: Draw) -> Trap:
        layer, other, u = d.layer(), d.layer(n_heads=1), d.normal(d.d)
        x = d.inputs_of("gaussian", n=d.pick(N, 400))
        bar = np.quantile(x.mean(axis=1) @ u, 0.985)

        def box(x: Array) -> Array:
            y, there = forward(layer, x), (x.mean(axis=1) @ u > bar)[:, None, None]
            return np.where(there, forward(other, x) + (0.0 if examples else y), y)

        return from_box(d, box, x, d.pick(d.m, d.m + 1))

    return trap


def squashed(d: Draw, layer: Layer) -> Box:
    size = d.size(1e-3, 1.0)
    return lambda x: np.tanh(size * forward(layer, x))


def residual_path(extra: int) -> Make:
    """y = x + F(x), with the heads of F asked for, or more."""

    def trap(d: Draw) -> Trap:
        layer, x = d.layer(), d.inputs()
        return from_box(d, lambda x: forward(layer, x) + x, x, d.m + extra)

    return trap


def constant(d: Draw) -> Box:
    by = d.size(1e-3, 1.0)
    return lambda x: np.full_like(x, by)


def multiple(d: Draw) -> Box:
    by = d.size(1e-3, 1.0)
    return lambda x: by * x


def key_vector(d: Draw, layer: Layer) -> Box:
    return plain(layer.replace(key_vector=d.size(1e-3, 1.0) * d.normal(d.m, d.d)))


NO_LAYER: dict[str, Make] = {
    "too few heads asked for": too_few_heads,
    "a small head missing": small_head_missing,
    "time runs out": time_runs_out,
    "a needless mask": without(lambda d: {"causal": True}),
    "a rank too low": without(lambda d: {"head_dim": d.pick(1, d.d - 1)}),
    "a mask unknown": boxed(lambda d, layer: plain(layer.replace(causal=True))),
    "an output bias unknown": added(constant),
    "a key vector unknown": boxed(key_vector),
    "a residual path": added(multiple),
    "a residual path of one": residual_path(0),
    "a residual path and a surplus head": residual_path(1),
    "squashed outputs": boxed(squashed),
    "nearly linear outputs": bent(BENDS["cubic outputs"], 1e-8, 1e-1),
    "gated outputs": bent(BENDS["gate"], 1e-8, 0.5),
    "soft cap": bent(BENDS["soft cap"], 1e-8, 0.3),
    "outputs by position": bent(BENDS["outputs by position"], 1e-8, 0.3),
    "temperature by position": bent(BENDS["temperature by position"], 1e-8, 0.3),
    "distance matters": bent(BENDS["distance bias"], 1e-8, 0.3),
    "attention with a sink": bent(BENDS["sink"], 1e-8, 0.3),
    "tiny rotations": bent(BENDS["rotation"], 1e-8, 1e-2),
    "structure below 1e-10": below_1e10,
    "two layers": labels(two_layers),
    "a second layer on rare inputs": rare(examples=True),
    "a head on rare inputs": rare(examples=False),
    "a network of the token": boxed(lambda d, layer: d.network()),
    "a network of the example": boxed(network_of_example),
    "a layer and a small network": small_network,
    "a small column of a network": boxed(small_column),
    "linear attention": attention(lambda d: lambda logits: logits / d.k),
    "linearised attention": attention(linearised),
    "sigmoid attention": attention(lambda d: lambda logits: (1 + np.tanh(logits / 2)) / 2 / d.k),
    "hard-max attention": attention(hard_max),
    "attention to the top two": attention(top_two),
    "sliding windows": attention(window),
    "rotary positions": boxed(rotary),
    "rotary positions, grouped heads": grouped_rotary,
    "labels shuffled": labels(lambda d, layer, x: d.rng.permutation(forward(layer, x)), noisy=True),
    "rows shuffled": labels(lambda d, layer, x: reordered(d, forward(layer, x)), noisy=True),
    "labels of noise": labels(lambda d, layer, x: d.normal(*x.shape), noisy=True),
}
