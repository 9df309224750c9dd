"""What was asked of a box: counted, within a budget, and never asked twice.

A call is one sequence that is asked about, however many a box takes at once; tokens are those of
the sequences, scalars the numbers that come back.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.types import Float64
from mhalearn.data.answers_by_question import AnswersByQuestion
from mhalearn.data.box import BoxFailed
from mhalearn.learners.queries.forms import AnyBox, questions_for_rows

# Sequences that are asked about at once, and whose answers are kept together.
_TOGETHER = 64

Teller = Callable[[str, int], None]


@dataclass(frozen=True)
class Budget:
    """What may be asked in all; None where there is no limit."""

    calls: int | None = None
    tokens: int | None = None
    scalars: int | None = None


@dataclass(frozen=True)
class Step:
    """What was asked for one purpose."""

    purpose: str
    calls: int
    tokens: int
    scalars: int


class BudgetSpent(Exception):
    """The budget does not allow the next question. purpose: what it would have been for."""

    def __init__(self, purpose: str) -> None:
        super().__init__(purpose)
        self.purpose = purpose


class TimeSpent(Exception):
    """Time is up before the next question."""


class Session:
    """A box that is asked for all rows of sequences, whatever its form.

    steps: what was asked so far, by purpose, in order. answered: calls that the file of an earlier
    run had answers to; they count, and are not made again. tell: called with a purpose and the
    number of calls. until: the time (`time.monotonic`) after which nothing more is asked; None
    where there is no limit.
    """

    def __init__(
        self,
        box: AnyBox,
        budget: Budget,
        keep: str | Path | None,
        about: dict[str, Any],
        *,
        causal: bool = False,
        tell: Teller | None = None,
    ) -> None:
        self._box, self._budget, self._causal = box, budget, causal
        self._answers = AnswersByQuestion(keep, about)
        self._tell = tell
        self.steps: list[Step] = []
        self.answered = 0
        self.until: float | None = None
        self.out_dim: int | None = None
        self.rows: str = "all"

    @property
    def calls(self) -> int:
        return sum(step.calls for step in self.steps)

    @property
    def tokens(self) -> int:
        return sum(step.tokens for step in self.steps)

    @property
    def scalars(self) -> int:
        return sum(step.scalars for step in self.steps)

    def begin(self, x: Float64, purpose: str) -> NDArray[Any]:
        """Ask about the first sequence of all (k, d), which tells the form of the answers."""
        last = questions_for_rows(x, causal=self._causal)[-1]
        self._check(1, len(last), 1, purpose)
        first = self._raw([last], purpose)[0]
        self.out_dim = first.shape[-1]
        self.rows = "all" if len(first) == len(x) > 1 else "last"
        if self.rows == "all":
            self._check(0, 0, 0, purpose)  # how many numbers come back is known only now
            return first
        rest = questions_for_rows(x, causal=self._causal)[:-1]
        self._check(len(rest), sum(map(len, rest)), len(rest) * self.out_dim, purpose)
        return np.concatenate([*self._raw(rest, purpose), first])

    def ask(self, x: Float64, purpose: str) -> NDArray[Any]:
        """The outputs (n, k, e) at all rows of sequences (n, k, d).

        Raises BudgetSpent before anything is asked that the budget does not allow, and TimeSpent
        where it is too late.
        """
        if self.out_dim is None:
            first = self.begin(x[0], purpose)[None]
            return first if len(x) == 1 else np.concatenate([first, self.ask(x[1:], purpose)])
        if self.until is not None and time.monotonic() > self.until:
            raise TimeSpent
        n, k, _ = x.shape
        if n > self.affordable(k):
            raise BudgetSpent(purpose)
        if self.rows == "all":
            return np.stack(self._raw(list(x), purpose))
        questions = [q for one in x for q in questions_for_rows(one, causal=self._causal)]
        return np.concatenate(self._raw(questions, purpose)).reshape(n, k, -1)

    def ask_once(self, x: Float64, purpose: str) -> NDArray[Any]:
        """What the box answers about a sequence (k, d) in one call: all rows, or the last alone."""
        rows = len(x) if self.rows == "all" else 1
        self._check(1, len(x), rows * (self.out_dim or 1), purpose)
        return self._raw([x], purpose)[0]

    def ask_again(self, x: Float64, answer: NDArray[Any], purpose: str) -> float:
        """How far a second answer about a sequence (k, d) is from the first (k, e), relative to it;
        above zero, the box answers at random. Of last rows only the last is asked for."""
        again = self.ask_once(x, purpose).astype(np.float64)
        first = answer.astype(np.float64)[-len(again) :]
        return float(np.linalg.norm(again - first) / (np.linalg.norm(first) or 1.0))

    def affordable(self, k: int) -> int:
        """Sequences of k tokens, with all their rows, that the budget still allows."""
        left = [
            (limit - spent) // cost
            for limit, spent, cost in zip(self._limits, self._spent, self.cost(k), strict=True)
            if limit is not None
        ]
        return max(0, min(left)) if left else 2**31

    def cost(self, k: int) -> tuple[int, int, int]:
        """Calls, tokens and scalars of a sequence of k tokens with all its rows."""
        calls, tokens = 1, k
        if self.rows == "last":
            calls, tokens = k, (k * (k + 1) // 2 if self._causal else k * k)
        return calls, tokens, k * (self.out_dim or 1)

    @property
    def remedy(self) -> str:
        return self._answers.remedy

    @property
    def _limits(self) -> tuple[int | None, int | None, int | None]:
        return self._budget.calls, self._budget.tokens, self._budget.scalars

    @property
    def _spent(self) -> tuple[int, int, int]:
        return self.calls, self.tokens, self.scalars

    def _check(self, calls: int, tokens: int, scalars: int, purpose: str) -> None:
        for limit, spent, more in zip(
            self._limits, self._spent, (calls, tokens, scalars), strict=True
        ):
            if limit is not None and spent + more > limit:
                raise BudgetSpent(purpose)

    def _raw(self, questions: list[Float64], purpose: str) -> list[NDArray[Any]]:
        """Answers to sequences as the box gives them, those of equal length together."""
        answers: list[NDArray[Any]] = []
        first = 0
        while first < len(questions):
            length = len(questions[first])
            end = first + 1
            while (
                end < len(questions) and len(questions[end]) == length and end - first < _TOGETHER
            ):
                end += 1
            answers.extend(self._answer(np.stack(questions[first:end]), purpose))
            first = end
        return answers

    def _answer(self, x: Float64, purpose: str) -> list[NDArray[Any]]:
        found: list[NDArray[Any]] = []
        while len(found) < len(x):
            rest = x[len(found) :]
            known = self._answers.take(rest)
            if known is None:
                rest = rest[: 1 if self._box.one_by_one else self._answers.count_new(rest)]
                known = self._call(rest)
                self._answers.add(rest, known)
            else:
                self.answered += len(known)
            self._check_alike(known)
            self._count(purpose, len(known), len(known) * x.shape[1], known.size)
            found.extend(known)
        return found

    def _call(self, x: Float64) -> NDArray[Any]:
        try:
            return self._box(x)
        except BoxFailed as error:
            raise BoxFailed(f"{error}; {self.remedy}") from error.__cause__

    def _check_alike(self, labels: NDArray[Any]) -> None:
        if self.out_dim is not None and labels.shape[2] != self.out_dim:
            raise ValueError(
                f"the box returned {labels.shape[2]} outputs after {self.out_dim}: it must keep "
                "their number"
            )

    def _count(self, purpose: str, calls: int, tokens: int, scalars: int) -> None:
        if self.steps and self.steps[-1].purpose == purpose:
            last = self.steps.pop()
            calls, tokens = calls + last.calls, tokens + last.tokens
            scalars += last.scalars
        self.steps.append(Step(purpose, calls, tokens, scalars))
        if self._tell is not None:
            self._tell(purpose, self.calls)
