"""The paper's phases as a section of the page: in words, in numbers, and drawn."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from markupsafe import Markup

from mhalearn.report.numbers import number
from mhalearn.report.phase_figures import Curve, Marks, sorted_values
from mhalearn.run.events import Event

_HEADINGS = {
    1: "A crude sum of the projections",
    2: "Rows on which all heads attend alike",
    3: "A better sum of the projections",
    4: "The same rows again, and a tighter body",
    5: "The span of the attention matrices",
    6: "A net in the span",
}
_WORDS = {
    1: "How inputs and labels correlate shows the sum of all projections W, roughly.",
    2: "Where a label is a mixture of tokens seen through that sum, all heads share one attention "
    "pattern, if the sum is exact. Each such row is a linear condition on every Θ; together they "
    "cut out a convex body. A crude sum lets some rows pass on which heads differ.",
    3: "The point of the body nearest to zero, the proxy, says on which rows every head picks the "
    "same token. Their labels are that token seen through the sum. Rows on which the heads "
    "disagree all the same are outliers.",
    4: "With the better sum rows are certified once more, and the body is cut out anew. Between "
    "the heads it should stay wide: in one direction fewer than there are heads.",
    5: "The proxy and the wide directions should span every Θ. Membership queries to the body find "
    "them in the paper's way; linear optimisation and eigenvectors are two others.",
    6: "Candidates for the heads are taken from the span, W follows by least squares, and examples "
    "held out choose.",
}
# A margin row is an inlier while its residual is below this share of the typical label.
_INLIER = 0.1
# Candidates of the net agree with the best one up to this factor.
_AGREE = 1.5
# Sines above this are said to be a disagreement.
_FAR = 0.3
_TIMES = {1: "first time", 2: "second time"}
# The phases that certify rows and cut out a body.
_BODIES = (2, 4)

Data = dict[str, Any]


class DrawnFigure(NamedTuple):
    """A figure in both widths, its caption, and its key: a colour and what it stands for."""

    caption: str
    svg: tuple[Markup, Markup]
    key: list[tuple[int, str]]


@dataclass(frozen=True)
class Phase:
    number: int
    heading: str
    words: str
    seconds: float  # when it ended
    columns: list[str]  # of the table, one a repetition; empty for one
    rows: list[tuple[str, list[str]]]
    figures: list[DrawnFigure]
    breakdown: str  # why it could not work; empty where it did


@dataclass(frozen=True)
class Section:
    theory: Data  # the theorem's figures and what was used; empty where not told
    phases: list[Phase]
    alone: str  # how far the phases came before polish; empty where they did not end


def describe_phases(trace: Sequence[Event]) -> Section | None:
    """What the phases of a run found; None where no phase ran."""
    results: dict[int, list[Event]] = {}
    for event in trace:
        told = re.match(r"phase ([1-6]): ", event.stage)
        # Bare events are steps within a phase, those with `of` its progress over the examples.
        if told and event.data and "of" not in event.data:
            results.setdefault(int(told[1]), []).append(event)
    if not results:
        return None
    # Scores and widths of all rounds share a figure, where they were last measured.
    bodies = [event for which in _BODIES for event in results.get(which, [])]
    last = max((which for which in _BODIES if which in results), default=None)
    phases = []
    for which, events in sorted(results.items()):
        drawn = [_scores(bodies), _widths(bodies)] if which == last else []
        drawn += [_residuals(events)] if which == 3 else []
        drawn += [_candidates(events)] if which == 6 else []
        rounds = _by_round(events)
        phases.append(
            Phase(
                number=which,
                heading=_HEADINGS[which],
                words=_WORDS[which],
                seconds=events[-1].seconds,
                columns=[_TIMES.get(r, str(r)) for r in rounds] if len(rounds) > 1 else [],
                rows=_table(_QUANTITIES[which], list(rounds.values())),
                figures=[figure for figure in drawn if figure is not None],
                breakdown=next((e.detail for e in events if "broke_down" in e.data), ""),
            )
        )
    net = [*results.get(6, []), *(event for event in trace if event.stage == "decoded")]
    error = net[-1].loss if net else math.nan
    return Section(_theory(trace, phases[-1].seconds, error), phases, _alone(trace, net))


def _alone(trace: Sequence[Event], net: Sequence[Event]) -> str:
    """The error that is the phases' own: what polish makes of it is not the paper's."""
    if not net or not math.isfinite(net[-1].loss):
        return ""
    rest = "; the rest was done by polish" * any(event.stage == "polish" for event in trace)
    return f"The phases alone came to a relative squared error of {number(net[-1].loss)}{rest}."


def _by_round(events: Sequence[Event]) -> dict[int, Data]:
    """The data of each round's events together: a round has one certification and one body."""
    rounds: dict[int, Data] = {}
    for event in events:
        found = rounds.setdefault(int(event.data.get("round", 0)), {})
        found |= {"loss": event.loss, **event.data}
    return rounds


