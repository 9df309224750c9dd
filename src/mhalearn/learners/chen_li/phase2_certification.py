"""Phase 2, first half: rows on which all heads attend alike.

The paper's: the linear programme over the simplex (`certify_rows`), and `certify_every_row`, which
asks it of every row and accepts by its residual at a stated epsilon. Ours: the screen over pairs of
tokens (`screen_pairs`), the l1 fit on a pair, the scores that rank rows.

If F_r = p^T X W_sum for a probability vector p then, generically, every head's pattern is p, and
every Theta_i satisfies <Theta, x_r (x_a - x_b)^T> = log(p_a / p_b).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse as sparse
from numpy.typing import NDArray
from scipy.optimize import linprog

from mhalearn._runtime.devices import shard_locally
from mhalearn._runtime.programs import in_float64
from mhalearn._runtime.types import Array, Float, Float64
from mhalearn.data import Examples
from mhalearn.learners.chen_li.programme_vertices import has_few_vertices, solve_by_vertices
from mhalearn.learners.chen_li.streaming import Lowest, Watcher, spread, up_to_sign, walk
from mhalearn.learners.options import Constants

_PROGRAMMES_AT_ONCE = 256
_FURTHER = 16  # how many more rows are looked at where most repeat others
_ROWS_AT_ONCE, _PROJECTED_STEPS = 8192, 400
_DEFAULTS = Constants()


@dataclass(frozen=True)
class CertifiedRows:
    """Rows whose label lies, nearly, between two tokens' images under the sum of projections.

    score: residual over distance of the two images, over q (1 - q): the error of the log-odds.
    attention and residual: over the pair as the screen finds them, over the whole simplex once the
    linear programme has certified the rows.
    """

    example: NDArray[np.int64]
    row: NDArray[np.int64]
    pair: NDArray[np.int64]  # (c, 2)
    weight: Float64  # q, on the first token of the pair
    attention: Float64  # (c, k)
    residual: Float64  # l1 norm of what the attention leaves of the label
    score: Float64
    query: Float64  # (c, d), x_r
    difference: Float64  # (c, d), x_a - x_b
    tokens: Float64  # (c, k, d)
    labels: Float64  # (c, e)

    def __len__(self) -> int:
        return len(self.score)

    @property
    def log_odds(self) -> Float64:
        return np.log(self.weight / (1 - self.weight))

    def select(self, chosen: NDArray[np.int64] | NDArray[np.bool_] | slice) -> "CertifiedRows":
        fields = self.__dataclass_fields__
        return CertifiedRows(**{name: getattr(self, name)[chosen] for name in fields})


@jax.jit
def _pair_scores(
    x: Array, y: Float[Array, "b k e"], total: Float[Array, "d e"], least: Float[Array, ""]
) -> Float[Array, "b k pairs"]:
    """The score of every row and pair of tokens; infinite where the pair's weight is extreme."""
    k = x.shape[1]
    tokens = x.astype(total.dtype)
    # Equal tokens share their weight in a label, and the log-odds of a pair would be wrong.
    alike = jnp.einsum("bid,bjd->bij", tokens, tokens)
    lengths = jnp.diagonal(alike, axis1=1, axis2=2)
    apart_by = lengths[:, :, None] + lengths[:, None, :] - 2 * alike + jnp.eye(k)
    distinct = jnp.all(apart_by > 1e-9 * (1 + lengths[:, :, None]), axis=(1, 2))[:, None]
    images = tokens @ total
    # All distances a pair needs, from inner products alone.
    onto = jnp.einsum("bre,bje->brj", y, images)
    inner = jnp.einsum("bie,bje->bij", images, images)[:, None]
    norms = jnp.sum(y**2, axis=-1)
    scores = []
    for a in range(k):
        for b in range(a):
            length = inner[..., a, a] - 2 * inner[..., a, b] + inner[..., b, b]
            apart = norms - 2 * onto[..., b] + inner[..., b, b]
            along = onto[..., a] - onto[..., b] - inner[..., a, b] + inner[..., b, b]
            q = along / jnp.maximum(length, 1e-300)
            residual = jnp.sqrt(jnp.maximum(apart / length - q**2, 0))
            usable = (q > least) & (q < 1 - least) & distinct
            scores.append(jnp.where(usable, residual / (q * (1 - q)), jnp.inf))
    return jnp.stack(scores, axis=-1)


