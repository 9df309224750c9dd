"""Answers found again by what was asked, in whatever order a later run asks.

A run with another budget, or told more of a layer, asks some of the same questions at other places:
what was paid for is not paid for again.
"""

from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mhalearn.data.answers import DIGEST, Answers, digests


class AnswersByQuestion:
    """The answers of earlier runs, each given once, and a file for those that come.

    A question that was asked twice, to learn whether answers are random, has two answers.
    """

    def __init__(self, path: str | Path | None, about: dict[str, Any]) -> None:
        self._file = Answers(path, about, hold=False)
        self._left: dict[bytes, deque[NDArray[Any]]] = defaultdict(deque)
        self._next = 0
        for first, questions, labels in self._file.rows():
            for i, answer in enumerate(labels):
                self._left[questions[i * DIGEST : (i + 1) * DIGEST]].append(answer)
            self._next = first + len(labels)

    @property
    def remedy(self) -> str:
        return self._file.remedy

    def take(self, x: NDArray[Any]) -> NDArray[Any] | None:
        """The answers to as many of the first sequences of x as are known; None: to none."""
        found: list[NDArray[Any]] = []
        for one in x:
            left = self._left.get(digests(one[None]))
            if not left:
                break
            found.append(left.popleft())
        return np.stack(found) if found else None

    def count_new(self, x: NDArray[Any]) -> int:
        """How many of the first sequences of x have no answer."""
        for i, one in enumerate(x):
            if self._left.get(digests(one[None])):
                return i
        return len(x)

    def add(self, x: NDArray[Any], labels: NDArray[Any]) -> None:
        """Keep an answer, before anything is done with it."""
        self._file.add(self._next, x, labels)
        self._next += len(x)
