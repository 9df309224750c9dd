"""The live line: stage, step, residual and time on standard error, only where somebody watches."""

from __future__ import annotations

import math
import sys
import time
from types import TracebackType
from typing import IO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from mhalearn.outcome import Event


class Progress:
    """One line that follows a run and disappears when it ends.

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
        """Show an event from the next redraw on."""
        self._event, self._told = event, time.monotonic()

    def line(self) -> Text:
        """The line as it stands now."""
        event, now = self._event, time.monotonic()
        if event is None:
            parts = [("starting", "bold"), (clock(now - self._began), "")]
        else:
            parts = [(event.stage, "bold"), (f"step {event.step}", "")]
            if math.isfinite(event.loss) and event.loss >= 0:
                parts.append((f"residual {math.sqrt(event.loss):.1e}", "cyan"))
            parts.append((clock(event.seconds + now - self._told), ""))
            if event.detail:
                parts.append((event.detail, "dim"))
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
