"""The margin of a row: how far the largest logit is ahead of the second.

Rows of small margin are those on which the softmax is undecided and heads may differ; the proof
needs that they are few. By the union over pairs of tokens, the margin is at most t only if some
pair has log-odds within t of zero: (k - 1)(k - 2) / 2 pairs of other tokens, and k - 1 with the
query itself, whose own logit is a constant once the query is given.
"""

import numpy as np
from numpy.typing import ArrayLike

from mhalearn._runtime.types import Float64
from mhalearn._runtime.validation import check_count
from mhalearn.tails.anticoncentration import (
    BERRY_ESSEEN_SOURCE,
    ERDOS_SOURCE,
    at_most_in_interval,
)
from mhalearn.tails.record import Bound, Tail, check_abscissas, check_confidence, count_tail
from mhalearn.tails.tokens import Heads, Inputs, draw_tokens, find_theta, name_inputs

_ROUNDING = 1e-9


def margin_tail(
    layer: Heads,
    k: int,
    inputs: Inputs = "boolean",
    *,
    t: ArrayLike | None = None,
    n: int = 200_000,
    seed: int = 0,
    head: int = 0,
    confidence: float = 0.99,
) -> Tail:
    """The lower tail of a head's margin on rows of k tokens.

    t: 0.01 to 1 times sqrt(2) |Theta|_F unless given. Cost: O(n d (d + k + len(t))) time, a block
    of memory. Trust: proved for "boolean" and "gaussian"; elsewhere the bound is that of signs.
    """
    theta, confidence = find_theta(layer, head), check_confidence(confidence)
    k = check_count("k", k, least=2)
    t = check_abscissas(t, np.sqrt(2) * np.linalg.norm(theta) * np.geomspace(0.01, 1, 12))
    kind = name_inputs(inputs)
    gaussian = kind == "gaussian"
    counts, most = np.zeros(t.size, np.int64), np.zeros(t.size)
    for tokens in draw_tokens(inputs, n, k, len(theta), seed):
        a = tokens[:, 0] @ theta
        logits = np.einsum("bd,bkd->bk", a, tokens)
        counts += np.sum(find_margins(logits)[:, None] <= t + _ROUNDING, axis=0)
        own = at_most_in_interval(a, logits[:, 0], t, 1, gaussian=gaussian)
        others = at_most_in_interval(a, np.zeros(len(a)), t, 2, gaussian=gaussian)
        pairs = (k - 1) * own + (k - 1) * (k - 2) / 2 * others
        most += np.minimum(1, pairs).sum(axis=0)
    return count_tail(
        "lower tail of the margin",
        "largest logit - second <= t",
        "margin t, log-odds",
        kind,
        t,
        counts,
        n,
        confidence,
        (
            Bound(
                "at most",
                most / n,
                kind in ("boolean", "gaussian"),
                "sum over pairs of tokens of their small-ball bounds, mean over queries",
                f"union bound; {BERRY_ESSEEN_SOURCE}; {ERDOS_SOURCE}",
            ),
        ),
    )


def find_margins(logits: Float64) -> Float64:
    """(b,): the largest of each row less the second."""
    top = np.partition(logits, -2, axis=-1)
    return top[..., -1] - top[..., -2]
