"""The paper's phases as cards that light up: the report's words, numbers and figures, live."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from mhalearn.report.phases import describe_phases
from mhalearn.run.events import Event
from mhalearn.studio.words import find_phase


def draw_card(events: Sequence[Event]) -> dict[str, Any] | None:
    """What the last event's phase has found by now; None where the event is no result of one.

    Figures are the report's, in the width of a card.
    """
    number = find_phase(events[-1].stage) if events else None
    section = None if number is None or not _is_result(events[-1]) else describe_phases(events)
    phases = [] if section is None else section.phases
    for phase in phases:
        if phase.number == number:
            return {
                "number": number,
                "whole": _ends_phase(events[-1]),
                "words": phase.words,
                "columns": phase.columns,
                "rows": phase.rows,
                "breakdown": phase.breakdown,
                "figures": [
                    {
                        "caption": figure.caption,
                        "svg": _for_page(str(figure.svg[1]), f"phase-{number}"),
                        "key": figure.key,
                    }
                    for figure in phase.figures
                ],
            }
    return None


def _is_result(event: Event) -> bool:
    """Bare events are steps within a phase, those with `of` its progress over the examples."""
    return bool(event.data) and "of" not in event.data


def _ends_phase(event: Event) -> bool:
    """Certification is the first result of its phase; the body, or a breakdown, the last."""
    return "certified" not in event.data or "broke_down" in event.data


def _for_page(svg: str, prefix: str) -> str:
    """Two cards may have a figure of one name, and a page has each id once. Styles are set by the
    page's script: its policy allows none in markup."""
    svg = re.sub(r'(\bid="|href="#|url\(#|aria-labelledby=")', rf"\g<1>{prefix}-", svg)
    return svg.replace(' style="', ' data-style="')
