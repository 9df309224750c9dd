"""One run in a process of its own: a wish comes in as JSON, what happens goes out as JSON lines.

    python -m mhalearn.studio.worker REPORT < wish.json

Standard input stays open as long as the server lives; when it closes, so does the run.
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
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mhalearn.studio.wish import Wish

if TYPE_CHECKING:
    from mhalearn.layer import AttentionLayer
    from mhalearn.outcome import Event

# Events a run tells one by one, and pictures of its heads; later ones by the clock.
_MANY_EVENTS, _MANY_PICTURES = 600, 40
_EVENT_SECONDS, _PICTURE_SECONDS = 0.5, 1.0

Tell = Callable[[dict[str, Any]], None]


def main(arguments: list[str]) -> None:
    wish = Wish(**json.loads(sys.stdin.readline()))
    threading.Thread(target=_leave_with_the_server, daemon=True).start()
    with contextlib.suppress(AttributeError, OSError):
        os.nice(10)  # whoever watches comes first
    out = sys.stdout

    def tell(message: dict[str, Any]) -> None:
        out.write(json.dumps(message, allow_nan=False) + "\n")
        out.flush()

    try:
        learn(wish, Path(arguments[0]), tell)
    except ValueError as error:
        tell({"kind": "failed", "reason": " ".join(str(error).split())})
    except Exception as error:
        # RESOURCE_EXHAUSTED: how XLA says that memory ran out.
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        tell({"kind": "failed", "reason": "out of memory: choose fewer examples, or a smaller one"})


def learn(wish: Wish, report: Path, tell: Tell) -> None:
    """Draw a layer and examples, learn it back, write the report. The learner sees no truth."""
    import mhalearn as mha

    truth = mha.random_layer(n_heads=wish.heads, d=wish.dim, scale=wish.scale, seed=wish.seed)
    examples = mha.Examples.from_callable(
        truth,
        wish.inputs,
        n=wish.examples,
        k=wish.tokens,
        d=wish.dim,
        seed=wish.seed,
        noise=wish.noise,
    )
    ratio = wish.examples / examples.counting_limit(wish.heads)
    tell({"kind": "truth", "ratio": ratio, "heads": _pictures(truth, truth)})
    estimator = mha.AttentionRegressor(
        n_heads="auto" if wish.count_heads else wish.heads,
        method=wish.method,
        random_state=wish.seed,
        max_seconds=wish.seconds,
    )
    watcher = Watcher(truth, estimator, tell)
    solution = estimator.set_params(on_event=watcher.on_event).fit(examples).solution_
    watcher.show(solution.layer, in_any_case=True)
    tell({"kind": "stage", "name": "writing the report"})
    mha.write_report(solution, report, truth=truth)
    found = mha.compare(solution.layer, truth)
    tell(
        {
            "kind": "ended",
            "outcome": solution.outcome.name,
            "explanation": solution.outcome.explanation,
            "reason": solution.reason,
            "max_error": _finite(found.max_error),
            "heads": solution.layer.n_heads,
            "report": True,
        }
    )


class Watcher:
    """Turns the learner's events into messages; the truth is compared here, for display only."""

    def __init__(self, truth: AttentionLayer, estimator: Any, tell: Tell) -> None:
        self._truth, self._estimator, self._tell = truth, estimator, tell
        self._events = self._pictures = 0
        self._told = self._shown = -math.inf
        self._best: AttentionLayer | None = None
        self._looked = False

    def on_event(self, event: Event) -> None:
        """Tell an event. Beyond many, only every half second, unless it says something."""
        now = time.monotonic()
        if self._events > _MANY_EVENTS and now - self._told < _EVENT_SECONDS and not event.detail:
            return
        self._events, self._told = self._events + 1, now
        layer = self._estimator.layer_at_hand_()
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

    def show(self, layer: AttentionLayer, in_any_case: bool = False) -> None:
        """Send pictures of the heads. Beyond many, only every second."""
        now = time.monotonic()
        many = self._pictures > _MANY_PICTURES and now - self._shown < _PICTURE_SECONDS
        if (many and not in_any_case) or not np.isfinite(layer.theta).all():
            return
        self._pictures, self._shown = self._pictures + 1, now
        heads = _pictures(layer, self._truth)
        self._tell({"kind": "heads", "heads": heads})

    def _newest_best(self) -> AttentionLayer | None:
        """The best layer so far, where it is another than before."""
        best = self._estimator.best_layer_so_far_()
        known = self._best
        if best is None or (known is not None and np.array_equal(best.theta, known.theta)):
            return None
        self._best = best
        return best

    def _errors(self, layer: AttentionLayer) -> list[float] | None:
        from mhalearn.matching import compare

        found = compare(layer, self._truth)
        if not found.comparable:
            return None
        return np.maximum(found.theta_errors, found.w_errors).tolist()


def _pictures(layer: AttentionLayer, truth: AttentionLayer) -> list[dict[str, Any]]:
    """Each head as two small pictures and its errors, in the truth's order where it can be."""
    from mhalearn.matching import compare

    found = compare(layer, truth)
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


def _leave_with_the_server() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
