"""The live line: what it says, and that it says nothing where nobody watches."""

import math
import os
import time

import pytest

from mhalearn.outcome import Event
from mhalearn.terminal import Progress, clock


@pytest.fixture
def terminal(monkeypatch):
    """A pseudo-terminal: a stream to write to, and a function that reads what arrived."""
    pty = pytest.importorskip("pty", reason="pseudo-terminals are a POSIX matter")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    reader, writer = pty.openpty()
    os.set_blocking(reader, False)

    def arrived():
        try:
            return os.read(reader, 65536).decode()
        except BlockingIOError:
            return ""

    with os.fdopen(writer, "w") as stream:
        yield stream, arrived
    os.close(reader)


def test_the_line_follows_the_events(terminal):
    stream, arrived = terminal
    seen = ""
    with Progress(stream=stream) as line:
        line.on_event(Event("newton", 7, 4e-10, 1.5, "start 3 of 8"))
        for _ in range(50):
            time.sleep(0.05)
            seen += arrived()
            if "newton" in seen:
                break
    for part in ("newton", "step 7", "residual 2.0e-05", "start 3 of 8"):
        assert part in seen
    assert "\x1b[2K" in seen + arrived()  # the line is erased at the end


@pytest.fixture
def file(tmp_path):
    with open(tmp_path / "log", "w+") as stream:
        yield stream


def test_silent_when_not_a_terminal(monkeypatch, file):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Progress(stream=file) as line:
        line.on_event(Event("newton", 1, 0.5, 0.1))
        time.sleep(0.3)
    assert file.tell() == 0


def test_silent_on_a_terminal_that_cannot_redraw(terminal, monkeypatch):
    stream, arrived = terminal
    monkeypatch.setenv("TERM", "dumb")
    with Progress(stream=stream) as line:
        line.on_event(Event("newton", 1, 0.5, 0.1))
        time.sleep(0.3)
    assert arrived() == ""


def test_silent_when_not_enabled(terminal):
    stream, arrived = terminal
    with Progress(enabled=False, stream=stream) as line:
        line.on_event(Event("newton", 1, 0.5, 0.1))
        time.sleep(0.3)
    assert arrived() == ""


def test_an_error_passes_through_and_the_line_is_erased(terminal):
    stream, _ = terminal
    with pytest.raises(KeyboardInterrupt), Progress(stream=stream):
        raise KeyboardInterrupt


@pytest.mark.parametrize("loss", [math.nan, math.inf, -1.0])
def test_no_residual_where_there_is_none(loss, file):
    line = Progress(stream=file)
    line.on_event(Event("start", 0, loss, 0.0))
    assert "residual" not in line.line().plain
    assert "start" in line.line().plain


def test_a_long_detail_stays_on_one_line(file):
    line = Progress(stream=file)
    line.on_event(Event("start", 0, 1.0, 0.0, "a long story " * 50))
    assert line.line().no_wrap


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.04, "0.0 s"), (59.94, "59.9 s"), (245.0, "4 min 05 s"), (7380.0, "2 h 03 min")],
)
def test_clock(seconds, said):
    assert clock(seconds) == said
