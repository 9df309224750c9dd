"""One run that asks: the hidden layer is a box, and what it is asked is told as it is spent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import mhalearn as mha
from mhalearn._runtime.seeds import Stream, generator
from mhalearn.extraction.search import Search
from mhalearn.extraction.settings import ASKING, FOUND, Settings, Teller
from mhalearn.learners.queries.domain import make_domain
from mhalearn.learners.queries.forms import AnyBox
from mhalearn.learners.queries.session import Budget, Session
from mhalearn.report.terminal import Progress
from mhalearn.studio.request import Wish
from mhalearn.studio.watcher import LayerWatcher
from mhalearn.studio.worker import Learning, Tell

# The tokens that may be asked about, by the words of the form.
_INPUTS = {"boolean": "cube", "gaussian": "any"}


class Asking(Learning):
    """As `mhalearn.extract`: a box, and as many calls of it as there were to be examples.

    The examples that a run begins with say how often the counting limit is met, and no more: the
    learner sees what it asked for.
    """

    def __init__(self, wish: Wish, report: Path, tell: Tell) -> None:
        super().__init__(wish, report, tell)
        settings = Settings(self._settings["n_heads"], None, False, False, wish.seed, wish.seconds)
        self._session = Session(
            AnyBox(self._answer),
            Budget(wish.examples),
            None,
            {"asked by": "studio"},
            tell=self._ask,
        )
        self._teller = Teller(Progress(enabled=False), self._hear)
        self._noise = generator(wish.seed, Stream.NOISE)
        self._heads: int | None = None
        domain = make_domain(_INPUTS[wish.inputs], wish.dim)
        self._make = lambda: Search(self._session, domain, settings, wish.tokens, self._teller)
        self._watcher = LayerWatcher(self._truth, self, self._say)
        self._search: Search | None = None

    def layer_at_hand(self) -> Any:
        return None if self._search is None else self._search.layer_at_hand()

    def best_layer_so_far(self) -> Any:
        return None if self._search is None else self._search.best_layer_so_far()

    def _solve(self) -> mha.Solution:
        self._search = self._make()
        return self._search.run("auto")

    def _best_layer(self) -> Any:
        return self.best_layer_so_far()

    def _answer(self, x: Any) -> Any:
        assert self._truth is not None
        y = self._truth(x)
        size = self._wish.noise * float(np.sqrt(np.mean(y**2)))
        return y + size * self._noise.standard_normal(y.shape) if size else y

    def _ask(self, purpose: str, calls: int) -> None:
        self._teller.asked(purpose, calls)

    def _hear(self, event: mha.Event) -> None:
        """An event and, where something was asked or found, how the account stands."""
        self._watcher.on_event(event)
        if event.stage == FOUND:
            self._heads = int(event.step)
        if event.stage in (ASKING, FOUND):
            self._say(
                {
                    "kind": "asked",
                    "at": self._watcher.moment,
                    "calls": self._session.calls,
                    "most": self._wish.examples,
                    "scalars": self._session.scalars,
                    "steps": [[step.purpose, step.calls] for step in self._session.steps],
                    "heads": self._heads,
                }
            )
