"""The live line: what it says, and that it says nothing where nobody watches."""

import math
import os
import re
import time

import pytest

from mhalearn.report.terminal import Progress, clock, is_phase_result
from mhalearn.run.events import Event


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


def watch(terminal, events):
    """What a terminal has received once a run with these events is over."""
    stream, arrived = terminal
    with Progress(stream=stream) as line:
        for event in events:
            line.on_event(event)
        shown = line.line().plain
    seen = ""
    for _ in range(100):
        seen += arrived()
        if "\x1b[?25h" in seen:  # the cursor is back: all was written
            break
        time.sleep(0.02)
    return seen, shown


def result(phase, detail, **data):
    return Event(phase, 0, math.nan, 2.0, detail, {"round": 0} | data)


def test_each_finished_phase_leaves_a_line_and_the_live_line_goes_on(terminal):
    events = [
        Event("theory", 0, math.nan, 0.1, "orders", {"heads": 2}),
        Event("phase 1: crude sum", 500, math.nan, 1.0, "", {"of": 2000}),
        result("phase 1: crude sum", "all tokens"),
        result("phase 2: certification", "461 rows"),
        Event("phase 6: net", 3, 0.25, 4.0),
    ]
    seen, shown = watch(terminal, events)
    assert shown.startswith("phase 6: net  step 3  residual 5.0e-01")
    # What stays of a line comes after its last erasure.
    lines = [line.split("\x1b[2K")[-1] for line in seen.split("\n")]
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", line) for line in lines]
    kept = [line for line in lines if "2.0 s" in line]
    assert [line.split("  ")[0] for line in kept] == [
        "phase 1: crude sum",
        "phase 2: certification",
    ]
    assert "all tokens" in kept[0]
    _, shown = watch(terminal, events[:-1])
    assert shown.startswith("after phase 2: certification  2.")


def test_a_phase_that_broke_down_says_so(terminal):
    broken = result("phase 2: certification", "73 rows certify", broke_down=True)
    seen, _ = watch(terminal, [broken])
    assert "broke down:" in seen
    assert "73 rows certify" in seen


def test_other_learners_and_progress_leave_no_line(terminal):
    events = [
        Event("newton", 7, 4e-10, 1.5, "start 3 of 8", {"heads": 3}),
        Event("phase 1: crude sum", 500, math.nan, 1.5, "a pass", {"of": 2000}),
    ]
    seen, shown = watch(terminal, events)
    assert not any(is_phase_result(event) for event in events)
    assert shown.startswith("phase 1: crude sum  25%")
    assert seen.count("\n") <= 1  # what the live line itself needs
    assert "step 500" not in shown


@pytest.mark.parametrize("total", [0, None, -1])
def test_a_total_that_says_nothing_gives_the_step(total, file):
    line = Progress(stream=file)
    line.on_event(Event("phase 1: crude sum", 5, math.nan, 0.0, "", {"of": total}))
    assert "step 5" in line.line().plain


def test_no_phase_lines_when_not_a_terminal(file):
    with Progress(stream=file) as line:
        line.on_event(result("phase 1: crude sum", "all tokens"))
    assert file.tell() == 0


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


def test_work_without_events_has_a_line_that_names_it(terminal):
    line = Progress(stream=terminal[0])
    with line.during("writing the report"):
        assert line.line().plain.startswith("writing the report  0.")  # and no step 0