@in_float64
def screen_pairs(
    examples: Examples,
    total: Float64,
    count: int,
    *,
    most: int | None = None,
    constants: Constants = _DEFAULTS,
    watch: Watcher | None = None,
) -> CertifiedRows:
    """The `count` rows and pairs of tokens with the lowest scores, in one pass.

    No constraint comes twice: with a small vocabulary the best rows would be a few constraints over
    and over. Where most are repeated, a second pass looks further.
    Source: the certification step of phase 2, on two-token supports, which are far more frequent
    than full ones. Cost: O(n k^3 e) time; memory of a chunk and of `count` rows.
    Trust: no false positives generically while m (k - 1) <= e and the sum is exact; the scores
    rank, the linear programme certifies.
    """
    for room in (1, _FURTHER):
        rows = _lowest_pairs(examples, total, room * count, most, constants, watch)
        keys = np.hstack([up_to_sign(rows.query), up_to_sign(rows.difference)])
        distinct = spread(keys, count, repeats=1)
        if 2 * len(distinct) >= len(rows):
            break
    return rows.select(distinct)


def _lowest_pairs(
    examples: Examples,
    total: Float64,
    count: int,
    most: int | None,
    constants: Constants,
    watch: Watcher | None,
) -> CertifiedRows:
    k = examples.k
    pairs = np.array([(a, b) for a in range(k) for b in range(a)])
    lowest = Lowest(count)
    for part in walk(examples, most, watch):
        x, y = shard_locally(part.x), shard_locally(part.y)
        scores = _pair_scores(x, y, total, jnp.asarray(constants.least_weight))
        lowest.offer(np.asarray(scores), part)
    lowest.merge()
    example, rest = np.divmod(lowest.places, k * len(pairs))
    row, which = np.divmod(rest, len(pairs))
    x = lowest.x.astype(np.float64)
    return fit_pairs(example, row, pairs[which], x, lowest.y, total, constants)


def fit_pairs(
    example: NDArray[np.int64],
    row: NDArray[np.int64],
    pair: NDArray[np.int64],
    x: Float64,
    y: Float64,
    total: Float64,
    constants: Constants = _DEFAULTS,
) -> CertifiedRows:
    """Fit each row's weight on its pair in the l1 norm, the norm of the linear programme.

    The best q in |u - q D|_1 is the median of u / D weighted by |D|.
    """
    each = np.arange(len(row))
    labels, query = y[each, row], x[each, row]
    first, second = x[each, pair[:, 0]], x[each, pair[:, 1]]
    along, apart = (first - second) @ total, labels - second @ total
    safe = np.where(along == 0, 1.0, along)
    ratio = np.where(along == 0, 0.0, apart / safe)
    order = np.argsort(ratio, axis=1)
    mass = np.take_along_axis(np.abs(along), order, axis=1)
    middle = np.argmax(np.cumsum(mass, axis=1) >= 0.5 * mass.sum(axis=1, keepdims=True), axis=1)
    q = np.clip(np.take_along_axis(ratio, order, axis=1)[each, middle], 0.0, 1.0)
    edge = 0.5 * constants.least_weight
    q_inside = np.clip(q, edge, 1 - edge)
    attention = np.zeros(x.shape[:2])
    attention[each, pair[:, 0]], attention[each, pair[:, 1]] = q, 1 - q
    left = apart - q[:, None] * along
    score = np.linalg.norm(left, axis=1) / np.linalg.norm(along, axis=1)
    return CertifiedRows(
        example=example,
        row=row,
        pair=pair,
        weight=q_inside,
        attention=attention,
        residual=np.abs(left).sum(axis=1),
        score=score / (q_inside * (1 - q_inside)),
        query=query,
        difference=first - second,
        tokens=x,
        labels=labels,
    )


@dataclass(frozen=True)
class Certification:
    """Attention vectors found by the linear programme, and the l1 residuals they leave."""

    attention: Float64  # (c, k)
    residual: Float64  # (c,)


