"""Which changes explain a box: one at a time, then pairs, then more, to a stated depth."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from scipy import optimize

from mhalearn.auditing.catalogue import list_edits
from mhalearn.auditing.fault import Context, Dial, Edit
from mhalearn.auditing.reading import Reading
from mhalearn.auditing.trial import Attempt, Hypothesis, State, Trial

# Faults whose number is fitted, of those tried, the most promising first.
_FITTED = 4
# A change of which less than this part goes along with the residual is fitted close to the claim.
_NEAR = 0.4
# Attempts that leave up to so much more, squared, may explain as well, and how many are kept.
_TIE, _MOST_EQUAL = 1.3, 8
# Attempts of which it is measured what a box like them rounds, where they leave at most so much of
# the claim's error, and so many times what the claim's own box rounds.
_MEASURED, _MOSTLY, _ROUNDS = 3, 0.2, 8.0
# Pairs from which a third change is looked for, and what a second one must promise to explain of
# the squared residual to have its number fitted.
_BEAM, _WORTH_FITTING = 3, 0.5
# Of a residual that rounding may have left, a change must explain so much to be believed, and the
# residual must grow by about as much as the change says.
_SMALL, _SMALL_FITTED, _SLOPE = 0.03, 0.15, 0.3
# Times the logarithm of how many changes are tried, over how many numbers: four times what the best
# of so many has by chance of white noise, and rounding is not quite that.
_CHANCE = 8.0


@dataclass(frozen=True)
class Found:
    """hypotheses: those that explain best, the simplest first; explained: down to the floor."""

    hypotheses: tuple[Hypothesis, ...]
    explained: bool


class Search:
    """Looks for what a box does, on a trial's sequences.

    floor: the relative error below which a box is right; floor_of: that of a box which does what a
    hypothesis says. depth: changes made together, at most.
    """

    def __init__(
        self,
        trial: Trial,
        claimed: Reading,
        context: Context,
        floor: float,
        floor_of: Callable[[Hypothesis], float],
        depth: int,
        deadline: float,
    ) -> None:
        self.trial, self.claimed, self.context = trial, claimed, context
        self.floor, self.floor_of = floor, floor_of
        self.depth, self.deadline = depth, deadline
        self.before = 0.0  # the claim's relative error

    def run(self) -> Found:
        """The explanation that is found, which may be none: the claim itself."""
        start = self.trial.state(Hypothesis(), self.claimed)
        self.before = float(np.sqrt(start.square))
        attempts = self._level(start)
        equal = self._explaining(attempts)
        if not equal and self.depth > 1:
            equal = self._deeper(attempts)
        if not equal:
            return self._partial(start, attempts)
        found = [one.hypothesis for one in equal]
        for index in range(len(found[0].steps) - 1):
            found += self._instead(found[0], index)
        return Found(tuple(found), True)

    def _instead(self, best: Hypothesis, index: int) -> list[Hypothesis]:
        """Other changes that would do in the place of one, with the others as they are."""
        others = Hypothesis(best.steps[:index] + best.steps[index + 1 :])
        attempts = self._level(self.trial.state(others, self.claimed))
        taken = best.steps[index].edit.said
        equal = self._explaining(attempts)
        return [one.hypothesis for one in equal if one.step.edit.said != taken]

    def smaller(self, hypothesis: Hypothesis) -> Attempt | None:
        """A further change that rounding would hide, were it not for its direction.

        Trust: a right change has slope one. Rounding has nothing to do with any change, so that its
        slope along one is near zero; a change that explains three percent of a residual of many
        thousand numbers is no accident.
        """
        state = self.trial.state(hypothesis, self.claimed)
        taken = set(hypothesis.names)
        found = None
        attempts = self._level(state, small=True)
        # The best of many changes, each for some of the heads, explains that much of any noise.
        chance = np.log(len(attempts)) + self.claimed.n_heads * np.log(2)
        least = _CHANCE * float(chance) / self.trial.labels.size
        for one in attempts:
            before = self._controlled(state, one.step.edit)
            if one.step.edit.fault in taken or not _is_real(one, before, least):
                continue
            if found is None or one.square < found.square:
                found = one
        return found

    def _controlled(self, state: State, edit: Edit) -> float:
        """What is left before an edit is made, or by what it does beside, if that is less."""
        if edit.control is None:
            return state.square
        return min(
            state.square, self.trial.attempt(state, replace(edit, change=edit.control)).square
        )

    def _level(self, state: State, *, small: bool = False, least: float = 0.0) -> list[Attempt]:
        """Every edit tried on a state, the best first; numbers are fitted where that may help.

        It does not where an edit without a number explains all, which is plainer. small: the
        residual is rounding, of which a change that hardly goes along with it explains nothing.
        least: what an edit must promise to be fitted.
        """
        context = replace(self.context, suspects=self.trial.suspects(state))
        attempts = [self.trial.attempt(state, edit) for edit in list_edits(state.reading, context)]
        attempts.sort(key=lambda one: one.square)
        plain = next((one for one in attempts if one.step.edit.dial is None), None)
        if not small and plain is not None and plain.error <= self.floor:
            return attempts
        fitted: dict[tuple[str, str], Attempt] = {}
        for one in sorted(attempts, key=lambda one: -_promise(one, state.square)):
            dial = one.step.edit.dial
            if dial is None or (small and one.along < _SMALL):
                continue
            if len(fitted) < _FITTED and _promise(one, state.square) >= least:
                fitted.setdefault((one.step.edit.fault, dial.name), one)
        attempts += [self._fit(state, one) for one in fitted.values()]
        return sorted(attempts, key=lambda one: one.square)

    def _fit(self, state: State, attempt: Attempt) -> Attempt:
        """The number of an edit that leaves least, as round as it may be."""
        dial = attempt.step.edit.dial
        assert dial is not None
        low, high = dial.neighbours()
        if dial.claimed and dial.value > 0 and not dial.whole and 0 < attempt.reach < _NEAR:
            # Much nearer to the claim: beyond twice as far, no head would have the change.
            ends = dial.claimed, dial.claimed * (dial.value / dial.claimed) ** (2 * attempt.reach)
            low, high = min(ends), max(ends)
        tried: dict[float, Attempt] = {dial.value: attempt}

        def square(value: float) -> float:
            if value not in tried:
                tried[value] = self.trial.attempt(state, dial.make(value))
            return tried[value].square

        if dial.whole:
            _try_whole(square, int(low), int(high), int(dial.value))
        elif low > 0:
            _minimise(square, np.log(max(low, 1e-13)), np.log(max(high, 1e-13)))
        best = min(tried.values(), key=lambda one: one.square)
        return best if dial.whole else self._rounder(square, tried, best)

    def _rounder(
        self, square: Callable[[float], float], tried: dict[float, Attempt], best: Attempt
    ) -> Attempt:
        assert best.step.edit.dial is not None
        value = best.step.edit.dial.value
        for digits in range(1, 6):
            candidate = float(f"{value:.{digits - 1}e}")
            if candidate > 0 and square(candidate) <= 1.02 * best.square + 1e-26:
                return tried[candidate]
        return best

    def _explaining(self, attempts: list[Attempt]) -> tuple[Attempt, ...]:
        """Those that explain all, the simplest first; none where nothing does."""
        attempts = [
            one for at, one in enumerate(attempts) if self._explains(one, self._floor_of(at, one))
        ]
        if not attempts:
            return ()
        least = attempts[0].square
        equal: dict[tuple[object, ...], Attempt] = {}
        for one in attempts:
            if one.square > _TIE * least + 1e-28:
                break
            equal.setdefault((one.step.edit.fault, one.step.edit.said, one.step.heads), one)
        kept = list(equal.values())[:_MOST_EQUAL]
        return tuple(sorted(kept, key=lambda one: (*one.hypothesis.plainness, one.square)))

    def _explains(self, attempt: Attempt, floor: float) -> bool:
        """Down to what a box rounds; what is rounded once more, to a part of what that does."""
        hypothesis = attempt.hypothesis
        if attempt.error > hypothesis.allowed(floor, self.before):
            return False
        if attempt.error <= floor:
            return True
        before = self.trial.state(hypothesis.without_flips(), self.claimed).square
        return attempt.error <= hypothesis.allowed(floor, float(np.sqrt(before)))

    def _floor_of(self, place: int, attempt: Attempt) -> float:
        """What a box like an attempt rounds; measured for the best, where that may be decisive."""
        near = attempt.error <= min(_MOSTLY * self.before, _ROUNDS * self.floor)
        if place >= _MEASURED or not near or attempt.error <= self.floor:
            return self.floor
        return self.floor_of(attempt.hypothesis)

    def _deeper(self, singles: list[Attempt]) -> tuple[Attempt, ...]:
        """Pairs: each fault's best edit, with every other; then a third change to the best."""
        bases: dict[str, Attempt] = {}
        for one in singles:
            if np.isfinite(one.square):
                bases.setdefault(one.step.edit.fault, one)
        pairs: list[Attempt] = []
        for base in bases.values():
            for hypothesis in _all_or_some(base, self.claimed.n_heads):
                if time.monotonic() > self.deadline:
                    break
                state = self.trial.state(hypothesis, self.claimed)
                attempts = self._level(state, least=_WORTH_FITTING)
                pairs += attempts[:4]
                if found := self._explaining(attempts):
                    return found
        if self.depth < 3:
            return ()
        pairs.sort(key=lambda one: one.square)
        for pair in pairs[:_BEAM]:
            if time.monotonic() > self.deadline:
                break
            attempts = self._level(self.trial.state(pair.hypothesis, self.claimed))
            if found := self._explaining(attempts):
                return found
        return ()

    def _partial(self, start: State, attempts: list[Attempt]) -> Found:
        """What explains most, where nothing explains all."""
        some = [one for one in attempts if one.square < start.square]
        return Found((some[0].hypothesis if some else Hypothesis(),), False)


