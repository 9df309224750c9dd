"""The learner that begins with what the algebra found, and with random starts where that fails."""

from __future__ import annotations

from typing import Any

import numpy as np

from mhalearn.data import Examples
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.layer import AttentionLayer
from mhalearn.learners.options import NewtonOptions
from mhalearn.learners.protocol import Learner
from mhalearn.learners.queries.attention_step import fit_attention, fit_together, plain_rows
from mhalearn.learners.queries.extension import Sketch
from mhalearn.learners.registry import DEFAULT
from mhalearn.run.outcome import Candidate
from mhalearn.run.run import Run

# Loss up to which a sketch is worth polishing.
_NEAR = 0.05


class FromSketch(Learner):
    """Attention from a sketch with its W, for one run: a sketch is what one box answered.

    fell_back: whether random starts had to be made.
    """

    name = "queries"
    title = "Queries: algebra on chosen calls"
    counts_heads = True

    def __init__(self, sketch: Sketch) -> None:
        self._sketch = sketch
        self.fell_back = False

    def learn(
        self, examples: Examples, architecture: Architecture, run: Run, options: Any
    ) -> Candidate:
        x, y, _ = examples.arrays()
        rows = plain_rows(x.astype(np.float64), y.astype(np.float64))
        theta, loss = fit_attention(self._sketch.theta, self._sketch.w, rows)
        run.emit("attention, W known", loss=loss)
        if loss < _NEAR:
            theta, w, loss = fit_together(theta, rows)
            layer = AttentionLayer(theta, w)
            run.keep(layer, loss)
            return Candidate(layer, loss=loss)
        self.fell_back = True
        return DEFAULT.learn(examples, architecture, run, NewtonOptions())
