"""From examples to a solution: split, learn, polish, judge, in that order. No mathematics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mhalearn.data import Examples, Survey
from mhalearn.data.box import Box
from mhalearn.data.input_information import measure_information
from mhalearn.data.label_precision import DOUBLE, Precision, label_precision
from mhalearn.data.span import find_coordinates
from mhalearn.judge.box_answers import box_in_span
from mhalearn.judge.evidence import Evidence
from mhalearn.judge.kind_words import write_setting
from mhalearn.judge.refit import may_refit, refit
from mhalearn.judge.shown_example import choose_example
from mhalearn.judge.solution import Solution
from mhalearn.judge.span import Fit, lift_fit
from mhalearn.judge.subsets import Subsets, split_to_certify
from mhalearn.judge.verdict import agree, judge
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.projected_layer import ProjectedLayer
from mhalearn.layer.span_coordinates import SpanCoordinates
from mhalearn.learners.protocol import Learner
from mhalearn.learners.settings import check_candidate
from mhalearn.run.outcome import Candidate, Outcome
from mhalearn.run.run import Run
from mhalearn.run.watch import Watch
from mhalearn.solvers.merge_heads import reduce_heads
from mhalearn.solvers.polish import polish_on

# Heads to have room for where their number is open and their rank is not known.
_PLAUSIBLE = 8


@dataclass(frozen=True)
class Task:
    """What one fit works on: the class of layers and the data, how to learn, and what to say.

    working_set: the examples in memory, or all; box: what labels are asked of, where they are.
    residual: tokens were taken off the labels.
    metadata: of a layer that was learned from so many examples. settings: as a solution tells them.
    open_fields: of the architecture, whose values are to be found.
    coordinates: of the tokens' span, to learn and judge in, where the user's will not do.
    """

    architecture: Architecture
    examples: Examples
    working_set: Examples
    survey: Survey
    box: Box | None
    learner: Learner
    options: Any
    polish: bool
    residual: bool
    seed: int
    run: Run
    metadata: Callable[[int], dict[str, str]]
    settings: dict[str, Any]
    open_fields: frozenset[str] = frozenset()
    coordinates: SpanCoordinates | None = None

    @property
    def searched(self) -> Architecture:
        """The class of layers in the coordinates that are learned in."""
        return self.architecture if self.coordinates is None else self.coordinates.reduced

    def inside(self, examples: Examples) -> Examples:
        """Examples in those coordinates."""
        return examples if self.coordinates is None else examples.in_span(self.coordinates)


def gather(
    examples: Examples, architecture: Architecture, seed: int, run: Run
) -> tuple[Examples, Examples, Survey]:
    """The examples, in memory if they are few; the working set, or all; and their survey."""
    plausible = architecture
    if plausible.n_heads is None:
        any_rank = plausible.head_dim is None
        plausible = plausible.with_heads(_PLAUSIBLE if any_rank else plausible.usual_heads())
    count = examples.working_set_size(plausible)
    if count == examples.n:
        examples = examples if examples.in_memory else examples.subset(slice(None))
        return examples, examples, examples.survey()
    survey, working_set = examples.survey_and_sample(count, seed)
    detail = f"{count} of {examples.n} examples"
    run.emit("working set", count, detail=detail, of=examples.n)
    return examples, working_set, survey


def solve(task: Task) -> Solution:
    """Split, learn, polish, judge, and under noise fit once more; in coordinates of the tokens'
    span where those of the user will not do."""
    # A difference is rounded as its terms are, and not in proportion to its own size.
    precision = DOUBLE if task.residual else label_precision(task.working_set)
    task = replace(task, coordinates=_find_coordinates(task, precision))
    inside = task.inside(task.working_set)
    information = measure_information(inside, task.searched, precision.unit)
    given = split_to_certify(task.examples, task.working_set, task.searched, information, task.seed)
    subsets = Subsets(
        task.inside(given.every),
        inside,
        task.inside(given.train),
        None if given.certify is None else task.inside(given.certify),
        given.certify_groups,
    )
    task, learned, told = _fill_fields(task, subsets.train)
    learned = learned or _learn(task, given, subsets.train)
    candidate, converged = _polish(task, learned, subsets.train)
    box = task.box
    if box is not None and task.coordinates is not None:
        box = box_in_span(box, task.coordinates, task.working_set)
    evidence = Evidence(
        candidate=candidate,
        architecture=task.searched,
        subsets=subsets,
        run=task.run,
        precision=precision,
        information=information,
        polished=task.polish or not task.learner.needs_polish,
        converged=converged,
        box=box,
        given=given.train,
        residual=task.residual,
        time_is_up=task.run.begin_judging(),
    )
    return _conclude(task, evidence, given, precision, told)


def _fill_fields(task: Task, train: Examples) -> tuple[Task, Candidate | None, str]:
    """The task with its open fields filled, the layer where that is known by then, and what was
    found, in words that end a reason."""
    if not task.open_fields:
        return task, None, ""
    names = sorted(task.open_fields)
    found = task.learner.find_kind(
        train, task.architecture, task.open_fields, task.run, task.options
    )
    if found is None:
        left = ", ".join(names)
        return task, None, f"; {left} could not be found: no kind of heads explains the examples"
    architecture, candidate = found
    told = ", ".join(write_setting(name, getattr(architecture, name)) for name in names)
    task.run.emit("kind of heads", detail=told)
    if candidate is not None:
        check_candidate(candidate, task.learner, architecture)
    return replace(task, architecture=architecture), candidate, f"; found: {told}"


def _find_coordinates(task: Task, precision: Precision) -> SpanCoordinates | None:
    """Those to learn and judge in, told to the run; None where the user's will do, where the
    learner does not know the layers of the others, or where kinds of heads are to be found."""
    if task.open_fields:
        return None
    some = task.working_set.n < task.examples.n
    coordinates = find_coordinates(
        task.working_set,
        task.architecture,
        precision,
        others=task.examples if some else None,
        whiten=task.learner.whitens,
    )
    if coordinates is None or task.learner.supports(coordinates.reduced) is not None:
        return None
    span = coordinates.span
    coordinates = coordinates.recorded(task.run.checkpoint.once("span", coordinates.arrays))
    task.run.enter(coordinates)
    detail = f"{span.rank} of {span.d} dimensions, whitened"
    task.run.emit("span", span.rank, detail=detail, of=span.d)
    return coordinates


def _learn(task: Task, given: Subsets, train: Examples) -> Candidate:
    """Run the learner on `train` or, if it can, on all but `certify`.

    given: the subsets as the user has them, whose hashes the survey knows.
    """
    learner, all_given = task.learner, train
    if given.has_more and learner.streams:
        certify = given.certify
        apart = np.zeros(0, np.uint64) if certify is None else certify.survey().input_hashes
        all_given = task.inside(given.every.view(~np.isin(task.survey.input_hashes, apart)))
        all_given = all_given.with_working_set(train)

    def learn() -> Candidate:
        found = learner.learn(all_given, task.searched, task.run, task.options)
        return check_candidate(found, learner, task.searched)

    return task.run.once("solution", learn)


def _polish(task: Task, learned: Candidate, train: Examples) -> tuple[Candidate, bool]:
    """The candidate to be judged: polished, with no head too many, unless the search failed; and
    whether the descent came to rest."""
    layer, converged = learned.layer, True
    if task.polish and learned.outcome is Outcome.FITTED:
        layer, loss, converged = polish_on(train, layer, task.searched, task.run)
        if isinstance(layer, AttentionLayer):
            layer, _ = reduce_heads(layer, loss, train, task.searched, task.run)
    return replace(learned, layer=layer.replace(metadata=task.metadata(train.n))), converged


def _conclude(
    task: Task, evidence: Evidence, given: Subsets, precision: Precision, found: str
) -> Solution:
    """The verdict and, where noise is what is left, a layer fitted to all examples.

    found: what of the class was found, in words that end the reason.
    """
    run, certificate = task.run, evidence.certificate
    if certificate is not None:
        run.emit("certificate", loss=certificate.relative_mse, detail=certificate.reason)
    verdict = judge(evidence)
    layer, told = evidence.layer, ""
    certificate = agree(evidence, verdict)
    if certificate is not None and task.polish and may_refit(verdict, evidence):
        cause = "Noise" if verdict.findings[0].name == "noise" else "Rounding"
        layer, certificate, told = refit(certificate, evidence, cause, task.metadata)
    if task.coordinates is not None and isinstance(layer, AttentionLayer | ProjectedLayer):
        fit = Fit(
            layer, verdict, certificate, given.train, given.certify, task.working_set, precision
        )
        watch = Watch(run, "identifiability")
        layer, verdict, certificate = lift_fit(fit, task.coordinates, watch)
    reason = verdict.reason + told + found
    run.emit("outcome", detail=f"{verdict.outcome.name}: {reason}")
    return Solution(
        layer=layer.replace(seen=task.survey.remembered),
        outcome=verdict.outcome,
        trace=run.events,
        reason=reason,
        certificate=certificate,
        settings=task.settings,
        findings=verdict.findings,
        phases=evidence.candidate.phases,
        example=choose_example(
            given.train if given.certify is None else given.certify,
            held_out=certificate is not None and not certificate.refitted,
            causal=task.architecture.causal,
        ),
        token_spectrum=None if task.coordinates is None else task.coordinates.span.spectrum,
    )
