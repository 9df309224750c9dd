"""What a hard layer hides: a count of secret weights, and the square wave of it that is the label.

With a diagonal Theta_i = diag(D_i) both rows attend to the other token with the weight
sigmoid(sum_a D_i[a] (b_a - 1)), b = x_1 * x_2. Each head is a sharp halfspace of b; heads of
alternating sign add up to a square wave of a secret count.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mhalearn._runtime import storage
from mhalearn._runtime.types import Float64
from mhalearn._runtime.validation import check_array, check_count


@dataclass(frozen=True)
class Secret:
    """What a hard layer hides, and the function it makes in the limit of sharp attention.

    weights: of each coordinate in the count h = sum_a weights_a [b_a = -1]; 0 or 1 for a parity.
    The label's sign is (-1)^j with j = floor(h / period), at most n_heads.
    projection: U, which is no secret.
    """

    families: ClassVar[tuple[str, ...]] = ("parity", "rounding")

    family: str
    weights: NDArray[np.int64]
    projection: Float64
    n_heads: int
    modulus: int

    def __post_init__(self) -> None:
        heads = check_count("n_heads", self.n_heads, least=2)
        modulus = check_count("modulus", self.modulus, least=2)
        if self.family not in self.families or heads % 2 or modulus % 2:
            known = " or ".join(self.families)
            raise ValueError(f"a secret is of the family {known}, its numbers even")
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

    def reference_labels(self, x: ArrayLike) -> Float64:
        """(2, n, 2, e): the labels if all signs were +1, and if all were -1.

        With a coin for each sign there is no secret: the mean of a query over both is what an
        adversarial `QueryOracle` answers.
        """
        free = self.free_part(x)
        return np.stack([np.zeros_like(free), 2 * free])

    def save(self, path: str | Path) -> None:
        """Write the secret to a .safetensors file, atomically."""
        facts = {"family": self.family, "n_heads": str(self.n_heads), "modulus": str(self.modulus)}
        tensors: dict[str, NDArray[Any]] = {"weights": self.weights, "projection": self.projection}
        storage.write_tensors(path, tensors, facts | {"kind": "secret"})


def is_shown(x: ArrayLike, d: int | None = None) -> NDArray[np.int64]:
    """1[b_0 = -1]: elsewhere all heads attend alike, and cancel."""
    return (_products(x, d)[:, 0] < 0).astype(np.int64)


def differences(x: ArrayLike) -> Float64:
    """x_other - x_own for each row."""
    tokens = np.asarray(x, dtype=np.float64)
    return tokens[:, ::-1] - tokens


def label_shares(x: ArrayLike, y: ArrayLike, projection: Float64) -> Float64:
    """The first row of each label along (x_2 - x_1) U: 0 or -2 where b_0 = -1 and heads are sharp.

    Halfway, at -1, is where noise begins to flip what is read.
    """
    along = differences(x)[:, 0] @ projection
    return np.sum(along * np.asarray(y)[:, 0], axis=1) / np.sum(along**2, axis=1)


def _products(x: ArrayLike, d: int | None) -> NDArray[Any]:
    """b = x_1 * x_2, of d features where that is known."""
    tokens = check_array("X", x, 3)
    if d is not None and tokens.shape[2] != d:
        raise ValueError(f"X has {tokens.shape[2]} features a token, the layer has d = {d}")
    if tokens.shape[1] != 2:
        raise ValueError(f"X has shape {tokens.shape}: hard layers have two tokens, (n, 2, d)")
    return tokens[:, 0] * tokens[:, 1]


def largest_sum(n_heads: int, modulus: int) -> int:
    """Of a rounding secret; with more, counts beyond the last head's step would go unseen."""
    return (n_heads + 1) * modulus // 2 - 1
