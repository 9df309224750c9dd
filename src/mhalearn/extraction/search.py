"""One extraction: what has been asked, and the order of the steps."""

from __future__ import annotations

import math
import time
from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.seeds import Stream, generator
from mhalearn._runtime.types import Float64
from mhalearn.data import Examples
from mhalearn.data.label_precision import label_precision
from mhalearn.estimator import AttentionRegressor
from mhalearn.extraction.last_questions import check_length, say_biases
from mhalearn.extraction.result import Extraction
from mhalearn.extraction.settings import Settings, Teller
from mhalearn.judge.solution import Solution
from mhalearn.layer.base import Layer
from mhalearn.layer.layer import AttentionLayer
from mhalearn.learners.queries.algebra import find_by_algebra
from mhalearn.learners.queries.at_turns import Alike, count_at_turns, rank_of_images
from mhalearn.learners.queries.design import design_calls
from mhalearn.learners.queries.domain import Domain, half_sharp_size, mantissa_unit
from mhalearn.learners.queries.extension import AlgebraFound
from mhalearn.learners.queries.learner import FromAlgebra, NeedsMore
from mhalearn.learners.queries.session import BudgetSpent, Session, TimeSpent
from mhalearn.run.outcome import Outcome

RANDOM = "random sequences, to fit and to certify"
SIZE = "one sequence in several sizes"
DESIGNED = "what the others leave nearly open"
AGAIN = "one sequence once more, to learn whether answers are random"
# Random sequences, over the counting limit: of a first fit from random starts, the same of answers
# that are rounded or random, and from algebra, which needs no more than certifying does.
_RATIO, _RATIO_OF_COARSE, _RATIO_OF_ALGEBRA = 3.0, 8.0, 1.6
# The same of narrow heads, each of which is learned on its own; and of heads held by their
# projections, which are found among surplus ones.
_RATIO_OF_NARROW, _RATIO_OF_PROJECTED = 2.1, 20.0
# Fits, and sequences of each over those of the one before; of narrow heads, a few are enough.
_ROUNDS, _MORE, _MORE_OF_NARROW = 3, 2.0, 1.6
# Calls that are designed where a fit has left a direction nearly open, and the most unknowns.
_DESIGNED, _MOST_DESIGNED = 4, 1024
# Logits of random tokens, about, where the size of Theta is known.
_LOGITS = 1.5
# The same where heads write alike: small logits show little but their sum.
_LOGITS_OF_ALIKE = 5.0
# By how much tokens are smaller where heads were not found from those before.
_SMALLER = 0.7
# Sizes of tokens, among which that of random ones is chosen.
_LADDER = (0.06, 0.12, 0.25, 0.5, 2.0)
# Unknowns of Theta up to which attention is fitted with W known; rounding of exact answers.
_MOST_UNKNOWNS, _EXACT_ANSWERS = 4096, 1e-12
# Heads that a first fit has room for where their number is open.
_PLAUSIBLE = 4
# Findings that more sequences answer: a check had too few, or a parameter an error bar too wide.
_TOO_FEW = ("no test for a missing head", "parameter not resolved")
# A finding that they do not: the heads are found, and were said to be more or fewer.
_OTHER_NUMBER = "surplus heads"
_RECOVERED = (Outcome.RECOVERED, Outcome.RECOVERED_ON_SPAN)
# Seconds of a fit for which none are left; how far sums in another order are from each other.
_NO_TIME, _SAME_ANSWER = 1e-3, 1e-14


def _wants_more(solution: Solution, *, exact: bool) -> bool:
    """Whether more random sequences may tell what these did not. exact: answers are neither rounded
    nor random, so that what is left of them is not theirs."""
    first = solution.findings[0].name if solution.findings else ""
    if first == _OTHER_NUMBER:
        return False
    if solution.outcome is Outcome.FITTED:
        lacking = first in _TOO_FEW
        return exact or lacking or solution.certificate is None
    return solution.outcome in (
        Outcome.STUCK,
        Outcome.NOT_IDENTIFIED,
        Outcome.TOO_FEW_EXAMPLES,
    )


def _say(calls: int, tokens: int, scalars: int) -> str:
    named = (("call", calls), ("token", tokens), ("scalar", scalars))
    return ", ".join(f"{count} {name}{'s' * (count != 1)}" for name, count in named)


