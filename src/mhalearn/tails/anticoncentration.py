"""Bounds for a weighted sum of tokens' coordinates, given its weights.

Given the query x, a head's log-odds of two other tokens are <a, x' - x''> with a = Theta^T x: a sum
of 2d independent terms of weights a, a. Everything here is for given rows of a, (b, d), and is
averaged over queries by who calls it: given the queries, the draws are independent, and the mean
of the rows' bounds is a bound for the mean of their probabilities, with no error of its own.
"""

import numpy as np
from scipy.special import gammaln, ndtr

from mhalearn._runtime.types import Float64

BERRY_ESSEEN = 0.56
BERRY_ESSEEN_SOURCE = "Berry 1941, Esseen 1942; constant 0.56: Shevtsova 2010"
ERDOS_SOURCE = "Erdos 1945 (Littlewood-Offord)"


def distance_to_normal(a: Float64, copies: int, *, gaussian: bool) -> Float64:
    """(b,): how far, in Kolmogorov's distance, a sum of signs with weights a, repeated, is from
    the normal law of its variance: 0.56 sum |a|^3 / (sum a^2)^(3/2); zero for Gaussian terms.

    Where all weights vanish the sum is zero, at distance 1/2.
    """
    squares = np.sum(a**2, axis=-1)
    cubes = np.sum(np.abs(a) ** 3, axis=-1)
    some = squares > 0
    ratio = cubes / np.where(some, squares, 1.0) ** 1.5
    found = BERRY_ESSEEN * ratio / np.sqrt(copies)
    return np.where(some, 0.0 if gaussian else found, 0.5)


def deviation(a: Float64, copies: int) -> Float64:
    """(b,): the standard deviation of the sum."""
    return np.sqrt(copies * np.sum(a**2, axis=-1))


def interval_probability(centre: Float64, t: Float64, spread: Float64) -> Float64:
    """(b, t): of [centre - t, centre + t] under N(0, spread^2); 1 or 0 where spread is zero."""
    with np.errstate(divide="ignore", invalid="ignore"):
        right = (centre[:, None] + t) / spread[:, None]
        left = (centre[:, None] - t) / spread[:, None]
        found = ndtr(right) - ndtr(left)
    inside = np.abs(centre)[:, None] <= t
    return np.where(spread[:, None] > 0, found, inside)


def erdos(a: Float64, t: Float64, copies: int) -> Float64:
    """(b, t): at most this is the chance of any interval of length 2t, for signs with weights a.

    The weights beyond t count: of N signs C(N, N/2) / 2^N lie in an open interval of length twice
    the least weight, whatever the others are.
    """
    counts = np.stack([copies * np.sum(np.abs(a) > one, axis=-1) for one in t], axis=-1)
    return _central_binomial(counts.astype(np.float64))


def _central_binomial(n: Float64) -> Float64:
    half = np.floor(n / 2)
    return np.exp(gammaln(n + 1) - gammaln(half + 1) - gammaln(n - half + 1) - n * np.log(2))


def at_most_in_interval(
    a: Float64, centre: Float64, t: Float64, copies: int, *, gaussian: bool
) -> Float64:
    """(b, t): a bound for the chance that the sum is within t of the centre.

    The lesser of Berry and Esseen's (the normal law's chance and twice the distance) and Erdos's.
    """
    normal = interval_probability(centre, t, deviation(a, copies))
    if gaussian:
        return normal
    apart = distance_to_normal(a, copies, gaussian=False)
    some = np.any(a, axis=-1)[:, None]
    found = np.minimum(normal + 2 * apart[:, None], erdos(a, t, copies))
    return np.minimum(1, np.where(some, found, normal))
