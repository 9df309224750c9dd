"""Attacks that do not obey the rules: they know the family and look at single examples.

Parities fall to Gaussian elimination over GF(2), which one wrong bit among its equations ruins.
Small roundings fall to a search through all secrets, or to an integer program; so do small secrets
of learning with rounding, and with a fixed modulus they fall to elimination as well.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

import numpy as np
import scipy.optimize
from numpy.typing import NDArray

from mhalearn._runtime.seeds import Stream, generator
from mhalearn._runtime.types import Float64
from mhalearn.data import Examples
from mhalearn.hardness.families import entry_bound
from mhalearn.hardness.lwr import count_bits, spread
from mhalearn.hardness.secret import is_shown, label_shares, largest_sum

Bits = NDArray[np.uint8]
Integers = NDArray[np.int64]
# Secrets that are looked at together, and examples that reject most of them.
_AT_ONCE, _FIRST = 2**16, 24
# How often chance may pass for a secret: by Hoeffding's inequality, or by as many equations beyond
# the unknowns that a solution of all must meet. A subset has a few of those, to be rejected by.
_CHANCE, _SPARE = 1e-3, 4


@dataclass(frozen=True)
class Broken:
    """What an attack found, and what it paid: subsets, candidates, nodes of a tree, or unknowns."""

    weights: Integers | None
    work: int
    examples: int


def read_bits(examples: Examples, projection: Float64) -> tuple[Bits, Bits]:
    """From the examples that show the secret: [b_a = -1] for a >= 1, and whether the sign is -1.

    The sign is what `label_shares` shows.
    """
    x, y, _ = examples.arrays()
    shown = is_shown(x).astype(bool)
    x, y = x[shown], y[shown]
    share = label_shares(x, y, projection)
    return (x[:, 0, 1:] * x[:, 1, 1:] < 0).astype(np.uint8), (share < -1).astype(np.uint8)


def eliminate(equations: Bits, right: Bits) -> Bits | None:
    """The only solution over GF(2), or None where there is none or more than one. O(n d^2)."""
    rows = np.column_stack([equations, right]).astype(np.uint8)
    unknowns = equations.shape[1]
    for column in range(unknowns):
        pivots = np.flatnonzero(rows[column:, column])
        if not len(pivots):
            return None
        pivot = column + pivots[0]
        rows[[column, pivot]] = rows[[pivot, column]]
        others = rows[:, column].astype(bool)
        others[column] = False
        rows[others] ^= rows[column]
    return None if rows[unknowns:, -1].any() else rows[:unknowns, -1]


def break_parity(
    examples: Examples, projection: Float64, *, tries: int = 1, seed: int = 0
) -> Broken:
    """Gaussian elimination on all examples; then on random subsets of a few more than unknowns.

    A subset without a wrong bit gives the secret. What a subset says is believed if the other
    examples agree with it far more often than chance would have it, in any of the tries.
    """
    equations, right = read_bits(examples, projection)
    count, unknowns = equations.shape
    found = eliminate(equations, right)
    if found is not None and count - unknowns >= math.log2(1 / _CHANCE):
        return Broken(np.concatenate([[0], found]).astype(np.int64), 1, examples.n)
    rng = generator(seed, Stream.ATTACK)
    size = unknowns + _SPARE
    best, least = None, 0.5 + math.sqrt(math.log(tries / _CHANCE) / (2 * max(1, count - size)))
    for _ in range(tries if count > size else 0):
        order = rng.permutation(count)
        chosen, others = order[:size], order[size:]
        found = eliminate(equations[chosen], right[chosen])
        if found is None:
            continue
        agreement = float(np.mean((equations[others] @ found) % 2 == right[others]))
        if agreement > least:
            best, least = np.concatenate([[0], found]).astype(np.int64), agreement
    return Broken(best, 1 + tries, examples.n)


def break_rounding_by_search(
    examples: Examples, projection: Float64, n_heads: int, modulus: int
) -> Broken:
    """Try all integer vectors the family draws from. Cost: (bound + 1)^(d - 1) secrets."""
    unknowns = len(projection) - 1
    entries = range(entry_bound(n_heads, unknowns + 1, modulus) + 1)
    most = largest_sum(n_heads, modulus)

    def weights(block: Integers) -> Integers:
        return np.insert(block[block.sum(axis=1) <= most], 0, 0, axis=1)

    return _search(product(entries, repeat=unknowns), weights, examples, projection, modulus)


def break_lwr_by_search(examples: Examples, projection: Float64, modulus: int) -> Broken:
    """Try all vectors of integers modulo q. Cost: q^n secrets."""
    n = (len(projection) - 1) // count_bits(modulus)
    vectors = product(range(modulus), repeat=n)
    return _search(vectors, lambda block: spread(block, modulus), examples, projection, modulus)


def _search(
    candidates: Iterator[tuple[int, ...]],
    weights_of: Callable[[Integers], Integers],
    examples: Examples,
    projection: Float64,
    modulus: int,
) -> Broken:
    """The first candidate whose weights make all the bits seen."""
    equations, right = read_bits(examples, projection)
    work = 0
    while block := list(islice(candidates, _AT_ONCE)):
        alive = weights = weights_of(np.array(block, dtype=np.int64))
        for rows in (slice(0, _FIRST), slice(_FIRST, None)):
            counts = alive[:, 1:] @ equations[rows].T.astype(np.int64)
            alive = alive[np.all(2 * counts // modulus % 2 == right[rows], axis=1)]
        if len(alive):
            tried = int(np.flatnonzero(np.all(weights == alive[0], axis=1))[0]) + 1
            return Broken(alive[0], work + tried, examples.n)
        work += len(weights)
    return Broken(None, work, examples.n)


def break_rounding_by_integers(
    examples: Examples, projection: Float64, n_heads: int, modulus: int, *, seconds: float = 30.0
) -> Broken:
    """An integer program for the weights; `_solve_integers` says which."""
    equations, right = read_bits(examples, projection)
    unknowns = equations.shape[1]
    # The last half period has no head that ends it: `largest_sum` does.
    solved, work = _solve_integers(
        equations,
        right,
        modulus,
        bounds=(entry_bound(n_heads, unknowns + 1, modulus), math.ceil(n_heads / 2)),
        largest=largest_sum(n_heads, modulus),
        seconds=seconds,
    )
    weights = None if solved is None else np.insert(solved, 0, 0)
    return Broken(weights, work, examples.n)


def break_lwr_by_integers(
    examples: Examples, projection: Float64, modulus: int, *, seconds: float = 30.0
) -> Broken:
    """An integer program for the vector; `_solve_integers` says which.

    It asks for the point of a lattice that lies within q / 4 of the middles of the half periods
    seen, coordinate by coordinate: the closest vector problem, left to branch and cut.
    """
    bits, right = read_bits(examples, projection)
    width = count_bits(modulus)
    integers = bits.reshape(len(bits), -1, width) @ (1 << np.arange(width))
    n = integers.shape[1]
    solved, work = _solve_integers(
        integers, right, modulus, bounds=(modulus - 1, n * (modulus - 1)), seconds=seconds
    )
    weights = None if solved is None else spread(solved, modulus)
    return Broken(weights, work, examples.n)


def _solve_integers(
    coefficients: NDArray[Any],
    right: Bits,
    modulus: int,
    *,
    bounds: tuple[int, int],
    largest: int | None = None,
    seconds: float,
) -> tuple[Integers | None, int]:
    """Integers s, each at most bounds[0], whose counts lie in half periods of the parity seen.

    q/2 j <= <s, a> <= q/2 (j + 1) - 1 with j = 2 u + right, each u at most bounds[1]; the sum of s
    at most `largest`. Solved by HiGHS, branch and cut. Cost: exponential in the worst case; also
    returns the nodes of its tree. None: not found in time.
    """
    n, unknowns = coefficients.shape
    half = modulus // 2
    columns = np.hstack([coefficients.astype(float), -2.0 * half * np.eye(n)])
    within = scipy.optimize.LinearConstraint(columns, half * right, half * (right + 1.0) - 1)
    total = scipy.optimize.LinearConstraint(
        np.concatenate([np.ones(unknowns), np.zeros(n)]), 0, np.inf if largest is None else largest
    )
    solved = scipy.optimize.milp(
        np.zeros(unknowns + n),
        integrality=np.ones(unknowns + n),
        bounds=scipy.optimize.Bounds(0, np.repeat(bounds, (unknowns, n))),
        constraints=[within, total],
        options={"time_limit": seconds},
    )
    work = int(getattr(solved, "mip_node_count", 0) or 0)
    if solved.x is None:
        return None, work
    return np.round(solved.x[:unknowns]).astype(np.int64), work


def break_lwr_by_elimination(examples: Examples, projection: Float64, modulus: int) -> Broken:
    """Linearise over GF(2), in the manner of Arora & Ge (ICALP 2011), and eliminate.

    The bit is binomial(h, q/2) mod 2 (Lucas), h = <a, s>: a polynomial over GF(2) in the bits of a
    that has a product of them only if their place values sum to at most q/2. Its coefficients are
    the unknowns, binomial(n + q/2, n) - 1 of them; those of single bits are the bits of s. Cost: as
    many examples that show a bit, and the cube of that in time: polynomial in n for fixed q.
    """
    bits, right = read_bits(examples, projection)
    width, half = count_bits(modulus), modulus // 2
    places = np.tile(1 << np.arange(width), bits.shape[1] // width)
    unknowns = count_products(len(places) // width, modulus)
    if len(bits) < unknowns + math.log2(1 / _CHANCE):
        return Broken(None, unknowns, examples.n)
    products, sums = np.ones((len(bits), 1), np.uint8), np.zeros(1, np.int64)
    singles = []
    for bit, place in zip(bits.T, places, strict=True):
        singles.append(len(sums))  # the product of this bit and no other comes first
        kept = sums + place <= half
        products = np.hstack([products, products[:, kept] * bit[:, None]])
        sums = np.concatenate([sums, sums[kept] + place])
    found = eliminate(products[:, 1:], right)
    if found is None:
        return Broken(None, unknowns, examples.n)
    # At a = 2^l e_j the label is bit t - 1 - l of s_j.
    digits = found[np.array(singles) - 1].reshape(-1, width)[:, ::-1]
    return Broken(spread(digits @ (1 << np.arange(width)), modulus), unknowns, examples.n)


def count_products(dimension: int, modulus: int) -> int:
    """Products of bits of n integers whose place values sum to at most q/2, without the empty one.

    Bits are those of n numbers with that sum at most, and each such choice of numbers is one.
    """
    return math.comb(dimension + modulus // 2, dimension) - 1
