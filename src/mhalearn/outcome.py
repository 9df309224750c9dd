"""How a run ended, what happened on the way, and what it returns."""

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mhalearn.devices import anywhere
from mhalearn.journal import Journal, to_arrays
from mhalearn.layer import AttentionLayer


class Outcome(enum.Enum):
    """How a run ended; each member's value says what it means."""

    RECOVERED = "every head is determined by the data and certified on examples not used to fit"
    FITTED = "the error is low, but exactness is not certified"
    NOT_IDENTIFIED = "a family of layers fits the examples equally well"
    STUCK = "no start reached a layer that explains the examples"
    TOO_FEW_EXAMPLES = "fewer examples than the counting limit: no method could determine the layer"
    TIME_LIMIT = "the time limit came first; the best layer so far is returned"
    NONFINITE = "the solver diverged to values that are not finite"

    @property
    def explanation(self) -> str:
        return self.value


@dataclass(frozen=True)
class Event:
    """One thing that happened: progress of a stage, or a fact worth telling."""

    stage: str
    step: int
    loss: float  # relative squared error of the layer at hand, nan where there is none
    seconds: float  # since the run began
    detail: str = ""
    data: dict[str, Any] = field(default_factory=dict)


class Trace:
    """The events of a run, its clock, its journal, and the best layer known so far.

    `on_event` sees every event as it happens.
    """

    def __init__(
        self,
        max_seconds: float | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self.journal = Journal()
        self.events: list[Event] = []
        self.best: AttentionLayer | None = None
        self.best_loss = float("inf")
        self.at_hand: Callable[[], AttentionLayer] | None = None
        self._began = time.monotonic()
        self._max_seconds = max_seconds
        self._expired = False
        self._on_event = on_event

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @property
    def expired(self) -> bool:
        """Whether time is up, which closes the journal. Processes of one run ask together, and all
        hear the same."""
        if self._max_seconds is not None and not self._expired:
            self._expired = anywhere(self.seconds >= self._max_seconds)
        if self._expired:
            self.journal.close()
        return self._expired

    def follow(self, journal: Journal) -> None:
        """Go on from what a journal knows, and write to it."""
        self.journal = journal
        if journal.best is not None:
            self.best, self.best_loss = journal.best
        if journal.resumed:
            self.emit("resumed", journal.records, self.best_loss)

    def emit(
        self,
        stage: str,
        step: int = 0,
        loss: float = float("nan"),
        detail: str = "",
        *,
        at_hand: Callable[[], AttentionLayer] | None = None,
        **data: Any,
    ) -> None:
        """Tell an event. at_hand makes the layer it speaks of, for a listener that asks at once."""
        event = Event(stage, step, loss, self.seconds, detail, data)
        self.events.append(event)
        if self._on_event is not None:
            self.at_hand = at_hand
            self._on_event(event)
            self.at_hand = None

    def keep(self, layer: AttentionLayer, loss: float) -> None:
        """Remember a layer if it is better than the best so far."""
        if loss < self.best_loss:
            self.best, self.best_loss = layer, loss
            self.journal.keep(layer, loss)

    def once(self, name: str, work: Callable[[], "Solution"]) -> "Solution":
        """The solution of some work, which a resumed run does not do again."""
        found = self.journal.recall_layer(name, "outcome", "reason", "loss")
        if found is not None:
            layer, state = found
            try:
                outcome = list(Outcome)[state["outcome"]]
                reason = state["reason"].tobytes().decode()
            except (IndexError, ValueError, TypeError, AttributeError):
                raise self.journal.damaged() from None
            return Solution(layer, outcome, self.events, reason, loss=state["loss"])
        with self.journal.within(name):
            solution = work()
        state = to_arrays(solution.layer) | {
            "outcome": np.array(list(Outcome).index(solution.outcome)),
            "reason": np.frombuffer(solution.reason.encode(), np.uint8),
            "loss": np.array(solution.loss),
        }
        self.journal.record(name, state, now=True)
        return solution


@dataclass(frozen=True)
class Solution:
    """What a learner returns, and what polish and certification complete."""

    layer: AttentionLayer
    outcome: Outcome
    trace: list[Event]
    reason: str = ""  # one sentence: why this outcome
    certificate: Any = None  # a Certificate, once certified
    settings: dict[str, Any] = field(default_factory=dict)  # what is needed to run it again
    loss: float = float("nan")  # on the examples that chose the layer

    def __repr__(self) -> str:
        """Short: a trace may have thousands of events."""
        return (
            f"Solution({self.outcome.name}, reason={self.reason!r}, layer={self.layer!r}, "
            f"{len(self.trace)} events)"
        )
