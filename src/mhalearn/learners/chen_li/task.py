"""What every step of the phases is given."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from mhalearn.data import Examples
from mhalearn.learners.chen_li.streaming import Watcher
from mhalearn.learners.options import Constants
from mhalearn.run.run import Run
from mhalearn.run.watch import OutOfTime, Watch

Result = TypeVar("Result")


@dataclass(frozen=True)
class Task:
    """What a run of the phases works on.

    examples: all that the phases see, walked over in passes. few: some of them, in memory.
    validation: others, which only the literal net sees. constants: the numbers that steps use.
    n_heads: None where it is open.
    """

    examples: Examples
    few: Examples
    validation: Examples
    run: Run
    constants: Constants
    n_heads: int | None

    @property
    def d(self) -> int:
        return self.examples.d

    def once(self, kind: type[Result], name: str, work: Callable[[], Result]) -> Result:
        """A step's result, a dataclass of arrays, which a resumed run does not work out again."""
        names = list(kind.__dataclass_fields__)  # type: ignore[attr-defined]
        found = self.run.checkpoint.once(name, lambda: vars(work()), needs=names)
        return kind(**{name: found[name] for name in names})

    def check_time(self, stage: str) -> None:
        if self.run.is_over():
            raise OutOfTime(stage)

    def watcher(self, stage: str) -> Watcher:
        """Progress of a pass as events, one a second at most; the end of the time ends the pass."""
        return Watch(self.run, stage)
