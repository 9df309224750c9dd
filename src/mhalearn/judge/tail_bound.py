"""How many inputs may be worse than promised: Clopper and Pearson's bound, and its words."""

import math

import numpy as np
from scipy.stats import beta

from mhalearn._runtime.types import Float64

# A share of inputs that is worth promising.
ENOUGH = 0.99
# Quantiles of the fresh examples' errors that a certificate keeps.
_MOST_KEPT = 65


def bound_tail(exceeding: int, n: int, delta: float) -> float:
    """Clopper & Pearson's upper limit for a share of which `exceeding` of n were seen."""
    return 1.0 if exceeding == n else float(beta.ppf(1 - delta, exceeding + 1, n - exceeding))


def count_needed(share: float, delta: float) -> int:
    """Fresh examples that promise at least this share of inputs, where none of them exceeds.

    With none of n the bound is 1 - delta^(1/n).
    """
    count = max(1, math.floor(math.log(delta) / math.log(share)))
    return count if bound_tail(0, count, delta) <= 1 - share else count + 1


def say_needed(exceeding: int, tail: float, delta: float) -> str:
    """What would promise more of the inputs; empty where examples exceeded, or are enough."""
    if exceeding or not 1 - ENOUGH < tail < 1:
        return ""
    needed = count_needed(ENOUGH, delta)
    return f"{needed} fresh examples, all of them below, would give {100 * ENOUGH:g} %."


def say_share(tail: float) -> str:
    """The share of inputs that is promised, as a percentage on the safe side: 77.9 %, 99.97 %.

    One decimal, and of a tail below one percent two digits that are not zero.
    """
    if tail <= 0:
        return "100 %"
    decimals = max(1, 1 - math.floor(math.log10(100 * tail))) if tail < 0.01 else 1
    promised = math.floor(100 * (1 - tail) * 10**decimals) / 10**decimals
    return f"{f'{promised:.{decimals}f}'.rstrip('0').rstrip('.')} %"


def keep_errors(relative: Float64) -> Float64:
    """The errors in ascending order or, of many, evenly spaced ones from least to largest."""
    ascending = np.sort(relative)
    if ascending.size <= _MOST_KEPT:
        return ascending
    kept = np.round(np.linspace(0, ascending.size - 1, _MOST_KEPT)).astype(int)
    return np.asarray(ascending[kept], np.float64)
