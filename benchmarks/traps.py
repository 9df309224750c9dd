"""Data made to mislead, drawn from a seed, and what is true about them."""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import mhalearn as mha

# Heads, features, tokens: one shape a seed, so that programs are compiled once for all traps.
SHAPES = [(2, 4, 4), (1, 6, 3), (3, 3, 5), (2, 5, 2), (2, 6, 3), (1, 8, 6), (3, 5, 4)]
N = 96  # examples
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
        limit = truth.architecture.with_heads(d.m).counting_limit(x.shape[1])
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
