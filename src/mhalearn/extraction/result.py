"""What an extraction found, and what was asked for it."""

from __future__ import annotations

from dataclasses import dataclass

from mhalearn.data import Examples
from mhalearn.judge.solution import Solution
from mhalearn.learners.queries.extension import AlgebraFound
from mhalearn.learners.queries.session import Step


@dataclass(frozen=True)
class Extraction(Solution):
    """A `Solution`, and what was asked for it.

    calls, tokens, scalars: in all, those that certify among them. plan: the same by purpose, in
    order. algebra: the heads that algebra found on the way; None where random starts found them.
    random_starts: whether any was made. asked: all random sequences and their answers, of which
    the layer was fitted to some and certified on the others.
    """

    calls: int = 0
    tokens: int = 0
    scalars: int = 0
    plan: tuple[Step, ...] = ()
    algebra: AlgebraFound | None = None
    random_starts: bool = False
    asked: Examples | None = None

    def __repr__(self) -> str:
        return f"Extraction({self.calls} calls, {super().__repr__()})"
