"""The tangent space of a layer's outputs: what a small change of its parameters explains."""

from typing import NamedTuple

import numpy as np
import scipy.linalg

from mhalearn._runtime.types import Float64
from mhalearn.judge.fitted_attention import FittedAttention

# Beyond these the tangent space is not computed.
_MOST_UNKNOWNS = 1500
_SCALARS_EACH = 1.5
# Ridge on columns of length one: directions that inputs leave open do not count.
_RIDGE = 1e-11


class TangentSpace(NamedTuple):
    """columns (p, N), each of length one; None where they are too many, or examples too few."""

    columns: Float64 | None
    factor: Float64 | None  # of their Gram matrix, by Cholesky
    rank: int
    leverage: Float64 | None  # of each scalar (N,): the share of its noise that a fit takes

    def project(self, rows: Float64) -> Float64:
        """The part of rows (q, N) beyond the tangent space."""
        if self.columns is None:
            return rows
        for _ in range(2):  # normal equations lose half of the digits
            inside = scipy.linalg.cho_solve((self.factor, True), self.columns @ rows.T)
            rows = rows - inside.T @ self.columns
        return rows


def measure_tangent_space(fitted: FittedAttention, weights: Float64 | None = None) -> TangentSpace:
    """Of the class of layers the fit was made in, rows weighed by (n, k). Cost: O(N p^2)."""
    unknowns = fitted.architecture.count()
    if unknowns > _MOST_UNKNOWNS or fitted.n_scalars < _SCALARS_EACH * unknowns:
        return TangentSpace(None, None, min(unknowns, fitted.n_scalars // 2), None)
    scale = 1.0 if weights is None else weights[..., None]
    parts = [*fitted.along_theta(), *fitted.along_w()]
    columns = np.concatenate([flatten(part * scale) for part in parts])
    size = np.linalg.norm(columns, axis=1, keepdims=True)
    columns /= np.where(size > 0, size, 1.0)
    gram = columns @ columns.T
    factor = np.linalg.cholesky(gram + _RIDGE * np.eye(len(gram)))
    leverage = np.sum(scipy.linalg.solve_triangular(factor, columns, lower=True) ** 2, axis=0)
    return TangentSpace(columns, factor, round(float(leverage.sum())), leverage)


def flatten(directions: Float64) -> Float64:
    """(q, n, k, e) as rows (q, N)."""
    return directions.reshape(len(directions), -1)