def certify_rows(
    tokens: Float64, labels: Float64, total: Float64, allowed: NDArray[np.bool_] | None = None
) -> Certification:
    """Minimise |y - p^T X W_sum|_1 over probability vectors p: one linear programme a row.

    allowed: (c, k) tokens that may carry weight; all unless given. With few tokens a programme is
    solved by looking at its vertices, otherwise by HiGHS, many rows as one block-diagonal
    programme, which costs less than many small ones.
    Source: certification in phase 2 of Chen & Li. Trust: the programme is solved exactly; that a
    small residual means that all heads attend alike needs m (k - 1) <= e, projections in general
    position and a good sum.
    """
    c, k, _ = tokens.shape
    images = tokens @ total
    upper = np.ones((c, k)) if allowed is None else allowed.astype(np.float64)
    if has_few_vertices(k, images.shape[2]):
        attention = solve_by_vertices(images, labels, upper)
    else:
        attention = np.zeros((c, k))
        for start in range(0, c, _PROGRAMMES_AT_ONCE):
            part = slice(start, start + _PROGRAMMES_AT_ONCE)
            attention[part] = solve_programmes(images[part], labels[part], upper[part])
    left = labels - np.einsum("ck,cke->ce", attention, images)
    return Certification(attention, np.abs(left).sum(axis=1))


@jax.jit
def _simplex_weights(images: Float[Array, "c k e"], labels: Float[Array, "c e"]) -> Array:
    """argmin |y - p V|^2 over probability vectors, by accelerated projected gradients."""
    gram = jnp.einsum("cae,cbe->cab", images, images)
    onto = jnp.einsum("cae,ce->ca", images, labels)
    step = 1 / jnp.maximum(jnp.trace(gram, axis1=1, axis2=2), 1e-300)[:, None]
    k = images.shape[1]

    def project(v: Array) -> Array:
        descending = -jnp.sort(-v, axis=-1)
        excess = (jnp.cumsum(descending, axis=-1) - 1) / jnp.arange(1, k + 1)
        last = jnp.sum(descending > excess, axis=-1, keepdims=True) - 1
        return jnp.maximum(v - jnp.take_along_axis(excess, last, axis=-1), 0.0)

    def move(step_number: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        p, ahead = state
        moved = project(ahead - step * (jnp.einsum("cab,cb->ca", gram, ahead) - onto))
        push = step_number / (step_number + 3.0)
        return moved, moved + push * (moved - p)

    start = jnp.full(onto.shape, 1 / k)
    return jax.lax.fori_loop(0, _PROJECTED_STEPS, move, (start, start))[0]


@in_float64
def fit_simplex(tokens: Float64, labels: Float64, total: Float64) -> Certification:
    """As `certify_rows`, in the l2 norm, for many rows with long labels.

    Source: ours. Cost: O(c k e) and k^2 a step. Trust: solved to six digits or so.
    """
    found = []
    for start in range(0, len(tokens), _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        found.append(np.asarray(_simplex_weights(tokens[part] @ total, labels[part])))
    attention = np.concatenate(found) if found else np.zeros(tokens.shape[:2])
    left = labels - np.einsum("ck,ckd->cd", attention, tokens) @ total
    return Certification(attention, np.abs(left).sum(axis=1))


def solve_programmes(images: Float64, labels: Float64, upper: Float64) -> Float64:
    """By HiGHS. Variables of a row: p (k), then t (e) with -t <= y - p^T V <= t, whose sum is
    minimised."""
    c, k, e = images.shape
    # HiGHS's tolerances are absolute.
    size = np.maximum(np.abs(labels).max(axis=1), np.abs(images).max(axis=(1, 2)))
    size = np.where(size > 0, size, 1.0)
    images, labels = images / size[:, None, None], labels / size[:, None]
    eye = sparse.identity(e, format="csr")
    blocks = []
    for v in images:
        side = sparse.csr_matrix(v.T)
        blocks.append(sparse.bmat([[side, -eye], [-side, -eye]], format="csr"))
    simplex = sparse.kron(sparse.identity(c), np.concatenate([np.ones(k), np.zeros(e)])[None])
    bounds = np.zeros((c, k + e, 2))
    bounds[:, :k, 1], bounds[:, k:, 1] = upper, np.inf
    solved = linprog(
        np.tile(np.concatenate([np.zeros(k), np.ones(e)]), c),
        A_ub=sparse.block_diag(blocks, format="csr"),
        b_ub=np.stack([labels, -labels], axis=1).ravel(),
        A_eq=simplex.tocsr(),
        b_eq=np.ones(c),
        bounds=bounds.reshape(-1, 2),
        method="highs",
        options={"primal_feasibility_tolerance": 1e-9, "dual_feasibility_tolerance": 1e-9},
    )
    assert solved.status == 0, solved.message
    return np.clip(solved.x.reshape(c, k + e)[:, :k], 0.0, 1.0)