# Numbers


def _table(
    quantities: dict[str, Callable[[Data], str]], rounds: Sequence[Data]
) -> list[tuple[str, list[str]]]:
    """Each quantity with a value a round; those no round has are left out."""
    rows = []
    for name, say in quantities.items():
        values = []
        for data in rounds:
            try:
                values.append(say(data))
            except KeyError:
                values.append(number(None))
        if any(value != number(None) for value in values):
            rows.append((name, values))
    return rows


def _middle(values: Sequence[float]) -> str:
    if not values:
        return number(None)
    quarter = len(values) // 4
    return f"{values[quarter]:.2f}\N{EN DASH}{values[-1 - quarter]:.2f}"


def _gap(data: Data) -> str:
    """How much wider the narrowest direction between heads is than the next one."""
    widths, wide = _relative_widths(data), data["heads"] - 1
    return number(widths[wide - 1] / widths[wide]) if 0 < wide < len(widths) else number(None)


def _relative_widths(data: Data) -> list[float]:
    """Widths are inverse to the square roots of the eigenvalues, which are over the largest."""
    return [max(value, 1e-16) ** -0.5 for value in data["eigenvalues"]]


def _angle(data: Data) -> str:
    if data["angle"] is None:
        return "not checked: too large"
    said = "" if data["angle"] <= _FAR else " (they disagree)"
    return number(data["angle"]) + said


_CERTIFICATION: dict[str, Callable[[Data], str]] = {
    "Rows screened": lambda data: number(data["screened"]),
    "Rows certified": lambda data: number(data["certified"]),
    "Share of all rows": lambda data: number(data["frequency"]),
    "Median score": lambda data: number(data["median_score"]),
    "Weight on one token, middle half": lambda data: _middle(data["weights"]),
    "Norm of the proxy": lambda data: number(data["proxy_norm"]),
    "Constraints of the body": lambda data: number(data["constraints"]),
    "Heads": lambda data: number(data["heads"]),
    "Gap in the widths there": _gap,
    "Rows found": lambda data: number(data["rows"]),
    "Rows needed": lambda data: number(data["needed"]),
}
_QUANTITIES: dict[int, dict[str, Callable[[Data], str]]] = {
    1: {
        "Estimate chosen": lambda data: data["chosen"],
        "Its squared norm, over the labels'": lambda data: number(data["strength"]),
        "Its smallest singular value, over the largest": lambda data: number(data["conditioning"]),
    },
    2: _CERTIFICATION,
    3: {
        "Rows with a large margin": lambda data: number(data["margin_rows"]),
        "Smallest margin": lambda data: number(data["smallest_margin"]),
        "Median margin": lambda data: number(data["median_margin"]),
        "Inliers": lambda data: f"{100 * data['inliers']:.0f} %",
        "Squared norm of the sum, over the labels'": lambda data: number(data["strength"]),
    },
    4: _CERTIFICATION,
    5: {
        "Sine to the span by linear optimisation": _angle,
        "Sine to the span by eigenvectors": lambda data: number(data["angles"]["eigenvectors"]),
        "Queries": lambda data: number(data["queries"]),
    },
    6: {
        "Candidates": lambda data: number(data["starts"]),
        "Candidates that agree with the best": lambda data: number(data["agree"]),
        "Best error of a candidate, held out": lambda data: number(
            min(data["candidates"], default=None)
        ),
        "Error of the layer, held out": lambda data: number(data["loss"]),
        "Bound on the expected error, clipped": lambda data: number(data["bound"]),
    },
}


