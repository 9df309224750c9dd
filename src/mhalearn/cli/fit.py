"""Fitting as a command does it: behind the live line, with Ctrl-C that loses nothing."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from mhalearn.cli.exit_codes import Stopped

if TYPE_CHECKING:
    from mhalearn.data import Examples
    from mhalearn.layer.layer import AttentionLayer
    from mhalearn.run.events import Event


def fit(estimator: Any, examples: Examples, out: Path | None) -> Any:
    """Fit behind the live line. On Ctrl-C or an OSError the best layer so far is saved."""
    from mhalearn._runtime.devices import any_process, is_first, n_processes
    from mhalearn.report.terminal import Progress

    # Processes of one run stop at the same event, or some would wait for the others.
    alone = n_processes() == 1
    out = out if is_first() else None
    with _ctrl_c(alone) as asked, Progress(enabled=is_first()) as progress:

        def on_event(event: Event) -> None:
            # An interrupt that arrives inside a destructor or a callback is swallowed there.
            if any_process(asked()):
                raise KeyboardInterrupt
            progress.on_event(event)

        try:
            return estimator.set_params(on_event=on_event).fit(examples)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the file is written in any case
            stopped = Stopped(_save_best(estimator, out))
            _hint(stopped, estimator)
            raise stopped from None
        except OSError as error:
            with contextlib.suppress(OSError):
                if (saved := _save_best(estimator, out)) is not None:
                    error.add_note(f"best layer so far saved to {saved}")
            _hint(error, estimator)
            raise


def _save_best(estimator: Any, out: Path | None) -> str | None:
    """Save the best layer so far, if there is one and a place for it; returns the place."""
    best: AttentionLayer | None = estimator.best_layer_so_far()
    if best is None or out is None:
        return None
    best.replace(metadata={**best.metadata, "outcome": "interrupted"}).save(out)
    return str(out)


def _hint(error: BaseException, estimator: Any) -> None:
    from mhalearn.run.checkpoint import holds_something

    if estimator.checkpoint is not None and holds_something(estimator.checkpoint):
        error.add_note("--resume goes on from the checkpoint")


@contextlib.contextmanager
def _ctrl_c(at_once: bool) -> Iterator[Callable[[], bool]]:
    """Remember that Ctrl-C was pressed, and raise KeyboardInterrupt at once or leave that."""
    pressed = []

    def handle(number: int, frame: FrameType | None) -> None:
        pressed.append(number)
        if at_once:
            raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGINT, handle)
    except ValueError:  # not the main thread: no signals here
        yield lambda: False
        return
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)
