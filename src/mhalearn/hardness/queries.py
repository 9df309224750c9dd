"""Statistical queries: an oracle that answers with averages, and a learner restricted to it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.types import Float64
from mhalearn._runtime.validation import check_array, check_count, check_inputs, is_number
from mhalearn.hardness.secret import Secret

# Queries map all inputs and labels (n, 2, d), (n, 2, e) to one number from -1 to 1 an example.
Query = Callable[[NDArray[Any], Float64], Float64]

# Between the correlation of the right product with an entry of the label, a quarter, and none.
_HALFWAY = 1 / 8


@dataclass
class QueryOracle:
    """Answers E[query(X, Y)] up to `tolerance`, and counts.

    x, y: all inputs of a small dimension (`cube`) with their labels, for exact averages; or a
    sample, whose own error must be small against the tolerance.
    Answers are rounded to multiples of twice the tolerance, so that asking again tells no more.
    """

    x: NDArray[Any]
    y: Float64
    tolerance: float
    asked: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if not (is_number(self.tolerance) and 0 <= self.tolerance <= 1):
            raise ValueError(f"tolerance={self.tolerance!r}: pass a number from 0 to 1")
        self.x, self.y = check_inputs(self.x)[0], check_array("labels", self.y, 3)
        if len(self.x) != len(self.y):
            raise ValueError(f"{len(self.x)} inputs, {len(self.y)} labels: pass as many")

    def ask(self, query: Query) -> float:
        values = np.asarray(query(self.x, self.y), dtype=np.float64)
        if values.shape != (len(self.x),):
            raise ValueError(f"the query has shape {values.shape}: return one number an example")
        if not np.all(np.abs(values) <= 1 + 1e-9):
            raise ValueError("the query leaves [-1, 1]: scale it down")
        self.asked += 1
        mean, unit = float(values.mean()), 2 * self.tolerance
        return unit * round(mean / unit) if unit > 0 else mean


def learn_by_queries(
    oracle: QueryOracle, family: Secret, max_queries: int | None = None
) -> tuple[int, ...] | None:
    """The secret coordinates of a parity, by correlations alone; None where it cannot tell.

    `family` gives what is public, the projection and the free part; its weights are not looked at.
    Asks for the correlation of every entry of the label with every product of ever more bits: the
    first that does not vanish tells. Cost: about (d - 1) binomial(d - 2, m - 1) queries for m
    heads, after all of smaller degree.
    """
    d = len(family.projection)
    shape = oracle.x.shape[2], oracle.y.shape[2]
    if shape != (d, d):
        raise ValueError(
            f"the oracle maps {shape[0]} features to {shape[1]}, the family {d} to {d}"
        )
    if max_queries is not None:
        check_count("max_queries", max_queries, least=0)
    if oracle.tolerance >= _HALFWAY:
        return None
    for size in range(d - 1):
        for others in combinations(range(1, d), size):
            for entry in sorted(set(range(1, d)) - set(others)):
                if max_queries is not None and oracle.asked >= max_queries:
                    return None
                found = oracle.ask(_correlation(family, entry, others))
                if abs(found) > _HALFWAY:
                    return tuple(sorted((entry, *others)))
    return None


def _correlation(family: Secret, entry: int, others: tuple[int, ...]) -> Query:
    """Half of the entry of what depends on the secret, times its token and a product of bits."""

    def query(x: NDArray[Any], y: Float64) -> Float64:
        own = np.asarray(x[:, 0], dtype=np.float64)
        bits = own * x[:, 1]
        hidden = (y[:, 0] - family.free_part(x)[:, 0]) @ family.projection[entry]
        return np.clip(hidden * own[:, entry] / 2 * bits[:, list(others)].prod(axis=1), -1, 1)

    return query


def cube(d: int) -> NDArray[np.int8]:
    """All inputs of two +-1 tokens: (4^d, 2, d), the first token's bits outermost, then b's."""
    if check_count("d", d) > 10:
        raise ValueError(f"d={d}: all 4^d inputs are listed up to d = 10")
    half = ((np.arange(2**d)[:, None] >> np.arange(d)[::-1]) & 1).astype(np.int8)
    signs = 1 - 2 * half
    first = np.repeat(signs, 2**d, axis=0)
    bits = np.tile(signs, (2**d, 1))
    return np.stack([first, first * bits], axis=1)
