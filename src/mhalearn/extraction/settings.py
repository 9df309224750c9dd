"""What is said of a box, and what is told of a search."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

from mhalearn.layer.architecture import Architecture
from mhalearn.report.terminal import Progress
from mhalearn.run.events import Event, Listener

PLANS = ("auto", "algebra", "random")
# Stages of events: calls that were made, and heads that their answers show.
ASKING, FOUND = "asking", "heads found"


# What makes it matter where in a sequence tokens stand.
_POSITIONS = ("rope", "window", "position_bias")


def list_kinds(**said: Any) -> dict[str, Any]:
    """What was said of heads, without what they do not have."""
    return {name: has for name, has in said.items() if has not in (None, False)}


def check_kinds(settings: Settings, d: int) -> None:
    """Reject what the estimator would, before the box is asked for anything."""
    if isinstance(settings.n_heads, str) and settings.n_heads != "auto":
        raise ValueError(f"n_heads={settings.n_heads!r}: pass an integer or 'auto'")
    if settings.kinds and (settings.known_heads is None or settings.head_dim is None):
        said = ", ".join(settings.kinds)
        raise ValueError(f"{said}: such heads are learned given n_heads and head_dim; pass both")
    settings.architecture(d, d, settings.known_heads)


@dataclass(frozen=True)
class Settings:
    """kinds: of heads held by their projections, what they have."""

    n_heads: int | str
    head_dim: int | None
    bias: bool
    causal: bool
    seed: int
    max_seconds: float | None
    kinds: dict[str, Any] = field(default_factory=dict)

    @property
    def known_heads(self) -> int | None:
        return None if isinstance(self.n_heads, str) else int(self.n_heads)

    @property
    def has_positions_to_both_sides(self) -> bool:
        return not self.causal and any(name in self.kinds for name in _POSITIONS)

    def architecture(self, d: int, out_dim: int, n_heads: int | None) -> Architecture:
        """The class of layers, as far as it is told."""
        told = {name: said for name, said in self.kinds.items() if said != "auto"}
        return Architecture(
            d,
            n_heads,
            self.head_dim,
            out_dim,
            bias=bool(self.bias),
            causal=bool(self.causal),
            **told,
        )


class Teller:
    """What is told of a search, to a terminal and to the caller."""

    def __init__(self, drawn: Progress, on_event: Listener | None) -> None:
        self._drawn, self._on_event = drawn, on_event
        self._began = time.monotonic()
        self.events: list[Event] = []

    def asked(self, purpose: str, calls: int) -> None:
        self._note(ASKING, calls, purpose)

    def found(self, heads: int, where: str) -> None:
        self._note(FOUND, heads, where)

    def _note(self, stage: str, step: int, detail: str) -> None:
        event = Event(stage, step, math.nan, time.monotonic() - self._began, detail)
        self.events.append(event)
        self.tell(event)

    def tell(self, event: Event) -> None:
        self._drawn.on_event(event)
        if self._on_event is not None:
            self._on_event(event)
