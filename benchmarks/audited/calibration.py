"""Confidence against truth: shares are fitted on one half of the boxes, and shown on the other."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

Record = dict[str, Any]
STUDIES = ("single", "pairs", "outside", "mixed", "clean")


class Said(NamedTuple):
    """A finding, and whether it is right. A rival's share of one is `1 / (1 + rivals)`."""

    kind: str
    rivals: int
    confidence: float
    right: bool


def halves(runs: list[Record]) -> tuple[list[Said], list[Said]]:
    """What was said of every second box of each study, to fit, and of the others, to look at."""
    found: tuple[list[Said], list[Said]] = [], []
    for study in STUDIES:
        made = [one for one in runs if one["study"] == study and one.get("findings")]
        for at, one in enumerate(made):
            found[at % 2].extend(_judged(one))
    return found


def _judged(one: Record) -> list[Said]:
    planted = {one.get("fault"), *one.get("faults", ())}
    outside = one["study"] in ("outside", "mixed")
    return [
        Said(
            f["kind"],
            f["rivals"],
            f["confidence"],
            outside if f["name"] == "unexplained" else f["name"] in planted,
        )
        for f in one["findings"]
    ]


def fitted_shares(runs: list[Record]) -> dict[str, tuple[float, int]]:
    """How often findings of each kind are right, with one of either added, and how many there are.

    Of findings that would explain as well, together one counts.
    """
    rights, cases = defaultdict(float), defaultdict(float)
    for said in halves(runs)[0]:
        rights[said.kind] += said.right
        cases[said.kind] += 1 / (1 + said.rivals)
    return {
        kind: ((rights[kind] + 1) / (cases[kind] + 2), round(cases[kind])) for kind in sorted(cases)
    }
