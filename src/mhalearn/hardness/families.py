"""Two families of two-token layers that carry a secret: parities, and roundings modulo q.

With a diagonal Theta_i = diag(D_i) both rows attend to the other token with the weight
sigmoid(sum_a D_i[a] (b_a - 1)), b = x_1 * x_2. Each head is a sharp halfspace of b; heads of
alternating sign add up to a square wave of a secret count. See Chen & Li, Theorem 1.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mhalearn._runtime import storage
from mhalearn._runtime.seeds import Stream, generator
from mhalearn._runtime.types import Float64
from mhalearn._runtime.validation import check_array, check_count, is_number
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.random_layers import random_layer

FAMILIES = ("parity", "rounding")
MODULUS = 8
# The norm of the Thetas of the random layer that `mix` leads to.
_GENERIC = 2.0
# Beyond these the closed form is reached long since, and secrets take seconds to draw.
_SHARPEST, _LARGEST_MODULUS = 1000.0, 4096


@dataclass(frozen=True)
class Secret:
    """What a hard layer hides, and the function it makes in the limit of sharp attention.

    weights: of each coordinate in the count h = sum_a weights_a [b_a = -1]; 0 or 1 for a parity.
    The label's sign is (-1)^j with j = floor(h / period), at most n_heads.
    projection: U, which is no secret.
    """

    family: str
    weights: NDArray[np.int64]
    projection: Float64
    n_heads: int
    modulus: int

    def __post_init__(self) -> None:
        heads = check_count("n_heads", self.n_heads, least=2)
        modulus = check_count("modulus", self.modulus, least=2)
        if self.family not in FAMILIES or heads % 2 or modulus % 2:
            raise ValueError("a secret is of the family parity or rounding, its numbers even")
        weights = check_array("weights", self.weights, 1)
        size = check_array("projection", self.projection, 2).shape
        integers = np.issubdtype(weights.dtype, int) and len(weights) > 0
        if not integers or size != (len(weights),) * 2:
            raise ValueError(
                f"weights {weights.shape}, projection {size}: pass d integers and d x d"
            )
        if weights.min() < 0 or weights[0] != 0:
            raise ValueError("weights are not negative, and the first is 0")
        if weights.sum() > largest_sum(self.n_heads, self.modulus):
            raise ValueError(
                f"the weights sum to {weights.sum()}: with {self.n_heads} heads and modulus "
                f"{self.modulus} at most {largest_sum(self.n_heads, self.modulus)} is periodic"
            )

    @property
    def coordinates(self) -> tuple[int, ...]:
        return tuple(np.flatnonzero(self.weights).tolist())

    def counts(self, x: ArrayLike) -> NDArray[np.int64]:
        """h for each example."""
        return (_products(x, len(self.weights)) < 0) @ self.weights

    def signs(self, x: ArrayLike) -> NDArray[np.int64]:
        """(-1)^j: the parity, or the square wave, of the secret count."""
        j = np.minimum(self.n_heads, 2 * self.counts(x) // self.modulus)
        return 1 - 2 * (j % 2)

    def labels(self, x: ArrayLike) -> Float64:
        """What infinitely sharp heads make: 1[b_0 = -1] (sign - 1) (x_other - x_own) U."""
        shown = (self.signs(x) - 1) * is_shown(x)
        return shown[:, None, None] * differences(x) @ self.projection

    def free_part(self, x: ArrayLike) -> Float64:
        """The part of the labels that depends on no secret.

        For a parity it leaves half of their energy; little less can be left without the secret
        where there are many.
        """
        shown = is_shown(x, len(self.weights))
        return -shown[:, None, None] * differences(x) @ self.projection

    def save(self, path: str | Path) -> None:
        """Write the secret to a .safetensors file, atomically."""
        facts = {"family": self.family, "n_heads": str(self.n_heads), "modulus": str(self.modulus)}
        tensors: dict[str, NDArray[Any]] = {"weights": self.weights, "projection": self.projection}
        storage.write_tensors(path, tensors, facts | {"kind": "secret"})


def load_secret(path: str | Path) -> Secret:
    """Read a secret that `Secret.save` wrote."""
    needed = ("weights", "projection")
    tensors, facts = storage.read_tensors(path, kind="secret", required=needed)
    try:
        return Secret(
            facts["family"],
            tensors["weights"],
            tensors["projection"],
            int(facts["n_heads"]),
            int(facts["modulus"]),
        )
    except KeyError as missing:
        raise ValueError(f"{storage.show(path)}: not a secret: no {missing}") from None
    except ValueError as error:
        raise ValueError(f"{storage.show(path)}: {error}") from None


def hard_layer(
    family: str,
    *,
    n_heads: int,
    d: int,
    seed: int = 0,
    sharpness: float = 8.0,
    modulus: int | None = None,
    mix: float = 0.0,
) -> tuple[AttentionLayer, Secret]:
    """A layer of the family and its secret, for two +-1 tokens.

    parity: the secret is a set of n_heads coordinates among 1..d-1 and the label its parity.
    rounding: the secret is a vector of small integers and the label rounds its inner product with
        the bits, modulo `modulus` (8 unless given): one head for each half period.
    sharpness: the layer is within 4 exp(-sharpness) |(x_2 - x_1) U| of `Secret.labels`.
    mix: 0 is the hard layer, 1 a random one of the same shape; between, their parameters mixed.
    Source: the lower-bound constructions of Chen & Li, in the form derived for two tokens.
    Trust: `Secret.labels` is exact in the limit. What is proved of parities is proved of that
    limit and of correlations; the last digits of a finitely sharp layer tell more.
    """
    n_heads, d = check_count("n_heads", n_heads), check_count("d", d)
    if family not in FAMILIES:
        raise ValueError(f"family={family!r}: pass 'parity' or 'rounding'")
    if n_heads % 2:
        raise ValueError(f"n_heads={n_heads}: heads cancel in pairs; pass an even number")
    if not (is_number(mix) and 0 <= mix <= 1):
        raise ValueError(f"mix={mix!r}: pass a number from 0 (hard) to 1 (random)")
    if family == "parity" and modulus is not None:
        raise ValueError(f"modulus={modulus}: parities have none; leave it out")
    rng = generator(seed, Stream.SECRET)
    projection = np.linalg.qr(rng.standard_normal((d, d)))[0]
    modulus = 2 if family == "parity" else MODULUS if modulus is None else modulus
    if family == "parity":
        weights = _random_set(n_heads, d, rng)
    else:
        weights = _random_integers(n_heads, d, modulus, rng)
    secret = Secret(family, weights, projection, n_heads, modulus)
    layer = sharp_layer(secret, sharpness)
    if mix:
        other = random_layer(n_heads, d, scale=_GENERIC, seed=seed)
        layer = layer.replace(
            theta=(1 - mix) * layer.theta + mix * other.theta,
            w=(1 - mix) * layer.w + mix * other.w,
        )
    recipe = (
        f"hard_layer({family!r}, n_heads={n_heads}, d={d}, seed={seed}, sharpness={sharpness}, "
        f"modulus={None if family == 'parity' else modulus}, mix={mix})"
    )
    return layer.replace(metadata={"seed": str(seed), "teacher": recipe}), secret


def is_shown(x: ArrayLike, d: int | None = None) -> NDArray[np.int64]:
    """1[b_0 = -1]: elsewhere all heads attend alike, and cancel."""
    return (_products(x, d)[:, 0] < 0).astype(np.int64)


def differences(x: ArrayLike) -> Float64:
    """x_other - x_own for each row."""
    tokens = np.asarray(x, dtype=np.float64)
    return tokens[:, ::-1] - tokens


def _products(x: ArrayLike, d: int | None) -> NDArray[Any]:
    """b = x_1 * x_2, of d features where that is known."""
    tokens = check_array("X", x, 3)
    if d is not None and tokens.shape[2] != d:
        raise ValueError(f"X has {tokens.shape[2]} features a token, the layer has d = {d}")
    if tokens.shape[1] != 2:
        raise ValueError(f"X has shape {tokens.shape}: hard layers have two tokens, (n, 2, d)")
    return tokens[:, 0] * tokens[:, 1]


def sharp_layer(secret: Secret, sharpness: float) -> AttentionLayer:
    """Head i steps at h = t_i + 1/2, t_i = (i + 1) q / 2 - 1."""
    if not (is_number(sharpness) and 0 < sharpness <= _SHARPEST):
        raise ValueError(
            f"sharpness={sharpness!r}: pass a positive number up to {_SHARPEST:g}, such as 8.0"
        )
    heads = np.arange(secret.n_heads)
    steps = (heads + 1) * secret.modulus // 2 - 0.5
    diagonals = np.tile(sharpness * secret.weights.astype(float), (secret.n_heads, 1))
    diagonals[:, 0] -= sharpness * steps
    theta = diagonals[:, :, None] * np.eye(len(secret.weights))
    signs = 2.0 * (-1.0) ** heads
    return AttentionLayer(theta, signs[:, None, None] * secret.projection)


def _random_set(size: int, d: int, rng: np.random.Generator) -> NDArray[np.int64]:
    if d < size + 1:
        raise ValueError(
            f"n_heads={size}, d={d}: a parity of {size} bits beside bit 0 needs d of at least "
            f"{size + 1}"
        )
    weights = np.zeros(d, np.int64)
    weights[1 + rng.choice(d - 1, size, replace=False)] = 1
    return weights


def _random_integers(
    n_heads: int, d: int, modulus: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Small integers, as large as their sum may be for the wave to be periodic everywhere."""
    modulus = check_count("modulus", modulus, least=2)
    if modulus % 2:
        raise ValueError(f"modulus={modulus}: half periods are integers; pass an even number")
    if modulus > _LARGEST_MODULUS:
        raise ValueError(f"modulus={modulus}: pass at most {_LARGEST_MODULUS}, such as {MODULUS}")
    if d < 2:
        raise ValueError(f"d={d}: coordinate 0 shows the label; pass at least 2")
    most = largest_sum(n_heads, modulus)
    bound = entry_bound(n_heads, d, modulus)
    weights = np.concatenate([[0], rng.integers(0, bound + 1, d - 1)])
    while weights.sum() > most:
        weights[rng.choice(np.flatnonzero(weights))] -= 1
    while weights.sum() < modulus // 2:  # else no count would reach the first step
        weights[rng.integers(1, d)] += 1
    return weights.astype(np.int64)


def largest_sum(n_heads: int, modulus: int) -> int:
    """Of a rounding secret; with more, counts beyond the last head's step would go unseen."""
    return (n_heads + 1) * modulus // 2 - 1


def entry_bound(n_heads: int, d: int, modulus: int) -> int:
    """The largest entry a rounding secret is drawn with: twice the mean its sum allows."""
    return max(1, 2 * largest_sum(n_heads, modulus) // (d - 1))
