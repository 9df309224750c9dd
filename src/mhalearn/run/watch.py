"""Progress of long work, and its end when time is up."""

from typing import Any

from mhalearn.run.run import Run

# Seconds between two events of one piece of work.
_EVERY = 1.0


class OutOfTime(Exception):
    """The time limit came before this was done."""


class Watch:
    """What a stage of a run tells its listeners, and when it must end.

    Work that is made of parts calls `begin` before a part that cannot be interrupted, and the watch
    itself between the steps of one that can. Both raise OutOfTime once the time of the run is up.
    Processes of one run call together.
    """

    def __init__(self, run: Run, stage: str) -> None:
        self._run = run
        self._stage = stage
        self._detail = ""
        self._told = run.seconds

    def begin(self, part: str) -> None:
        """A part of the work begins; it is told at once."""
        self.check_time()
        self._detail = part
        self._tell(0)

    def __call__(self, done: int, of: int) -> None:
        """So many steps of a part are done: told, but not more than once a second."""
        self.check_time()
        if self._run.clock.is_due(self._told, _EVERY):
            self._tell(done, of=of)

    def check_time(self) -> None:
        if self._run.is_over():
            raise OutOfTime(self._stage)

    def _tell(self, step: int, **data: Any) -> None:
        self._told = self._run.seconds
        self._run.emit(self._stage, step, detail=self._detail, **data)
