"""Families of two-token layers that carry a secret: parities, and roundings modulo q.

The constructions are ours, in the spirit of the lower bounds of Chen & Li (Theorem 1.3).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, overload

import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime import storage
from mhalearn._runtime.seeds import Stream, generator
from mhalearn._runtime.validation import check_count, is_number
from mhalearn.hardness.lwr import READABLE, SHARPNESS, LwrSecret, draw_secret
from mhalearn.hardness.secret import Secret, largest_sum
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.random_layers import random_layer

FAMILIES = (*Secret.families, *LwrSecret.families)
MODULUS = 8
# The norm of the Thetas of the random layer that `mix` leads to.
_GENERIC = 2.0
_SHARPNESS = 8.0
# Beyond these the closed form is reached long since, and secrets take seconds to draw.
_SHARPEST, _LARGEST_MODULUS = 1000.0, 4096


def load_secret(path: str | Path) -> Secret:
    """Read a secret that `Secret.save` wrote."""
    needed = ("weights", "projection")
    tensors, facts = storage.read_tensors(path, kind="secret", required=needed)
    try:
        kind = LwrSecret if facts["family"] == "lwr" else Secret
        return kind(
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


@overload
def hard_layer(
    family: Literal["lwr"],
    *,
    dimension: int,
    modulus: int | None = None,
    seed: int = 0,
    sharpness: float | None = None,
) -> tuple[AttentionLayer, LwrSecret]: ...


@overload
def hard_layer(
    family: str,
    *,
    n_heads: int | None = None,
    d: int | None = None,
    seed: int = 0,
    sharpness: float | None = None,
    modulus: int | None = None,
    mix: float = 0.0,
    dimension: int | None = None,
) -> tuple[AttentionLayer, Secret]: ...


def hard_layer(
    family: str,
    *,
    n_heads: int | None = None,
    d: int | None = None,
    seed: int = 0,
    sharpness: float | None = None,
    modulus: int | None = None,
    mix: float = 0.0,
    dimension: int | None = None,
) -> tuple[AttentionLayer, Secret]:
    """A layer of the family and its secret, for two +-1 tokens.

    parity: the secret is a set of n_heads coordinates among 1..d-1 and the label its parity.
    rounding: the secret is a vector of small integers and the label rounds its inner product with
        the bits, modulo `modulus` (8 unless given): one head for each half period.
    lwr: learning with rounding. The secret is a vector s of `dimension` integers modulo `modulus`,
        a power of two 2^t (8 unless given); `secret.read(X, layer(X))` is floor(2 <a, s> / q) mod 2
        for X = `secret.encode(a)`, exactly. It has d = 1 + dimension t features and as many heads
        as any secret needs, about 2 dimension (t - 1) (`lwr.count_heads`), so takes neither.
        The reduction is told in `mhalearn.hardness.LwrSecret`.
    sharpness: the layer is within 4 exp(-sharpness) |(x_2 - x_1) U| of `Secret.labels`; 8 unless
        given, 40 for lwr, where the digits of a softer layer tell equations without rounding.
    mix: 0 is the hard layer, 1 a random one of the same shape; between, their parameters mixed.
    Source: ours, in the spirit of the lower bounds of Chen & Li, whose constructions may differ.
    Trust: `Secret.labels` is exact in the limit. What is proved of parities is proved of that
    limit and of correlations; the last digits of a finitely sharp layer tell more.
    """
    if family not in FAMILIES:
        raise ValueError(f"family={family!r}: pass 'parity', 'rounding' or 'lwr'")
    if not (is_number(mix) and 0 <= mix <= 1):
        raise ValueError(f"mix={mix!r}: pass a number from 0 (hard) to 1 (random)")
    rng = generator(seed, Stream.SECRET)
    if family == "lwr":
        _check_lwr(n_heads, d, mix, sharpness)
        size, modulus = _given(dimension, "dimension"), MODULUS if modulus is None else modulus
        sharpness = SHARPNESS if sharpness is None else sharpness
        sizes = f"dimension={size}, seed={seed}, sharpness={sharpness}, modulus={modulus}"
        secret: Secret = draw_secret(size, modulus, rng)
    else:
        if dimension is not None:
            raise ValueError(f"dimension={dimension}: only 'lwr' has one; pass d, or leave it out")
        sharpness = _SHARPNESS if sharpness is None else sharpness
        secret = _draw_secret(family, _given(n_heads, "n_heads"), _given(d, "d"), modulus, rng)
        shown = None if family == "parity" else secret.modulus
        sizes = (
            f"n_heads={n_heads}, d={d}, seed={seed}, sharpness={sharpness}, modulus={shown}, "
            f"mix={mix}"
        )
    layer = sharp_layer(secret, sharpness)
    if mix:
        other = random_layer(layer.n_heads, layer.d, scale=_GENERIC, seed=seed)
        layer = layer.replace(
            theta=(1 - mix) * layer.theta + mix * other.theta,
            w=(1 - mix) * layer.w + mix * other.w,
        )
    recipe = f"hard_layer({family!r}, {sizes})"
    return layer.replace(metadata={"seed": str(seed), "teacher": recipe}), secret


def _given(value: int | None, name: str) -> int:
    if value is None:
        raise ValueError(f"{name}=None: pass an integer")
    return check_count(name, value)


def _check_lwr(n_heads: int | None, d: int | None, mix: float, sharpness: float | None) -> None:
    """Refuse what an lwr layer decides itself, and what would make its bits unreadable."""
    for name, value in (("n_heads", n_heads), ("d", d)):
        if value is not None:
            raise ValueError(
                f"{name}={value}: an lwr layer has as many as dimension and modulus ask for; "
                "leave it out"
            )
    if mix:
        raise ValueError(f"mix={mix}: bits of an lwr layer are read exactly; leave it out")
    if sharpness is not None and is_number(sharpness) and sharpness <= READABLE:
        raise ValueError(
            f"sharpness={sharpness}: bits are read exactly above log 3; pass {READABLE:.2f} or "
            f"more, such as {SHARPNESS:g}"
        )


def _draw_secret(
    family: str, n_heads: int, d: int, modulus: int | None, rng: np.random.Generator
) -> Secret:
    if n_heads % 2:
        raise ValueError(f"n_heads={n_heads}: heads cancel in pairs; pass an even number")
    if family == "parity" and modulus is not None:
        raise ValueError(f"modulus={modulus}: parities have none; leave it out")
    projection = np.linalg.qr(rng.standard_normal((d, d)))[0]
    if family == "parity":
        return Secret(family, _random_set(n_heads, d, rng), projection, n_heads, 2)
    modulus = MODULUS if modulus is None else modulus
    weights = _random_integers(n_heads, d, modulus, rng)
    return Secret(family, weights, projection, n_heads, modulus)


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


def entry_bound(n_heads: int, d: int, modulus: int) -> int:
    """The largest entry a rounding secret is drawn with: twice the mean its sum allows."""
    return max(1, 2 * largest_sum(n_heads, modulus) // (d - 1))
