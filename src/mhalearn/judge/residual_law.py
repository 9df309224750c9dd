"""Is what a fit leaves like independent Gaussian noise: of one size, and no row far off?

What attention leaves of labels that it cannot make is large in a few rows and small in most, and
larger at some positions or for some tokens than for others. Independent noise is neither.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import f as f_distribution

from mhalearn._runtime.seeds import Stream
from mhalearn._runtime.types import Float64
from mhalearn.data import Examples
from mhalearn.judge.tangent_space import TangentSpace
from mhalearn.layer.base import Layer

# Mardia's kurtosis: by so many standard deviations, and by so much, off that of a Gaussian.
_DEVIATIONS, _EXCESS = 6.0, 0.2
# The probability under noise of one size of so large a difference in size.
_UNLIKELY = 1e-6
# Positions are looked at in at most so many groups.
_GROUPS = 8
# A fit takes a share of each row's noise; rows of which it takes more say nothing.
_MOST_TAKEN = 0.9
_MOST_ROWS = 1500


class ResidualLaw(NamedTuple):
    """What stands against noise, each None where nothing does."""

    heavy_tails: float | None  # kurtosis of rows over that of a Gaussian
    by_position: float | None  # root mean square at the worst position over that of all
    by_size: bool  # rows with large tokens or large outputs have larger errors, or smaller ones

    @property
    def is_noise(self) -> bool:
        return self.heavy_tails is None and self.by_position is None and not self.by_size

    def describe(self) -> str:
        """What it is, in words that follow "the residual"."""
        told = []
        if self.by_position is not None:
            told.append(f"is {self.by_position:.1f} times as large at some positions as on average")
        if self.by_size:
            told.append("varies in size with the tokens")
        if self.heavy_tails is not None:
            how = (
                "is large in a few rows"
                if self.heavy_tails > 1
                else "is nearly the same in all rows"
            )
            told.append(f"{how} (kurtosis {self.heavy_tails:.2g} times a Gaussian's)")
        return " and ".join(told)


class Rows(NamedTuple):
    """What a layer of any kind makes of some examples."""

    x: Float64  # (n, k, d)
    inside: NDArray[np.bool_]  # (n, k)
    outputs: Float64  # (n, k, e)
    residual: Float64  # (n, k, e)


def rows_of(layer: Layer, examples: Examples) -> Rows:
    """Of at most 1500 rows of the examples."""
    x, y, lengths = examples.subset(slice(0, max(2, _MOST_ROWS // examples.k))).arrays()
    inside = np.arange(examples.k) < lengths[:, None]
    outputs = layer(x, lengths)
    tokens = x.astype(np.float64) * inside[..., None]
    return Rows(tokens, inside, outputs, (y - outputs) * inside[..., None])


def describe_residual_law(rows: Rows, tangent: TangentSpace) -> ResidualLaw:
    """Trust: three tests of noise that is Gaussian, independent and of one size, each with a false
    alarm in some million; not tests of independence. Cost: O(N e + e^3)."""
    n, k, e = rows.residual.shape
    left = tangent.project(rows.residual.reshape(1, -1))[0].reshape(n, k, e)
    taken = np.full((n, k), tangent.rank / max(rows.inside.sum() * e, 1))
    if tangent.leverage is not None:
        taken = tangent.leverage.reshape(n, k, e).mean(axis=-1)
    telling = rows.inside & (taken < _MOST_TAKEN)
    if telling.sum() <= 2 * e + 10:
        return ResidualLaw(None, None, False)
    left = left / np.sqrt(np.where(telling, 1 - taken, 1.0))[..., None]
    whitened = _whiten(left[telling])
    if whitened.shape[1] == 0:
        return ResidualLaw(None, None, False)
    energy = np.zeros((n, k))
    energy[telling] = np.sum(whitened**2, axis=1) / whitened.shape[1] - 1
    return ResidualLaw(
        _kurtosis(whitened), _worst_position(energy, telling), _varies(rows, energy, telling)
    )


def _whiten(rows: Float64) -> Float64:
    """Rows with output columns that are not correlated, each of size one."""
    values, vectors = np.linalg.eigh(rows.T @ rows / len(rows))
    there = values > 1e-12 * values[-1] if values[-1] > 0 else values > 0
    return (rows @ vectors[:, there]) / np.sqrt(values[there])


def _kurtosis(whitened: Float64) -> float | None:
    """Mardia's, over that of a Gaussian, where it is not that."""
    rows, e = whitened.shape
    expected = e * (e + 2)
    found = float(np.mean(np.sum(whitened**2, axis=1) ** 2))
    spread = np.sqrt(8 * expected / rows)
    off = abs(found - expected)
    return found / expected if off > max(_DEVIATIONS * spread, _EXCESS * expected) else None


