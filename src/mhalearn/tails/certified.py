"""The share of rows that phase 2 can certify: the luck that the algorithm lives on.

With the exact sum of projections, a row's label lies between the images of two tokens if all heads
attend to those two alike. Its score is the distance from that segment's line, over its length and
over q (1 - q), q the place on it: the error of the log-odds log(q / (1 - q)) it gives. Rows with
two equal tokens, which share their weight, are left out, as phase 2 leaves them out.
"""

import itertools

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mhalearn._runtime.types import Float64
from mhalearn._runtime.validation import check_count
from mhalearn.layer.layer import AttentionLayer
from mhalearn.tails.record import Tail, check_abscissas, check_confidence, count_tail
from mhalearn.tails.tokens import Inputs, draw_tokens, find_thetas, name_inputs

# Beyond these weights on the first token of a pair the log-odds are noise, as in phase 2.
_LEAST, _MOST = 0.1, 0.9
# On a matched row every head has the row's log-odds to within this.
_ALIKE = 1.0


def certified_share(
    layer: AttentionLayer,
    k: int,
    tolerances: ArrayLike | None = None,
    inputs: Inputs = "boolean",
    *,
    matched: bool = False,
    n: int = 200_000,
    seed: int = 0,
    confidence: float = 0.99,
) -> Tail:
    """The share of rows whose best pair of tokens has a score of at most each tolerance.

    matched: count a row's pair only where every head has its log-odds to within one, so that what
    is certified by accident is left out. tolerances: 0.05 to 0.4 unless given.
    Source: the certification of phase 2 of Chen & Li, on two-token supports, with the exact sum.
    Cost: O(n (m d^2 + k d e + k^2 e)) time, a block of memory.
    Trust: a measurement; no bound with explicit constants is known to us.
    """
    thetas, confidence = find_thetas(layer), check_confidence(confidence)
    k = check_count("k", k, least=2)
    t = check_abscissas(tolerances, np.geomspace(0.05, 0.4, 7))
    counts = np.zeros(t.size, np.int64)
    for tokens in draw_tokens(inputs, n, k, layer.d, seed):
        scores = _best_scores(tokens, thetas, layer.w, matched)
        counts += np.sum(scores[:, None] <= t, axis=0)
    return count_tail(
        "matched rows" if matched else "certified rows",
        "the row's best pair has a score of at most t" + (" and all heads agree" * matched),
        "tolerance t of the score, log-odds",
        name_inputs(inputs),
        t,
        counts,
        n,
        confidence,
        (),
    )


def _best_scores(tokens: Float64, thetas: Float64, w: Float64, matched: bool) -> Float64:
    """(b,): the least score over pairs of tokens, of the first token's row."""
    weights = np.einsum("bd,mde->bme", tokens[:, 0], thetas, optimize=True)
    logits = np.einsum("bme,bke->bmk", weights, tokens, optimize=True)
    p = np.exp(logits - logits.max(axis=2, keepdims=True))
    p /= p.sum(axis=2, keepdims=True)
    label = np.einsum("bmd,mde->be", p @ tokens, w, optimize=True)
    images = tokens @ w.sum(axis=0)
    best = np.full(len(tokens), np.inf)
    all_distinct = _are_distinct(tokens)
    for a, b in itertools.combinations(range(tokens.shape[1]), 2):
        along, apart = images[:, a] - images[:, b], label - images[:, b]
        squared = np.sum(along**2, axis=1)
        distinct = squared > 0
        q = np.sum(along * apart, axis=1) / np.where(distinct, squared, 1.0)
        usable = all_distinct & distinct & (q > _LEAST) & (q < _MOST)
        q = np.where(usable, q, 0.5)
        left = apart - q[:, None] * along
        score = np.linalg.norm(left, axis=1) / np.sqrt(np.where(distinct, squared, 1.0))
        if matched:
            odds = logits[:, :, a] - logits[:, :, b] - np.log(q / (1 - q))[:, None]
            usable &= np.max(np.abs(odds), axis=1) < _ALIKE
        best = np.minimum(best, np.where(usable, score / (q * (1 - q)), np.inf))
    return best


def _are_distinct(tokens: Float64) -> NDArray[np.bool_]:
    """(b,): whether no two tokens of an example are equal."""
    pairs = itertools.combinations(range(tokens.shape[1]), 2)
    return np.all([np.any(tokens[:, a] != tokens[:, b], axis=1) for a, b in pairs], axis=0)
