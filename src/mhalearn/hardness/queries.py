"""Statistical queries: an oracle that answers with averages, and a learner restricted to it."""

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.types import Float64
from mhalearn._runtime.validation import check_array, check_count, check_inputs, is_number
from mhalearn.hardness.secret import Secret

# Queries map all inputs and labels (n, 2, d), (n, 2, e) to one number an example, from -1 to 1
# (from 0 to 1 for VSTAT).
Query = Callable[[NDArray[Any], Float64], Float64]

# Between the correlation of the right product with an entry of the label, a quarter, and none.
_HALFWAY = 1 / 8
ANSWERS = ("rounded", "adversarial")
# Rounding errors of queries that reach the ends of their range.
_SLACK = 1e-9


@dataclass
class QueryOracle:
    """Answers E[query(X, Y)] up to a tolerance, and counts what was asked and what withheld.

    x, y: all inputs of a small dimension (`cube`) with their labels, for exact averages; or a
    sample, whose own error must be small against the tolerance.
    tolerance: of queries with values from -1 to 1.
    vstat: t in its place, for VSTAT(t) of Feldman et al. (STOC 2013): queries have values from 0
    to 1, and a mean p is told up to max(1/t, sqrt(p (1 - p) / t)), as t examples would tell it.
    answers: "rounded" to a grid that does not depend on the labels, so that asking again tells no
    more; or "adversarial", as in proofs: the mean under `reference` where the tolerance allows it,
    and the rounded one elsewhere.
    reference: (r, n, 2, e), labels that know no secret, each as likely (`Secret.reference_labels`).
    """

    x: NDArray[Any]
    y: Float64
    tolerance: float | None = None
    _: KW_ONLY
    vstat: int | None = None
    answers: str = "rounded"
    reference: Float64 | None = None
    asked: int = field(default=0, init=False)
    withheld: int = field(default=0, init=False)  # answers of an adversary that know no secret

    def __post_init__(self) -> None:
        if self.tolerance is not None and self.vstat is not None:
            raise ValueError(
                f"tolerance={self.tolerance}, vstat={self.vstat}: either decides; leave one out"
            )
        if self.vstat is not None:
            check_count("vstat", self.vstat)
        elif self.tolerance is None or not (is_number(self.tolerance) and 0 <= self.tolerance <= 1):
            raise ValueError(f"tolerance={self.tolerance!r}: pass a number from 0 to 1, or vstat")
        self.x, self.y = check_inputs(self.x)[0], check_array("labels", self.y, 3)
        if len(self.x) != len(self.y):
            raise ValueError(f"{len(self.x)} inputs, {len(self.y)} labels: pass as many")
        self._check_answers()

    def _check_answers(self) -> None:
        if self.answers not in ANSWERS:
            raise ValueError(f"answers={self.answers!r}: pass 'rounded' or 'adversarial'")
        if (self.reference is not None) != (self.answers == "adversarial"):
            raise ValueError(
                f"answers={self.answers!r}: adversarial answers, and only they, have a reference; "
                "pass both, or leave both out"
            )
        if self.reference is not None:
            self.reference = check_array("reference", self.reference, 4)
            if not len(self.reference) or self.reference.shape[1:] != self.y.shape:
                raise ValueError(
                    f"reference has shape {self.reference.shape}: pass a stack of labels "
                    f"{self.y.shape}"
                )

    def ask(self, query: Query) -> float:
        """The mean of the query, off by what is allowed and no more."""
        mean = self._mean(query, self.y)
        self.asked += 1
        if self.reference is not None:
            without = float(np.mean([self._mean(query, labels) for labels in self.reference]))
            if abs(without - mean) <= self.allowed(mean):
                self.withheld += 1
                return without
        return self._round(mean)

    def ask_signed(self, query: Query) -> float:
        """The mean of a query with values from -1 to 1, which VSTAT is asked for as (1 + v) / 2."""
        if self.vstat is None:
            return self.ask(query)
        return 2 * self.ask(lambda x, y: (1 + np.asarray(query(x, y))) / 2) - 1

    @property
    def signed_tolerance(self) -> float:
        """The most that an answer of `ask_signed` may be off by."""
        return self.allowed(0.0) if self.vstat is None else 2 * max(map(self.allowed, (0.0, 0.5)))

    def allowed(self, mean: float) -> float:
        """How far from the mean an answer may be."""
        if self.tolerance is not None:
            return float(self.tolerance)
        assert self.vstat is not None
        return max(1 / self.vstat, math.sqrt(max(0.0, mean * (1 - mean)) / self.vstat))

    def _mean(self, query: Query, labels: Float64) -> float:
        values = np.asarray(query(self.x, labels), dtype=np.float64)
        if values.shape != (len(self.x),):
            raise ValueError(f"the query has shape {values.shape}: return one number an example")
        least = -1 if self.vstat is None else 0
        if not np.all((values >= least - _SLACK) & (values <= 1 + _SLACK)):
            raise ValueError(f"the query leaves [{least}, 1]: scale it")
        return float(values.mean())

    def _round(self, mean: float) -> float:
        if self.tolerance is not None:
            unit = 2 * float(self.tolerance)
            return unit * round(mean / unit) if unit > 0 else mean
        assert self.vstat is not None
        # p = sin^2(angle). An angle off by half a unit u moves p by at most u sqrt(p (1 - p)) +
        # u^2 / 4; with u = c / sqrt(t) and c + c^2 / 4 = 1 that is allowed, on either side of
        # p (1 - p) = 1 / t.
        unit = 2 * (math.sqrt(2) - 1) / math.sqrt(self.vstat)
        angle = math.asin(math.sqrt(min(1.0, max(0.0, mean))))
        return math.sin(unit * round(angle / unit)) ** 2


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
    if oracle.signed_tolerance >= _HALFWAY:
        return None
    for size in range(d - 1):
        for others in combinations(range(1, d), size):
            for entry in sorted(set(range(1, d)) - set(others)):
                if max_queries is not None and oracle.asked >= max_queries:
                    return None
                found = oracle.ask_signed(_correlation(family, entry, others))
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
