"""One run in a process of its own: a wish comes in as JSON, what happens goes out as JSON lines.

    python -m mhalearn.studio.worker REPORT < wish.json

Standard input stays open as long as the server lives; when it closes, so does the run. A second
line says why the run is to stop: it ends with a report of what it has.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mhalearn as mha
from mhalearn.studio.request import Wish

# Events a run tells one by one, and pictures of its heads; later ones by the clock.
_MANY_EVENTS, _MANY_PICTURES = 600, 40
_EVENT_SECONDS, _PICTURE_SECONDS = 0.5, 1.0
# Examples by which a stopped run chooses what to report.
_SOME = 1000

Tell = Callable[[dict[str, Any]], None]


def run_worker(arguments: list[str]) -> None:
    wish = Wish(**json.loads(sys.stdin.readline()))
    out = sys.stdout

    def tell(message: dict[str, Any]) -> None:
        out.write(json.dumps(message, allow_nan=False) + "\n")
        out.flush()

    try:
        run = Learning(wish, Path(arguments[0]), tell)
        threading.Thread(target=_heed_the_server, args=[run.stop], daemon=True).start()
        with contextlib.suppress(AttributeError, OSError):
            os.nice(10)  # whoever watches comes first
        run.learn()
    except ValueError as error:
        tell({"kind": "failed", "reason": " ".join(str(error).split())})
    except Exception as error:
        # RESOURCE_EXHAUSTED: how XLA says that memory ran out.
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        tell({"kind": "failed", "reason": "out of memory: choose fewer examples, or a smaller one"})


class Learning:
    """Draws a layer and examples, learns it back, writes the report. The learner sees no truth."""

    def __init__(self, wish: Wish, report: Path, tell: Tell) -> None:
        self._report, self._tell = report, tell
        self._truth = mha.random_layer(
            n_heads=wish.heads, d=wish.dim, scale=wish.scale, seed=wish.seed
        )
        self._examples = mha.Examples.from_callable(
            self._truth,
            wish.inputs,
            n=wish.examples,
            k=wish.tokens,
            d=wish.dim,
            seed=wish.seed,
            noise=wish.noise,
        )
        settings: dict[str, Any] = {
            "n_heads": "auto" if wish.count_heads else wish.heads,
            "method": wish.method,
            "random_state": wish.seed,
            "max_seconds": wish.seconds,
        }
        shape = ("n", "k", "d", "out_dim")
        self._settings = settings | {name: getattr(self._examples, name) for name in shape}
        self._estimator = mha.AttentionRegressor(**settings)
        self._watcher = LayerWatcher(self._truth, self._estimator, self._say)
        # Who has the floor speaks: the learner for a message, whoever ends the run for good.
        self._floor = threading.RLock()
        self._has_ended = False

    def learn(self) -> None:
        truth = self._truth
        ratio = self._examples.n / self._examples.counting_limit(truth.architecture)
        self._say({"kind": "truth", "ratio": ratio, "heads": _pictures(truth, truth)})
        self._estimator.set_params(on_event=self._watcher.on_event).fit(self._examples)
        with self._floor:
            self._end(self._estimator.solution_)
            self._has_ended = True

    def stop(self, why: str) -> None:
        """Report the best layer so far, from another thread: the learner may be compiling.

        It is not heard again: it waits for the floor with its next message.
        """
        self._floor.acquire()
        layer = self._best_layer()
        if self._has_ended or layer is None:
            return
        outcome, events = mha.Outcome.TIME_LIMIT, list(self._watcher.events)
        reason = f"{why}; this is the best layer until then, and nothing about it is certified"
        self._write(mha.Solution(layer, outcome, events, reason, settings=self._settings))

    def _end(self, solution: mha.Solution) -> None:
        assert isinstance(solution.layer, mha.AttentionLayer)  # no other kind is asked for here
        self._watcher.show(solution.layer, in_any_case=True)
        self._write(solution)
        found = mha.compare(solution.layer, self._truth)
        self._say(
            {
                "kind": "ended",
                "outcome": solution.outcome.name,
                "explanation": solution.outcome.explanation,
                "reason": solution.reason,
                "max_error": _finite(found.max_error),
            }
        )

    def _best_layer(self) -> Any:
        """What the learner has chosen or, if it fits better, what was shown last: polish, say."""
        layers = (self._estimator.best_layer_so_far(), self._watcher.last)
        known = [layer for layer in layers if layer is not None]
        x, y, _ = self._examples.subset(slice(_SOME)).arrays()
        return min(known, key=lambda layer: np.sum((layer(x) - y) ** 2), default=None)

    def _write(self, solution: mha.Solution) -> None:
        self._say({"kind": "stage", "name": "writing the report"})
        mha.write_report(solution, self._report, truth=self._truth)

    def _say(self, message: dict[str, Any]) -> None:
        with self._floor:
            self._tell(message)


class LayerWatcher:
    """Turns the learner's events into messages; the truth is compared here, for display only."""

    def __init__(self, truth: mha.AttentionLayer, estimator: Any, tell: Tell) -> None:
        self.events: list[mha.Event] = []
        self.last: mha.AttentionLayer | None = None  # that was shown
        self._truth, self._estimator, self._tell = truth, estimator, tell
        self._messages = self._pictures = 0
        self._told = self._shown = -math.inf
        self._best: mha.AttentionLayer | None = None
        self._looked = False

    def on_event(self, event: mha.Event) -> None:
        """Tell an event. Beyond many, only every half second, unless it says something."""
        self.events.append(event)
        now = time.monotonic()
        if self._messages > _MANY_EVENTS and now - self._told < _EVENT_SECONDS and not event.detail:
            return
        self._messages, self._told = self._messages + 1, now
        layer = self._estimator.layer_at_hand()
        if layer is not None:
            self._looked = True
        elif not self._looked:  # a learner that shows no steps has at least its best layer
            layer = self._newest_best()
        errors = None if layer is None else self._errors(layer)
        self._tell(
            {
                "kind": "event",
                "stage": event.stage,
                "step": int(event.step),
                "error": _finite(math.sqrt(event.loss)) if event.loss >= 0 else None,
                "seconds": event.seconds,
                "detail": event.detail,
                "of": event.data.get("of"),
                "broke_down": "broke_down" in event.data,
                "head_error": errors and max(errors),
            }
        )
        if layer is not None:
            self.show(layer)

    def show(self, layer: mha.AttentionLayer, in_any_case: bool = False) -> None:
        """Send pictures of the heads. Beyond many, only every second."""
        now = time.monotonic()
        many = self._pictures > _MANY_PICTURES and now - self._shown < _PICTURE_SECONDS
        if (many and not in_any_case) or not np.isfinite(layer.theta).all():
            return
        self._pictures, self._shown, self.last = self._pictures + 1, now, layer
        self._tell({"kind": "heads", "heads": _pictures(layer, self._truth)})

    def _newest_best(self) -> mha.AttentionLayer | None:
        """The best layer so far, where it is another than before."""
        best = self._estimator.best_layer_so_far()
        known = self._best
        if best is None or (known is not None and np.array_equal(best.theta, known.theta)):
            return None
        self._best = best
        return best

    def _errors(self, layer: mha.AttentionLayer) -> list[float] | None:
        found = mha.compare(layer, self._truth)
        if not found.comparable:
            return None
        return np.maximum(found.theta_errors, found.w_errors).tolist()


