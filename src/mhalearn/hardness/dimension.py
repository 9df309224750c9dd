"""How little correlations tell of a secret: exact sums over all inputs of a small dimension.

A statistical-query learner sees averages. Which averages differ between secrets is decided by two
things that can be listed for small d: the correlations of one layer's labels with products of
bits, and the correlations of the labels of two layers with each other.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from mhalearn._runtime.types import Float64
from mhalearn._runtime.validation import check_count
from mhalearn.hardness.families import hard_layer, sharp_layer
from mhalearn.hardness.queries import cube
from mhalearn.hardness.secret import Secret
from mhalearn.layer.random_layers import random_layer


@dataclass(frozen=True)
class Dimension:
    """What statistical queries see of a class of layers of one shape.

    by_degree: the largest |correlation| of a label's entry, of unit mean square, with a product of
        r bits of b and any product of bits of x_1, for r = 0, 1, ..., over the first layer.
    largest: |correlation| between the labels of two layers of the class.
    size: layers in the class; dimension: min(size, 1 / largest), a lower bound on the
        statistical dimension from the worst pair. With tolerance t about t^2 as many queries are
        needed, which says something only where it is large.
    """

    by_degree: tuple[float, ...]
    largest: float
    size: int

    @property
    def dimension(self) -> float:
        return min(float(self.size), 1 / self.largest if self.largest > 0 else math.inf)


def parity_dimension(n_heads: int, d: int, sharpness: float = 16.0) -> Dimension:
    """All parities of n_heads bits beside bit 0, without what no secret enters.

    Cost: labels of 4^d inputs for each of binomial(d - 1, m) secrets. Trust: exact up to rounding
    and 4 exp(-sharpness).
    """
    x = cube(d)
    _, public = hard_layer("parity", n_heads=n_heads, d=d)
    free = public.free_part(x)[:, 0]
    labels = [
        sharp_layer(secret, sharpness)(x)[:, 0] - free for secret in all_parities(n_heads, public)
    ]
    return _dimension(labels)


def generic_dimension(n_heads: int, d: int, size: int, seed: int = 0) -> Dimension:
    """As many random layers of the same shape, whose mean label is zero already."""
    x = cube(d)
    count = check_count("size", size)
    layers = [random_layer(n_heads, d, seed=seed + number) for number in range(count)]
    return _dimension([layer(x)[:, 0] for layer in layers])


def all_parities(n_heads: int, public: Secret) -> list[Secret]:
    """Every secret of the family that shares the public part."""
    d = len(public.weights)
    found = []
    for chosen in combinations(range(1, d), n_heads):
        weights = np.zeros(d, np.int64)
        weights[list(chosen)] = 1
        found.append(Secret("parity", weights, public.projection, n_heads, 2))
    return found


def _dimension(labels: Sequence[Float64]) -> Dimension:
    flat = np.stack([label.ravel() / np.linalg.norm(label) for label in labels])
    between = np.abs(flat @ flat.T - np.eye(len(flat)))
    return Dimension(by_degree(labels[0]), float(between.max()), len(labels))


def by_degree(labels: Float64) -> tuple[float, ...]:
    """The largest |correlation| with r bits of b, for each r; labels (4^d, e) in `cube`'s order."""
    d = round(math.log(len(labels), 4))
    scaled = labels / math.sqrt(np.mean(np.sum(labels**2, axis=1)))
    spectrum = np.abs(walsh(scaled)).max(axis=1).reshape(2**d, 2**d).max(axis=0)
    degrees = np.array([index.bit_count() for index in range(2**d)])
    return tuple(float(spectrum[degrees == r].max()) for r in range(d + 1))


def walsh(values: Float64) -> Float64:
    """Correlations of functions of +-1 bits with all products of them: (2^t, e) -> (2^t, e).

    Cost: O(t 2^t e), the fast transform. Bits of an index are which entries are -1, and which
    entries a product has.
    """
    found = values.copy()
    size = len(values)
    step = 1
    while step < size:
        pairs = found.reshape(size // (2 * step), 2, step, -1)
        found = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1)
        found = found.reshape(size, -1)
        step *= 2
    return found / size
