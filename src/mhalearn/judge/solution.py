"""What a fit returns: the layer, the outcome, and what it rests on."""

from dataclasses import dataclass, field
from typing import Any

from mhalearn._runtime.types import Float64
from mhalearn.judge.certificate import Certificate
from mhalearn.judge.finding import Finding
from mhalearn.judge.shown_example import ShownExample
from mhalearn.layer.base import Layer
from mhalearn.run.events import Event
from mhalearn.run.outcome import Outcome


@dataclass(frozen=True)
class Solution:
    """A learned layer and what may be said about it."""

    layer: Layer
    outcome: Outcome
    trace: list[Event]
    reason: str = ""  # one sentence: why this outcome
    certificate: Certificate | None = None  # None if no example could be spared
    settings: dict[str, Any] = field(default_factory=dict)  # what is needed to run it again
    # All that was found; the first decided, unless the run was ended from outside.
    findings: tuple[Finding, ...] = ()
    # What the learner found on its way: `chen_li.Phases` of method "sculpt"; None of others, and of
    # a run that was resumed after its learner had ended.
    phases: Any = None
    # One example, held out where one could be, for the report to show the layer at work on.
    example: ShownExample | None = None
    # Eigenvalues of the tokens' covariance, largest first, as far as tokens span; None where they
    # spread nearly alike in all directions, as random inputs do.
    token_spectrum: Float64 | None = None

    def __repr__(self) -> str:
        """Short: a trace may have thousands of events."""
        return (
            f"Solution({self.outcome.name}, reason={self.reason!r}, layer={self.layer!r}, "
            f"{len(self.trace)} events)"
        )

    def _repr_html_(self) -> str:
        """What a notebook shows: outcome, reason and heads; the rest folded."""
        from mhalearn.judge.notebook import describe_solution  # which knows solutions

        return describe_solution(self)
