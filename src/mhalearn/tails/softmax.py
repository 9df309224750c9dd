"""The softmax does not concentrate; its mean given the Hamming weight of a substring does.

With large Theta a row of attention is nearly one-hot and jumps from example to example. The first
phase's proof conditions on how many of a few fixed input bits are +1, and averages over all else.
Here the bits are the first `length` features of the query token, and the softmax is the weight p
the query has for itself: given the bits, the other tokens share 1 - p alike. With g(w) the mean of
p at weight w and W binomial, the lemma is about |g(W) - E p|. A bound by coupling: a string of
weight w becomes one of weight w + 1 by one flip at a place c that is uniform in the substring. A
flip moves the logits by u, and p by at most a quarter of the range of u. Logit j moves by
2 <Theta_c, x_j>, the query's own by 2 sum_b (Theta_cb + Theta_bc) x_b, of which the part inside the
substring is bounded by its sum of absolute values, and the rest, like the others, is sub-Gaussian
and independent of them: the largest of k(k - 1) differences is in the mean at most sqrt(2 log(k(k -
1))) of their deviations. Hence

    |g(w + 1) - g(w)| <= L = mean over c of ( s_c sqrt(log(k(k - 1))) + q_c / 2 ),
    s_c = max(|Theta_c|, |(Theta_c + Theta^T_c) outside|),   q_c = |(Theta_c + Theta^T_c) inside|_1,

and bounded differences (McDiarmid) give P(|g(W) - E p| >= t) <= 2 exp(-2 t^2 / (length L^2)). For
dense Theta, L is of order |Theta|_F sqrt(log k / d). Gaussian tokens: signs in place of bits.
"""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import binom

from mhalearn._runtime.seeds import Stream, generator
from mhalearn._runtime.types import Float64
from mhalearn._runtime.validation import check_count
from mhalearn.tails.record import Bound, Tail, check_abscissas, check_confidence
from mhalearn.tails.tokens import Heads, Inputs, draw_tokens, find_theta, name_inputs

# The place of the random strings in their stream, after the blocks of tokens.
_STRINGS = 2**31


def softmax_concentration(
    layer: Heads,
    k: int,
    inputs: Inputs = "boolean",
    *,
    length: int | None = None,
    t: ArrayLike | None = None,
    n: int = 200_000,
    seed: int = 0,
    head: int = 0,
    confidence: float = 0.99,
) -> Tail:
    """How the mean attention, given the Hamming weight of a substring, concentrates.

    Event: |E[p | weight] - E p| >= t, p the query's weight for itself, over binomial weights.
    beside: the same of p itself, which does not concentrate. length: of the substring,
    sqrt(d) unless given; n draws are shared by its length + 1 weights. The interval comes from
    empirical Bernstein bounds for every conditional mean (Maurer & Pontil 2009).
    Cost: O(n d (d + k)) time, memory of n numbers.
    Trust: proved for "boolean" and "gaussian", the only inputs taken. Which substring the authors
    take the sources at hand do not say.
    """
    theta, confidence = find_theta(layer, head), check_confidence(confidence)
    k, d = check_count("k", k, least=2), len(theta)
    length = math.isqrt(d) if length is None else check_count("length", length)
    kind = name_inputs(inputs)
    if kind not in ("boolean", "gaussian"):
        raise ValueError(f"inputs are a {kind}: a Hamming weight needs 'boolean' or 'gaussian'")
    if length > d:
        raise ValueError(f"length={length}: the query token has {d} features")
    t = check_abscissas(t, np.geomspace(0.001, 0.6, 16))
    each = max(2, check_count("n", n) // (length + 1))
    attention = [
        np.concatenate(list(_attention(theta, k, kind, length, weight, each, seed)))
        for weight in range(length + 1)
    ]
    chance = binom.pmf(np.arange(length + 1), length, 0.5)
    means = np.array([values.mean() for values in attention])
    apart = np.abs(means - chance @ means)
    # Of every mean, and of their mean: all at once with the confidence.
    log = math.log(4 * (length + 1) / (1 - confidence))
    spread = np.array([values.var() for values in attention]) * each / (each - 1)
    radius = np.sqrt(2 * spread * log / each) + 7 * log / (3 * (each - 1))
    error = radius + chance @ radius

    def share(deviations: Float64) -> Float64:
        return np.minimum(1, chance @ (deviations[:, None] >= t))

    itself = [np.abs(values - chance @ means)[:, None] >= t for values in attention]
    change = find_change(theta, k, length)
    return Tail(
        name="softmax given a Hamming weight",
        event="|E[p | weight of the substring] - E p| >= t",
        abscissa="deviation t of the query's weight for itself",
        inputs=kind,
        t=t,
        measured=share(apart),
        lower=share(apart - error),
        upper=share(apart + error),
        n=np.full(t.size, each * (length + 1), np.int64),
        confidence=confidence,
        interval="empirical Bernstein, of the conditional means",
        bounds=(
            Bound(
                "at most",
                np.minimum(1, 2 * np.exp(-2 * np.maximum(t, 0) ** 2 / (length * change**2))),
                True,
                "2 exp(-2 t^2 / (length L^2)), L = mean of s_c sqrt(log(k(k - 1))) + q_c / 2",
                "McDiarmid 1989, by a coupling derived in tails/softmax.py",
            ),
        ),
        beside={"the softmax itself": chance @ np.array([hits.mean(axis=0) for hits in itself])},
    )


def find_change(theta: Float64, k: int, length: int) -> float:
    """L: the most the mean attention changes with one step of the Hamming weight."""
    both = theta + theta.T
    both = both - np.diag(np.diag(both))  # a flip leaves the square of its own feature
    outside = np.linalg.norm(both[:length, length:], axis=1)
    s = np.maximum(np.linalg.norm(theta[:length], axis=1), outside)
    inside = np.abs(both[:length, :length]).sum(axis=1)
    return float(np.mean(s * math.sqrt(math.log(k * (k - 1))) + inside / 2))


def _attention(
    theta: Float64, k: int, kind: str, length: int, weight: int, n: int, seed: int
) -> Iterator[Float64]:
    """Blocks of the query's weight for itself, with `weight` of its first features positive."""
    for index, tokens in enumerate(draw_tokens(kind, n, k, len(theta), seed)):
        rng = generator(seed, Stream.TAILS, _STRINGS + weight, index)
        order = rng.random((len(tokens), length)).argsort(axis=1)
        signs = np.where(order < weight, 1.0, -1.0)
        tokens[:, 0, :length] = np.abs(tokens[:, 0, :length]) * signs
        logits = np.einsum("bd,bkd->bk", tokens[:, 0] @ theta, tokens)
        shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
        yield shifted[:, 0] / shifted.sum(axis=1)
