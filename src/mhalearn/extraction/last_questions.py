"""What is asked when a search is over.

Of a layer that was found, whether it holds at another length; where none was found, whether zeros
are answered.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from mhalearn._runtime.types import Float64
from mhalearn.data.box import BoxFailed
from mhalearn.judge.finding import Finding
from mhalearn.judge.solution import Solution
from mhalearn.learners.queries.session import BudgetSpent, Session
from mhalearn.run.outcome import Outcome

# What a box raises that takes no such sequence, or answers it with NaN: no reason to lose a search.
_NO_ANSWER = (ValueError, BoxFailed)
LENGTH = "one shorter sequence, to learn whether length matters"
ZEROS = "tokens of zeros, which only biases answer"
# Rounding and noise of an answer, times which it is more; the same of a layer at another length,
# over what held-out sequences leave; and rounding of doubles.
_MORE_THAN_ROUNDING, _MORE_THAN_HELD_OUT, _ROUNDING = 10.0, 100.0, 1e-14


def check_length(
    session: Session, solution: Solution, shorter: Float64, k: int, precision: float
) -> Solution:
    """The solution; not called recovered where a shorter sequence is answered otherwise.

    precision: of answers, relative to them.

    Cost: one call; where the budget does not allow it, or the box does not answer, the reason says
    so. Trust: one length of several, and one sequence.
    """
    if len(shorter) < 2:
        return solution
    try:
        answer = session.ask_once(shorter, LENGTH).astype(np.float64)
    except (BudgetSpent, *_NO_ANSWER):
        return replace(
            solution, reason=f"{solution.reason}; only sequences of {k} tokens were answered"
        )
    told = solution.layer(shorter[None])[0][-len(answer) :]
    off = float(np.linalg.norm(answer - told) / (np.linalg.norm(answer) or 1.0))
    held = solution.certificate.relative_mse if solution.certificate is not None else 0.0
    if off <= _MORE_THAN_HELD_OUT * max(math.sqrt(held), precision, _ROUNDING):
        return solution
    sentence = (
        f"the layer is met on sequences of {k} tokens, and is off by {off:.2g} of an answer on one "
        f"of {len(shorter)}: what the box does depends on their number, as logits that are scaled "
        "with it; pass the length that matters as max_length"
    )
    certificate = solution.certificate
    if certificate is not None:
        certificate = replace(
            certificate, recovered=False, recovered_on_span=False, reason=sentence
        )
    finding = Finding("length", Outcome.FITTED, sentence, {"relative_error": off})
    return replace(
        solution,
        outcome=Outcome.FITTED,
        reason=sentence,
        certificate=certificate,
        findings=(finding, *solution.findings),
    )


def say_biases(session: Session, zeros: Float64, usual: float, precision: float) -> str:
    """Where a layer without biases was looked for and not found: whether zeros (1, k, d), of which
    it makes nothing, are answered with more. usual: the size of an answer.

    Cost: one sequence, where the budget allows it.
    """
    if not session.affordable(zeros.shape[1]):
        return ""
    try:
        answer = session.ask(zeros, ZEROS)[0].astype(np.float64)
    except _NO_ANSWER:
        return "; tokens of zeros have no answer, as where tokens are normalised"
    least = _MORE_THAN_ROUNDING * max(precision, 1e-15)
    share = float(np.linalg.norm(answer)) / (usual or 1.0)
    if not share > least:
        return ""
    said = f"; tokens of zeros are answered with {share:.2g} of an answer's usual size"
    if float(np.linalg.norm(answer - answer.mean(axis=0))) / (usual or 1.0) > least:
        return f"{said}, and differently at each row: the box knows the positions of tokens"
    if session.rows == "last":
        return f"{said}, as biases make it, or positions: if it has biases, ask with bias=True"
    return f"{said}, which no layer without biases does: ask with bias=True"
