"""What the starts of a baseline share, and where each of them ends."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mhalearn._runtime.types import Array
from mhalearn.layer.batches import Chunk
from mhalearn.layer.parametrisation import Params
from mhalearn.learners.baselines.student import relative_loss
from mhalearn.run.run import Run
from mhalearn.solvers.scaled_problem import Problem

# Multiplications of forward passes between two looks at the clock, some hundredths of a second, and
# the fewest and most steps. Not by the clock itself: where blocks end decides where descent does.
_WORK = 2e8
_LEAST_BLOCK, _MOST_BLOCK = 8, 1024


@dataclass(frozen=True)
class DescentTask:
    """What every start of a task shares."""

    problem: Problem
    data: Chunk  # the problem's examples, cut for gradients
    energy: Array
    run: Run

    @property
    def block(self) -> int:
        """Steps between two looks at the clock."""
        architecture, k = self.problem.architecture, self.problem.k
        d, e = architecture.d, architecture.outputs
        work = self.data.weight.size * architecture.heads * d * (d + k + e)
        return int(2 ** np.floor(np.log2(np.clip(_WORK / work, _LEAST_BLOCK, _MOST_BLOCK))))

    def loss(self, student: Params) -> float:
        """Relative squared error over all examples to fit."""
        kind = self.problem.parametrisation
        return float(relative_loss(kind, student, self.data, self.energy))

    def keep(self, student: Params, loss: float) -> None:
        """Give the run what is known so far, not more often than is worth its cost."""
        if loss < 0.5 * self.run.best_loss:
            self.run.keep(self.problem.to_layer(student), loss)


class Descent(NamedTuple):
    """Where a start ended: its last finite student, and whether it stayed finite."""

    student: Params
    loss: float
    finite: bool
