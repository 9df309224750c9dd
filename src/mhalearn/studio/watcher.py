"""Turns a learner's events into messages for the page: points, heads, and cards of phases."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import mhalearn as mha
from mhalearn.layer.base import Layer
from mhalearn.studio.film import Film
from mhalearn.studio.phase_cards import draw_card
from mhalearn.studio.pictures import draw_heads, in_order_of, scales
from mhalearn.studio.words import explain_stage, find_phase

# Events a run tells one by one; later ones by the clock.
_MANY_EVENTS, _EVENT_SECONDS = 600, 0.5

Tell = Callable[[dict[str, Any]], None]


class LayerWatcher:
    """Hears every event. The truth, where there is one, is compared here, for display only.

    What is drawn of a moment says after how many told events it came, so that a page can go back
    to it.
    """

    def __init__(self, truth: mha.AttentionLayer | None, estimator: Any, tell: Tell) -> None:
        self.events: list[mha.Event] = []
        self.last: mha.AttentionLayer | None = None  # that was shown
        self._truth, self._estimator, self._tell = truth, estimator, tell
        self._film = Film()
        self._messages = 0
        self._told = -math.inf
        self._explained: set[str] = set()
        self._best: mha.AttentionLayer | None = None
        self._looked = False

    @property
    def moment(self) -> int:
        """How many events were told."""
        return self._messages

    def on_event(self, event: mha.Event) -> None:
        """Tell an event. Beyond many, only every half second, unless it says something."""
        self.events.append(event)
        now = time.monotonic()
        if self._messages > _MANY_EVENTS and now - self._told < _EVENT_SECONDS and not event.detail:
            return
        self._messages, self._told = self._messages + 1, now
        layer = self._look()
        self._tell(self._describe(event, layer))
        if layer is not None and self._film.takes(now):
            self.show(layer)
        card = draw_card(self.events)
        if card is not None:
            self._tell({"kind": "phase", "at": self._messages, **card})

    def show(self, layer: Any) -> None:
        """Send pictures of the heads, unless they are none: diverged, or nothing was found."""
        finite = np.isfinite(layer.theta).all() and np.isfinite(layer.w).all()
        if not finite or not layer.w.any():
            return
        found = None
        if self._truth is None:
            layer = in_order_of(layer, self.last)
        else:
            found = mha.compare(layer, self._truth)
        self.last = layer
        limits = scales(self._truth or layer)
        heads = draw_heads(layer, found, limits)
        count = layer.n_heads
        about = {"at": self._messages, "count": count, "limits": limits}
        self._tell({"kind": "heads", **about, "heads": heads})

    def _describe(self, event: mha.Event, layer: Layer | None) -> dict[str, Any]:
        new = event.stage not in self._explained
        self._explained.add(event.stage)
        return {
            "kind": "event",
            "stage": event.stage,
            "step": int(event.step),
            "error": _root(event.loss),
            "seconds": round(event.seconds, 3),
            "detail": event.detail,
            "of": event.data.get("of"),
            "phase": find_phase(event.stage),
            "broke_down": "broke_down" in event.data,
            "head_error": None if layer is None else self._error(layer),
            **({"words": explain_stage(event.stage)} if new else {}),
        }

    def _look(self) -> Layer | None:
        layer: Layer | None = self._estimator.layer_at_hand()
        if layer is not None:
            self._looked = True
            return layer
        # A learner that shows no steps has at least its best layer.
        return None if self._looked else self._newest_best()

    def _newest_best(self) -> mha.AttentionLayer | None:
        """The best layer so far, where it is another than before."""
        best: mha.AttentionLayer | None = self._estimator.best_layer_so_far()
        known = self._best
        if best is None or (known is not None and np.array_equal(best.theta, known.theta)):
            return None
        self._best = best
        return best

    def _error(self, layer: Any) -> float | None:
        found = None if self._truth is None else mha.compare(layer, self._truth)
        if found is None or not found.comparable:
            return None
        return float(np.maximum(found.theta_errors, found.w_errors).max())


def _root(loss: float) -> float | None:
    return math.sqrt(loss) if 0 <= loss < math.inf else None