def _theory(trace: Sequence[Event], seconds: float, error: float) -> Data:
    """The theorem beside what was used."""
    for event in trace:
        if event.stage == "theory" and "examples" in event.data:
            return {**event.data, "seconds": f"{seconds:.1f} s", "error": number(error)}
    return {}


# Figures


def _colour(round_: int) -> int:
    return round_ % 5 + 1


def _key(rounds: dict[int, Data]) -> list[tuple[int, str]]:
    said = {0: "the crude sum", 1: "the sum refined once", 2: "the sum refined twice"}
    return [(_colour(r), "with " + said.get(r, f"the sum refined {r} times")) for r in rounds]


def _first_and_last(events: Sequence[Event], name: str) -> dict[int, Data]:
    """The rounds that are drawn: those between would lie on the last."""
    rounds = {r: data for r, data in _by_round(events).items() if data.get(name)}
    return {r: data for r, data in rounds.items() if r in (min(rounds), max(rounds))}


def _scores(events: Sequence[Event]) -> DrawnFigure | None:
    rounds = _first_and_last(events, "scores")
    curves = [
        Curve(_colour(r), _ranks(data["scores"], data["screened"]), data["scores"])
        for r, data in rounds.items()
    ]
    title = "Certification scores of the screened rows, ascending, on a log axis"
    svg = sorted_values(curves, "row, by score", Marks(), "scores", title)
    caption = "Scores of the rows: the error of a row's log-odds. Lower is better."
    return svg and DrawnFigure(caption, svg, _key(rounds))


def _widths(events: Sequence[Event]) -> DrawnFigure | None:
    rounds = _first_and_last(events, "eigenvalues")
    curves, heads = [], 1
    for r, data in rounds.items():
        widths, heads = _relative_widths(data), data.get("heads", 1)
        places = list(range(1, len(widths) + 1))
        curves.append(Curve(_colour(r), places, widths, [place < heads for place in places]))
    title = f"The widest directions of the body, on a log axis; {heads - 1} before the gap"
    marks = Marks(before=heads - 0.5 if heads > 1 else None)
    svg = sorted_values(curves, "direction, widest first", marks, "widths", title)
    caption = "Widths of the body, over the narrowest."
    if heads > 1:
        caption += f" With {heads} heads, {heads - 1} should stand out, left of the dashed line."
    return svg and DrawnFigure(caption, svg, _key(rounds))


def _residuals(events: Sequence[Event]) -> DrawnFigure | None:
    rounds = _first_and_last(events, "residuals")
    curves = [
        Curve(
            _colour(r),
            _ranks(data["residuals"], data["margin_rows"]),
            data["residuals"],
            [value < _INLIER for value in data["residuals"]],
        )
        for r, data in rounds.items()
    ]
    title = "Residuals of the margin rows, ascending, on a log axis"
    svg = sorted_values(curves, "row, by residual", Marks(level=_INLIER), "residuals", title)
    caption = (
        "Residuals over the typical label. Rings above the dashed line are outliers: there the "
        "heads disagree."
    )
    return svg and DrawnFigure(caption, svg, _key(rounds))


def _candidates(events: Sequence[Event]) -> DrawnFigure | None:
    errors = events[-1].data.get("candidates") or []
    agree = [error < _AGREE * errors[0] for error in errors]
    curve = Curve(1, list(range(1, len(errors) + 1)), errors, agree)
    title = "Relative squared errors of the candidates on held-out examples, ascending"
    svg = sorted_values([curve], "candidate, best first", Marks(), "candidates", title)
    caption = "Candidates' relative squared errors, held out."
    caption += "" if all(agree) else " Rings do not agree with the best."
    return svg and DrawnFigure(caption, svg, [])


def _ranks(values: Sequence[float], count: int) -> list[float]:
    """The ranks that quantiles of `count` numbers stand for."""
    return [1 + (count - 1) * i / max(1, len(values) - 1) for i in range(len(values))]
