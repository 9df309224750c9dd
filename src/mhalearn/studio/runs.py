"""Runs: each is a process that tells what happens; they can be watched, and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from mhalearn.studio.dropped import Dropped, DroppedFiles
from mhalearn.studio.film import thin
from mhalearn.studio.request import Limits, Wish

# The longest line a worker may send: pictures of sixteen heads have a tenth of it.
_LONGEST_LINE = 2**20
# Pictures of the heads that are kept of a run, for who comes late and for going back.
_PICTURES = 64
# What a process may take to leave once it has closed its output.
_LEAVING_SECONDS = 10.0
# What a stopped process may take to write a report of what it has.
_REPORT_SECONDS = 30.0
_WORKER = (sys.executable, "-m", "mhalearn.studio.worker")


class TooManyRuns(Exception):
    """All places are taken."""


class StudioRun:
    """One run: its wish, its process, and everything it has told.

    data: examples of the visitor's own, None where they are drawn.
    """

    def __init__(self, number: int, wish: Wish, report: Path, data: Dropped | None = None) -> None:
        self.number, self.wish, self.report, self._data = number, wish, report, data
        # JSON, in order; the last one has kind "ended", "stopped" or "failed".
        self.messages: list[str] = []
        self.state = "running"  # then the name of an outcome, "stopped" or "failed"
        self.began = time.monotonic()
        self.took: float | None = None
        self._has_layer = False  # it has shown one, so that there is something to report
        self._pictures: list[tuple[int, int]] = []  # which messages, after how many events
        self._told = asyncio.Condition()
        self._process: asyncio.subprocess.Process | None = None
        self._why_stopped: str | None = None

    @property
    def is_running(self) -> bool:
        return self.took is None

    @property
    def has_report(self) -> bool:
        return not self.is_running and self.report.exists()

    def summary(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "wish": dataclasses.asdict(self.wish),
            "state": self.state,
            "seconds": time.monotonic() - self.began if self.took is None else self.took,
            "running": self.is_running,
            "report": self.has_report,
            "data": None if self._data is None else self._data.summary(),
        }

    async def work(self, environment: dict[str, str], seconds: float) -> None:
        """Start the process and listen until it ends; after `seconds` stop it."""
        errors: bytes = b""
        limit = asyncio.create_task(self._stop_after(seconds))
        try:
            self._process = await asyncio.create_subprocess_exec(
                *_WORKER,
                str(self.report),
                *self._files(),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=_LONGEST_LINE,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the server, which ends its runs itself
            )
            if self._why_stopped is not None:  # asked for while it was being started
                self._end_process()
            errors = await self._listen(self._process)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _LEAVING_SECONDS)
        except (OSError, ValueError) as error:
            self._why_stopped = self._why_stopped or f"the process could not be followed: {error}"
        finally:
            limit.cancel()
            if self._process is not None:
                self._end_process()
                await self._process.wait()
            await self._end(errors)

    async def stop(self, why: str = "stopped by hand", *, report: bool = True) -> None:
        """End the process, and wait until it has gone.

        One that has a layer is asked to write a report of it first, unless nobody will read it.
        """
        is_first = self._why_stopped is None
        self._why_stopped = self._why_stopped or why
        if not (report and self._has_layer):
            self._end_process()
        elif is_first:
            self._ask_to_leave(why)
        try:
            await asyncio.wait_for(self._gone(), _REPORT_SECONDS)
        except TimeoutError:
            self._end_process()
            await self._gone()

    async def follow(self, after: int = 0) -> AsyncIterator[tuple[int, str]]:
        """Messages with their numbers, from the one after `after`, until the run has ended."""
        sent = after
        while self.is_running or sent < len(self.messages):
            async with self._told:
                while self.is_running and sent >= len(self.messages):
                    await self._told.wait()
                fresh = self.messages[sent:]
            for message in fresh:
                sent += 1
                yield sent, message

    def _files(self) -> list[str]:
        if self._data is None:
            return []
        return [json.dumps({name: str(path) for name, path in self._data.files.items()})]

    async def _listen(self, process: asyncio.subprocess.Process) -> bytes:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        complaints = asyncio.create_task(process.stderr.read())
        try:
            process.stdin.write(json.dumps(dataclasses.asdict(self.wish)).encode() + b"\n")
            with contextlib.suppress(ConnectionError):  # it has died already: stderr says why
                await process.stdin.drain()
            async for line in process.stdout:
                await self._tell(line.decode().rstrip("\n"))
            return await complaints
        finally:
            complaints.cancel()

    async def _tell(self, message: str) -> None:
        told = json.loads(message)
        async with self._told:
            self.messages.append(message)
            if told["kind"] == "heads":
                self._has_layer = True
                self._pictures.append((len(self.messages) - 1, told.get("at", 0)))
                self._thin_pictures()
            self._told.notify_all()

    def _thin_pictures(self) -> None:
        """Keep few, evenly spread over the events; the numbers of the others stay taken."""
        if len(self._pictures) > _PICTURES:
            place, _ = self._pictures.pop(thin([at for _, at in self._pictures]))
            self.messages[place] = '{"kind": "past"}'

    async def _end(self, errors: bytes) -> None:
        last = json.loads(self.messages[-1]) if self.messages else {}
        if last.get("kind") == "ended":
            self.state = last["outcome"]
        elif last.get("kind") == "failed":
            self.state = "failed"
        else:
            self.state = "failed" if self._why_stopped is None else "stopped"
            why = self._why_stopped or _last_line(errors)
            await self._tell(json.dumps({"kind": self.state, "reason": why}))
        async with self._told:
            self.took = time.monotonic() - self.began
            self._told.notify_all()

    async def _stop_after(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self.stop("it did not end by itself after its time limit")

    async def _gone(self) -> None:
        async with self._told:
            await self._told.wait_for(lambda: not self.is_running)

    def _ask_to_leave(self, why: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(f"{why}\n".encode())

    def _end_process(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()


class Runs:
    """All runs of a server. Only the newest are kept, and only so many run at a time."""

    def __init__(self, limits: Limits, environment: dict[str, str] | None = None) -> None:
        self.limits = limits
        self._environment = dict(os.environ if environment is None else environment)
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # made for the first run
        self._runs: dict[int, StudioRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._count = 0
        self.files = DroppedFiles(limits, self._environment, self._make_folder)

    def start(self, wish: Wish) -> StudioRun:
        """Begin a run; TooManyRuns where as many are running as may."""
        running = sum(run.is_running for run in self._runs.values())
        if running >= self.limits.running:
            raise TooManyRuns(f"{running} runs are going on, and no more may: stop one, or wait")
        self._count += 1
        report = self._make_folder() / f"run-{self._count}.html"
        run = StudioRun(self._count, wish, report, self.files.find(wish.data))
        self._runs[run.number] = run
        self._forget_old()
        work = run.work(self._environment, wish.seconds + self.limits.grace)
        task = asyncio.create_task(work)
        self._tasks.add(task)  # the loop itself holds tasks only weakly
        task.add_done_callback(self._tasks.discard)
        return run

    def find(self, number: int) -> StudioRun | None:
        return self._runs.get(number)

    def newest_first(self) -> list[StudioRun]:
        return list(reversed(self._runs.values()))

    async def close(self) -> None:
        """Stop everything, and leave nothing on disk."""
        for run in self.newest_first():
            if run.is_running:
                await run.stop("the studio was closed", report=False)
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _make_folder(self) -> Path:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="mhalearn-studio-")
        return Path(self._folder.name)

    def _forget_old(self) -> None:
        ended = [run for run in self._runs.values() if not run.is_running]
        for run in ended[: max(0, len(self._runs) - self.limits.kept)]:
            run.report.unlink(missing_ok=True)
            del self._runs[run.number]


def _last_line(errors: bytes) -> str:
    lines = errors.decode(errors="replace").split("\n")
    said = [line.strip() for line in lines if line.strip()]
    return f"the process broke: {said[-1][:300]}" if said else "the process ended without a word"