class Search:
    """One extraction: what has been asked, and the order of the steps."""

    def __init__(
        self,
        session: Session,
        domain: Domain,
        settings: Settings,
        length: int,
        teller: Teller,
    ) -> None:
        self._session, self._domain, self._settings = session, domain, settings
        self._k, self._teller = length, teller
        self._rng = generator(settings.seed, Stream.GENERIC_QUERIES)
        self._size, self._unit = 1.0, 0.0
        self._began = time.monotonic()
        self._x: Float64
        self._y: NDArray[Any]
        self._spent_on: str | None = None
        self._estimator: AttentionRegressor | None = None
        self._alike: Alike | None = None  # heads that only their turns tell apart
        self._begin()

    def _begin(self) -> None:
        """Ask about one sequence, which tells the form of answers, and once more about it."""
        x = self._domain.draw(1, self._k, self._size, self._rng)
        try:
            answer = self._session.ask(x, RANDOM)
        except BudgetSpent:
            raise ValueError(
                f"the budget does not allow one sequence of {self._k} tokens, which takes "
                f"{_say(*self._session.cost(self._k))}: raise max_calls, max_tokens or "
                "max_scalars, or lower max_length"
            ) from None
        self._x, self._y = x, answer
        if self._session.rows == "last" and self._settings.has_positions_to_both_sides:
            raise ValueError(
                "the box answers for its last row alone: heads that know positions must be causal, "
                "so that other rows can be asked for"
            )
        self._unit = max(label_precision(Examples(x, answer)).unit, mantissa_unit(answer))
        try:
            self._repeated = self._session.ask_again(x[0], answer[0], AGAIN)
        except BudgetSpent as spent:
            self._repeated, self._spent_on = 0.0, spent.purpose

    def run(self, plan: str) -> Extraction:
        algebra = self._algebra(plan)
        learner = None if algebra is None else FromAlgebra(algebra)
        solution = self._learn(algebra, learner)
        if solution is None:  # the size of the sequences was wrong too, so they are left out
            algebra = learner = None
            self._x, self._y, self._alike = self._x[:1], self._y[:1], None
            solution = self._learn(algebra, learner)
        assert solution is not None
        return self._tell(solution, algebra, learner)

    def _learn(self, algebra: AlgebraFound | None, learner: FromAlgebra | None) -> Solution | None:
        """Ask about random sequences and fit, in some rounds; None where what algebra found leads
        to no layer, and as many sequences may be asked about again."""
        heads = self._settings.known_heads or (
            _PLAUSIBLE if algebra is None else algebra.heads.n_heads
        )
        if algebra is not None:
            self._expect(algebra, heads)
        elif self._domain.is_continuous:
            self._choose_size()
        ratio, solution = self._first_ratio(algebra), None
        for round_ in range(_ROUNDS):
            more = self._ask_up_to(heads, ratio)
            if solution is not None and not more:
                break
            if learner is not None:
                last = round_ == _ROUNDS - 1 and self._session.affordable(self._k) < len(self._x)
                learner.last_resort = last or self._spent_on is not None
            try:
                solution = self._fit(learner)
            except NeedsMore:
                solution = None
                ratio *= _MORE_OF_NARROW
                if algebra is not None and algebra.rows is None:
                    self._size *= _SMALLER
                continue
            if self._spent_on is not None or not _wants_more(solution, exact=self._exact):
                break
            self._ask_designed(solution)
            ratio *= _MORE if algebra is None or algebra.rows is None else _MORE_OF_NARROW
        return solution

    def _expect(self, algebra: AlgebraFound, heads: int) -> None:
        """The sequences that heads which algebra found are best fitted to."""
        where = "by where they turn" if algebra.by_turns else "on a plane"
        self._teller.found(algebra.heads.n_heads, f"{algebra.heads.n_heads} heads, {where}")
        if algebra.by_turns and algebra.sketch is not None:
            rank = rank_of_images(algebra.heads.images)
            count = count_at_turns(heads, self._domain.d, self._k, rank)
            self._alike = Alike(algebra.sketch.theta, count)
        logits = _LOGITS_OF_ALIKE if algebra.by_turns else _LOGITS
        self._size = math.sqrt(logits / max(algebra.size, 1e-300))

    def _first_ratio(self, algebra: AlgebraFound | None) -> float:
        """Random sequences of the first fit, over the counting limit."""
        if self._settings.kinds:
            return _RATIO_OF_PROJECTED
        if algebra is None or algebra.by_turns:
            return _RATIO if self._exact else _RATIO_OF_COARSE
        return _RATIO_OF_ALGEBRA if algebra.rows is None else _RATIO_OF_NARROW

    def _algebra(self, plan: str) -> AlgebraFound | None:
        """What algebra finds, where it may be tried and is affordable."""
        why = self._why_no_algebra()
        if plan == "algebra" and why is not None:
            raise ValueError(f"plan='algebra': {why}; choose plan='auto'")
        if plan == "random" or why is not None:
            return None
        try:
            self._session.until = self._end
            found = find_by_algebra(
                self._session,
                self._domain,
                self._k,
                self._settings.seed,
                self._settings.known_heads,
                self._settings.head_dim,
                causal=self._settings.causal,
            )
        except BudgetSpent as spent:
            self._spent_on = spent.purpose
            return None
        except TimeSpent:
            return None
        finally:
            self._session.until = None  # a fit without time asks little, and tells what it can
        if found is None:
            return None
        if found.rows is None and found.heads.n_heads * self._domain.d**2 > _MOST_UNKNOWNS:
            return None
        return found

    @property
    def _end(self) -> float | None:
        limit = self._settings.max_seconds
        return None if limit is None else self._began + limit

    @property
    def _exact(self) -> bool:
        return max(self._unit, self._repeated) <= _EXACT_ANSWERS

    def _why_no_algebra(self) -> str | None:
        """Why algebra cannot be tried; None where it can."""
        settings = self._settings
        if not self._domain.is_continuous:
            return "tokens of a cube or a vocabulary cannot be moved along a plane"
        if settings.bias or settings.kinds:
            return "it knows heads of one Theta and one W each, without biases"
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
        share = 0.0
        if self._alike is not None:  # half of them, or as many as tell all of these heads
            at_turns = max(wanted // 2, math.ceil(ratio / _RATIO * self._alike.calls))
            wanted += at_turns - wanted // 2
            share = at_turns / wanted
        count = wanted - len(self._x)
        if count <= 0:
            return False
        possible = min(count, self._session.affordable(self._k))
        if possible < count:
            self._spent_on = RANDOM
        return possible > 0 and self._ask_random(possible, share)

    def _ask_random(self, count: int, share: float) -> bool:
        """share: of sequences at the turns of heads that only these tell apart."""
        x = self._domain.draw(count, self._k, self._size, self._rng, self._unit)
        if self._alike is not None:
            at_turns = np.diff(np.floor(share * np.arange(count + 1))) > 0
            x[at_turns] = self._alike.draw(int(at_turns.sum()), self._k, self._rng)
        try:
            answers = self._session.ask(x, RANDOM)
        except BudgetSpent as spent:
            self._spent_on = spent.purpose
            return False
        self._x = np.concatenate([self._x, x])
        self._y = np.concatenate([self._y, answers])
        return True

    def _ask_designed(self, solution: Solution) -> None:
        """Ask about what the sequences so far leave nearly open, where that is all that is wrong:
        tokens that may be moved freely, and a layer that explains the answers."""
        layer = solution.layer
        if solution.outcome is not Outcome.NOT_IDENTIFIED or not isinstance(layer, AttentionLayer):
            return
        plain = not (self._settings.kinds or self._settings.bias or self._settings.causal)
        small = layer.theta.size + layer.w.size <= _MOST_DESIGNED
        count = min(_DESIGNED, self._session.affordable(self._k))
        if not (plain and small and count and self._domain.is_continuous):
            return
        length = float(np.median(np.linalg.norm(self._x, axis=-1)))
        x = design_calls(layer.theta, layer.w, self._x, count, length, self._rng)
        self._x = np.concatenate([self._x, x])
        self._y = np.concatenate([self._y, self._session.ask(x, DESIGNED)])

    def _fit(self, learner: FromAlgebra | None) -> Solution:
        settings, end = self._settings, self._end
        rest = None if end is None else max(_NO_TIME, end - time.monotonic())
        self._estimator = AttentionRegressor(
            settings.n_heads,
            "newton" if learner is None else learner,
            head_dim=settings.head_dim,
            bias=settings.bias,
            causal=settings.causal,
            **settings.kinds,
            random_state=settings.seed,
            max_seconds=rest,
            on_event=self._teller.tell,
        )
        return self._estimator.fit(self._x, self._y).solution_

    def layer_at_hand(self) -> Layer | None:
        """As of `AttentionRegressor`, of the fit that is going on."""
        return None if self._estimator is None else self._estimator.layer_at_hand()

    def best_layer_so_far(self) -> Layer | None:
        """As of `AttentionRegressor`, of the newest fit."""
        return None if self._estimator is None else self._estimator.best_layer_so_far()

    def _tell(
        self, solution: Solution, algebra: AlgebraFound | None, learner: FromAlgebra | None
    ) -> Extraction:
        session = self._session
        solution = self._ask_at_last(solution)
        said = solution.reason + self._say_randomness(solution)
        if self._spent_on is not None and solution.outcome not in _RECOVERED:
            said += (
                f"; the budget is spent ({_say(session.calls, session.tokens, session.scalars)}), "
                f"and the next call would have been for {self._spent_on}"
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

    def _say_randomness(self, solution: Solution) -> str:
        if solution.outcome in _RECOVERED or self._repeated <= _SAME_ANSWER:
            return ""
        return f"; asked twice, the box answers otherwise, by {self._repeated:.2g} of its answer"

    def _ask_at_last(self, solution: Solution) -> Solution:
        """Ask what only a layer tells how to ask: whether it holds at another length, or, where
        none was found, whether the box has biases."""
        precision = max(self._unit, self._repeated)
        if solution.outcome in _RECOVERED:
            shorter = self._domain.draw(1, self._k // 2, self._size, self._rng, self._unit)[0]
            return check_length(self._session, solution, shorter, self._k, precision)
        if self._settings.bias or not self._domain.is_continuous:
            return solution
        usual = float(np.linalg.norm(self._y)) / math.sqrt(len(self._y))
        zeros = np.zeros((1, self._k, self._domain.d))
        return replace(
            solution,
            reason=solution.reason + say_biases(self._session, zeros, usual, precision),
        )
