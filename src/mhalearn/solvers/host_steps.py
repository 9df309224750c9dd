"""Direct Gauss-Newton steps in NumPy, for problems so small that a program takes longer to compile
than they take to solve.

The equations are those of `variable_projection`: damped steps of Theta, W eliminated. The reduced
normal matrix is formed from the rows that count, and its Cholesky factor, in single precision where
that is enough, preconditions conjugate gradients whose products are exact. Where steps converge
fast, several are made with one factor (Shamanskii's method).
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg.lapack import dpotrf, dpotrs, dtrtri, spotrf, spotrs

from mhalearn._runtime.types import Float64
from mhalearn.solvers.damping import IDLE, ROUNDING, update_damping

# Shares of the mean diagonal: of the design's Gram matrix, so that unused heads stay solvable, and
# of the normal matrix, by which its rounding may make it indefinite.
_DESIGN_FLOOR, _FLOOR = 1e-13, 8
# How exactly equations are solved, in at most so many products: they cost little beside a factor.
# Loosely solved ones, far from the end, mostly do without.
_LOOSEST, _LOOSE, _TIGHTEST, _PRODUCTS = 1e-1, 1e-2, 1e-6, 12
# Steps made with one factor, as long as each leaves no more than this part of the objective.
_CHORDS, _FAST = 6, 0.1


class Rows(NamedTuple):
    """The examples that count, as arrays of the host."""

    tokens: Float64  # (b, k, d)
    queries: Float64  # (b k, q)
    labels: Float64  # (b k, e), zero where a row pads
    constant: Float64  # (b k, x)
    weight: Float64  # (b k, 1)
    forbidden: NDArray[np.bool_] | None  # (b, k, 1, k), None where every key may be attended to
    centre: Float64  # (b, 1, d): each example's mean token
    squares: Float64  # (b, k, d d): outer products of tokens less that mean


def make_rows(data: Any) -> Rows:
    """The rows of a data set of the form of `layer.batches.Chunk`; what only pads is left out."""
    tokens, queries, labels, constant, weight, allowed = (
        np.concatenate(list(np.asarray(leaf)))
        for leaf in data[:6]  # heads without positions
    )
    real = weight.any(axis=1)
    flat = weight[real].reshape(-1, 1)
    forbidden = ~allowed[real][:, :, None]
    return complete_rows(
        tokens[real],
        queries[real].reshape(len(flat), -1),
        labels[real].reshape(len(flat), -1) * flat,
        constant[real].reshape(len(flat), -1),
        flat,
        forbidden if forbidden.any() else None,
    )


def complete_rows(tokens: Float64, *rest: Any) -> Rows:
    """With what is made of the tokens alone."""
    centre = tokens.mean(axis=1, keepdims=True)
    apart = tokens - centre
    squares = (apart[..., :, None] * apart[..., None, :]).reshape(*apart.shape[:2], -1)
    made: Rows = Rows._make((tokens, *rest, centre, squares))
    return made


class Point(NamedTuple):
    """The objective at attention matrices, W eliminated."""

    theta: Float64  # (m, q, d)
    w: Float64  # (p, e)
    objective: float  # |Y - F|^2 and penalties
    squared: float  # |Y - F|^2
    p: Float64  # (b, k, m, k), patterns
    design: Float64  # (b k, p)
    residual: Float64  # (b k, e)
    columns: Float64  # (b k, p): the design's span, orthonormal but for the ridge


def attend_on_host(theta: Float64, rows: Rows) -> tuple[Float64, Float64]:
    """Patterns (b, k, m, k) and the design matrix (b k, p), as `layer.attention` has them."""
    m, q, d = theta.shape
    b, k, _ = rows.tokens.shape
    keyed = rows.queries @ theta.transpose(1, 0, 2).reshape(q, m * d)
    scores = keyed.reshape(b, k * m, d) @ rows.tokens.transpose(0, 2, 1)
    p = scores.reshape(b, k, m, k)
    if rows.forbidden is not None:
        p[np.broadcast_to(rows.forbidden, p.shape)] = -np.inf
    p -= p.max(axis=-1, keepdims=True)
    np.exp(p, out=p)
    p /= p.sum(axis=-1, keepdims=True)
    means = (p.reshape(b, k * m, k) @ rows.tokens).reshape(b * k, m * d)
    design = np.concatenate([means, rows.constant], axis=1) if rows.constant.size else means
    if rows.forbidden is not None:
        design = design * rows.weight
    return p, design


def evaluate(
    theta: Float64, rows: Rows, ridge_theta: float, ridge_w: float, last: Point | None = None
) -> Point:
    """Patterns, the best W, and what it leaves. Cost: O(b k m d (q + k) + b k p (p + e)).

    last: a point whose patterns are used again if it is this one.
    """
    if last is not None and np.array_equal(last.theta, theta):
        p, design = last.p, last.design
    else:
        p, design = attend_on_host(theta, rows)
    gram = design.T @ design
    floor = _DESIGN_FLOOR * gram.trace() / len(gram)
    gram.flat[:: len(gram) + 1] += ridge_w + floor
    lower, failed = dpotrf(gram, lower=True)
    half, _ = dtrtri(lower * (np.nan if failed else 1.0), lower=True)
    w = half.T @ (half @ (design.T @ rows.labels))
    # One step of refinement takes back the floor and most of the squared conditioning.
    w += half.T @ (half @ (design.T @ (rows.labels - design @ w) - ridge_w * w))
    residual = rows.labels - design @ w
    squared = float(np.vdot(residual, residual))
    objective = (
        squared + ridge_w * float(np.vdot(w, w)) + ridge_theta * float(np.vdot(theta, theta))
    )
    return Point(theta, w, objective, squared, p, design, residual, design @ half.T)


def covariance_products(p: Float64, design: Float64, w: Float64, rows: Rows) -> Float64:
    """C_i(r) W_i for every row and head: (b k, m d, e).

    Head by head: larger arrays would be given back to the system and asked for again each time.
    """
    (b, k, m, _), d, e = p.shape, rows.tokens.shape[2], w.shape[1]
    means = design[:, : m * d].reshape(b, k, m, d) - rows.centre[:, :, None]
    products = np.empty((b * k, m, d, e))
    for head in range(m):
        mean = means[:, :, head]
        covariance = (p[:, :, head] @ rows.squares).reshape(b, k, d, d)
        covariance -= mean[..., :, None] * mean[..., None, :]
        product = covariance.reshape(-1, d) @ w[head * d : (head + 1) * d]
        products[:, head] = product.reshape(b * k, d, e)
    if rows.forbidden is not None:  # otherwise no row pads
        products *= rows.weight[:, :, None, None]
    return products.reshape(b * k, m * d, e)


def normal_matrix(keys: NDArray[np.floating], x: NDArray[np.floating]) -> Any:
    """J^T J: by J where outputs are few, else from each pair of query features."""
    (count, md, e), q = keys.shape, x.shape[1]
    if e <= 2:
        jacobian = (x[:, None, :, None] * keys.transpose(0, 2, 1)[:, :, None, :]).reshape(
            count * e, q * md
        )
        return jacobian.T @ jacobian
    kernel = (keys @ keys.transpose(0, 2, 1)).reshape(count, md * md)
    first, second = np.triu_indices(q)
    upper = ((x[:, first] * x[:, second]).T @ kernel).reshape(-1, md, md)
    blocks = np.empty((q, q, md, md), keys.dtype)
    blocks[first, second] = blocks[second, first] = upper
    return blocks.transpose(0, 2, 1, 3).reshape(q * md, q * md)


class Factor(NamedTuple):
    """The damped normal matrix of some point as a Cholesky factor, in scaled coordinates."""

    upper: NDArray[np.floating]
    root: Float64  # (m d,)

    def solve(self, flat: Float64) -> Float64:
        inner = (flat * self.root).ravel().astype(self.upper.dtype)
        potrs = spotrs if inner.dtype == np.float32 else dpotrs
        return potrs(self.upper, inner)[0].reshape(flat.shape) * self.root


class Equations:
    """(S + ridge + damping D) step = J^T (Y - F) - ridge Theta at a point, for steps (q, m d).

    D is the mean diagonal of J^T J in each head's block.
    """

    def __init__(self, here: Point, rows: Rows, ridge: float, damping: float) -> None:
        m, q, d = here.theta.shape
        self.here, self.rows = here, rows
        self.keys = covariance_products(here.p, here.design, here.w, rows)
        squares = np.einsum("rie,rie->ri", self.keys, self.keys)
        diagonal = np.sum(rows.queries**2, axis=1) @ squares / q
        head_scale = diagonal.reshape(m, d).mean(axis=1)
        head_scale += 1e-12 * head_scale.max() + np.finfo(float).tiny
        self.scale = np.repeat(head_scale, d)
        self.shift = ridge + damping * self.scale
        theta = here.theta.transpose(1, 0, 2).reshape(q, m * d)
        self.right = self._vjp(here.residual) - ridge * theta

    def _vjp(self, change: Float64) -> Float64:
        return self.rows.queries.T @ (self.keys @ change[:, :, None])[..., 0]

    def apply(self, flat: Float64) -> Float64:
        """The matrix times a step, from exact products."""
        change = ((self.rows.queries @ flat)[:, None, :] @ self.keys)[:, 0]
        columns = self.here.columns
        return self._vjp(change - columns @ (columns.T @ change)) + self.shift * flat

    def factor(self, dtype: type[np.floating]) -> Factor | None:
        """None where rounding makes the matrix indefinite."""
        root = 1 / np.sqrt(self.scale)
        matrix = self._reduced_matrix(self.keys * root[:, None], dtype)
        shift = np.tile(self.shift / self.scale, len(matrix) // len(root))
        matrix.flat[:: len(matrix) + 1] += shift + _FLOOR * np.finfo(dtype).eps
        potrf = spotrf if dtype is np.float32 else dpotrf
        upper, failed = potrf(matrix.T, overwrite_a=True)  # of its transpose, which LAPACK has
        return None if failed else Factor(upper, root)

    def _reduced_matrix(self, keys: Float64, dtype: type[np.floating]) -> NDArray[np.floating]:
        """S of scaled keys, with J^T J = sum_r x_r x_r^T (x) K_r."""
        keys, x = keys.astype(dtype), self.rows.queries.astype(dtype)
        (count, md, e), q = keys.shape, x.shape[1]
        mixed = (x[:, :, None] * self.here.columns.astype(dtype)[:, None, :]).reshape(count, -1)
        cross = (mixed.T @ keys.reshape(count, -1)).reshape(q, -1, md, e)
        flat = cross.transpose(0, 2, 1, 3).reshape(q * md, -1)
        return normal_matrix(keys, x) - flat @ flat.T

    def solve(
        self, factor: Factor | None, tolerance: float, start: Float64
    ) -> tuple[Float64, bool]:
        """By conjugate gradients from `start`, until the residual is small beside the right.

        factor: the preconditioner; None for D and what is added.
        """
        enough = tolerance**2 * float(np.vdot(self.right, self.right))
        found, along, size = start, np.zeros_like(start), 1.0
        left = self.right - self.apply(found) if found.any() else self.right
        diagonal = self.scale + self.shift
        for _ in range(_PRODUCTS):
            if not np.vdot(left, left) > enough:
                break
            solved = left / diagonal if factor is None else factor.solve(left)
            after = float(np.vdot(left, solved))
            along = solved + (after / size) * along
            product = self.apply(along)
            curvature, size = float(np.vdot(along, product)), after
            if not curvature > 0:
                break
            found = found + (size / curvature) * along
            left = left - (size / curvature) * product
        return found, bool(np.vdot(left, left) <= enough)


class Descent(NamedTuple):
    """Where a start has come to."""

    point: Point
    damping: float
    idle: float  # steps since the objective last fell by more than a thousandth
    solved: bool


def step_on_host(
    theta: Float64,
    damping: float,
    idle: float,
    rows: Rows,
    energy: float,
    ridge: tuple[Any, Any],
    last: Point | None = None,
) -> Descent:
    """One damped step and, while they converge fast, more with the same factor.

    last: where the step before ended.
    Cost: O(b k (q m d)(m d)(q + e) + (q m d)^2 p e + (q m d)^3); a tenth for each further step.
    """
    with np.errstate(all="ignore"):  # what is not finite is no progress
        penalties = energy * float(ridge[0]), energy * float(ridge[1])
        here = evaluate(theta, rows, *penalties, last)
        return _step_on_host(here, damping, idle, rows, energy, penalties)


def _step_on_host(
    here: Point,
    damping: float,
    idle: float,
    rows: Rows,
    energy: float,
    penalties: tuple[float, float],
) -> Descent:
    factor = None
    m, q, d = here.theta.shape
    for _ in range(_CHORDS):
        level = math.sqrt(min(1.0, here.objective / energy))
        equations = Equations(here, rows, penalties[0], damping * level)
        tolerance = min(max(level, _TIGHTEST), _LOOSEST)
        flat, factor, solved = _solve(equations, factor, tolerance)
        step = flat.reshape(q, m, d).transpose(1, 0, 2)
        there = evaluate(here.theta + step, rows, *penalties)
        gain = here.objective - there.objective
        damped = damping * level * float(np.vdot(flat * equations.scale, flat))
        predicted = float(np.vdot(flat, equations.right)) + damped
        ratio = gain / predicted if predicted > 0 else -1.0  # none where no factor was found
        damping = float(update_damping(damping, ratio, np))
        idle = 0.0 if gain > IDLE * here.objective else idle + 1
        fast = there.objective <= _FAST * here.objective
        here = there if gain > 0 else here
        if not fast or here.squared < ROUNDING * energy:
            break
    return Descent(here, damping, idle, solved)


def _solve(
    equations: Equations, factor: Factor | None, tolerance: float
) -> tuple[Float64, Factor | None, bool]:
    """By the factor at hand where that goes, or without where that may do; else by a new one of
    single or double precision."""
    flat, solved = np.zeros_like(equations.right), False
    if factor is not None or tolerance > _LOOSE:
        flat, solved = equations.solve(factor, tolerance, flat)
    for dtype in (np.float32, np.float64):
        if solved:
            break
        new = equations.factor(dtype)
        if new is not None:
            factor = new
            flat, solved = equations.solve(factor, tolerance, flat)
    return flat, factor, solved
