"""The body's shape by weighted least squares: its centre and the directions in which it is wide.

Ours, in place of the paper's programmes: phases 2 and 4 shape the body, its centre stands for phase
3's minimum-norm point, its wide directions for phase 5's queries.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import scipy.linalg
from scipy.sparse.linalg import LinearOperator, cg, lobpcg

from mhalearn._runtime.seeds import Stream, generator
from mhalearn._runtime.threads import one_lapack_thread
from mhalearn._runtime.types import Float64
from mhalearn.learners.chen_li.phase2_certification import CertifiedRows
from mhalearn.learners.chen_li.span import Span
from mhalearn.learners.options import Constants

_ROWS = 2048
_DEFAULTS = Constants()
# Where the Gram matrix is not formed: eigenvectors sought beside the wide ones, whose convergence
# they speed up; steps between two looks at it, and at most; how little a wide direction turns in
# between once it has converged. Rows are reweighted after each solution, so that more digits than
# the rows themselves have are for nothing.
_COMPANY, _STEPS, _MOST_STEPS, _TURN = 2, 5, 60, 1e-3
_RESIDUAL = 1e-4


@dataclass(frozen=True)
class BodyShape:
    """proxy: the minimum-norm point, (d, d). wide: (m - 1, d, d), orthonormal, widest first.
    eigenvalues: of the constraints' Gram matrix, ascending, over the largest; the widths of the
    body are inverse to their square roots. All of them, or the lowest.
    """

    proxy: Float64
    wide: Float64
    eigenvalues: Float64

    @property
    def span(self) -> Span:
        return Span(self.proxy, self.wide)

    def guess_heads(self, most: int) -> tuple[int, float]:
        """The head count at the largest gap of the spectrum, and that gap as a ratio."""
        most = min(most, len(self.eigenvalues))
        gaps = self.eigenvalues[1:most] / np.maximum(self.eigenvalues[: most - 1], 1e-300)
        best = int(np.argmax(gaps))
        return best + 2, float(gaps[best])


def fit_shape(
    rows: CertifiedRows,
    n_heads: int,
    trusted: int,
    constants: Constants = _DEFAULTS,
    *,
    sought: int = 0,
) -> BodyShape:
    """Centre and wide directions from the constraints' Gram matrix, robustly.

    Rows weigh 4 q (1 - q), less once their score is above that at rank `trusted`, and less again
    where they disagree with the others (eight reweightings). At least `sought` eigenvalues are
    found.
    Source: the eigenvector form of phases 2, 3 and 5. Cost: O(rows d^4 + d^6) time and O(d^4)
    memory up to `largest_dense` features; beyond, O(rows d^2) a product and O(rows d) memory.
    Trust: a heuristic shortcut; `span_by_queries` is what it is checked against.
    """
    c, d = rows.query.shape
    offsets = rows.log_odds
    usual = np.partition(rows.score, min(trusted, c - 1))[min(trusted, c - 1)] + 1e-300
    base = 4 * rows.weight * (1 - rows.weight) / (1 + np.minimum(rows.score / usual, 1e6) ** 2)
    weights, free = base, n_heads - 1
    solve = (
        partial(_solve_dense, rows)
        if d <= constants.largest_dense
        else _Iterative(rows, max(free + _COMPANY, sought)).solve
    )
    for _ in range(constants.reweightings + 1):
        pull = (rows.query * (weights * offsets)[:, None]).T @ rows.difference
        values, wide, proxy = solve(weights, pull, free)
        leak = np.sum(_applied(rows, wide) ** 2, axis=1) * float(np.sum(proxy**2))
        doubt = leak + (_applied(rows, proxy[None])[:, 0] - offsets) ** 2
        weights = base / np.sqrt(1 + doubt / max(float(np.median(doubt)), 1e-300))
    return BodyShape(proxy, wide, values)


def _solve_dense(
    rows: CertifiedRows, weights: Float64, pull: Float64, free: int
) -> tuple[Float64, Float64, Float64]:
    """Relative eigenvalues, the lowest eigenvectors, and the solution without them."""
    d = rows.query.shape[1]
    with one_lapack_thread():
        values, basis = scipy.linalg.eigh(_gram(rows, weights))
    wide, firm = basis[:, :free].T.reshape(free, d, d), basis[:, free:]
    stiffness = np.maximum(values[free:], 1e-12 * values[-1])
    proxy = (firm @ ((firm.T @ pull.ravel()) / stiffness)).reshape(d, d)
    return values / values[-1], wide, proxy


class _Iterative:
    """The same from products with the Gram matrix, which is never formed: with a few times d^2 rows
    it is well conditioned but for the few wide directions, so that few products do. Each solution
    begins at the last, of which only the weights have changed.

    Products are in single precision, which is more exact than what is asked of them."""

    def __init__(self, rows: CertifiedRows, sought: int) -> None:
        d = rows.query.shape[1]
        self._query, self._difference = (
            one.astype(np.float32) for one in (rows.query, rows.difference)
        )
        start = generator(0, Stream.BODY_EIGENVECTORS).normal(size=(d * d, sought))
        self._basis = np.linalg.qr(start)[0]
        self._proxy = np.zeros(d * d)

    def solve(self, weights: Float64, pull: Float64, free: int) -> tuple[Float64, Float64, Float64]:
        d = self._query.shape[1]
        scaled = weights.astype(np.float32)[:, None] * self._query

        def product(vectors: Float64) -> Float64:
            found = np.zeros((d * d, vectors.size // (d * d)))
            for number, vector in enumerate(vectors.reshape(d * d, -1).T):
                theta = vector.reshape(d, d).astype(np.float32)
                applied = np.sum((self._query @ theta) * self._difference, axis=1)
                found[:, number] = ((scaled * applied[:, None]).T @ self._difference).ravel()
            return found.reshape(vectors.shape)

        gram = LinearOperator((d * d, d * d), matvec=product, matmat=product, dtype=np.float64)
        values = self._find_wide(gram, free)
        wide = self._basis[:, :free]

        def across(vector: Float64) -> Float64:
            vector = vector - wide @ (wide.T @ vector)
            result = product(vector)
            return result - wide @ (wide.T @ result)

        firm = LinearOperator((d * d, d * d), matvec=across, dtype=np.float64)
        right = pull.ravel() - wide @ (wide.T @ pull.ravel())
        self._proxy = cg(firm, right, x0=self._proxy, rtol=_RESIDUAL, maxiter=200)[0]
        proxy = self._proxy - wide @ (wide.T @ self._proxy)
        relative = np.maximum(values, 0.0) / max(_largest_eigenvalue(product, right), 1e-300)
        return relative, wide.T.reshape(free, d, d), proxy.reshape(d, d)

    def _find_wide(self, gram: LinearOperator, free: int) -> Float64:
        """The lowest eigenvalues; their vectors are kept. The wide ones have converged, the others
        only keep them company."""
        values = np.zeros(0)
        for _ in range(0, _MOST_STEPS, _STEPS):
            before = self._basis[:, :free]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that not all of them converged
                values, basis = lobpcg(gram, self._basis, largest=False, tol=1e-9, maxiter=_STEPS)
            order = np.argsort(values)
            values, self._basis = values[order], basis[:, order]
            wide = self._basis[:, :free]
            if np.linalg.norm(before - wide @ (wide.T @ before)) < _TURN:
                break
        return values


def _largest_eigenvalue(product: Callable[[Float64], Float64], start: Float64) -> float:
    """By the power method: only its order of magnitude matters."""
    vector, largest = start / max(float(np.linalg.norm(start)), 1e-300), 0.0
    for _ in range(5):
        vector = product(vector)
        largest = float(np.linalg.norm(vector))
        vector = vector / max(largest, 1e-300)
    return largest


def _applied(rows: CertifiedRows, thetas: Float64) -> Float64:
    """<x_r (x_a - x_b)^T, Theta> for every row and matrix: (c, s)."""
    applied = [np.sum((rows.query @ one) * rows.difference, axis=1) for one in thetas]
    return np.stack(applied, axis=1) if applied else np.zeros((len(rows.query), 0))


def _gram(rows: CertifiedRows, weights: Float64) -> Float64:
    """The weighted Gram matrix of the constraints (d^2, d^2), from a few rows at a time."""
    d = rows.query.shape[1]
    gram = np.zeros((d * d, d * d))
    for start in range(0, len(weights), _ROWS):
        part = slice(start, start + _ROWS)
        outer = rows.query[part, :, None] * rows.difference[part, None, :]
        normals = outer.reshape(-1, d * d)
        gram += (normals * weights[part, None]).T @ normals
    return gram
