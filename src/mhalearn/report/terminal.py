"""The live line: stage, step, residual and time on standard error, only where somebody watches.

The paper's phases leave a line each, which stays; other learners have the live line alone.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import IO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from mhalearn.run.events import Event


class Progress:
    """One line that follows a run and disappears when it ends; finished phases stay above it.

        with Progress() as progress:
            AttentionRegressor(3, on_event=progress.on_event).fit(examples)

    Drawn on the stream (standard error unless told otherwise) if it is a terminal that can redraw a
    line, silent otherwise and where not `enabled`. The clock ticks between events, so that a long
    compilation does not look like a hang.
    """

    def __init__(self, enabled: bool = True, stream: IO[str] | None = None) -> None:
        stream = sys.stderr if stream is None else stream
        self._event: Event | None = None
        self._told = self._began = time.monotonic()
        self._live: Live | None = None
        # rich would believe FORCE_COLOR over the stream; a log file must stay silent all the same.
        if enabled and stream is not None and stream.isatty():
            console = Console(file=stream)
            if not console.is_dumb_terminal:
                self._live = Live(
                    console=console,
                    get_renderable=self.line,
                    refresh_per_second=8,
                    transient=True,
                    redirect_stdout=False,
                    redirect_stderr=False,
                )

    def __enter__(self) -> Progress:
        self._told = self._began = time.monotonic()
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def on_event(self, event: Event) -> None:
        """Show an event from the next redraw on; the result of a phase at once, and for good."""
        self._event, self._told = event, time.monotonic()
        if self._live is not None and self._live.is_started and is_phase_result(event):
            self._live.console.print(finished(event))
            self._live.refresh()

    @contextmanager
    def during(self, stage: str) -> Iterator[None]:
        """The line of work that tells no events."""
        with self:
            self.on_event(Event(stage, 0, math.nan, 0.0))
            yield

    def line(self) -> Text:
        """The line as it stands now."""
        event, now = self._event, time.monotonic()
        if event is None:
            parts = [("starting", "bold"), (clock(now - self._began), "")]
        elif is_phase_result(event):
            # What it found stands above; the next phase has not told anything yet.
            parts = [
                (f"after {event.stage}", "bold"),
                (clock(event.seconds + now - self._told), ""),
            ]
        else:
            parts = [(event.stage, "bold")]
            if said := _how_far(event):
                parts.append((said, ""))
            if math.isfinite(event.loss) and event.loss >= 0:
                parts.append((f"residual {math.sqrt(event.loss):.1e}", "cyan"))
            parts.append((clock(event.seconds + now - self._told), ""))
            if event.detail:
                parts.append((event.detail, "dim"))
        return _one_line(parts)


def is_phase_result(event: Event) -> bool:
    """Whether an event says what a phase found: bare events are steps, those with `of` progress."""
    is_phase = re.match(r"phase \d+: |theory$|head count$", event.stage) is not None
    return is_phase and bool(event.data) and "of" not in event.data


def finished(event: Event) -> Text:
    """The line a phase leaves: its name, what it found, the time since the run began."""
    parts = [(event.stage, "bold"), (clock(event.seconds), "")]
    if "broke_down" in event.data:
        parts.append(("broke down:", "bold red"))
    return _one_line([*parts, (event.detail, "dim")])


def _how_far(event: Event) -> str:
    """A percentage where the event knows what it is a part of, else its step, once there is one."""
    total = event.data.get("of")
    if isinstance(total, (int, float)) and total > 0:
        return f"{min(1.0, event.step / total):.0%}"
    return f"step {event.step}" if event.step else ""


def _one_line(parts: list[tuple[str, str]]) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    for index, (part, style) in enumerate(parts):
        text.append("  " if index else "").append(part, style)
    return text


def clock(seconds: float) -> str:
    """3.2 s, 4 min 05 s, 2 h 03 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
