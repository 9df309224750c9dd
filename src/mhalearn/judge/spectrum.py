"""What a spectrum says: eigenvalues, open directions, and the error of each parameter."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mhalearn._runtime.types import Float64

# An eigenvalue this far below the largest is rounding: the data do not see that direction.
NULL = 1e-12


@dataclass(frozen=True)
class Parameters:
    """A number for each parameter of a layer, by name, in the layer's shapes."""

    arrays: Mapping[str, Float64]

    @property
    def theta(self) -> Float64:
        return self.arrays["theta"]

    @property
    def w(self) -> Float64:
        return self.arrays["w"]

    @property
    def key_vector(self) -> Float64 | None:
        return self.arrays.get("key_vector")

    @property
    def out_bias(self) -> Float64 | None:
        return self.arrays.get("out_bias")


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues, ascending, of scaled normal matrices.

    theta: of the Schur complement left when W is eliminated, in units where J^T J has diagonal one
    (or less, where it is rounding), or of J^T J in all parameters, the gauge left out; w: of the
    design's Gram matrix, likewise, which is the same for each of the output columns.
    deviations: standard deviation of each parameter's estimate for label noise of deviation one;
    infinite where a parameter touches a null direction.
    token_size: root mean square of the tokens' features, to the nearest power of two.
    """

    theta: Float64
    w: Float64
    null_dimension: int
    deviations: Parameters
    token_size: float


def count_null(values: Float64, noise: float = 0.0) -> int:
    """Eigenvalues at rounding, of a matrix scaled to a diagonal of one or below."""
    return int(np.sum(values <= max(NULL, noise) * max(float(values[-1]), 1.0)))
