"""Explanations that a few sequences cannot tell apart, compared on all of them."""

from __future__ import annotations

import numpy as np

from mhalearn.auditing.evidence import Evidence
from mhalearn.auditing.reading import Reading
from mhalearn.auditing.trial import Hypothesis

# Two explanations are told apart if they differ by this share of the squared residual; of two that
# are not equally plain, the other is taken if it leaves so much less.
_TELLING, _LESS = 0.01, 0.85


def choose(
    evidence: Evidence, claimed: Reading, hypotheses: tuple[Hypothesis, ...]
) -> tuple[Hypothesis, tuple[Hypothesis, ...]]:
    """The best of several explanations, the plainest first, and those that are as good.

    Between two, the residual of the first along the step to the second tells: its slope is near
    zero where the first is right, near one where the second is, however small the step is beside
    rounding. Where the step is too small for that, the plainer is taken, and another of the same
    plainness and another name is a rival.
    """
    best = hypotheses[0]
    residual = evidence.residual(best, claimed)
    rivals: list[Hypothesis] = []
    for other in hypotheses[1:]:
        theirs = evidence.residual(other, claimed)
        step = residual - theirs
        apart = float(np.sum(step**2))
        square = float(np.sum(residual**2))
        less_plain = other.plainness > best.plainness
        if apart >= _TELLING * square:
            if less_plain and float(np.sum(theirs**2)) > _LESS * square:
                continue
            if float(np.sum(residual * step)) > 0.5 * apart:
                best, residual, rivals = other, theirs, []
        elif other.plainness == best.plainness and other.names != best.names:
            rivals.append(other)
    named = {one.names: one for one in reversed(rivals)}
    return best, tuple(reversed(named.values()))
