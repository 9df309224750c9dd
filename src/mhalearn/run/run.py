"""What accompanies a learner: seed, clock, checkpoint, events, and the best layer so far."""

from collections.abc import Callable
from typing import Any

import numpy as np

from mhalearn.layer.base import Layer
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.projected_layer import ProjectedLayer
from mhalearn.layer.span_coordinates import SpanCoordinates
from mhalearn.run.checkpoint import Checkpoint, to_arrays
from mhalearn.run.clock import Clock
from mhalearn.run.events import Event, Listener
from mhalearn.run.outcome import Candidate, Outcome

# What the judge may take beyond the time limit: this share of it, and so many seconds at least.
_OVERRUN, _LEAST_OVERRUN = 0.1, 5.0


class Run:
    """One run of a learner. `on_event` sees every event as it happens.

    start: a layer to go on from, for learners that can.
    """

    def __init__(
        self,
        max_seconds: float | None = None,
        on_event: Listener | None = None,
        *,
        seed: int = 0,
        start: Layer | None = None,
    ) -> None:
        self.seed = seed
        self.start = start
        self.clock = Clock(max_seconds)
        self.checkpoint = Checkpoint()
        self.events: list[Event] = []
        self.best: Layer | None = None
        self.best_loss = float("inf")
        self.layer_at_hand: Callable[[], Layer] | None = None
        self._coordinates: SpanCoordinates | None = None
        self._on_event = on_event

    @property
    def seconds(self) -> float:
        return self.clock.seconds

    def is_over(self) -> bool:
        """Whether time is up, which closes the checkpoint: what follows is cut short, and nothing
        to go on from. Processes of one run ask together, and all hear the same."""
        over = self.clock.is_over()
        if over:
            self.checkpoint.close()
        return over

    def begin_judging(self) -> bool:
        """Whether the search has used up its time. The judge then has a tenth of the limit more, so
        that what was found in time can still be certified; what follows ends by that clock."""
        over = self.is_over()
        self.clock.extend(_OVERRUN, _LEAST_OVERRUN)
        return over

    def follow(self, checkpoint: Checkpoint) -> None:
        """Go on from what a checkpoint knows, and write to it."""
        self.checkpoint = checkpoint
        self.start = checkpoint.start
        if checkpoint.best is not None:
            self.best, self.best_loss = checkpoint.best
        if checkpoint.resumed:
            self.emit("resumed", checkpoint.records, self.best_loss)

    def enter(self, coordinates: SpanCoordinates) -> None:
        """From now on learners speak in coordinates of the tokens' span; what others see of them,
        the best layer and the one at hand, stays in the user's features."""
        self._coordinates = coordinates
        if isinstance(self.start, AttentionLayer | ProjectedLayer):
            self.start = coordinates.restrict(self.start)

    def _in_user_features(self, layer: Layer) -> Layer:
        if self._coordinates is None or not isinstance(layer, AttentionLayer | ProjectedLayer):
            return layer
        return self._coordinates.lift(layer)

    def emit(
        self,
        stage: str,
        step: int = 0,
        loss: float = float("nan"),
        detail: str = "",
        *,
        at_hand: Callable[[], Layer] | None = None,
        **data: Any,
    ) -> None:
        """Tell an event. at_hand makes the layer it speaks of, for a listener that asks at once."""
        event = Event(stage, step, loss, self.seconds, detail, data)
        self.events.append(event)
        if self._on_event is not None:
            if at_hand is not None:
                self.layer_at_hand = lambda: self._in_user_features(at_hand())
            self._on_event(event)
            self.layer_at_hand = None

    def keep(self, layer: Layer, loss: float) -> None:
        """Remember a layer if it is better than the best so far."""
        if loss < self.best_loss:
            self.best, self.best_loss = self._in_user_features(layer), loss
            self.checkpoint.keep(self.best, loss)

    def once(self, name: str, work: Callable[[], Candidate]) -> Candidate:
        """The candidate of some work, which a resumed run does not do again."""
        found = self.checkpoint.recall_layer(name, "outcome", "reason", "loss")
        if found is not None:
            layer, state = found
            try:
                outcome = list(Outcome)[state["outcome"]]
                reason = state["reason"].tobytes().decode()
            except (IndexError, ValueError, TypeError, AttributeError):
                raise self.checkpoint.damaged() from None
            return Candidate(layer, outcome, reason, state["loss"])
        with self.checkpoint.within(name):
            candidate = work()
        state = to_arrays(candidate.layer) | {
            "outcome": np.array(list(Outcome).index(candidate.outcome)),
            "reason": np.frombuffer(candidate.reason.encode(), np.uint8),
            "loss": np.array(candidate.loss),
        }
        self.checkpoint.record(name, state, now=True)
        return candidate
