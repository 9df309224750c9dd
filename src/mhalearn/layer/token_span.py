"""Where tokens lie: their mean, how far they spread in which directions, and where they do not.

Tokens seen lie in an affine hull of r <= d dimensions, x = mean + z S. Labels say what a layer does
there, and nothing of what it would do elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import scipy.linalg
from numpy.typing import ArrayLike, NDArray

from mhalearn._runtime.precision import Precision, find_precision
from mhalearn._runtime.threads import one_lapack_thread
from mhalearn._runtime.types import Float64
from mhalearn._runtime.validation import check_inputs

Read = Callable[[], Iterable[Float64]]

# A spread is that of rounding up to so many times what rounding each entry once makes, ...
_ROUNDED = 2.0
# ... and so many units of the precision that tokens were computed in, relative to their size: a
# norm's mean or a product's sum moves all features together.
_COMPUTED = 64.0
_DOUBLE, _SINGLE = 2.0**-53, 2.0**-24
# Largest over smallest eigenvalue of the tokens' moments up to which they are taken as they are.
NEARLY_ISOTROPIC = 30.0
# Tokens for each feature that are looked at to see whether they are.
_LOOKED_AT = 16
# Spreads, the smallest over the largest, that no rounding explains.
_CLEARLY = 1e-2


@runtime_checkable
class TokenSource(Protocol):
    """What tokens can be read from a chunk at a time, as from `Examples`."""

    @property
    def k(self) -> int: ...

    def chunks(self, size: int) -> Iterator[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]: ...


@dataclass(frozen=True)
class TokenSpan:
    """The affine hull of tokens in r of d dimensions: x = mean + z directions.

    mean (d,). directions (r, d), with which z has mean 0 and covariance I; the widest first.
    coordinates (d, r): z = (x - mean) coordinates; of all matrices that do so the one of least
    norm, directions @ coordinates = I.
    moment_directions, moment_coordinates: the same about zero in place of the mean, where the hull
    passes through it: x = z directions, with which z has second moment I.
    normals (d - r, d): an orthonormal basis of the directions that are not spanned.
    nearest (d,): the hull's point nearest to zero; zero where the hull passes through it, as far as
    rounding lets one tell. tokens: how many there were.
    covariance_condition, moment_condition: largest over smallest eigenvalue of the covariance and
    of the second moment, as far as spanned, over what chance makes of as many isotropic tokens.
    """

    mean: Float64
    directions: Float64
    coordinates: Float64
    moment_directions: Float64
    moment_coordinates: Float64
    normals: Float64
    nearest: Float64
    tokens: int
    covariance_condition: float
    moment_condition: float

    @property
    def d(self) -> int:
        return len(self.mean)

    @property
    def rank(self) -> int:
        return len(self.directions)

    @property
    def is_full(self) -> bool:
        return self.rank == self.d

    @property
    def through_zero(self) -> bool:
        return not self.nearest.any()

    @property
    def spectrum(self) -> Float64:
        """Eigenvalues (r,) of the tokens' covariance, largest first; the others are rounding."""
        with one_lapack_thread():
            spreads = np.linalg.svd(self.directions, compute_uv=False)
        return np.asarray(spreads**2, np.float64)

    def distance(self, x: Float64) -> Float64:
        """How far tokens (..., d) are from the hull."""
        return np.linalg.norm((x - self.mean) @ self.normals.T, axis=-1)


def read_tokens(inputs: ArrayLike | TokenSource, lengths: ArrayLike | None = None) -> Read:
    """Passes over the tokens (t, d) of X (n, k, d), or of an Examples, padding left out."""
    if isinstance(inputs, TokenSource):
        source = inputs

        def read() -> Iterator[Float64]:
            for x, _, sizes in source.chunks(4096):
                yield x[np.arange(source.k) < sizes[:, None]].astype(np.float64)

        return read
    x, sizes = check_inputs(inputs, None, lengths)
    tokens = x[np.arange(x.shape[1]) < sizes[:, None]].astype(np.float64)
    return lambda: [tokens]


