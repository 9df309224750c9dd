"""From what was found to what is said: sentences, their numbers, and how sure they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mhalearn._runtime.types import Float64
from mhalearn.auditing.catalogue import FAULTS
from mhalearn.auditing.confidence import confidence, whole
from mhalearn.auditing.evidence import Evidence
from mhalearn.auditing.precision import finest
from mhalearn.auditing.reading import Reading
from mhalearn.auditing.result import Audit, Finding
from mhalearn.auditing.shown import choose_rows
from mhalearn.auditing.trial import Hypothesis, Step
from mhalearn.auditing.unexplained import Locus, find_locus

# Shares of the squared error from which on a fault is named although a rest remains, and the
# relative error that the rest may have.
_WORTH, _REST = 0.9, 0.3
_FAMILIES = {fault.name: fault.family for fault in FAULTS}
_SEEN = {fault.name: fault.seen for fault in FAULTS}


@dataclass(frozen=True)
class Conclusion:
    """What a search came to. hidden: how many of the last steps rounding would have hidden."""

    hypothesis: Hypothesis
    explained: bool
    rivals: tuple[Hypothesis, ...] = ()
    hidden: int = 0


def explain(
    evidence: Evidence,
    claimed: Reading,
    conclusion: Conclusion,
    tried: int,
    depth: int,
    seconds: float,
) -> Audit:
    """The audit's answer."""
    hypothesis = conclusion.hypothesis
    error = evidence.error(evidence.residual(Hypothesis(), claimed))
    residual = evidence.residual(hypothesis, claimed)
    left = evidence.error(residual)
    floor = evidence.floor_of(hypothesis, claimed) if hypothesis.steps else evidence.floor
    rounded = left
    if hypothesis.flips:
        rounded = evidence.error(evidence.residual(hypothesis.without_flips(), claimed))
    explained = conclusion.explained and left <= 1.5 * hypothesis.allowed(floor, rounded)
    findings: list[Finding] = []
    worth = explained or (left <= _REST and 1 - (left / error) ** 2 >= _WORTH)
    if hypothesis.steps and worth:
        findings += _findings(evidence, claimed, conclusion, explained, error, left)
    locus = None
    if not explained:
        shown = residual if worth else evidence.residual(Hypothesis(), claimed)
        rest = left if worth else error
        reading = (hypothesis if worth else Hypothesis()).classes(claimed)[0][0]
        locus = find_locus(evidence.forward, reading, shown, evidence.y, evidence.floor)
        findings.append(_unexplained(evidence, claimed, locus, error, rest))
        findings.sort(key=lambda one: -one.confidence)
    return Audit(
        ok=not hypothesis.steps and explained,
        precision=_precision(evidence, left) if explained else None,
        findings=tuple(findings),
        error=error,
        error_left=left if worth else error,
        floor=evidence.floor,
        explained=explained,
        locus=locus,
        n_sequences=len(evidence.y),
        n_tokens=evidence.y.shape[1],
        n_tried=tried,
        depth=depth,
        seconds=seconds,
        shown=choose_rows(evidence, claimed, hypothesis if worth else Hypothesis()),
    )


def _precision(evidence: Evidence, left: float) -> str:
    """The finest that the box is right at, or what its labels are rounded to."""
    return finest(left, evidence.floors) or evidence.precision


