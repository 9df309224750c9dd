"""One run in a process of its own: a wish comes in as JSON, what happens goes out as JSON lines.

    python -m mhalearn.studio.worker REPORT [FILES] < wish.json

FILES: examples of one's own, paths by names as JSON. Standard input stays open as long as the
server lives; when it closes, so does the run. A second line says why the run is to stop: it ends
with a report of what it has.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import mhalearn as mha
from mhalearn.data.label_precision import DOUBLE, label_precision
from mhalearn.studio.own_data import read_examples
from mhalearn.studio.pictures import draw_heads, scales
from mhalearn.studio.request import Limits, Wish
from mhalearn.studio.watcher import LayerWatcher
from mhalearn.studio.words import PHASES

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
        files = {
            name: Path(path) for name, path in json.loads("".join(arguments[1:2]) or "{}").items()
        }
        run = make_run(wish, Path(arguments[0]), tell, files)
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


def make_run(wish: Wish, report: Path, tell: Tell, files: dict[str, Path]) -> Learning:
    """From examples of a layer or of a block, or by asking."""
    if wish.block:
        from mhalearn.studio.blocks import LearningBlock

        return LearningBlock(wish, report, tell)
    if not wish.ask:
        return Learning(wish, report, tell, files)
    from mhalearn.studio.asking import Asking

    return Asking(wish, report, tell)


class Learning:
    """Takes or draws examples, learns from them, writes the report. The learner sees no truth."""

    def __init__(
        self, wish: Wish, report: Path, tell: Tell, files: dict[str, Path] | None = None
    ) -> None:
        self._wish, self._report, self._tell = wish, report, tell
        self._truth: Any = None if files else self._draw()
        self._examples: mha.Examples = (
            read_examples(files, Limits()) if files else _label(self._truth, wish)
        )
        settings = self._choose()
        shape = ("n", "k", "d", "out_dim")
        self._settings = settings | {name: getattr(self._examples, name) for name in shape}
        self._estimator = self._make_estimator(settings)
        self._watcher = self._watch()
        # Who has the floor speaks: the learner for a message, whoever ends the run for good.
        self._floor = threading.RLock()
        self._has_ended = False

    def _draw(self) -> Any:
        """What is hidden."""
        wish = self._wish
        return mha.random_layer(n_heads=wish.heads, d=wish.dim, scale=wish.scale, seed=wish.seed)

    def _choose(self) -> dict[str, Any]:
        """Settings of the estimator."""
        wish = self._wish
        return {
            "n_heads": "auto" if wish.count_heads else wish.heads,
            "method": wish.method,
            "bias": wish.bias,
            "causal": wish.causal,
            "residual": wish.residual,
            "random_state": wish.seed,
            "max_seconds": wish.seconds,
        }

    def _make_estimator(self, settings: dict[str, Any]) -> Any:
        return mha.AttentionRegressor(**settings)

    def _watch(self) -> LayerWatcher:
        return LayerWatcher(self._truth, self._estimator, self._say)

    def learn(self) -> None:
        self._begin()
        solution = self._solve()
        with self._floor:
            self._end(solution)
            self._has_ended = True

    def _solve(self) -> mha.Solution:
        self._estimator.set_params(on_event=self._watcher.on_event).fit(self._examples)
        return self._estimator.solution_

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

    def _begin(self) -> None:
        """What is there before anything is learned: the truth, and how far a residual can fall."""
        self._say(
            {
                "kind": "begin",
                "ratio": self._examples.n / self._examples.counting_limit(self._architecture()),
                **self._show_truth(),
                "floor": self._first_floor(),
                "phases": PHASES if self._wish.method == "sculpt" else [],
            }
        )

    def _architecture(self) -> Any:
        """The class of layers whose unknowns are counted."""
        wish = self._wish
        heads = 1 if wish.count_heads and self._truth is None else wish.heads
        return self._examples.architecture(heads, bias=wish.bias, causal=wish.causal)

    def _show_truth(self) -> dict[str, Any]:
        truth = self._truth
        return {
            "heads": [] if truth is None else draw_heads(truth, None, scales(truth)),
            "limits": None if truth is None else scales(truth),
        }

    def _first_floor(self) -> dict[str, Any]:
        """How far the residual can fall: to the noise, where it is known, or to the rounding."""
        noise = self._wish.noise if self._truth is not None else 0.0
        if noise > 0:
            return {"value": noise / math.sqrt(1 + noise**2), "name": "noise on the labels"}
        precision = DOUBLE if self._truth is not None else label_precision(self._examples)
        return {"value": float(precision.unit), "name": "rounding of the labels"}

    def _last_floor(self, solution: mha.Solution) -> dict[str, Any] | None:
        """The noise in own labels, where the judge found what is left to be noise."""
        certificate = solution.certificate
        level = None if certificate is None else certificate.noise_level
        fitted = solution.outcome is mha.Outcome.FITTED
        if self._truth is not None or not fitted or level is None or not level > 0:
            return None
        _, y, _ = self._examples.subset(slice(_SOME)).arrays()
        size = float(np.sqrt(np.mean(y.astype(np.float64) ** 2)))
        return {"value": float(level) / size, "name": "noise on the labels, as it was found"}

    def _end(self, solution: mha.Solution) -> None:
        self._watcher.show(solution.layer)
        self._write(solution)
        truth = self._truth
        layer: Any = solution.layer
        found = None if truth is None else mha.compare(layer, truth)
        self._say(
            {
                "kind": "ended",
                "outcome": solution.outcome.name,
                "explanation": solution.outcome.explanation,
                "reason": solution.reason,
                "max_error": _finite(math.inf if found is None else found.max_error),
                "floor": self._last_floor(solution),
            }
        )

    def _best_layer(self) -> Any:
        """What the learner has chosen or, if it fits better, what was shown last: polish, say."""
        layers = (self._estimator.best_layer_so_far(), self._watcher.last)
        known = [layer for layer in layers if layer is not None]
        examples = self._examples.without_residual() if self._wish.residual else self._examples
        x, y, lengths = examples.subset(slice(_SOME)).arrays()

        def error(layer: Any) -> float:
            apart = layer(x, lengths) - y
            return float(np.sum(apart[np.arange(examples.k) < lengths[:, None]] ** 2))

        return min(known, key=error, default=None)

    def _write(self, solution: mha.Solution) -> None:
        self._say({"kind": "stage", "name": "writing the report"})
        mha.write_report(solution, self._report, truth=self._truth)

    def _say(self, message: dict[str, Any]) -> None:
        with self._floor:
            self._tell(message)


def _label(truth: Any, wish: Wish) -> mha.Examples:
    """Examples of what is hidden."""
    return mha.Examples.from_callable(
        truth,
        wish.inputs,
        n=wish.examples,
        k=wish.tokens,
        d=wish.dim,
        seed=wish.seed,
        noise=wish.noise,
    )


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
