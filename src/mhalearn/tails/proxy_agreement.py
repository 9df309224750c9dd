"""Rows on which all heads agree, given the margin of the proxy: what phase 3 builds on.

The proxy is the point of least norm in the affine hull of the Theta_i, so Theta_i = Theta* + D_i
with <Theta*, D_i> = 0: all heads lean the proxy's way, and differ by what it does not see. Given
the query, write a* and a_i for Theta*^T x and Theta_i^T x. For Gaussian tokens, given the logits
<a*, x_j> of the proxy, a head's own are normal with means (<a_i, a*> / |a*|^2) <a*, x_j> and the
variance |a_i|^2 - <a_i, a*>^2 / |a*|^2; the query's own logit is known. A union over heads and
tokens then bounds the chance that some head prefers another token than the proxy does.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr

from mhalearn._runtime.types import Float64
from mhalearn._runtime.validation import check_count
from mhalearn.tails.margin import find_margins
from mhalearn.tails.record import Bound, Tail, check_abscissas, check_confidence, count_tail
from mhalearn.tails.tokens import Heads, Inputs, draw_tokens, find_thetas, name_inputs

# Of the heads' norm: below, the hull goes through zero, and there is no proxy.
_NO_PROXY = 1e-9


def find_proxy(layer: Heads) -> Float64:
    """(d, d): the point of least norm in the affine hull of the heads' attention matrices."""
    thetas = find_thetas(layer)
    flat = thetas.reshape(len(thetas), -1)
    directions = (flat[1:] - flat[0]).T
    steps = np.linalg.lstsq(directions, -flat[0], rcond=None)[0] if len(flat) > 1 else np.zeros(0)
    proxy = flat[0] + directions @ steps
    if np.linalg.norm(proxy) <= _NO_PROXY * np.max(np.linalg.norm(flat, axis=1)):
        raise ValueError("the heads' affine hull goes through zero: they have no proxy")
    return proxy.reshape(thetas.shape[1:])


def agreement(
    layer: Heads,
    k: int,
    inputs: Inputs = "boolean",
    *,
    t: ArrayLike | None = None,
    n: int = 200_000,
    seed: int = 0,
    confidence: float = 0.99,
) -> Tail:
    """The share of rows on which every head's largest logit is the proxy's, given its margin.

    Event: all heads agree with the proxy, of the rows on which its margin is at least t; n counts
    those. beside: the share of rows that have such a margin.
    t: 0 to 3 times sqrt(2) |Theta*|_F unless given. Cost: O(n m d (d + k)) time, a block of memory.
    Trust: the bound is proved for "gaussian", given the rows drawn; elsewhere it is a prediction,
    with Gaussian tokens in the place of those drawn.
    """
    thetas, confidence = find_thetas(layer), check_confidence(confidence)
    proxy, k = find_proxy(layer), check_count("k", k, least=2)
    t = check_abscissas(t, np.sqrt(2) * np.linalg.norm(proxy) * np.linspace(0, 3, 13))
    kind = name_inputs(inputs)
    agree, rows = np.zeros(t.size, np.int64), np.zeros(t.size, np.int64)
    least = np.zeros(t.size)
    for tokens in draw_tokens(inputs, n, k, thetas.shape[1], seed):
        lead = tokens[:, 0] @ proxy
        weights = np.einsum("bd,mde->bme", tokens[:, 0], thetas)
        seen = np.einsum("bd,bkd->bk", lead, tokens)
        logits = np.einsum("bme,bke->bmk", weights, tokens)
        top = np.argmax(seen, axis=1)
        alike = np.all(np.argmax(logits, axis=2) == top[:, None], axis=1)
        enough = find_margins(seen)[:, None] >= t
        agree += np.sum(enough & alike[:, None], axis=0)
        rows += np.sum(enough, axis=0)
        chance = _least_chance(lead, weights, seen, logits[:, :, 0], top)
        least += np.sum(enough * chance[:, None], axis=0)
    gaussian = kind == "gaussian"
    return count_tail(
        "agreement given the proxy's margin",
        "all heads prefer the proxy's token, given that its margin is at least t",
        "margin t of the proxy, log-odds",
        kind,
        t,
        agree,
        rows,
        confidence,
        (
            Bound(
                "at least",
                least / np.maximum(rows, 1),
                gaussian,
                "1 - sum over heads and tokens of Phi(-mean / deviation), given the proxy's logits",
                "union bound over normal laws, derived in tails/proxy_agreement.py"
                + ("" if gaussian else "; Gaussian tokens in the place of those drawn"),
            ),
        ),
        {"share of rows with such a margin": rows / n},
    )


def _least_chance(
    lead: Float64, weights: Float64, seen: Float64, own: Float64, top: NDArray[np.intp]
) -> Float64:
    """(b,): the least chance that all heads prefer token `top`, given the proxy's logits.

    lead: a*, (b, d); weights: a_i, (b, m, d); seen: the proxy's logits, (b, k); own: the heads'
    logits of the query itself, (b, m).
    """
    each = np.arange(len(seen))
    squared = np.maximum(np.sum(lead**2, axis=1), 1e-300)[:, None]
    along = np.einsum("bme,be->bm", weights, lead)
    mean = (along / squared)[:, :, None] * seen[:, None, :]
    mean[:, :, 0] = own
    left = np.maximum(0, np.sum(weights**2, axis=2) - along**2 / squared)
    variance = np.broadcast_to(left[:, :, None], mean.shape).copy()
    variance[:, :, 0] = 0  # the query is given, and its own logit with it
    ahead = mean[each, :, top][:, :, None] - mean
    spread = np.sqrt(variance[each, :, top][:, :, None] + variance)
    with np.errstate(divide="ignore", invalid="ignore"):
        wrong = np.where(spread > 0, ndtr(-ahead / spread), ahead < 0)
    wrong[each, :, top] = 0
    return np.maximum(0, 1 - wrong.sum(axis=(1, 2)))