def _findings(
    evidence: Evidence,
    claimed: Reading,
    conclusion: Conclusion,
    explained: bool,
    error: float,
    left: float,
) -> list[Finding]:
    """One a step, those that explain most first; then what would explain as well."""
    steps = conclusion.hypothesis.steps
    found = []
    for index, step in enumerate(steps):
        others = Hypothesis(steps[:index] + steps[index + 1 :])
        before = error if len(steps) == 1 else evidence.error(evidence.residual(others, claimed))
        hidden = index >= len(steps) - conclusion.hidden
        kind = "hidden" if hidden else whole(len(steps) - conclusion.hidden)
        kind = kind if explained else "part"
        rivals = [one for one in conclusion.rivals if _stands_for(one, steps) == index]
        also = tuple(_say(claimed, one.steps[-1]) for one in rivals)
        found.append(_finding(claimed, step, before, left, kind, also))
    found.sort(key=lambda one: (-one.confidence, -one.numbers["before"]))
    for rival in conclusion.rivals:
        place = _stands_for(rival, steps)
        equal = [one for one in conclusion.rivals if _stands_for(one, steps) == place]
        instead = [steps[place], *(one.steps[-1] for one in equal if one is not rival)]
        also = tuple(_say(claimed, one) for one in instead)
        found.append(_finding(claimed, rival.steps[-1], error, left, whole(len(steps)), also))
    return found


def _stands_for(rival: Hypothesis, steps: tuple[Step, ...]) -> int:
    """Which step a rival has another for, by its last one: the one that it is without."""
    kept = {step.edit.said for step in rival.steps[:-1]}
    return next(i for i, step in enumerate(steps) if step.edit.said not in kept)


def _finding(
    claimed: Reading, step: Step, before: float, after: float, kind: str, also: tuple[str, ...]
) -> Finding:
    """also: what would explain as well, which the finding then shares its likelihood with."""
    edit = step.edit
    numbers = {"before": before, "after": after}
    if edit.dial is not None:
        numbers[edit.dial.name] = edit.dial.value
    said = f"{_say(claimed, step)} (relative error falls from {before:.1e} to {after:.1e})"
    if also:
        said += f"; as well explained by: {'; '.join(also)}"
    return Finding(
        edit.fault,
        _FAMILIES[edit.fault],
        said,
        step.heads or (),
        numbers,
        confidence(kind, len(also)),
        _SEEN[edit.fault],
        also,
        kind,
    )


def _say(claimed: Reading, step: Step) -> str:
    """The clause of an edit, with its heads; those of one key head are said to be so."""
    if step.heads is None:
        return step.edit.said
    heads = [str(head + 1) for head in step.heads]
    where = f"head {heads[0]}" if len(heads) == 1 else f"heads {', '.join(heads)}"
    groups = {claimed.kv_of[head] for head in step.heads}
    whole = [i for i in range(claimed.n_heads) if claimed.kv_of[i] in groups]
    if 1 < claimed.groups < claimed.n_heads and len(groups) == 1 and len(heads) == len(whole):
        where += f" (of key head {groups.pop() + 1})"
    return f"{where} of {claimed.n_heads}: {step.edit.said}"


def _unexplained(
    evidence: Evidence, claimed: Reading, locus: Locus, error: float, rest: float
) -> Finding:
    """What is left, and where; whether it is as coarse arithmetic would leave it."""
    said = f"no fault of the catalogue explains a relative error of {rest:.1e}: "
    said += f"it lies {locus.describe()}"
    like = _low_precision(evidence, claimed)
    if like is not None:
        said += f"; it is as {like} throughout would leave it"
    numbers = {"before": error, "after": rest}
    kind = "unexplained"
    return Finding(kind, kind, said, locus.heads, numbers, confidence(kind), kind=kind)


def _low_precision(evidence: Evidence, claimed: Reading) -> str | None:
    """The format whose rounding the residual goes along with, if there is one."""
    residual = evidence.residual(Hypothesis(), claimed)[:8]
    error = evidence.error(evidence.residual(Hypothesis(), claimed))
    forward = evidence.forward
    for name in ("float16", "bfloat16"):
        if error > evidence.floors[name] or name == evidence.precision:
            continue
        coarse, exact = forward.some(slice(8), name), forward.some(slice(8))
        change = np.where(
            exact.rows[..., None], coarse.outputs(claimed) - exact.outputs(claimed), 0
        )
        if _cosine(residual, change) > 0.3:
            return name
    return None


def _cosine(a: Float64, b: Float64) -> float:
    size = float(np.sqrt(np.sum(a**2) * np.sum(b**2)))
    return float(np.sum(a * b)) / size if size > 0 else 0.0
