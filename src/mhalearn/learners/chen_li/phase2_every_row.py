"""Phase 2 as the paper states it: the linear programme is asked of every row.

The paper's: a row is certified when the programme over the whole simplex leaves at most epsilon of
its label, and each pair of tokens in its support is a constraint. Ours: the numbers (epsilon, what
error of the weights it stands for, the least weight of a token in the support), and a first look
that spares most programmes without changing what is certified.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime import devices
from mhalearn._runtime.devices import shard_locally
from mhalearn._runtime.programs import in_float64
from mhalearn._runtime.types import Array, Bool, Float, Float64
from mhalearn.data import Examples
from mhalearn.learners.chen_li.phase2_certification import CertifiedRows, certify_rows
from mhalearn.learners.chen_li.streaming import Watcher, walk
from mhalearn.learners.options import Constants

_TOGETHER = 2048  # programmes between two looks at whether any other can matter


@partial(jax.jit, static_argnames=("epsilon", "support"))
def _worth_asking(
    x: Array, y: Float[Array, "b k e"], total: Float[Array, "d e"], epsilon: float, support: float
) -> tuple[Bool[Array, "b k"], Float[Array, "b k"]]:
    """Rows that the programme might certify with two tokens in their support, and the least share
    of its label that it can leave of each.

    With q the least-squares weights over the affine hull, rho their residual and s the smallest
    singular value of the images' differences, every p that sums to one leaves
    |y - p X W|^2 = rho^2 + |(p - q) X W|^2. So rho > epsilon |y| rejects a row whatever the
    programme finds, and an accepted p is within sqrt(epsilon^2 |y|^2 - rho^2) / s of q.
    """
    tokens = x.astype(total.dtype)
    k = tokens.shape[1]
    images = tokens @ total
    frame = images - images.mean(axis=1, keepdims=True)
    inner = jnp.einsum("bae,bce->bac", frame, frame)
    values, basis = jnp.linalg.eigh(inner)
    # The centred images have one direction less than tokens; equal tokens leave fewer still.
    distinct = values[:, 1] > 1e-9 * values[:, -1]
    inverse = jnp.where(values[:, 1:] > 0, 1 / jnp.maximum(values[:, 1:], 1e-300), 0.0)
    apart = y - images.mean(axis=1, keepdims=True)
    onto = jnp.einsum("bre,bae->bra", apart, frame)
    along = jnp.einsum("bra,bac->brc", onto, basis[:, :, 1:])
    left = jnp.sum(apart**2, axis=-1) - jnp.sum(along**2 * inverse[:, None], axis=-1)
    weights = 1 / k + jnp.einsum("brc,bc,bac->bra", along, inverse, basis[:, :, 1:])
    allowed = epsilon**2 * jnp.sum(y**2, axis=-1)
    # Rounding must not reject what is exact.
    left = left - 1e-12 * jnp.sum(apart**2, axis=-1)
    room = allowed - left
    moved = jnp.sqrt(jnp.maximum(room, 0) / jnp.maximum(values[:, 1], 1e-300)[:, None])
    second = jnp.sort(weights, axis=-1)[..., -2]
    asked = (room >= 0) & distinct[:, None] & (second + moved >= support)
    least = jnp.sqrt(jnp.maximum(left, 0) / jnp.maximum(jnp.sum(y**2, axis=-1), 1e-300))
    return asked, least


@in_float64
def certify_every_row(
    examples: Examples,
    total: Float64,
    epsilon: float,
    tolerance: float,
    most: int,
    support: float = Constants.support,
    *,
    watch: Watcher | None = None,
) -> CertifiedRows:
    """All constraints of the `most` best rows that the linear programme certifies, best first.

    One entry a row and pair of tokens in its support; `score` is the error of its log-odds that
    the body allows, tolerance (1 / p_a + 1 / p_b).
    Cost: one pass and a programme for each row that is worth asking. Trust: with an exact sum no
    false positives, generically, while m (k - 1) <= e and epsilon is small; with a crude sum many.
    """
    number, rows, tokens, labels, bounds = [], [], [], [], []
    for part in walk(examples, watch=watch):
        x, y = shard_locally(part.x), shard_locally(part.y)
        asked, least = _worth_asking(x, y, total, epsilon, support)
        example, row = np.nonzero(np.asarray(asked)[: part.real])
        number.append(example + part.start)
        rows.append(row)
        tokens.append(part.x[example])
        labels.append(part.y[example, row])
        bounds.append(np.asarray(least)[example, row])
    found = (number, rows, tokens, labels, bounds)
    gathered = [devices.all_gather_rows(np.concatenate(one)) for one in found]
    order = np.lexsort((gathered[1], gathered[0], gathered[4]))
    number_, row_, x_, y_, least_ = (one[order] for one in gathered)
    x_ = x_.astype(np.float64)
    attention, residual, share = _solve_best(x_, y_, total, least_, epsilon, support, most)
    certified = np.flatnonzero(share <= epsilon)
    certified = certified[np.argsort(share[certified], kind="stable")][:most]
    return _constraints(
        number_[certified],
        row_[certified],
        x_[certified],
        y_[certified],
        attention[certified],
        residual[certified],
        tolerance,
        support,
    )


def _solve_best(
    x: Float64,
    y: Float64,
    total: Float64,
    least: Float64,
    epsilon: float,
    support: float,
    most: int,
) -> tuple[Float64, Float64, Float64]:
    """Attention, residual and share of the label left, by programmes in the order of their lower
    bounds, until no other row can be among the `most` best."""
    count, k = x.shape[:2]
    attention, residual, share = np.zeros((count, k)), np.zeros(count), np.full(count, np.inf)
    for start in range(0, count, _TOGETHER):
        if start >= most and least[start] > min(np.partition(share, most - 1)[most - 1], epsilon):
            break
        part = slice(start, start + _TOGETHER)
        solved = certify_rows(x[part], y[part], total)
        left = y[part] - np.einsum("ck,ckd->cd", solved.attention, x[part]) @ total
        norms = np.maximum(np.linalg.norm(y[part], axis=1), 1e-300)
        # Rows on one token leave least and constrain nothing: they must not take others' places.
        shared = np.sum(solved.attention >= support, axis=1) > 1
        share[part] = np.where(shared, np.linalg.norm(left, axis=1) / norms, np.inf)
        attention[part], residual[part] = solved.attention, solved.residual
    return attention, residual, share


def _constraints(
    example: NDArray[np.int64],
    row: NDArray[np.int64],
    x: Float64,
    y: Float64,
    attention: Float64,
    residual: Float64,
    error: float,
    support: float,
) -> CertifiedRows:
    """One entry for every pair of tokens that a certified row attends to."""
    k = attention.shape[1]
    pairs = np.array([(a, b) for a in range(k) for b in range(a)])
    held = (attention[:, pairs] >= support).all(axis=2)
    which, pair = np.nonzero(held)
    chosen = pairs[pair]
    p = attention[which[:, None], chosen]
    query = x[which, row[which]]
    difference = x[which, chosen[:, 0]] - x[which, chosen[:, 1]]
    return CertifiedRows(
        example=example[which],
        row=row[which],
        pair=chosen,
        weight=p[:, 0] / p.sum(axis=1),
        attention=attention[which],
        residual=residual[which],
        score=error * (1 / p).sum(axis=1),
        query=query,
        difference=difference,
        tokens=x[which],
        labels=y[which],
    )
