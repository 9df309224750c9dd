"""The learner that begins with what the algebra found, and with random starts where that fails."""

from __future__ import annotations

from typing import Any

import numpy as np

from mhalearn._runtime.types import Float64
from mhalearn.data import Examples
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.layer import AttentionLayer
from mhalearn.learners.options import NewtonOptions
from mhalearn.learners.protocol import Learner
from mhalearn.learners.queries.attention_step import fit_attention, fit_together, plain_rows
from mhalearn.learners.queries.extension import AlgebraFound, Sketch
from mhalearn.learners.queries.narrow_heads import fit_narrow_heads
from mhalearn.learners.registry import DEFAULT
from mhalearn.run.outcome import Candidate
from mhalearn.run.run import Run

# Loss up to which heads are worth polishing, and to which a narrow head has been found.
_NEAR, _FOUND = 0.05, 1e-3


class NeedsMore(Exception):
    """What algebra found leads to no layer from so few sequences."""


class FromAlgebra(Learner):
    """Attention from a sketch with its W, or narrow heads one by one, for one run: what algebra
    found is of what one box answered.

    last_resort: whether to make random starts where what was found leads to no layer, or to raise
    NeedsMore: from more sequences it may. fell_back: whether any were made.
    """

    name = "queries"
    title = "Queries: algebra on chosen calls"
    counts_heads = True

    def __init__(self, found: AlgebraFound) -> None:
        self._found = found
        self.last_resort = True
        self.fell_back = False

    def learn(
        self, examples: Examples, architecture: Architecture, run: Run, options: Any
    ) -> Candidate:
        x, y, _ = (part if part is None else part.astype(np.float64) for part in examples.arrays())
        assert x is not None
        assert y is not None
        causal = architecture.causal
        learned = self._learn(x, y, run, causal=causal)
        if learned is not None:
            (theta, w), loss = learned
            layer = AttentionLayer(theta, w, causal=causal)
            run.keep(layer, loss)
            return Candidate(layer, loss=loss)
        if not self.last_resort:
            raise NeedsMore
        self.fell_back = True
        return DEFAULT.learn(examples, architecture, run, NewtonOptions())

    def _learn(
        self, x: Float64, y: Float64, run: Run, *, causal: bool
    ) -> tuple[Sketch, float] | None:
        """The layer and its loss; None where what algebra found leads to none."""
        if self._found.rows is not None:
            narrow, loss = fit_narrow_heads(x, y, self._found.rows, causal=causal)
            _show(run, "narrow heads, one by one", narrow, loss)
            return (narrow, loss) if loss < _FOUND else None
        sketch, rows = self._found.sketch, plain_rows(x, y, causal=causal)
        assert sketch is not None
        _show(run, "sketch by algebra", sketch)
        theta = sketch.theta
        for few in _smallest(x, y):  # of whose attention a sketch that lacks most is near enough
            theta, _ = fit_attention(theta, sketch.w, plain_rows(*few, causal=causal))
        theta, loss = fit_attention(theta, sketch.w, rows)
        _show(run, "attention, W known", Sketch(theta, sketch.w), loss)
        if loss >= _NEAR:
            return None
        theta, w, loss = fit_together(theta, rows)
        return Sketch(theta, w), loss


def _smallest(x: Float64, y: Float64) -> list[tuple[Float64, Float64]]:
    """Sequences and their answers, those of the smallest tokens: a third, and two."""
    order = np.argsort(np.linalg.norm(x, axis=(1, 2)))
    return [(x[few], y[few]) for few in (order[: -(-part * len(x) // 3)] for part in (1, 2))]


def _show(run: Run, stage: str, sketch: Sketch, loss: float = float("nan")) -> None:
    run.emit(stage, loss=loss, at_hand=lambda: AttentionLayer(*sketch))
