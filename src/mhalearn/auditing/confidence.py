"""How sure a finding is: how often findings of its kind were right.

Kinds are told apart by what stands behind a finding, not by which fault it names. Shares are those
of `benchmarks/audit.py calibrate`, on one half of its boxes; docs/audit.md shows the other half.
"""

from __future__ import annotations

# It explains all by itself, or as one of two or three; it explains all, and rounding would have
# hidden it; it explains a part, something else stays; nothing of the catalogue explains a rest.
SHARES = {
    "alone": 0.994,
    "of two": 0.968,
    "of three": 0.9,
    "hidden": 0.833,
    "part": 0.857,
    "unexplained": 0.967,
}
# Beside something that nothing explains no fault is more likely than not.
_MOST_PARTIAL = 0.5


def whole(steps: int) -> str:
    """The kind of a fault that explains all together with others, so many in all."""
    return {1: "alone", 2: "of two"}.get(steps, "of three")


def confidence(kind: str, rivals: int = 0) -> float:
    """How often findings of a kind are right; rivals: faults that would explain as well."""
    share = SHARES[kind] / (1 + rivals)
    return min(_MOST_PARTIAL, share) if kind == "part" else share
