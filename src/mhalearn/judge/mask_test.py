"""Do labels show a causal mask? The first row of each example then sees its own token alone."""

from typing import NamedTuple

import numpy as np
from scipy.stats import f as f_distribution

from mhalearn._runtime.types import Float64
from mhalearn.data import Examples

# Examples for each unknown of the regression, and of them at most.
_EACH, _MOST = 2, 4096
# The first row leaves less than this share of what other rows leave, if it sees one token alone.
_LINEAR = 0.05
# The probability that noise goes with later tokens so much.
_UNLIKELY = 1e-9


class FirstRow(NamedTuple):
    """Shares of label energy that a linear map of a row's own token leaves, unknowns counted."""

    first: float  # of the first row
    others: float  # of the other rows, the least of them

    @property
    def sees_itself_alone(self) -> bool:
        return self.others > 0 and self.first < _LINEAR * self.others


def measure_first_row(examples: Examples) -> FirstRow | None:
    """Regress rows on their own tokens and a constant; None where there are too few examples.

    Under a causal mask y_0 = x_0 sum_i W_i + c, whatever attention does. Without one no row is
    linear in its own token, unless every row is.
    Cost: k least-squares problems with d + 1 unknowns.
    Trust: exact without noise; with noise below the size of what attention does.
    """
    part = examples if examples.n <= _MOST else examples.sample(_MOST, seed=0)
    x, y, lengths = part.arrays()
    whole = lengths == part.k
    n, k, d = int(whole.sum()), part.k, part.d
    if k < 2 or n < _EACH * (d + 1):
        return None
    left = []
    for row in range(k):
        tokens = np.column_stack([x[whole, row].astype(np.float64), np.ones(n)])
        labels = y[whole, row].astype(np.float64)
        solution = np.linalg.lstsq(tokens, labels, rcond=None)[0]
        energy = float(np.sum(labels**2)) or 1.0
        left.append(float(np.sum((labels - tokens @ solution) ** 2)) / energy)
    return FirstRow(left[0] * n / (n - d - 1), min(left[1:]))


def first_row_sees_later(examples: Examples, residual: Float64) -> bool:
    """Whether what is left of first rows (n, e) goes with the mean of later tokens."""
    x, _, lengths = examples.arrays()
    whole = (lengths == examples.k) & (examples.k > 1)
    n, d = int(whole.sum()), examples.d
    if n < 4 * (2 * d + 1):
        return False
    tokens = x[whole].astype(np.float64)
    own = np.column_stack([tokens[:, 0], np.ones(n)])
    later = tokens[:, 1:].mean(axis=1)
    later -= own @ np.linalg.lstsq(own, later, rcond=None)[0]
    left = residual[whole] - own @ np.linalg.lstsq(own, residual[whole], rcond=None)[0]
    energy = float(np.sum(left**2))
    rest = left - later @ np.linalg.lstsq(later, left, rcond=None)[0]
    if energy == 0:
        return False
    e, others = left.shape[1], n - 2 * d - 1
    share = 1 - float(np.sum(rest**2)) / energy
    ratio = share / max(1 - share, 1e-300) * others / d
    return bool(f_distribution.sf(ratio, d * e, others * e) < _UNLIKELY)
