"""What a trap is, and the random choices that make one from its name and a seed."""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

import mhalearn as mha
from benchmarks.traps.boxes import UNITS, Array, Box, forward, rms, stored
from benchmarks.traps.laws import LAWS, USUAL

# Heads, features, tokens: one shape a seed, so that programs are compiled once for all traps.
SHAPES = [(2, 4, 4), (1, 6, 3), (3, 3, 5), (2, 5, 2), (2, 6, 3), (1, 8, 6), (3, 5, 4)]
N = 96  # examples
Layer = mha.AttentionLayer  # here a record: labels are made by `forward`
Make = Callable[["Draw"], "Trap"]


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
    noisy: bool = False  # noise was added, or what is none but to its maker: it may be said
    box: Box | None = None  # makes unrounded labels of any inputs
    fresh: Callable[[int], Array] | None = None  # so many inputs of the same law
    cell: dict[str, str] | None = None  # of a plain layer: its place in the table of those
    twins: bool = False  # a distant layer makes the same labels, and no nearby one
    again: tuple[Array, Array] | None = None  # examples to certify on that hold nothing new
    gaussian: bool = False  # the noise is Gaussian, independent and of one size: intervals are due

    @property
    def last_place(self) -> float:
        return max(self.unit, float(np.finfo(self.y.dtype).eps))


class Draw:
    """The random choices of one seed and trap, all from one stream."""

    def __init__(self, name: str, seed: int) -> None:
        self.key = [seed, zlib.crc32(name.encode())]
        self.rng = np.random.default_rng(self.key)
        self.seed = seed
        self.m, self.d, self.k = SHAPES[seed % len(SHAPES)]
        self.law = "gaussian"

    def layer(self, **changes: Any) -> Layer:
        settings = {"n_heads": self.m, "d": self.d, "scale": self.pick(1.0, 2.0, 2.0, 5.0)}
        return mha.random_layer(**settings | {"seed": int(self.rng.integers(2**31))} | changes)

    def inputs(self, n: int = N, k: int | None = None, d: int | None = None) -> Array:
        """Of a usual law, which is remembered for fresh ones."""
        return self.inputs_of(self.pick("boolean", "gaussian", "gaussian", *USUAL), n, k, d)

    def inputs_of(self, law: str, n: int = N, k: int | None = None, d: int | None = None) -> Array:
        self.law = law
        return LAWS[law](self.rng, (n, k or self.k, d or self.d))

    def fresh(self) -> Callable[[int], Array]:
        """More inputs of the law last drawn from, from a stream of their own."""
        rng, shape = np.random.default_rng([*self.key, 1]), (self.k, self.d)
        return lambda n, law=self.law: LAWS[law](rng, (n, *shape))

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

    def network(self) -> Box:
        """A function of each token, of size one on Gaussian ones, that no attention layer is."""
        inner, outer = self.normal(self.d, 30), self.normal(30, self.d)
        size = rms(np.tanh(self.normal(200, self.d) @ inner) @ outer)
        return lambda x: np.tanh(x @ inner) @ outer / size


def from_layer(d: Draw, truth: Layer, x: Array, y: Array | None = None, **more: Any) -> Trap:
    """Labels of a layer, exact but for their precision, or those given."""
    y = forward(truth, x) if y is None else y
    return Trap(x, d.rounded(y), truth, d.asked(len(truth.theta)), **more)


def from_box(
    d: Draw, box: Box, x: Array, heads: int | str, precision: str | None = None, **more: Any
) -> Trap:
    """Labels that no layer makes, rounded to a precision, or to one drawn."""
    made = box(x)
    if precision is None:
        y, unit = d.rounded(made), 0.0
    else:
        y, unit = stored(precision, made), UNITS[precision]
    return Trap(x, y, None, heads, unit=unit, made=made, box=box, fresh=d.fresh(), **more)


def boxed(make: Callable[[Draw, Layer], Box], **more: Any) -> Make:
    """A trap from what makes a box of a layer."""

    def trap(d: Draw) -> Trap:
        layer, x = d.layer(), d.inputs()
        return from_box(d, make(d, layer), x, d.asked(), **more)

    return trap


def plain(layer: Layer) -> Box:
    return partial(forward, layer)