def _pictures(layer: mha.AttentionLayer, truth: mha.AttentionLayer) -> list[dict[str, Any]]:
    """Each head as two small pictures and its errors, in the truth's order where it can be."""
    found = mha.compare(layer, truth)
    order = found.order.tolist() if found.comparable else range(layer.n_heads)
    theta_limit, w_limit = np.abs(truth.theta).max(), np.abs(truth.w).max()
    return [
        {
            "theta": _picture(layer.theta[head], theta_limit),
            "w": _picture(layer.w[head], w_limit),
            "theta_error": float(found.theta_errors[i]) if found.comparable else None,
            "w_error": float(found.w_errors[i]) if found.comparable else None,
        }
        for i, head in enumerate(order)
    ]


def _picture(matrix: NDArray[np.float64], limit: float) -> dict[str, Any]:
    """Entries as signed bytes: 127 is the largest of the truth."""
    entries = np.clip(np.rint(matrix * (127 / limit)), -127, 127).astype(np.int8)
    rows, columns = entries.shape
    return {
        "rows": rows,
        "columns": columns,
        "bytes": base64.b64encode(entries.tobytes()).decode(),
    }


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _heed_the_server(stop: Callable[[str], None]) -> None:
    """Stop when a line says why; leave with a server that has gone."""
    try:
        if why := sys.stdin.readline().strip():
            stop(why)
    finally:
        os._exit(1)


if __name__ == "__main__":
    run_worker(sys.argv[1:])
