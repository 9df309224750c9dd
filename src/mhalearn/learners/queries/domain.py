"""Which tokens a box may be asked about: any, those of a ball, of the cube, or of a vocabulary."""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.types import Float64
from mhalearn._runtime.validation import check_array, is_number

ANY, CUBE = "any", "cube"
# Roundings of labels from which on tokens are rounded to float32 and to bfloat16: a box that
# computes in those would round them by itself, and be asked something else than we think.
_SINGLE, _HALF = 1e-12, 1e-4
# Share of a ball's radius that is used, so that what moves a little stays inside.
_INSIDE = 0.999
# Sizes of random tokens, relative to each other, in turn: heads of unequal norms all show.
_SIZES = (1.0, 0.7, 1.4)


@dataclass(frozen=True)
class Domain:
    """Tokens that may be asked about. radius: of a ball around zero; vocabulary: (v, d)."""

    d: int
    cube: bool = False
    radius: float | None = None
    vocabulary: Float64 | None = None

    @property
    def is_continuous(self) -> bool:
        """Whether tokens may be moved a little in any direction."""
        return not self.cube and self.vocabulary is None

    def fit(self, tokens: Float64) -> float:
        """The factor, at most one, by which these tokens must be smaller to be allowed."""
        if self.radius is None:
            return 1.0
        largest = float(np.sqrt(np.max(np.sum(tokens**2, axis=-1))))
        return min(1.0, _INSIDE * self.radius / max(largest, 1e-300))

    def draw(
        self, n: int, k: int, size: float, rng: np.random.Generator, unit: float = 0.0
    ) -> Float64:
        """Random sequences (n, k, d): Gaussian tokens of about this size, or allowed ones."""
        if self.cube:
            return np.asarray(2.0 * rng.integers(0, 2, (n, k, self.d)) - 1.0, np.float64)
        if self.vocabulary is not None:
            chosen: Float64 = self.vocabulary[rng.integers(0, len(self.vocabulary), (n, k))]
            return chosen
        sizes = size * np.resize(_SIZES, n)[:, None, None]
        x = sizes * rng.standard_normal((n, k, self.d))
        if self.radius is not None:
            norms = np.sqrt(np.sum(x**2, axis=-1, keepdims=True))
            x = x * np.minimum(1.0, self.radius / np.maximum(norms, 1e-300))
        if unit > _HALF:
            x = x.astype(ml_dtypes.bfloat16).astype(np.float64)
        elif unit > _SINGLE:
            x = x.astype(np.float32).astype(np.float64)
        return x


def draw_direction(rng: np.random.Generator, d: int) -> Float64:
    """A random direction whose features are of size one."""
    x = rng.standard_normal(d)
    scaled: Float64 = x * np.sqrt(d) / np.linalg.norm(x)
    return scaled


def half_sharp_size(sizes: Float64, answers: NDArray[Any]) -> float:
    """The size c at which F(c X) / c is half way from its smallest size's to its largest's.

    For small c all tokens weigh alike, for large ones a few count. Trust: a rule of thumb.
    """
    scaled = answers.astype(np.float64) / sizes[:, None, None]
    away = np.sqrt(np.sum((scaled - scaled[0]) ** 2, axis=(1, 2)))
    if len(sizes) < 2 or away[-1] == 0.0:
        return float(sizes[-1])
    return float(
        np.exp(
            np.interp(
                0.5 * away.max(), away[: np.argmax(away) + 1], np.log(sizes[: np.argmax(away) + 1])
            )
        )
    )


def mantissa_unit(answers: NDArray[Any]) -> float:
    """2^-b where all answers have at most b < 48 bits of mantissa, as coarse ones in a wide type
    have; zero otherwise."""
    bits = np.ascontiguousarray(answers, np.float64).view(np.uint64) & np.uint64(2**52 - 1)
    together = int(np.bitwise_or.reduce(bits, axis=None))
    if together == 0:
        return 0.0
    trailing = (together & -together).bit_length() - 1
    used = 53 - trailing
    return 2.0**-used if used < 48 else 0.0


def make_domain(inputs: Any, d: int) -> Domain:
    """The domain that a caller names: "any", "cube", a radius, or an array of tokens (v, d)."""
    if isinstance(inputs, str):
        if inputs not in (ANY, CUBE):
            raise ValueError(
                f"inputs={inputs!r}: pass 'any', 'cube', the radius of a ball, or an array of "
                "tokens (v, d)"
            )
        return Domain(d, cube=inputs == CUBE)
    if is_number(inputs):
        if not inputs > 0:
            raise ValueError(f"inputs={inputs}: the radius of a ball is positive")
        return Domain(d, radius=float(inputs))
    tokens = check_array("inputs", inputs, 2, "(tokens, features)").astype(np.float64)
    if tokens.shape[1] != d or len(tokens) < 2:
        raise ValueError(
            f"inputs has shape {tokens.shape}: a vocabulary has at least two tokens of d = {d}"
        )
    return Domain(d, vocabulary=tokens)
