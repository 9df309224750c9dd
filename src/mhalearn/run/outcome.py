"""How a run ended, and what a learner hands on."""

import enum
from dataclasses import dataclass
from typing import Any

from mhalearn.layer.base import Layer


class Outcome(enum.Enum):
    """How a run ended; each member's value says what it means."""

    RECOVERED = "every head is determined by the data and certified on examples not used to fit"
    FITTED = "the error is low, but exactness is not certified"
    NOT_IDENTIFIED = "a family of layers fits the examples equally well"
    STUCK = "no start reached a layer that explains the examples"
    TOO_FEW_EXAMPLES = "fewer examples than the counting limit: no method could determine the layer"
    TIME_LIMIT = "the time limit came first; the best layer so far is returned"
    NONFINITE = "the solver diverged to values that are not finite"
    RECOVERED_ON_SPAN = (
        "every layer that fits agrees on the affine span of the tokens, certified on examples not "
        "used to fit; parameters that no such input can show are open, and stated"
    )

    @property
    def explanation(self) -> str:
        return self.value


@dataclass(frozen=True)
class Candidate:
    """What a learner returns: its best layer, and how its search ended.

    outcome: FITTED where the search ended by itself; a learner never says RECOVERED, which is the
    judge's word.
    """

    layer: Layer
    outcome: Outcome = Outcome.FITTED
    reason: str = ""  # one sentence: why it ended so
    loss: float = float("nan")  # relative squared error on the examples that chose the layer
    others: tuple[Layer, ...] = ()  # that other starts ended at, with no more error
    instead: Layer | None = None  # of another kind than asked for, which explains far more
    phases: Any = None  # what a learner found on its way, for those who want to look
