"""What an audit says: findings in order of likelihood, each with the number behind it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mhalearn.auditing.learned import Learned
from mhalearn.auditing.shown import Shown
from mhalearn.auditing.unexplained import Locus


@dataclass(frozen=True)
class Finding:
    """One thing that the box does otherwise.

    name: of the fault in the catalogue, or "unexplained". heads: counted from 0; empty where all
    heads have it. numbers: `before` and `after`, relative errors without and with it, and those
    that were fitted. confidence: how often a finding of its `kind` is right, shared with those that
    would explain the labels as well (`also`). kind: "alone", "of two", "of three": it explains all,
    so; "hidden": as others do, and rounding would have hidden it; "part": something else stays;
    "unexplained": that which does.
    """

    name: str
    family: str
    sentence: str
    heads: tuple[int, ...]
    numbers: Mapping[str, float]
    confidence: float
    seen_in: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    kind: str = ""

    @property
    def head(self) -> int | None:
        """The one head it concerns, counted from 0; None where it is all, or several."""
        return self.heads[0] if len(self.heads) == 1 else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "family": self.family,
            "sentence": self.sentence,
            "head": self.head,
            "heads": list(self.heads),
            "numbers": dict(self.numbers),
            "confidence": self.confidence,
            "seen_in": list(self.seen_in),
            "also": list(self.also),
            "kind": self.kind,
        }


@dataclass(frozen=True)
class Audit:
    """Whether a box computes what was claimed.

    ok: it does, as exactly as boxes of its precision do. precision: the finest at which it does,
    with the findings taken into account; None where something stays unexplained. error: the
    relative root-mean-square error of the claim, and floor: that of a right box.
    explained: whether the findings account for all that differs. locus: where the rest lies.
    shown: rows to look at. learned: the layer that the box does compute, where no fault explains it
    and it could be learned.
    """

    ok: bool
    precision: str | None
    findings: tuple[Finding, ...]
    error: float
    error_left: float
    floor: float
    explained: bool
    locus: Locus | None
    n_sequences: int
    n_tokens: int
    n_tried: int
    depth: int
    seconds: float
    shown: Shown | None = field(default=None, repr=False, compare=False)
    learned: Learned | None = None

    def __str__(self) -> str:
        """The findings, one a line."""
        if self.ok:
            return (
                f"ok at {self.precision}: relative error {self.error:.1e} on {self.n_sequences} "
                f"sequences of {self.n_tokens} tokens"
            )
        lines = [
            f"differs from the claim: relative error {self.error:.1e}, where a right box of its "
            f"precision has at most {self.floor:.1e}"
        ]
        lines += [f"- {one.sentence} [{one.name}, {one.confidence:.0%}]" for one in self.findings]
        lines += [] if self.learned is None else [f"- {self.learned.describe()}"]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "precision": self.precision,
            "error": self.error,
            "error_left": self.error_left,
            "floor": self.floor,
            "explained": self.explained,
            "findings": [one.to_dict() for one in self.findings],
            "locus": None if self.locus is None else self.locus.to_dict(),
            "learned": None if self.learned is None else self.learned.to_dict(),
            "sequences": self.n_sequences,
            "tokens": self.n_tokens,
            "edits_tried": self.n_tried,
            "depth": self.depth,
            "seconds": self.seconds,
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), allow_nan=False)

    def write_report(self, path: str | os.PathLike[str]) -> None:
        """One HTML file: the findings, and the first rows that differ, expected and found."""
        from mhalearn.auditing.page import write_audit

        write_audit(self, path)

    def _repr_html_(self) -> str:
        from mhalearn.auditing.notebook import describe_audit

        return str(describe_audit(self))
