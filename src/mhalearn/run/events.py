"""What happens in a run, as it happens."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Listener = Callable[["Event"], None]


@dataclass(frozen=True)
class Event:
    """One thing that happened: progress of a stage, or a fact worth telling."""

    stage: str
    step: int
    loss: float  # relative squared error of the layer at hand, nan where there is none
    seconds: float  # since the run began
    detail: str = ""
    data: dict[str, Any] = field(default_factory=dict)
