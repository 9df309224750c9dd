"""One sequence of an audit to look at: the first rows that differ, expected and found."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mhalearn._runtime.types import Float64
from mhalearn.auditing.evidence import Evidence
from mhalearn.auditing.reading import Reading
from mhalearn.auditing.trial import Hypothesis

# Rows, heads and outputs that are drawn.
_ROWS, _HEADS, _OUTPUTS = 12, 4, 32


@dataclass(frozen=True)
class Shown:
    """Patterns (heads, rows, keys) and outputs (rows, outputs), expected and found.

    found patterns are those of the explanation, since a box shows none; None where there is none.
    """

    sequence: int
    rows: tuple[int, ...]
    heads: tuple[int, ...]
    expected: Float64
    found: Float64 | None
    expected_outputs: Float64
    found_outputs: Float64


def choose_rows(evidence: Evidence, claimed: Reading, hypothesis: Hypothesis) -> Shown:
    """The first rows that differ, of the sequence that differs most, and the heads that do."""
    residual = evidence.residual(Hypothesis(), claimed)
    squares = (residual**2).sum(-1)
    at = int(np.argmax(squares.sum(1)))
    size = float((evidence.y[at] ** 2).mean()) or 1.0
    differing = np.flatnonzero(squares[at] / residual.shape[2] > 4 * evidence.floor**2 * size)
    rows = differing[:_ROWS] if differing.size else np.arange(min(_ROWS, len(squares[at])))
    one = evidence.forward.some(slice(at, at + 1))
    expected = one.weights(claimed)[0]
    found = None
    if hypothesis.steps:
        found = np.empty_like(expected)
        for reading, heads in hypothesis.classes(claimed):
            found[list(heads)] = one.weights(reading)[0][list(heads)]
    apart = np.abs(expected - (expected if found is None else found))[:, rows].sum((1, 2))
    most = np.sort(np.argsort(-apart, kind="stable")[:_HEADS])
    outputs = evidence.y[at] - residual[at]
    return Shown(
        at,
        tuple(rows.tolist()),
        tuple(most.tolist()),
        expected[most][:, rows],
        None if found is None else found[most][:, rows],
        outputs[rows, :_OUTPUTS],
        evidence.y[at][rows, :_OUTPUTS],
    )
