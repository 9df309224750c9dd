"""Checks of what no layer of the class does, however many heads it has: masks, positions, order."""

from mhalearn.judge.departures import Departure
from mhalearn.judge.evidence import Evidence
from mhalearn.judge.finding import Found, check
from mhalearn.judge.fit_quality import (
    Fit,
    classify_fit,
    describe_error,
    explains_most,
    structured_outcome,
)
from mhalearn.run.outcome import Outcome

# Answers that differ by this many times the precision of computing them do differ.
_DIFFER = 100.0
# A positional departure that explains less than most is named where what is left is large (far from
# the layer, directions say little) and spread over so many of the examples.
_SOME, _SPREAD = 0.03, 0.3


@check("causal mask")
def causal_mask(evidence: Evidence) -> Found | None:
    """The first row is linear in its own token, as under a causal mask that was not asked for.

    A first token unlike others may attend to itself alone without a mask: see `hint_at_mask`.
    """
    if evidence.architecture.causal or not _leaves_something(evidence):
        return None
    first = evidence.first_row
    if first is None or not first.sees_itself_alone or not evidence.positions_look_alike:
        return None
    return (
        Outcome.STUCK,
        f"the first output row is a linear function of the first token (regression leaves "
        f"{first.first:.1g} of it, and at least {first.others:.1g} of other rows), as under a "
        "causal mask: learn with causal=True",
        {"first_row": first.first, "other_rows": first.others},
    )


@check("no causal mask", expensive=True)
def no_causal_mask(evidence: Evidence) -> Found | None:
    """A causal mask was asked for, and the first row is no function of its own token."""
    if not evidence.architecture.causal or not _leaves_something(evidence):
        return None
    first, noise = evidence.first_row, evidence.train_residuals.root_relative**2
    if first is None or first.sees_itself_alone or first.first < 0.5 * noise:
        return None
    if not evidence.first_row_sees_later:
        return None
    return (
        Outcome.STUCK,
        "the first output row depends on later tokens, which a causal mask hides: learn with "
        "causal=False",
        {"first_row": first.first},
    )


@check("order of tokens", expensive=True)
def order_of_tokens(evidence: Evidence) -> Found | None:
    """The box answers otherwise where tokens come in another order. Cost: a question or two about
    each of a few examples."""
    if evidence.architecture.causal or not _leaves_something(evidence):
        return None
    answers = evidence.answers
    if answers is None or answers.asked == 0:
        return None
    bar = _DIFFER * max(evidence.label_precision.unit, 1e-13) + 3 * answers.twice
    if answers.reordered <= bar:
        return None
    return (
        Outcome.STUCK,
        f"permuting the tokens changes what the box answers (by {answers.reordered:.2g} of its "
        "answers): it has positions or a mask, which a layer without them explains only in part",
        {"reordered": answers.reordered, "asked": answers.asked},
    )


@check("positions", expensive=True)
def positions(evidence: Evidence) -> Found | None:
    """What is left goes with positions or distances, more than one more head explains, and inputs
    do not."""
    if classify_fit(evidence) is not Fit.PARTIAL or not evidence.positions_look_alike:
        return None
    # What explains most decides: a soft cap, say, goes with positions, too.
    found = [one for one in evidence.departures[:1] if one.alternative.positional]
    share = found[0].share if found else 0.0
    uneven = evidence.residual_law.by_position
    if uneven is not None and not evidence.architecture.causal and not evidence.departures:
        return (
            structured_outcome(evidence),
            f"{describe_error(evidence)}, and the residual is {uneven:.1f} times as large at some "
            "positions as on average: labels, or their errors, depend on positions, or there is a "
            "mask",
            {"by_position": uneven},
        )
    if not found or not (_is_everywhere(evidence, found[0]) or explains_most(evidence, share)):
        return None
    return (
        structured_outcome(evidence),
        f"{describe_error(evidence)}, {share:.0%} of which goes with the "
        f"{found[0].alternative.name} of tokens: {found[0].alternative.suggests}",
        {"share": share},
    )


def _is_everywhere(evidence: Evidence, departure: Departure) -> bool:
    large = structured_outcome(evidence) is Outcome.STUCK
    return large and departure.share >= _SOME and departure.spread >= _SPREAD


def _leaves_something(evidence: Evidence) -> bool:
    """Whether labels are not explained to their precision."""
    return not evidence.is_certified and not evidence.train_residuals.exact
