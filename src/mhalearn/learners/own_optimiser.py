"""An optimiser of the reader's own, a function of one vector, as a learner beside the others."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from mhalearn.learners.protocol import Learner

if TYPE_CHECKING:
    from mhalearn._runtime.types import Float64
    from mhalearn.data import Examples
    from mhalearn.layer.architecture import Architecture
    from mhalearn.learners.objective import Objective
    from mhalearn.run.outcome import Candidate
    from mhalearn.run.run import Run

Optimise = Callable[["Objective"], ArrayLike]


@dataclass(frozen=True)
class OwnOptions:
    """starts: random ones, until one explains the examples that select."""

    starts: int = 20

    def __post_init__(self) -> None:
        if not isinstance(self.starts, int) or self.starts < 1:
            raise ValueError(f"starts={self.starts!r}: pass a number of at least 1")


class OwnOptimiser(Learner):
    """Learns with a function that takes an `Objective` and returns the vector it ended at.

    Starts, the choice among them, clock and polish are those of the baselines.
    """

    options = OwnOptions

    def __init__(self, optimise: Optimise, name: str | None = None) -> None:
        if not callable(optimise):
            raise ValueError(f"{optimise!r} is not a function: pass one that takes an Objective")
        self.optimise = optimise
        self.name = name or str(getattr(optimise, "__name__", type(optimise).__name__))
        self.title = self.name

    @classmethod
    def from_file(cls, place: str) -> OwnOptimiser:
        """From "file.py:function". The file is executed, as by Python itself."""
        file, _, name = place.rpartition(":")
        if not file.endswith(".py") or not name:
            raise ValueError(f"{place!r}: give a file and a function in it, as in mine.py:descend")
        if not Path(file).is_file():
            raise ValueError(f"{file}: there is no such file")
        try:
            found = runpy.run_path(file).get(name)
        except Exception as error:
            raise ValueError(f"{file}: {type(error).__name__}: {error}") from error
        if not callable(found):
            raise ValueError(f"{file} has no function {name!r}")
        return cls(found, name)

    def supports(self, architecture: Architecture) -> str | None:
        if architecture.attention is None:
            return None
        return f"method {self.name!r} learns softmax heads and no other attention; use newton"

    def learn(
        self, examples: Examples, architecture: Architecture, run: Run, options: OwnOptions
    ) -> Candidate:
        from mhalearn.learners.objective import descend_from_starts

        return descend_from_starts(self, examples, architecture, run, options.starts)

    def ends_at(self, objective: Objective) -> Float64:
        """The vector that the function returns, if it is one."""
        found: Any = np.asarray(self.optimise(objective))
        if found.shape != objective.start.shape or found.dtype.kind != "f":
            raise ValueError(
                f"{self.name} returned an array {found.dtype} of shape {found.shape}: return "
                f"floats of shape {objective.start.shape}, as objective.start has"
            )
        return found.astype(np.float64)