def are_nearly_isotropic(read: Read, rows: int) -> bool:
    """Whether tokens spread alike in all directions, about zero: then nothing is to be measured.

    rows: how many tokens there are. Of many, evenly chosen ones are looked at: what they span, all
    span. Cost: O(d^3).
    """
    count, step, parts = 0, 0, []
    for tokens in read():
        step = step or max(1, rows // (_LOOKED_AT * tokens.shape[1]))
        parts.append(tokens[-count % step :: step])
        count += len(tokens)
    x = np.concatenate(parts)
    t, d = x.shape
    if t <= d + 1:
        return False
    moment, mean = x.T @ x / t, x.mean(axis=0)
    with one_lapack_thread():
        second = scipy.linalg.eigvalsh(moment)
        central = scipy.linalg.eigvalsh(moment - np.outer(mean, mean))
    clearly = central[0] > _CLEARLY**2 * central[-1] > 0
    return bool(clearly and max(_condition(second, t), _condition(central, t)) <= NEARLY_ISOTROPIC)


def measure_span(read: Read, finest: Precision | None = None) -> TokenSpan:
    """The affine hull of tokens, by a QR decomposition of them, and the mean and spread there.

    A direction in which they spread no more than rounding explains is not spanned. What rounding
    explains is read off the tokens' values: those of float32, float16 and bfloat16 by their last
    places, all others as doubles. finest: precision of the labels; where it is finer than that of
    the tokens, labels tell apart what rounding of tokens did, and tokens are taken for exact.
    Features count in units of their own size, so that the hull depends on no unit.
    Cost: O(t d^2) for t tokens; memory of d^2 and one chunk.
    Trust: a threshold on singular values. Rounding that is coarser than its format says (tokens
    that were computed in float16, say) passes for spread.
    """
    precision = find_precision(read)
    if finest is not None and finest.bits > precision.bits:
        precision = finest
    triangle, squared_steps, t = _decompose(read, precision)
    coarse = precision.name != "float64"
    sizes = np.sqrt(np.sum(triangle[:, 1:] ** 2, axis=0) / t)
    exponents = np.round(np.log2(np.where(sizes > 0, sizes, 1.0)))
    sizes = np.asarray(2.0**exponents, np.float64)
    mean = triangle[0, 1:] / triangle[0, 0]
    spread = np.zeros((len(mean), len(mean)))
    spread[: len(triangle) - 1] = triangle[1:, 1:] / np.sqrt(t)
    with one_lapack_thread():
        _, values, basis = np.linalg.svd(spread / sizes)
    entry = squared_steps / 12 / sizes**2
    unit = _SINGLE if coarse else _DOUBLE
    size = float(np.sqrt(np.sum(spread**2 / sizes**2) + np.sum((mean / sizes) ** 2)))
    rounding = _ROUNDED * np.sqrt(basis**2 @ entry) + _COMPUTED * unit * size
    there = values > rounding
    # A normal in units of the features' sizes is one of the user's features after division.
    normals = np.asarray(np.linalg.qr((basis[~there] / sizes).T)[0].T, np.float64)
    through = bool(np.all(np.abs(basis[~there] @ (mean / sizes)) <= rounding[~there]))
    about_zero = np.concatenate([mean[None], spread])
    with one_lapack_thread():
        _, moments, moment_basis = np.linalg.svd(about_zero / sizes)
    rank = int(there.sum())
    directions, coordinates = _whiten(values[there], basis[there], sizes, normals)
    moment_directions, moment_coordinates = _whiten(
        moments[:rank], moment_basis[:rank], sizes, normals
    )
    return TokenSpan(
        mean=mean,
        directions=directions,
        coordinates=coordinates,
        moment_directions=moment_directions,
        moment_coordinates=moment_coordinates,
        normals=normals,
        nearest=np.zeros(len(mean)) if through else normals.T @ (normals @ mean),
        tokens=t,
        covariance_condition=_condition_of(spread, rank, t),
        moment_condition=_condition_of(about_zero, rank, t),
    )


def _whiten(
    values: Float64, basis: Float64, sizes: Float64, normals: Float64
) -> tuple[Float64, Float64]:
    """S and P from singular values and vectors in units of the features' sizes; of all P with
    S P = I the least, which has nothing along the normals."""
    directions = values[:, None] * basis * sizes
    coordinates = (basis / values[:, None] / sizes).T
    return directions, coordinates - normals.T @ (normals @ coordinates)


def _decompose(read: Read, precision: Precision) -> tuple[Float64, Float64, int]:
    """R of the QR decomposition of tokens with a first feature of ones; the mean squares of the
    tokens' last places, by feature; and how many tokens there are."""
    triangle: Float64 = np.zeros((0, 0))
    steps, t = np.zeros(1), 0
    for tokens in read():
        rows = np.concatenate([np.ones((len(tokens), 1)), tokens], axis=1)
        triangle = np.concatenate([triangle.reshape(-1, rows.shape[1]), rows])
        with one_lapack_thread():
            triangle = np.asarray(np.linalg.qr(triangle, mode="r"), np.float64)
        if precision.name != "float64":
            steps = steps + np.sum(precision.steps(tokens) ** 2, axis=0)
        t += len(tokens)
    return triangle, np.broadcast_to(steps / t, triangle.shape[1] - 1), t


def _condition_of(root: Float64, rank: int, t: int) -> float:
    """Of the matrix root^T root, of the given rank."""
    if rank == 0:
        return np.inf
    values = np.asarray(np.linalg.svd(root, compute_uv=False), np.float64)[:rank]
    return _condition(values[::-1] ** 2, t)


def _condition(values: Float64, t: int) -> float:
    """Largest over smallest eigenvalue, ascending, over what Marchenko and Pastur expect of t
    isotropic tokens."""
    if values[0] <= 0:
        return np.inf
    share = np.sqrt(min(1.0, len(values) / t))
    return float(values[-1] / values[0] * ((1 - share) / (1 + share)) ** 2)
