"""All heads' log-odds of one pair of tokens near zero at once.

Given the query, the m log-odds are <a_i, x' - x''>, a_i = Theta_i^T x. For Gaussian tokens they are
jointly normal: head by head, given the heads before it, each is normal with the deviation
sqrt(2) l_i that its a_i has outside the span of those before, and an interval of a normal law holds
most where it is centred. So P(all within t) <= prod_i (2 Phi(t / (sqrt(2) l_i)) - 1), which falls
as t^m; Khatri and Sidak give the like product with |a_i| in place of l_i as a lower bound. For
signs no bound of order t^m whose constants mean anything at such d is known to us (that of Raic
2019 for convex sets exceeds one): proved is that of the single heads, and the normal product is a
prediction.
"""

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtr

from mhalearn._runtime.types import Float64
from mhalearn.tails.anticoncentration import (
    BERRY_ESSEEN_SOURCE,
    ERDOS_SOURCE,
    at_most_in_interval,
)
from mhalearn.tails.record import Bound, Tail, check_abscissas, check_confidence, count_tail
from mhalearn.tails.tokens import Heads, Inputs, draw_tokens, find_thetas, name_inputs

_ROUNDING = 1e-9


def joint_small_ball(
    layer: Heads,
    inputs: Inputs = "boolean",
    *,
    t: ArrayLike | None = None,
    n: int = 200_000,
    seed: int = 0,
    confidence: float = 0.99,
) -> Tail:
    """How seldom the log-odds of two tokens are within t of zero for all heads at once.

    t: 0.05 to 1 times sqrt(2) max |Theta_i|_F unless given. Cost: O(n m d (d + len(t))) time, a
    block of memory. Trust: the bounds are proved for "gaussian"; for "boolean" that of the single
    heads is, which does not fall as t^m, and the normal product is a prediction.
    """
    thetas, confidence = find_thetas(layer), check_confidence(confidence)
    size = np.sqrt(2) * np.max(np.linalg.norm(thetas, axis=(1, 2)))
    t = check_abscissas(t, size * np.geomspace(0.05, 1, 10))
    kind = name_inputs(inputs)
    gaussian = kind == "gaussian"
    counts = np.zeros(t.size, np.int64)
    single, above, below = np.zeros(t.size), np.zeros(t.size), np.zeros(t.size)
    for tokens in draw_tokens(inputs, n, 3, thetas.shape[1], seed):
        a = np.einsum("bd,mde->bme", tokens[:, 0], thetas)
        sums = np.einsum("bme,be->bm", a, tokens[:, 1] - tokens[:, 2])
        counts += np.sum(np.max(np.abs(sums), axis=1)[:, None] <= t + _ROUNDING, axis=0)
        zero = np.zeros(len(a))
        heads = [
            at_most_in_interval(a[:, i], zero, t, 2, gaussian=gaussian) for i in range(len(thetas))
        ]
        single += np.min(heads, axis=0).sum(axis=0)
        above += _product(_new_lengths(a), t).sum(axis=0)
        below += _product(np.linalg.norm(a, axis=2), t).sum(axis=0)
    chance = "prod_i (2 Phi(t / (sqrt(2) l_i)) - 1), l_i: a_i outside the span of a_1 .. a_(i-1)"
    marginal = Bound(
        "at most",
        single / n,
        kind in ("boolean", "gaussian"),
        "the least of the single heads' bounds",
        f"{BERRY_ESSEEN_SOURCE}; {ERDOS_SOURCE}",
    )
    if gaussian:
        derived = "derived in tails/joint_log_odds.py, after Anderson 1955"
        bounds = (
            Bound("at most", above / n, True, chance, derived),
            Bound(
                "at least",
                below / n,
                True,
                "prod_i (2 Phi(t / (sqrt(2) |a_i|)) - 1)",
                "Khatri 1967, Sidak 1967",
            ),
        )
    else:
        central = "central limit, up to a constant; derived in tails/joint_log_odds.py"
        bounds = (marginal, Bound("about", above / n, False, chance, central))
    return count_tail(
        "joint small ball",
        "max over heads of |<Theta_i, x (x' - x'')>| <= t",
        "log-odds t",
        kind,
        t,
        counts,
        n,
        confidence,
        bounds,
    )


def _new_lengths(a: Float64) -> Float64:
    """(b, min(m, d)): what each head's weights add to the span of those before it."""
    triangle = np.linalg.qr(a.transpose(0, 2, 1), mode="r")
    return np.abs(np.diagonal(triangle, axis1=1, axis2=2))


def _product(lengths: Float64, t: Float64) -> Float64:
    """(b, t): the product over heads of the chances of |N(0, 2 length^2)| <= t."""
    found = np.ones((len(lengths), t.size))
    with np.errstate(divide="ignore"):
        for length in lengths.T:
            found *= 2 * ndtr(t / (np.sqrt(2) * length[:, None])) - 1
    return found
