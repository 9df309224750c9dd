"""All lemmas of one layer as rows, each at the place where its bound is tightest."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from mhalearn._runtime.types import Float64
from mhalearn.layer.layer import AttentionLayer
from mhalearn.tails.bilinear_form import hanson_wright
from mhalearn.tails.certified import certified_share
from mhalearn.tails.joint_log_odds import joint_small_ball
from mhalearn.tails.log_odds import berry_esseen, large_log_odds, small_ball
from mhalearn.tails.margin import margin_tail
from mhalearn.tails.proxy_agreement import agreement
from mhalearn.tails.record import Bound, Tail
from mhalearn.tails.softmax import softmax_concentration
from mhalearn.tails.tokens import Inputs

# Events seen at least so often, so that the slack told of a row is not chance.
_SEEN = 20


@dataclass(frozen=True)
class Row:
    """A lemma at one t: what was measured, and its bound there. slack: how many times the bound is
    from the measurement (1 is tight); None where no bound says anything of what was seen. holds:
    the measurement does not contradict the bound, which, if it is not proved, it may."""

    name: str
    t: float
    measured: float
    lower: float
    upper: float
    side: str | None
    bound: float | None
    slack: float | None
    vacuous: bool
    proved: bool
    holds: bool
    source: str


def table(
    layer: AttentionLayer,
    k: int,
    inputs: Inputs = "boolean",
    *,
    n: int = 200_000,
    seed: int = 0,
    confidence: float = 0.99,
) -> tuple[Tail, ...]:
    """Every lemma on this layer: one head's on its first head, the others on all.

    `row` makes a row of each, `to_markdown` a table of all. Cost: nine passes of n draws; a few
    seconds for d = 16. The softmax's lemma is left out where tokens are neither +-1 nor Gaussian.
    """
    asked: dict[str, Any] = {"n": n, "seed": seed, "confidence": confidence}
    found = [
        hanson_wright(layer, inputs, **asked),
        berry_esseen(layer, inputs, **asked),
        small_ball(layer, inputs, **asked),
        large_log_odds(layer, inputs, **asked),
        joint_small_ball(layer, inputs, **asked),
        margin_tail(layer, k, inputs, **asked),
        agreement(layer, k, inputs, **asked),
    ]
    if isinstance(inputs, str):
        found.append(softmax_concentration(layer, k, inputs, **asked))
    found.append(certified_share(layer, k, None, inputs, **asked))
    return tuple(found)


def row(record: Tail) -> Row:
    """The first bound that says something, at the t where it is tightest; of those seen often."""
    bound = next((b for b in record.bounds if not b.vacuous), next(iter(record.bounds), None))
    place = _tightest(record, bound)
    slack = None if bound is None else _slack(record, bound)[place]
    return Row(
        name=record.name,
        t=float(record.t[place]),
        measured=float(record.measured[place]),
        lower=float(record.lower[place]),
        upper=float(record.upper[place]),
        side=None if bound is None else bound.side,
        bound=None if bound is None else float(bound.values[place]),
        slack=None if slack is None or not np.isfinite(slack) else float(slack),
        vacuous=bound is not None and bound.vacuous,
        proved=bound is not None and bound.proved,
        holds=record.holds and not (bound is not None and record.contradicts(bound).any()),
        source=bound.source if bound is not None else "",
    )


def _slack(record: Tail, bound: Bound) -> Float64:
    """How far the bound is from the measurement; infinite where it is true of every share,
    or where it is zero."""
    trivial = {"at most": (bound.values >= 1) | (bound.values <= 0), "at least": bound.values <= 0}
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = bound.values / record.measured
        ratio = 1 / ratio if bound.side == "at least" else ratio
        ratio = np.maximum(ratio, 1 / ratio) if bound.side == "about" else ratio
    return np.where(trivial.get(bound.side, bound.values <= 0), np.inf, ratio)


def _tightest(record: Tail, bound: Bound | None) -> int:
    often = record.measured * record.n >= _SEEN
    if bound is None:
        return int(np.flatnonzero(often)[0]) if often.any() else record.t.size // 2
    slack = np.where(often & np.isfinite(_slack(record, bound)), _slack(record, bound), np.inf)
    if np.isfinite(slack).any():
        return int(np.argmin(slack))
    return int(np.argmax(bound.values) if bound.side == "at least" else np.argmin(bound.values))


def to_markdown(records: tuple[Tail, ...]) -> str:
    """The rows of some records as a table."""
    lines = [
        "| lemma | t | measured | interval | bound | slack | proved | holds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in map(row, records):
        bound = "none" if one.bound is None else f"{one.side} {one.bound:.2g}"
        slack = "vacuous" if one.vacuous else "-" if one.slack is None else f"{one.slack:.2g}"
        holds = "yes" if one.holds else "NO" if one.proved else "no (nor is it proved)"
        lines.append(
            f"| {one.name} | {one.t:.2g} | {one.measured:.2g} | {one.lower:.2g} to "
            f"{one.upper:.2g} | {bound} | {slack} | {'yes' if one.proved else 'no'} | "
            f"{holds if one.bound is not None else '-'} |"
        )
    return "\n".join(lines) + "\n"
