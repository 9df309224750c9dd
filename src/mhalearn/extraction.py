"""A layer from a box that can be asked: choose calls, learn, judge on calls not fitted."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.seeds import Stream, generator
from mhalearn._runtime.types import Float64
from mhalearn._runtime.validation import check_count
from mhalearn.data import Examples
from mhalearn.data.label_precision import label_precision
from mhalearn.estimator import AttentionRegressor
from mhalearn.judge.solution import Solution
from mhalearn.layer.architecture import Architecture
from mhalearn.learners.queries.algebra import PLANE, find_by_algebra
from mhalearn.learners.queries.domain import Domain, half_sharp_size, make_domain, mantissa_unit
from mhalearn.learners.queries.extension import AlgebraFound
from mhalearn.learners.queries.forms import AnyBox
from mhalearn.learners.queries.learner import FromSketch
from mhalearn.learners.queries.session import Budget, BudgetSpent, Session, Step
from mhalearn.learners.queries.turns import draw_at_turns
from mhalearn.report.terminal import Progress
from mhalearn.run.events import Event, Listener
from mhalearn.run.outcome import Outcome

PLANS = ("auto", "algebra", "random")
RANDOM = "random sequences, to fit and to certify"
SIZE = "one sequence in several sizes"
AGAIN = "one sequence once more, to learn whether answers are random"
# Random sequences, over the counting limit: of a first fit from random starts, the same of answers
# that are rounded or random, and from algebra, which needs no more than certifying does.
_RATIO, _RATIO_OF_COARSE, _RATIO_OF_ALGEBRA = 3.0, 8.0, 1.6
# Fits, each from twice the sequences of the one before.
_ROUNDS = 3
# Logits of random tokens, about, where the size of Theta is known.
_LOGITS = 1.5
# The same where heads write alike: small logits show little but their sum.
_LOGITS_OF_ALIKE = 5.0
# Sizes of tokens, among which that of random ones is chosen.
_LADDER = (0.06, 0.12, 0.25, 0.5, 2.0)
# Unknowns of Theta up to which attention is fitted with W known; rounding of exact answers.
_MOST_UNKNOWNS, _EXACT_ANSWERS = 4096, 1e-12
# Heads that a first fit has room for where their number is open.
_PLAUSIBLE = 4
_RECOVERED = (Outcome.RECOVERED, Outcome.RECOVERED_ON_SPAN)


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


def extract(
    box: Callable[[Any], Any],
    d: int,
    n_heads: int | str = "auto",
    *,
    max_calls: int | None = None,
    max_tokens: int | None = None,
    max_scalars: int | None = None,
    seed: int = 0,
    max_length: int = 8,
    inputs: Any = "any",
    one_by_one: bool = False,
    head_dim: int | None = None,
    bias: bool = False,
    causal: bool = False,
    plan: str = "auto",
    keep: str | Path | None = None,
    max_seconds: float | None = None,
    progress: bool = False,
    on_event: Listener | None = None,
) -> Extraction:
    """Learn the attention layer inside a box by asking it about sequences of our choice.

    box: as `f` of `Examples.from_callable`; it may answer for the last row alone, (n, e), or with
        one number a sequence, (n,), and is then asked for each row on its own. one_by_one: it takes
        one sequence (k, d) a call.
    max_calls, max_tokens, max_scalars: what may be asked in all. A call is one sequence, whatever
        is sent together. Where a budget ends the search, the best layer is returned, and the reason
        says what the next call would have been for.
    max_length: tokens of the longest sequence that may be asked about.
    inputs: tokens that may be asked about: "any", "cube" (+-1), a number, the radius of a ball, or
        an array (v, d) of tokens.
    plan: "algebra" (see `learners.queries.algebra`), "random" (random sequences and the exact
        solver), or "auto": algebra where answers are exact, tokens free and outputs several.
    keep: a file that keeps every answer as it comes: another run with the same settings asks for
        none of them again. A box that fails is called again three times, with longer and longer
        waits, and then BoxFailed, an OSError, ends the run.
    head_dim, bias, causal, max_seconds, progress, on_event: as of `AttentionRegressor`.

    Cost: at d = 8 with six heads and all outputs some 36 calls of eight tokens and a few seconds.
    Trust: that of `AttentionRegressor`: RECOVERED is said by the same judge, of sequences that were
    asked and not fitted.
    """
    d, length = check_count("d", d), check_count("max_length", max_length, least=2)
    if plan not in PLANS:
        raise ValueError(f"plan={plan!r}: choose one of {', '.join(PLANS)}")
    for name, limit in (("calls", max_calls), ("tokens", max_tokens), ("scalars", max_scalars)):
        if limit is not None:
            check_count(f"max_{name}", limit)
    if not callable(box):
        raise ValueError(f"box is a {type(box).__name__}: pass a callable from X to Y")
    settings = _Settings(n_heads, head_dim, bias, causal, seed, max_seconds)
    with Progress(enabled=progress) as drawn:
        teller = _Teller(drawn, on_event)
        domain = make_domain(inputs, d)
        about = {"version": 1, "asked by": "extract", "seed": seed, "d": d, "length": length}
        session = Session(
            AnyBox(box, one_by_one=bool(one_by_one)),
            Budget(max_calls, max_tokens, max_scalars),
            keep,
            about | {"plan": plan},
            causal=causal,
            tell=teller.asked,
        )
        return _Search(session, domain, settings, length, teller).run(plan)


def _wants_more(solution: Solution) -> bool:
    """Whether more random sequences may tell what these did not."""
    if solution.outcome is Outcome.FITTED:
        return solution.certificate is None
    return solution.outcome in (
        Outcome.STUCK,
        Outcome.NOT_IDENTIFIED,
        Outcome.TOO_FEW_EXAMPLES,
    )


@dataclass(frozen=True)
class _Settings:
    n_heads: int | str
    head_dim: int | None
    bias: bool
    causal: bool
    seed: int
    max_seconds: float | None

    @property
    def known_heads(self) -> int | None:
        return None if isinstance(self.n_heads, str) else int(self.n_heads)

    def architecture(self, d: int, out_dim: int, n_heads: int | None) -> Architecture:
        return Architecture(d, n_heads, self.head_dim, out_dim, bias=self.bias, causal=self.causal)


class _Teller:
    """What is told of a search, to a terminal and to the caller."""

    def __init__(self, drawn: Progress, on_event: Listener | None) -> None:
        self._drawn, self._on_event = drawn, on_event
        self._began = time.monotonic()
        self.events: list[Event] = []

    def asked(self, purpose: str, calls: int) -> None:
        seconds = time.monotonic() - self._began
        event = Event("asking", calls, math.nan, seconds, purpose)
        self.events.append(event)
        self.tell(event)

    def tell(self, event: Event) -> None:
        self._drawn.on_event(event)
        if self._on_event is not None:
            self._on_event(event)


class _Search:
    """One extraction: what has been asked, and the order of the steps."""

    def __init__(
        self,
        session: Session,
        domain: Domain,
        settings: _Settings,
        length: int,
        teller: _Teller,
    ) -> None:
        self._session, self._domain, self._settings = session, domain, settings
        self._k, self._teller = length, teller
        self._rng = generator(settings.seed, Stream.GENERIC_QUERIES)
        self._size, self._unit = 1.0, 0.0
        self._x: Float64
        self._y: NDArray[Any]
        self._spent_on: str | None = None
        self._alike: Float64 | None = None  # heads that only their turns tell apart
        self._begin()

    def _begin(self) -> None:
        """Ask about one sequence, which tells the form of answers, and once more about it."""
        x = self._domain.draw(1, self._k, self._size, self._rng)
        try:
            answer = self._session.ask(x, RANDOM)
        except BudgetSpent:
            raise ValueError(
                "the budget does not allow one sequence: raise max_calls, max_tokens, max_scalars"
            ) from None
        self._x, self._y = x, answer
        self._unit = max(label_precision(Examples(x, answer)).unit, mantissa_unit(answer))
        try:
            self._repeated = self._session.ask_again(x[0], answer[0], AGAIN)
        except BudgetSpent as spent:
            self._repeated, self._spent_on = 0.0, spent.purpose

    def run(self, plan: str) -> Extraction:
        algebra = self._algebra(plan)
        learner = None if algebra is None else FromSketch(algebra.sketch)
        heads = self._settings.known_heads or (
            _PLAUSIBLE if algebra is None else algebra.heads.n_heads
        )
        if algebra is not None:
            self._alike = algebra.sketch.theta if algebra.by_turns else None
            logits = _LOGITS_OF_ALIKE if algebra.by_turns else _LOGITS
            self._size = math.sqrt(logits / max(algebra.size, 1e-300))
        elif self._domain.is_continuous:
            self._choose_size()
        ratio = _RATIO if self._exact else _RATIO_OF_COARSE
        if algebra is not None and not algebra.by_turns:
            ratio = _RATIO_OF_ALGEBRA
        solution = None
        for _ in range(_ROUNDS):
            more = self._ask_up_to(heads, ratio)
            if solution is not None and not more:
                break
            solution = self._fit(learner)
            if self._spent_on is not None or not _wants_more(solution):
                break
            ratio *= 2
        assert solution is not None
        return self._tell(solution, algebra, learner)

    def _algebra(self, plan: str) -> AlgebraFound | None:
        """What algebra finds, where it may be tried and is affordable."""
        why = self._why_no_algebra()
        if plan == "algebra" and why is not None:
            raise ValueError(f"plan='algebra': {why}; choose plan='auto'")
        if plan == "random" or why is not None:
            return None
        try:
            known = self._settings.known_heads
            found = find_by_algebra(
                self._session, self._domain, self._k, self._settings.seed, known
            )
        except BudgetSpent as spent:
            self._spent_on = spent.purpose
            return None
        if found is None or found.heads.n_heads * self._domain.d**2 > _MOST_UNKNOWNS:
            return None
        return found

    @property
    def _exact(self) -> bool:
        return max(self._unit, self._repeated) <= _EXACT_ANSWERS

    def _why_no_algebra(self) -> str | None:
        """Why algebra cannot be tried; None where it can."""
        settings = self._settings
        if not self._domain.is_continuous:
            return "tokens of a cube or a vocabulary cannot be moved along a plane"
        if settings.bias or settings.causal:
            return "it knows neither biases nor masks"
        if self._k < 4:
            return "it asks about sequences of at least four tokens"
        if self._session.rows == "last":
            return "it needs the outputs at all rows at once"
        if self._y.shape[-1] < 2:
            return "it needs more outputs than one"
        if not self._exact:
            return "it needs answers of double precision, the same each time"
        return None

    def _choose_size(self) -> None:
        """The size of tokens at which attention is half way from flat to sharp: one sequence is
        asked about in several sizes, which says too little of a layer to be fitted."""
        if self._session.affordable(self._k) < len(_LADDER):
            return
        x = np.array(_LADDER)[:, None, None] * self._x[:1]
        x = x[np.max(np.linalg.norm(x, axis=-1), axis=1) <= (self._domain.radius or math.inf)]
        if len(x) == 0:
            return
        y = self._session.ask(x, SIZE)
        self._size = half_sharp_size(np.array(_LADDER)[: len(x)], y)

    def _ask_up_to(self, heads: int, ratio: float) -> bool:
        """Ask about random sequences until there are enough, or the budget is spent; whether any
        was asked about."""
        architecture = self._settings.architecture(self._domain.d, self._y.shape[-1], heads)
        wanted = math.ceil(ratio * architecture.counting_limit(self._k)) + 2
        count = wanted - len(self._x)
        if count <= 0:
            return False
        possible = min(count, self._session.affordable(self._k))
        if possible < count:
            self._spent_on = RANDOM
        return possible > 0 and self._ask_random(possible)

    def _ask_random(self, count: int) -> bool:
        x = self._domain.draw(count, self._k, self._size, self._rng, self._unit)
        if self._alike is not None:  # every other one
            x[::2] = draw_at_turns(self._alike, len(x[::2]), self._k, self._rng)
        try:
            answers = self._session.ask(x, RANDOM)
        except BudgetSpent as spent:
            self._spent_on = spent.purpose
            return False
        self._x = np.concatenate([self._x, x])
        self._y = np.concatenate([self._y, answers])
        return True

    def _fit(self, learner: FromSketch | None) -> Solution:
        settings, rest = self._settings, self._settings.max_seconds
        estimator = AttentionRegressor(
            settings.n_heads,
            "newton" if learner is None else learner,
            head_dim=settings.head_dim,
            bias=settings.bias,
            causal=settings.causal,
            random_state=settings.seed,
            max_seconds=rest,
            on_event=self._teller.tell,
        )
        return estimator.fit(self._x, self._y).solution_

    def _tell(
        self, solution: Solution, algebra: AlgebraFound | None, learner: FromSketch | None
    ) -> Extraction:
        session = self._session
        said = solution.reason
        if self._spent_on is not None and solution.outcome not in _RECOVERED:
            said += (
                f"; the budget is spent ({session.calls} calls, {session.tokens} tokens, "
                f"{session.scalars} scalars), and the next call would have been for "
                f"{self._spent_on}"
            )
        known = {field.name: getattr(solution, field.name) for field in fields(solution)}
        extraction = Extraction(
            **known,
            calls=session.calls,
            tokens=session.tokens,
            scalars=session.scalars,
            plan=tuple(session.steps),
            algebra=algebra,
            random_starts=learner is None or learner.fell_back,
            asked=Examples(self._x, self._y),
        )
        return replace(extraction, reason=said, trace=[*self._teller.events, *solution.trace])


__all__ = ["PLANE", "Extraction", "extract"]