def inputs_look_alike_at_all_positions(rows: Rows) -> bool:
    """Whether tokens have the same mean and size wherever they stand, as far as examples show.

    Where they have not, what depends on tokens depends on positions. Trust: two moments.
    """
    whole = rows.inside.all(axis=1)
    x = rows.x[whole]
    n, k, d = x.shape
    if k < 2 or n < 8:
        return True
    along = np.random.default_rng(int(Stream.POSITIONS)).normal(size=d)
    moments = (x @ along, np.sum(x**2, axis=-1))
    return not any(_differs_by_position(moment) for moment in moments)


def _differs_by_position(values: Float64) -> bool:
    """Whether the means of values (n, k) differ between groups of positions."""
    k = values.shape[1]
    groups = np.arange(k) * _GROUPS // max(k, _GROUPS)
    means = [values[:, groups == name].mean(axis=1) for name in np.unique(groups)]
    contrasts = np.stack(means, axis=1) - values.mean(axis=1, keepdims=True)
    spread = float(np.abs(contrasts).max())
    return spread > 1e-9 * float(np.abs(values).max()) and _differs_from_zero(contrasts[:, 1:])


def _worst_position(energy: Float64, telling: NDArray[np.bool_]) -> float | None:
    """The largest error of a position over that of all, where positions differ."""
    k = energy.shape[1]
    groups = np.minimum(np.arange(k) * _GROUPS // max(k, _GROUPS), _GROUPS - 1) if k > 1 else None
    whole = telling.all(axis=1)
    if groups is None or whole.sum() < 4 * _GROUPS:
        return None
    names = np.unique(groups)
    means = np.stack([energy[whole][:, groups == name].mean(axis=1) for name in names], axis=1)
    contrasts = (means - energy[whole].mean(axis=1, keepdims=True))[:, 1:]
    if not _differs_from_zero(contrasts):
        return None
    return float(np.sqrt(1 + max(0.0, float(means.mean(axis=0).max()))))


def _varies(rows: Rows, energy: Float64, telling: NDArray[np.bool_]) -> bool:
    sizes = [np.sum(rows.x**2, axis=-1), np.sum(rows.outputs**2, axis=-1)]
    found = []
    for size in sizes:
        about = np.where(telling, size - size[telling].mean(), 0.0)
        spread = float(np.sqrt(np.mean(about**2)))
        if spread > 1e-6 * float(np.abs(size).max()):
            found.append((energy * about / spread).sum(axis=1))
    return bool(found) and _differs_from_zero(np.stack(found, axis=1))


def _differs_from_zero(scores: Float64) -> bool:
    """Hotelling's test that examples' scores (n, q) have mean zero."""
    n, q = scores.shape
    if q == 0 or n < 4 * q:
        return False
    mean = scores.mean(axis=0)
    centred = scores - mean
    covariance = centred.T @ centred / (n - 1)
    covariance += 1e-9 * np.trace(covariance) / q * np.eye(q)
    if not np.trace(covariance) > 0:
        return False
    squared = n * float(mean @ np.linalg.solve(covariance, mean))
    return bool(f_distribution.sf(squared * (n - q) / (q * (n - 1)), q, n - q) < _UNLIKELY)
