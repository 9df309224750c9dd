"""A head's log-odds of two tokens, <Theta, x (x' - x'')^T>: near normal, seldom small, often large.

Given the query x they are <a, x' - x''>, a = Theta^T x, of standard deviation sqrt(2) |a|. Where
Theta has few entries, so has a, and the sum of signs is far from normal: the density assumption.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtr

from mhalearn._runtime.types import Float64
from mhalearn.tails.anticoncentration import (
    BERRY_ESSEEN_SOURCE,
    ERDOS_SOURCE,
    at_most_in_interval,
    deviation,
    distance_to_normal,
    interval_probability,
)
from mhalearn.tails.record import (
    Bound,
    Tail,
    check_abscissas,
    check_confidence,
    count_tail,
    share_intervals,
)
from mhalearn.tails.tokens import Heads, Inputs, draw_tokens, find_theta, name_inputs

_PROVED = ("boolean", "gaussian")
# A sum of signs may meet an abscissa exactly, in mathematics but not in floating point.
_ROUNDING = 1e-9
_ABOVE_DEVIATION = 6 / 64


def berry_esseen(
    layer: Heads,
    inputs: Inputs = "boolean",
    *,
    t: ArrayLike | None = None,
    n: int = 200_000,
    seed: int = 0,
    head: int = 0,
    confidence: float = 0.99,
) -> Tail:
    """How far the log-odds, over their standard deviation given the query, are from normal.

    measured: |P(<a, x' - x''> <= t sqrt(2) |a|) - Phi(t)|. Bound: 0.56 sum |a|^3 / (sqrt(2)
    |a|^3), averaged over the queries drawn; zero for Gaussian tokens.
    t: -3 to 3 unless given. Cost: O(n d^2) time, a block of memory.
    Trust: proved for "boolean" and "gaussian"; elsewhere the bound is that of +-1 tokens.
    """
    theta, confidence = find_theta(layer, head), check_confidence(confidence)
    t = check_abscissas(t, np.linspace(-3, 3, 25))
    kind = name_inputs(inputs)
    counts, apart = np.zeros(t.size, np.int64), 0.0
    for a, sums in _log_odds(theta, inputs, n, seed):
        standard = _standardise(sums, deviation(a, 2))
        counts += np.sum(standard[:, None] <= t + _ROUNDING, axis=0)
        apart += float(np.sum(distance_to_normal(a, 2, gaussian=kind == "gaussian")))
    draws = np.full(t.size, n, np.int64)
    share, lower, upper = share_intervals(counts, draws, confidence)
    normal = ndtr(t)
    return Tail(
        name="Berry-Esseen",
        event="|P(log-odds <= t deviations) - Phi(t)|",
        abscissa="log-odds, in standard deviations given the query",
        inputs=kind,
        t=t,
        measured=np.abs(share - normal),
        lower=np.maximum(0, np.maximum(lower - normal, normal - upper)),
        upper=np.maximum(np.abs(lower - normal), np.abs(upper - normal)),
        n=draws,
        confidence=confidence,
        interval="Clopper-Pearson of the share, less Phi(t)",
        bounds=(
            Bound(
                "at most",
                np.full(t.size, apart / n),
                kind in _PROVED,
                "0.56 |a|_3^3 / (sqrt(2) |a|_2^3), mean over queries",
                BERRY_ESSEEN_SOURCE,
            ),
        ),
    )


def small_ball(
    layer: Heads,
    inputs: Inputs = "boolean",
    *,
    t: ArrayLike | None = None,
    n: int = 200_000,
    seed: int = 0,
    head: int = 0,
    confidence: float = 0.99,
) -> Tail:
    """How seldom the log-odds of two tokens are within t of zero.

    Bounds, each averaged over the queries drawn: at most the normal chance and twice Berry and
    Esseen's distance, or Erdos's bound where that is less; at least the normal chance less twice
    the distance. t: 0.01 to 1 times sqrt(2) |Theta|_F unless given.
    Cost: O(n d (d + len(t))) time, a block of memory.
    Trust: proved for "boolean" and "gaussian"; elsewhere the bounds are those of +-1 tokens.
    """
    theta, confidence = find_theta(layer, head), check_confidence(confidence)
    t = check_abscissas(t, np.sqrt(2) * np.linalg.norm(theta) * np.geomspace(0.01, 1, 12))
    kind = name_inputs(inputs)
    gaussian = kind == "gaussian"
    counts, most, least = np.zeros(t.size, np.int64), np.zeros(t.size), np.zeros(t.size)
    for a, sums in _log_odds(theta, inputs, n, seed):
        counts += np.sum(np.abs(sums)[:, None] <= t + _ROUNDING, axis=0)
        zero = np.zeros(len(a))
        most += at_most_in_interval(a, zero, t, 2, gaussian=gaussian).sum(axis=0)
        apart = distance_to_normal(a, 2, gaussian=gaussian)
        normal = interval_probability(zero, t, deviation(a, 2))
        least += np.maximum(0, normal - 2 * apart[:, None]).sum(axis=0)
    return count_tail(
        "small ball",
        "|<Theta, x (x' - x'')>| <= t",
        "log-odds t",
        kind,
        t,
        counts,
        n,
        confidence,
        (
            Bound(
                "at most",
                most / n,
                kind in _PROVED,
                "the normal chance, exactly"
                if gaussian
                else "min(normal chance + 2 Berry-Esseen, C(N, N/2) / 2^N), N weights beyond t",
                f"{BERRY_ESSEEN_SOURCE}; {ERDOS_SOURCE}",
            ),
            Bound(
                "at least",
                least / n,
                kind in _PROVED,
                "the normal chance, exactly" if gaussian else "normal chance - 2 Berry-Esseen",
                BERRY_ESSEEN_SOURCE,
            ),
        ),
    )


def large_log_odds(
    layer: Heads,
    inputs: Inputs = "boolean",
    *,
    t: ArrayLike | None = None,
    n: int = 200_000,
    seed: int = 0,
    head: int = 0,
    confidence: float = 0.99,
) -> Tail:
    """How often the log-odds are large: sparse patterns must occur, and with a known frequency.

    Event: log-odds of at least t standard deviations, given the query. Bounds: at least 6/64 up to
    one deviation, for any weights (Dvorak and Klein); at least the normal tail less Berry and
    Esseen's distance; at most exp(-t^2 / 2) (Hoeffding). t: 0.25 to 4 unless given.
    Cost: O(n d^2) time, a block of memory.
    Trust: proved for "boolean" and "gaussian"; elsewhere the bounds are those of +-1 tokens.
    """
    theta, confidence = find_theta(layer, head), check_confidence(confidence)
    t = check_abscissas(t, np.linspace(0.25, 4, 16))
    kind = name_inputs(inputs)
    counts, near, some = np.zeros(t.size, np.int64), np.zeros(t.size), 0
    for a, sums in _log_odds(theta, inputs, n, seed):
        spread = deviation(a, 2)
        standard = _standardise(sums, spread)
        counts += np.sum(standard[:, None] >= t - _ROUNDING, axis=0)
        apart = distance_to_normal(a, 2, gaussian=kind == "gaussian")
        tail = np.maximum(0, ndtr(-t) - apart[:, None])
        near += np.where(spread[:, None] > 0, tail, 0).sum(axis=0)
        some += int(np.sum(spread > 0))
    proved = kind in _PROVED
    return count_tail(
        "large log-odds",
        "<Theta, x (x' - x'')> >= t deviations",
        "log-odds, in standard deviations given the query",
        kind,
        t,
        counts,
        n,
        confidence,
        (
            Bound(
                "at least",
                np.where(t <= 1, _ABOVE_DEVIATION * some / n, 0),
                proved,
                "6/64 up to one deviation",
                "Dvorak & Klein 2022, Theorem 1.1",
            ),
            Bound(
                "at least",
                near / n,
                proved,
                "1 - Phi(t) - Berry-Esseen",
                BERRY_ESSEEN_SOURCE,
            ),
            Bound(
                "at most",
                np.where(t > 0, np.exp(-(t**2) / 2), 1),
                proved,
                "exp(-t^2 / 2)",
                "Hoeffding 1963",
            ),
        ),
    )


def _log_odds(
    theta: Float64, inputs: Inputs, n: int, seed: int
) -> Iterator[tuple[Float64, Float64]]:
    """Blocks of weights a = Theta^T x (b, d) and of <a, x' - x''> (b,)."""
    for tokens in draw_tokens(inputs, n, 3, len(theta), seed):
        a = tokens[:, 0] @ theta
        yield a, np.sum(a * (tokens[:, 1] - tokens[:, 2]), axis=1)


def _standardise(sums: Float64, spread: Float64) -> Float64:
    """Over the standard deviation; zero where that is."""
    return np.where(spread > 0, sums / np.where(spread > 0, spread, 1.0), 0.0)