def _all_or_some(attempt: Attempt, heads: int) -> list[Hypothesis]:
    """A change for the heads that it fits, and for all where it fits most: the others may have it
    too, and another one besides."""
    found, some = [attempt.hypothesis], attempt.step.heads
    if some is not None and 2 * len(some) >= heads:
        found.append(attempt.base.with_step(replace(attempt.step, heads=None)))
    return found


def _promise(attempt: Attempt, before: float) -> float:
    """What share of a squared residual another number may explain: as much as this one does, or as
    a smaller step in its direction would."""
    there = 1 - attempt.square / before if before > 0 else 0.0
    return max(there, attempt.along)


def _is_real(attempt: Attempt, before: float, least: float) -> bool:
    """Whether a change explains a part of a small residual; least: what any would by chance."""
    share = 1 - attempt.square / before if before > 0 else 0.0
    if share < least:
        return False
    dial = attempt.step.edit.dial
    if dial is None:
        return share >= _SMALL and abs(attempt.slope - 1) <= _SLOPE
    return share >= _SMALL_FITTED and _is_another(dial)


def _is_another(dial: Dial) -> bool:
    """Whether a fitted number is another than was claimed, and not the same one rounded."""
    if dial.claimed is None or dial.claimed == 0:
        return True
    return abs(dial.value / dial.claimed - 1) > 0.03


def _try_whole(square: Callable[[float], float], low: int, high: int, best: int) -> None:
    """Whole numbers between two: all where they are few, else ever closer to the best."""
    step = max(1, (high - low) // 16)
    while True:
        tried = {value: square(float(value)) for value in range(low, high + 1, step) if value > 0}
        best = min(tried, key=lambda value: tried[value])
        if step == 1:
            return
        low, high, step = best - step, best + step, max(1, step // 4)


def _minimise(square: Callable[[float], float], low: float, high: float) -> None:
    """Try numbers between two, on a logarithmic scale: a few, then ever closer to the best."""
    if high - low < 1e-9:
        return
    points = np.linspace(low, high, 7)
    values = [square(float(np.exp(point))) for point in points]
    at = int(np.argmin(values))
    bounds = (points[max(0, at - 1)], points[min(6, at + 1)])
    optimize.minimize_scalar(
        lambda log: square(float(np.exp(log))),
        bounds=bounds,
        method="bounded",
        options={"xatol": 1e-9, "maxiter": 40},
    )
