"""Attacks that do not obey the rules: they know the family and look at single examples.

Parities fall to Gaussian elimination over GF(2), which one wrong bit among its equations ruins.
Small roundings fall to a search through all secrets, or to an integer program.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import scipy.optimize
from numpy.typing import NDArray

from mhalearn._runtime.seeds import Stream, generator
from mhalearn._runtime.types import Float64
from mhalearn.data import Examples
from mhalearn.hardness.families import entry_bound
from mhalearn.hardness.secret import is_shown, label_shares, largest_sum

Bits = NDArray[np.uint8]
# Secrets that are looked at together, and examples that reject most of them.
_AT_ONCE, _FIRST = 2**16, 24
# How often chance may pass for a secret: by Hoeffding's inequality, or by as many equations beyond
# the unknowns that a solution of all must meet. A subset has a few of those, to be rejected by.
_CHANCE, _SPARE = 1e-3, 4


@dataclass(frozen=True)
class Broken:
    """What an attack found, and what it paid: subsets, candidates, or nodes of a search tree."""

    weights: NDArray[np.int64] | None
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
    equations, right = read_bits(examples, projection)
    unknowns = equations.shape[1]
    entries = range(entry_bound(n_heads, unknowns + 1, modulus) + 1)
    work = 0
    candidates = itertools.product(entries, repeat=unknowns)
    while block := list(itertools.islice(candidates, _AT_ONCE)):
        secrets = np.array(block, dtype=np.int64)
        secrets = secrets[secrets.sum(axis=1) <= largest_sum(n_heads, modulus)]
        alive = secrets
        for rows in (slice(0, _FIRST), slice(_FIRST, None)):
            counts = alive @ equations[rows].T.astype(np.int64)
            j = np.minimum(n_heads, 2 * counts // modulus)
            alive = alive[np.all(j % 2 == right[rows], axis=1)]
        if len(alive):
            tried = int(np.flatnonzero(np.all(secrets == alive[0], axis=1))[0]) + 1
            return Broken(np.concatenate([[0], alive[0]]), work + tried, examples.n)
        work += len(secrets)
    return Broken(None, work, examples.n)


def break_rounding_by_integers(
    examples: Examples, projection: Float64, n_heads: int, modulus: int, *, seconds: float = 30.0
) -> Broken:
    """An integer program: the count lies in a half period whose number has the parity seen.

    q/2 j <= <s, a> <= q/2 (j + 1) - 1 with j = 2 u + right. Solved by HiGHS, branch and cut.
    Cost: exponential in the worst case; `work` is nodes of its tree. None: not found in time.
    """
    equations, right = read_bits(examples, projection)
    n, unknowns = equations.shape
    half = modulus // 2
    columns = np.hstack([equations.astype(float), -2.0 * half * np.eye(n)])
    # The last half period has no head that ends it: `largest_sum` does.
    within = scipy.optimize.LinearConstraint(columns, half * right, half * (right + 1.0) - 1)
    total = scipy.optimize.LinearConstraint(
        np.concatenate([np.ones(unknowns), np.zeros(n)]), 0, largest_sum(n_heads, modulus)
    )
    most = np.concatenate(
        [
            np.full(unknowns, entry_bound(n_heads, unknowns + 1, modulus)),
            np.full(n, math.ceil(n_heads / 2)),
        ]
    )
    solved = scipy.optimize.milp(
        np.zeros(unknowns + n),
        integrality=np.ones(unknowns + n),
        bounds=scipy.optimize.Bounds(0, most),
        constraints=[within, total],
        options={"time_limit": seconds},
    )
    work = int(getattr(solved, "mip_node_count", 0) or 0)
    if solved.x is None:
        return Broken(None, work, examples.n)
    weights = np.round(solved.x[:unknowns]).astype(np.int64)
    return Broken(np.concatenate([[0], weights]), work, examples.n)
