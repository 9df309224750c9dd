"""What is measured of a tail, and the bounds it is held against.

Shares have Clopper-Pearson intervals which, over all abscissas of a record, hold together with the
stated confidence (Bonferroni). A measurement contradicts a bound where its whole interval lies on
the wrong side of it; of a proved bound that would be a bug, here or in a theorem.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import beta

from mhalearn._runtime.types import Float64
from mhalearn._runtime.validation import is_number

Side = Literal["at most", "at least", "about"]

# Rounding of a mean of so many values, in which a bound may be met exactly.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Bound:
    """What a measured share should be at most, at least or about, at each abscissa.

    proved: for the inputs of the record, with the constants of the statement. "about" is a
    prediction (a Gaussian in the place of signs, say) and never proved.
    """

    side: Side
    values: Float64
    proved: bool
    statement: str
    source: str

    @property
    def vacuous(self) -> bool:
        """Whether it says nothing that is not true of every share."""
        trivial = {"at most": self.values >= 1, "at least": self.values <= 0}
        return bool(np.all(trivial[self.side])) if self.side in trivial else False


@dataclass(frozen=True)
class Tail:
    """One lemma on one layer and one law of tokens.

    t: abscissas, what they are in `abscissa`; measured: the share of draws of which `event` holds;
    lower, upper: its interval, by the method named in `interval`; n: draws behind each share.
    beside: other curves over t that help to read this one.
    """

    name: str
    event: str
    abscissa: str
    inputs: str
    t: Float64
    measured: Float64
    lower: Float64
    upper: Float64
    n: NDArray[np.int64]
    confidence: float
    interval: str
    bounds: tuple[Bound, ...]
    beside: Mapping[str, Float64] = field(default_factory=dict)

    @property
    def proved(self) -> bool:
        """Whether a bound of the record is proved for its inputs."""
        return any(bound.proved for bound in self.bounds)

    @property
    def source(self) -> str:
        return "; ".join(dict.fromkeys(bound.source for bound in self.bounds))

    @property
    def holds(self) -> bool:
        """Whether the measurement contradicts no proved bound."""
        return not any(bound.proved and self.contradicts(bound).any() for bound in self.bounds)

    def contradicts(self, bound: Bound) -> NDArray[np.bool_]:
        """Where the interval lies wholly beyond the bound, or off the prediction."""
        above = self.lower > bound.values + _ROUNDING
        below = self.upper < bound.values - _ROUNDING
        return {"at most": above, "at least": below, "about": above | below}[bound.side]

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "event": self.event,
            "abscissa": self.abscissa,
            "inputs": self.inputs,
            "t": self.t.tolist(),
            "measured": self.measured.tolist(),
            "lower": self.lower.tolist(),
            "upper": self.upper.tolist(),
            "n": self.n.tolist(),
            "confidence": self.confidence,
            "interval": self.interval,
            "holds": self.holds,
            "bounds": [vars(bound) | {"values": bound.values.tolist()} for bound in self.bounds],
            "beside": {name: curve.tolist() for name, curve in self.beside.items()},
        }


def read_tail(record: Mapping[str, Any]) -> Tail:
    """The record that `to_json` wrote."""
    named = {name: value for name, value in record.items() if name != "holds"}
    for name in ("t", "measured", "lower", "upper"):
        named[name] = np.array(record[name], dtype=np.float64)
    named["n"] = np.array(record["n"], dtype=np.int64)
    named["bounds"] = tuple(
        Bound(**(dict(bound) | {"values": np.array(bound["values"], dtype=np.float64)}))
        for bound in record["bounds"]
    )
    named["beside"] = {name: np.array(curve) for name, curve in record["beside"].items()}
    return Tail(**named)


def clopper_pearson(
    counts: ArrayLike, n: ArrayLike | int, confidence: float
) -> tuple[Float64, Float64]:
    """Two-sided limits of shares of which `counts` of n were seen; 0 and 1 where n is 0.

    Exact for independent draws of one probability. Where probabilities differ between draws, the
    limits are those of their mean, and on the safe side (Hoeffding 1956).
    """
    seen, of = np.broadcast_arrays(np.asarray(counts, float), np.asarray(n, float))
    tail = (1 - confidence) / 2
    with np.errstate(invalid="ignore"):
        lower = np.where(seen > 0, beta.ppf(tail, seen, of - seen + 1), 0.0)
        upper = np.where(seen < of, beta.ppf(1 - tail, seen + 1, of - seen), 1.0)
    return lower, upper


def share_intervals(
    counts: NDArray[np.int64], n: NDArray[np.int64], confidence: float
) -> tuple[Float64, Float64, Float64]:
    """Shares and their limits, which hold together with the confidence; 0 of 0 is 0."""
    lower, upper = clopper_pearson(counts, n, 1 - (1 - confidence) / max(1, counts.size))
    return counts / np.maximum(n, 1), lower, upper


def count_tail(
    name: str,
    event: str,
    abscissa: str,
    inputs: str,
    t: Float64,
    counts: NDArray[np.int64],
    n: int | NDArray[np.int64],
    confidence: float,
    bounds: tuple[Bound, ...],
    beside: Mapping[str, Float64] | None = None,
) -> Tail:
    """The record of an event that was seen `counts` times of n, at each t."""
    draws = np.broadcast_to(np.asarray(n, np.int64), t.shape).copy()
    measured, lower, upper = share_intervals(counts, draws, confidence)
    return Tail(
        name,
        event,
        abscissa,
        inputs,
        t,
        measured,
        lower,
        upper,
        draws,
        confidence,
        "Clopper-Pearson",
        bounds,
        dict(beside or {}),
    )


def check_confidence(confidence: float) -> float:
    if not (is_number(confidence) and 0 < confidence < 1):
        raise ValueError(f"confidence={confidence!r}: pass a number between 0 and 1, such as 0.99")
    return float(confidence)


def check_abscissas(t: ArrayLike | None, usual: Float64) -> Float64:
    """The abscissas asked for, increasing, or the usual ones."""
    if t is None:
        return usual
    asked = np.atleast_1d(np.asarray(t, dtype=np.float64))
    if asked.ndim != 1 or asked.size == 0 or not np.all(np.isfinite(asked)):
        raise ValueError(f"t has shape {asked.shape}: pass a list of finite numbers")
    if np.any(np.diff(asked) <= 0):
        raise ValueError("t must increase from one entry to the next: sort it")
    return asked
