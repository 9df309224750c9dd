"""What a step of dense heads leaves to the next: W eliminated where it ended, and a preconditioner.

Both cost about as much as a few products of conjugate gradients. Where the next step begins there,
the first is what it would compute, to the last digit. The second serves two steps: heads move
little in one, and what it decides is only in how many products a step is solved for.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mhalearn._runtime.types import Array
from mhalearn.layer.attention import LinearFit
from mhalearn.layer.dense import DenseHeads
from mhalearn.solvers.variable_projection import Preconditioner


class LastStep(NamedTuple):
    """Of every start."""

    fit: LinearFit
    metric: Preconditioner


class Known(NamedTuple):
    """What of the last step holds for this one; of what does not, only the shape counts."""

    fit: Array | bool
    metric: Array | bool
    last: LastStep


@dataclass
class Memory:
    """Of a problem: where its last step ended."""

    theta: Any = None
    ridge: float = 0.0  # on W
    single: bool = False
    last: LastStep | None = None
    uses: int = 0  # of the preconditioner

    def recall(self, params: DenseHeads, ridge: float, single: bool) -> Known:
        """For a step from these parameters."""
        last = self.last
        if last is None or self.theta is not params.theta or self.single != single:
            return Known(False, False, _nothing(params, single))
        return Known(self.ridge == ridge, self.uses < 2, last)

    def note(
        self, params: DenseHeads, ridge: float, single: bool, known: Known, last: LastStep
    ) -> None:
        """After a step that was told `known`."""
        self.uses = self.uses + 1 if known.metric else 1
        self.theta, self.ridge, self.single, self.last = params.theta, ridge, single, last

    def forget(self) -> None:
        """So that the next step is the one that a resumed run, which knows nothing, takes."""
        self.theta = self.last = None


def _nothing(params: DenseHeads, single: bool) -> LastStep:
    """Zeros: arrays of the host, which compile no program."""
    (s, m, q, d), (_, p, e) = params.theta.shape, params.w.shape
    shapes = (s, q, q), (s, m * d, m * d), (s, q, m * d), (s, m), (s, m)
    dtype = np.float32 if single else np.float64
    fit: list[Any] = [np.zeros(shape) for shape in ((s, p, e), (s, p, p), (s,))]
    metric: list[Any] = [np.zeros(shape, dtype) for shape in shapes]
    return LastStep(LinearFit(*fit), Preconditioner(*metric))
