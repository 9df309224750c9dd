"""Hanson-Wright: how large a logit x^T Theta y of two independent tokens can be.

With both tokens' coordinates independent and E exp(l x_a) <= exp(l^2 / 2), as for +-1 and standard
Gaussian ones, averaging over y, then writing the square as a Gaussian average over g, then over x:

    E exp(l x^T Theta y) <= E exp(l^2 |Theta^T x|^2 / 2) = E exp(l <Theta g, x>)
                         <= E exp(l^2 |Theta g|^2 / 2) = prod_a (1 - l^2 s_a^2)^(-1/2),

s the singular values of Theta and l < 1 / s_max. The logarithm is at most
l^2 |Theta|_F^2 / (2 (1 - l s_max)), which is that of a sub-gamma variable, so that
P(|x^T Theta y| >= t) <= 2 exp(-t^2 / (2 (|Theta|_F^2 + s_max t))).
"""

import numpy as np
from numpy.typing import ArrayLike

from mhalearn._runtime.types import Float64
from mhalearn.tails.record import (
    Bound,
    Tail,
    check_abscissas,
    check_confidence,
    count_tail,
)
from mhalearn.tails.tokens import Heads, Inputs, draw_tokens, find_theta, name_inputs

_SOURCE = (
    "Hanson & Wright 1971, for two independent tokens with constants derived in "
    "tails/bilinear_form.py; sub-gamma tail: Boucheron, Lugosi & Massart 2013, section 2.4"
)


def hanson_wright(
    layer: Heads,
    inputs: Inputs = "boolean",
    *,
    t: ArrayLike | None = None,
    n: int = 200_000,
    seed: int = 0,
    head: int = 0,
    confidence: float = 0.99,
) -> Tail:
    """The tail of |x^T Theta y| beside Hanson and Wright's bound, with explicit constants.

    t: 0.5 to 6 times |Theta|_F unless given. Cost: O(n d^2) time, a block of memory.
    Trust: proved for "boolean" and "gaussian"; elsewhere the bound is that of such tokens.
    """
    theta, confidence = find_theta(layer, head), check_confidence(confidence)
    s = np.asarray(np.linalg.svd(theta, compute_uv=False), np.float64)
    size = float(np.linalg.norm(s))
    t = check_abscissas(t, size * np.linspace(0.5, 6.0, 12))
    counts = np.zeros(t.size, np.int64)
    for tokens in draw_tokens(inputs, n, 2, len(theta), seed):
        logits = np.abs(np.sum((tokens[:, 0] @ theta) * tokens[:, 1], axis=1))
        counts += np.sum(logits[:, None] >= t, axis=0)
    kind = name_inputs(inputs)
    proved = kind in ("boolean", "gaussian")
    positive = np.maximum(t, 0)
    closed = 2 * np.exp(-(positive**2) / (2 * (size**2 + s[0] * positive)))
    return count_tail(
        "Hanson-Wright",
        "|x^T Theta y| >= t",
        "logit t",
        kind,
        t,
        counts,
        n,
        confidence,
        (
            Bound(
                "at most",
                np.minimum(1, closed),
                proved,
                "2 exp(-t^2 / (2 (|Theta|_F^2 + |Theta| t)))",
                _SOURCE,
            ),
            Bound(
                "at most",
                np.minimum(1, 2 * _chernoff(positive, s)),
                proved,
                "2 inf over l of exp(-l t) prod_a (1 - l^2 s_a^2)^(-1/2)",
                _SOURCE,
            ),
        ),
    )


def _chernoff(t: Float64, s: Float64) -> Float64:
    """The least over a grid of l in (0, 1 / s_max): each l gives a bound, so the grid's least is
    one, too."""
    rates = np.linspace(0, 1, 400, endpoint=False)[:, None] / s[0]
    cumulant = -0.5 * np.sum(np.log1p(-((rates * s) ** 2)), axis=1)
    return np.exp(np.min(cumulant[:, None] - rates * t, axis=0))
