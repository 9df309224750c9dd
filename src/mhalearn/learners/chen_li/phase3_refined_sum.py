"""Phase 3: where the proxy has a large margin, heads tend to attend to one token, and W_sum shows.

The paper's: the minimum-norm point as a proxy that finds such rows, and least squares over them.
Ours: how many rows are taken, the limit on repeated tokens, and the robust form of the fit.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from mhalearn._runtime.devices import shard_locally
from mhalearn._runtime.programs import in_float64
from mhalearn._runtime.types import Array, Float, Float64, Int
from mhalearn.data import Examples
from mhalearn.learners.chen_li.streaming import Lowest, Watcher, spread, up_to_sign, walk
from mhalearn.learners.options import Constants

_DEFAULTS = Constants()


@dataclass(frozen=True)
class MarginRows:
    """Rows where the proxy puts one token far ahead of the others."""

    token: Float64  # (c, d)
    label: Float64  # (c, e)
    margin: Float64  # (c,)


@dataclass(frozen=True)
class RefinedSum:
    estimate: Float64
    residual: Float64  # of each row, over the typical label
    inliers: float  # share of rows within a tenth of the typical label
    margin: Float64  # of each row


@jax.jit
def _margins(x: Array, proxy: Float[Array, "d d"]) -> tuple[Float[Array, "b k"], Int[Array, "b k"]]:
    """By how much each row's first token is ahead of its second, and which token is first."""
    tokens = x.astype(proxy.dtype)
    scores = jnp.einsum("brd,bjd->brj", tokens @ proxy, tokens)
    first = jnp.argmax(scores, axis=-1)
    others = jnp.where(jax.nn.one_hot(first, x.shape[1], dtype=bool), -jnp.inf, scores)
    return jnp.max(scores, axis=-1) - jnp.max(others, axis=-1), first


@in_float64
def large_margin_rows(
    examples: Examples,
    proxy: Float64,
    count: int,
    *,
    repeats: int = _DEFAULTS.margin_repeats,
    watch: Watcher | None = None,
) -> MarginRows:
    """The `count` rows with the largest proxy margin, each token (up to sign) at most `repeats`
    times: in few dimensions the same token would otherwise crowd out the others.

    Source: phase 3 of Chen & Li. Cost: one pass, O(n k d (d + k)).
    Trust: that all heads attend to the token ahead is likely, not certain, where the proxy has the
    same inner product with every dense and incoherent Theta_i; others are outliers of the fit.
    """
    k, largest = examples.k, Lowest(8 * count)
    for part in walk(examples, watch=watch):
        margins, _ = _margins(shard_locally(part.x), proxy)
        largest.offer(-np.asarray(margins), part)
    largest.merge()
    x, y, row = largest.x.astype(np.float64), largest.y, largest.places % k
    each = np.arange(len(row))
    first = np.asarray(_margins(jnp.asarray(x), jnp.asarray(proxy))[1])[each, row]
    token, label, margins = x[each, first], y[each, row], -largest.values
    chosen = spread(up_to_sign(token), count, repeats)
    return MarginRows(token[chosen], label[chosen], margins[chosen])


def refine_projection_sum(
    rows: MarginRows,
    current: Float64,
    *,
    robust: bool = True,
    constants: Constants = _DEFAULTS,
) -> RefinedSum:
    """Regress labels on the token attended to; rows where heads disagree are outliers.

    Robust: least squares reweighted by (residual^2 + delta^2)^-2 while delta shrinks to the 4d-th
    smallest residual, from the plain and from the current estimate; the lower mean log residual
    wins. Source: phase 3 of Chen & Li, which has plain least squares; the robust form is ours, a
    heuristic that makes rows of moderate margin usable.
    """
    plain: Float64 = np.linalg.lstsq(rows.token, rows.label, rcond=None)[0].astype(np.float64)
    estimates = [plain]
    if robust:
        estimates = [_reweighted(rows, start, constants) for start in (plain, current)]
    residuals = [np.linalg.norm(rows.label - rows.token @ w, axis=1) for w in estimates]
    best = int(np.argmin([np.mean(np.log(left + 1e-300)) for left in residuals]))
    typical = max(float(np.median(np.linalg.norm(rows.label, axis=1))), 1e-300)
    inliers = float(np.mean(residuals[best] < 0.1 * typical))
    return RefinedSum(estimates[best], residuals[best] / typical, inliers, rows.margin)


def _reweighted(rows: MarginRows, start: Float64, constants: Constants) -> Float64:
    estimate, rank = start, min(4 * rows.token.shape[1], len(rows.token) - 1)
    delta = np.inf
    for _ in range(constants.robust_steps):
        left = np.linalg.norm(rows.label - rows.token @ estimate, axis=1)
        smallest = float(np.partition(left, rank)[rank]) + 1e-300
        delta = max(constants.robust_shrink * min(delta, float(np.median(left))), smallest)
        weight = ((left / delta) ** 2 + 1) ** -2
        weighted = rows.token * weight[:, None]
        normal, right = weighted.T @ rows.token, weighted.T @ rows.label
        estimate = np.linalg.lstsq(normal, right, rcond=None)[0].astype(np.float64)
    return estimate
