"""What one check says about a run, and what a check is."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mhalearn.judge.evidence import Evidence
from mhalearn.run.outcome import Outcome


@dataclass(frozen=True)
class Finding:
    """What a check found. `sentence` holds the numbers in words, `numbers` holds them by name."""

    name: str
    outcome: Outcome  # of the run, where this is the first finding
    sentence: str
    numbers: dict[str, int | float] = field(default_factory=dict)
    # Whether what is left may be taken for independent errors, so that parameters have error bars.
    has_error_bars: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON, which has no infinity."""
        numbers = {
            name: value if math.isfinite(value) else None for name, value in self.numbers.items()
        }
        return {
            "name": self.name,
            "outcome": self.outcome.name,
            "sentence": self.sentence,
            "numbers": numbers,
        }


# An outcome, a sentence and its numbers: a finding without the name of its check.
Found = tuple[Outcome, str, dict[str, int | float]]
_Look = Callable[[Evidence], Found | None]


@dataclass(frozen=True)
class Check:
    """A named question put to the evidence; it finds something, or nothing.

    expensive: it needs evidence that costs as much as a fit may, or draws a conclusion from others
    having found nothing; it is asked only while nothing is found.
    error_bars: what it finds lets what is left be taken for independent errors.
    """

    name: str
    look: _Look
    expensive: bool = False
    error_bars: bool = False

    def __call__(self, evidence: Evidence) -> Finding | None:
        found = self.look(evidence)
        return None if found is None else Finding(self.name, *found, self.error_bars)


def check(
    name: str, *, expensive: bool = False, error_bars: bool = False
) -> Callable[[_Look], Check]:
    """Make a check of a function of the evidence."""
    return lambda look: Check(name, look, expensive, error_bars)
