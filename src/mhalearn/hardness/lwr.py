"""Learning with rounding inside an attention layer: one bit of a secret inner product modulo q.

Write a in Z_q^n, q = 2^t, as n t bits, each the sign of a coordinate of b = x_1 * x_2. The weight
s_j 2^l mod q on bit l of a_j makes the count h congruent to <a, s> modulo q, so that the square
wave of period q, one head for each half period, shows floor(2 <a, s> / q) mod 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mhalearn._runtime.seeds import Stream, generator
from mhalearn._runtime.validation import check_array, check_count
from mhalearn.hardness.secret import Secret, is_shown, label_shares

# The heads next to the count are off by 2 sigmoid(-sharpness) each, in the same direction; those
# beyond them alternate and fall. Bits are read halfway between shares 0 and -2, so exactly if
# 4 sigmoid(-sharpness) < 1.
READABLE = math.log(3)
# 4 exp(-40) is below the last digit of a share. A softer layer tells in later digits how near the
# count is to a step: equations modulo q without any rounding, which elimination solves.
SHARPNESS = 40.0
# Of theta and w together.
_LARGEST_BYTES = 2**28
_LARGEST_MODULUS = 4096


@dataclass(frozen=True)
class LwrSecret(Secret):
    """The secret of an lwr layer, with the way in for integers and the way out for bits.

    The reduction. Samples (a, bit) of learning with rounding to one bit become examples of a layer:
    with probability one half X = `encode(a)` has the label -2 bit (x_other - x_own) U, else b_0 =
    +1 and the label is zero. For uniform a such X is uniform. If the bits are floor(2 <a, s> / q)
    mod 2, these are the examples of the layer's closed form; if they are coins, nothing predicts
    them, and half of the labels' energy is left to everyone. Whoever learns such layers from random
    examples to less than half thus tells rounded inner products from coins, with no more samples
    than examples.

    Source: learning with rounding is of Banerjee, Peikert & Rosen (Eurocrypt 2012); putting it into
    a layer in this way is ours. Trust: exact for the closed form, `Secret.labels`; the last digits
    of a computed label are rounding errors, which depend on how many heads have stepped and are
    covered by nothing. That samples cannot be told from coins is an assumption: false where n is
    small, or grows while q does not (`attacks.py`).
    """

    families: ClassVar[tuple[str, ...]] = ("lwr",)

    def __post_init__(self) -> None:
        super().__post_init__()
        width, size = count_bits(self.modulus), len(self.weights) - 1
        if size < width or size % width:
            raise ValueError(f"{size} weights beside the first: pass a multiple of {width}")
        if not np.array_equal(self.weights, spread(self.vector, self.modulus)):
            raise ValueError("weights of a secret vector s are s_j 2^l mod q; these are not")

    @property
    def vector(self) -> NDArray[np.int64]:
        """s, integers from 0 to q - 1: the weights on the lowest bits."""
        return self.weights[1 :: count_bits(self.modulus)]

    def encode(self, a: ArrayLike, *, seed: int = 0) -> NDArray[np.int8]:
        """Inputs X (N, 2, d) that show the bits of the integers a (N, n), taken modulo q.

        The first token is random, of this seed; the second makes b_0 = -1 and the sign of
        b_{1 + j t + l} bit l of a_j. For uniform a, X is uniform among inputs of b_0 = -1.
        """
        integers = check_array("a", a, 2, "(examples, dimension)")
        if not np.issubdtype(integers.dtype, np.integer):
            raise ValueError(
                f"a has dtype {integers.dtype}: pass integers; they are taken modulo {self.modulus}"
            )
        n = len(self.vector)
        if integers.shape[1] != n:
            raise ValueError(f"a has shape {integers.shape}: the secret has dimension {n}")
        # 2^64 is a multiple of q: what is lost of unsigned integers does not matter.
        lowest = integers.astype(np.int64)[:, :, None] >> np.arange(count_bits(self.modulus))
        signs = (1 - 2 * (lowest & 1)).astype(np.int8).reshape(len(integers), -1)
        products = np.column_stack([np.full(len(integers), -1, np.int8), signs])
        rng = generator(seed, Stream.SECRET, 1)
        first = 2 * rng.integers(0, 2, products.shape, dtype=np.int8) - np.int8(1)
        return np.stack([first, first * products], axis=1)

    def read(self, x: ArrayLike, y: ArrayLike) -> NDArray[np.int64]:
        """The bit each label shows: floor(2 <a, s> / q) mod 2 for X = encode(a), Y = layer(X).

        It takes no secret to read them: that the labels are halfway to -2 or not is all there is.
        """
        inputs = check_array("X", x, 3, "(examples, tokens, features)")
        labels = check_array("Y", y, 3, "(examples, tokens, features)")
        hidden = int(np.sum(1 - is_shown(inputs, len(self.weights))))
        if labels.shape != inputs.shape:
            raise ValueError(f"X has shape {inputs.shape}, Y {labels.shape}: pass labels of X")
        if hidden:
            raise ValueError(
                f"{hidden} of {len(inputs)} examples have b_0 = +1 and show no bit: pass inputs "
                "that encode made"
            )
        return (label_shares(inputs, labels, self.projection) < -1).astype(np.int64)


def count_bits(modulus: int) -> int:
    """t of q = 2^t, or a ValueError."""
    modulus = check_count("modulus", modulus, least=2)
    if modulus & (modulus - 1):
        raise ValueError(f"modulus={modulus}: integers enter bit by bit; pass a power of two")
    return modulus.bit_length() - 1


def count_heads(dimension: int, modulus: int) -> int:
    """Heads that are enough for every secret, so that their number tells nothing of it.

    The largest weight on bit l is q - 2^l, the largest count n (t q - q + 1), which must be below
    (m + 1) q / 2: m is the least even number of at least 2 n (t - 1) + 2 (n + 1) / q - 1.
    """
    largest = dimension * ((count_bits(modulus) - 1) * modulus + 1)
    return 2 * -((modulus - 2 * (largest + 1)) // (2 * modulus))


def spread(vector: NDArray[np.int64], modulus: int) -> NDArray[np.int64]:
    """The weights of a vector, or of each row of an array of them: s_j 2^l mod q, after a 0."""
    weights = (vector[..., None] << np.arange(count_bits(modulus))) % modulus
    flat = weights.reshape(*vector.shape[:-1], -1)
    return np.concatenate([np.zeros_like(flat[..., :1]), flat], axis=-1)


def check_size(dimension: int, modulus: int) -> None:
    """Refuse layers that no memory should hold."""
    check_count("dimension", dimension)
    width = count_bits(modulus)
    if modulus > _LARGEST_MODULUS:
        raise ValueError(f"modulus={modulus}: pass at most {_LARGEST_MODULUS}")
    d, heads = 1 + dimension * width, count_heads(dimension, modulus)
    size = 16 * heads * d**2
    if size > _LARGEST_BYTES:
        raise ValueError(
            f"dimension={dimension}, modulus={modulus}: {heads} heads of {d} features take "
            f"{size / 2**30:.1f} GiB; pass sizes that take {_LARGEST_BYTES / 2**30} GiB at most"
        )


def draw_secret(dimension: int, modulus: int, rng: np.random.Generator) -> LwrSecret:
    """Uniform among vectors with an odd entry, so that <a, s> is uniform for uniform a.

    That is uniform up to a distance of 2^-n.
    """
    check_size(dimension, modulus)
    d = 1 + dimension * count_bits(modulus)
    projection = np.linalg.qr(rng.standard_normal((d, d)))[0]
    vector = rng.integers(0, modulus, dimension)
    while not np.any(vector % 2):
        vector = rng.integers(0, modulus, dimension)
    heads = count_heads(dimension, modulus)
    return LwrSecret("lwr", spread(vector, modulus), projection, heads, modulus)
