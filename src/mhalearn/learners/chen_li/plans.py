"""The six steps as a record: the paper's, the practical ones, and any of the reader's own."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from mhalearn._runtime.types import Float64
from mhalearn.layer.layer import AttentionLayer
from mhalearn.learners.chen_li.body_shape import fit_shape
from mhalearn.learners.chen_li.breakdown import Breakdown, check_rows
from mhalearn.learners.chen_li.decode import Decoded, decode_rows
from mhalearn.learners.chen_li.events import certification_stage, emit_rows, warn
from mhalearn.learners.chen_li.net_steps import literal_net_step, search_net_step
from mhalearn.learners.chen_li.phase1_crude_sum import CrudeSum, estimate_projection_sum, paper_sum
from mhalearn.learners.chen_li.phase2_body import ConvexBody, sculpt_body, sculpt_within
from mhalearn.learners.chen_li.phase2_certification import (
    CertifiedRows,
    certify_rows,
    fit_simplex,
    screen_pairs,
)
from mhalearn.learners.chen_li.phase2_every_row import certify_every_row
from mhalearn.learners.chen_li.phase3_refined_sum import (
    RefinedSum,
    large_margin_rows,
    refine_projection_sum,
)
from mhalearn.learners.chen_li.phase5_span import span_by_membership, span_by_queries
from mhalearn.learners.chen_li.phase6_net import NetResult
from mhalearn.learners.chen_li.phases import Body
from mhalearn.learners.chen_li.span import Span, span_angle
from mhalearn.learners.chen_li.task import Task
from mhalearn.learners.options import PLANS

# Tolerances of the body that is walked through, over those of the body: the minimum-norm point is
# on the boundary of the one and inside the other.
_STRETCH = 1.5
# Features up to which the literal body's programmes end within minutes.
_LARGEST_LITERAL = 32


@dataclass(frozen=True)
class Plan:
    """Which function runs in each phase; `replace(PRACTICAL, certify=mine)` changes one.

    crude_sum: phase 1. Task -> CrudeSum.
    certify: phases 2 and 4. Task, sum (d, e), round (0 with the crude sum) -> CertifiedRows.
    sculpt: phases 2 and 4. Task, rows, heads, round -> a body: anything with a `proxy`.
    refine_sum: phase 3. Task, body, sum, round -> RefinedSum.
    span: phase 5. Task, body, rows, heads -> Span.
    net: phase 6. Task, Span -> NetResult.
    decode: past it, or None. Task, layer -> Decoded.
    literal: the net is validated on examples that no phase sees.
    """

    name: str
    crude_sum: Callable[[Task], CrudeSum]
    certify: Callable[[Task, Float64, int], CertifiedRows]
    sculpt: Callable[[Task, CertifiedRows, int, int], Any]
    refine_sum: Callable[[Task, Any, Float64, int], RefinedSum]
    span: Callable[[Task, Any, CertifiedRows | None, int], Span]
    net: Callable[[Task, Span], NetResult]
    decode: Callable[[Task, AttentionLayer], Decoded] | None = None
    literal: bool = False

    def __repr__(self) -> str:
        """By name: a function's address would differ in a run that is resumed."""
        return f"Plan({self.name!r})"


# Phase 1.


def _crude_sum(task: Task) -> CrudeSum:
    watch = task.watcher("phase 1: crude sum")
    return estimate_projection_sum(task.examples, task.constants, watch=watch)


def _paper_sum(task: Task) -> CrudeSum:
    return paper_sum(task.examples, watch=task.watcher("phase 1: crude sum"))


# Phases 2 and 4.


def certify_and_confirm(task: Task, total: Float64, round_: int = 0) -> CertifiedRows:
    """Screen pairs, keep the rows that the programme confirms.

    A row is confirmed when, over the whole simplex, the linear programme still puts its weight on
    the screened pair.
    """
    constants, d = task.constants, task.d
    later = constants.later_rows[(task.n_heads or 2) > 2]
    count = (later if round_ else constants.first_rows) * d**2

    def solve() -> CertifiedRows:
        watch = task.watcher(certification_stage(round_))
        rows = screen_pairs(task.examples, total, count, constants=constants, watch=watch)
        worst = constants.worst_score
        usable = rows.select(rows.score <= worst)
        check_rows(len(usable), f"certify at score {worst:g}", d, round_, constants)
        # A linear programme of long labels takes long, and false rows are rare among them.
        certify = certify_rows if d <= constants.largest_dense else fit_simplex
        programme = certify(usable.tokens, usable.labels, total)
        return replace(usable, attention=programme.attention, residual=programme.residual)

    solved = task.once(CertifiedRows, f"certified rows {round_}", solve)
    on_pair = np.take_along_axis(solved.attention, solved.pair, axis=1).sum(axis=1)
    confirmed = solved.select(on_pair >= constants.on_pair)
    emit_rows(solved, confirmed, round_, task.examples, task.run)
    check_rows(len(confirmed), "are confirmed by the programme", d, round_, constants)
    return confirmed


def _certify_every_row(task: Task, total: Float64, round_: int = 0) -> CertifiedRows:
    constants = task.constants
    later = round_ > 0
    epsilon, tolerance = constants.epsilon[later], constants.tolerance[later]
    most = constants.most_rows[later] * task.d**2

    def solve() -> CertifiedRows:
        watch = task.watcher(certification_stage(round_))
        return certify_every_row(
            task.examples, total, epsilon, tolerance, most, constants.support, watch=watch
        )

    rows = task.once(CertifiedRows, f"certified rows {round_}", solve)
    emit_rows(rows, rows, round_, task.examples, task.run)
    check_rows(len(rows), f"certify at epsilon {epsilon:g}", task.d, round_, constants)
    return rows


def _fit_shape(task: Task, rows: CertifiedRows, heads: int, round_: int) -> Body:
    constants = task.constants
    return fit_shape(rows, heads, constants.trusted_rows * task.d**2, constants)


def _sculpt_within(task: Task, rows: CertifiedRows, heads: int, round_: int) -> Body:
    if task.d > _LARGEST_LITERAL:
        raise Breakdown(
            "phase 2: body",
            f"d = {task.d}: the literal body's programmes have d^2 unknowns and are for d up to "
            f"{_LARGEST_LITERAL}; the practical plan goes on",
            d=task.d,
        )
    return sculpt_within(rows, task.constants)


# Phase 3.


def _refine(task: Task, body: Any, total: Float64, round_: int, *, robust: bool) -> RefinedSum:
    constants = task.constants
    rows = large_margin_rows(
        task.examples,
        body.proxy,
        constants.margin_rows * task.d,
        repeats=constants.margin_repeats,
        watch=task.watcher("phase 3: refined sum"),
    )
    return refine_projection_sum(rows, total, robust=robust, constants=constants)


# Phase 5.


def _span_of_eigenvectors(task: Task, body: Any, rows: CertifiedRows | None, heads: int) -> Span:
    """The eigenvectors' span; what decoding makes of it is the check."""
    return Span(body.proxy, body.wide)


def _span_of_shape(task: Task, body: Any, rows: CertifiedRows | None, heads: int) -> Span:
    """The eigenvectors' span, and its angle to that by queries to a body of the same rows."""
    constants, d = task.constants, task.d
    span = Span(body.proxy, body.wide)
    if rows is None or heads == 1 or d > constants.largest_queried:
        return span
    asked = sculpt_body(rows.select(slice(0, constants.queried_rows * d**2)), span.proxy, constants)
    queried = span_by_queries(asked, heads, task.run.seed)
    angle = span_angle(queried, span)
    if angle > constants.widest_angle:
        warn(
            "phase 5: span",
            f"queries to the body and eigenvectors disagree: a sine of {angle:.2g} between their "
            "spans, so that the rows hardly determine it",
            task.run,
            angle=angle,
        )
    return replace(span, angles=(("linear optimisation", angle),), queries=queried.queries)


def _span_by_membership(task: Task, body: Any, rows: CertifiedRows | None, heads: int) -> Span:
    """By membership alone; beside it by linear optimisation, and by eigenvectors."""
    constants, seed = task.constants, task.run.seed
    inside = proxy = body.proxy
    walked = body
    if isinstance(body, ConvexBody):
        walked, proxy = body.without_violated(inside, _STRETCH), body.stretch(inside) * inside
    span = span_by_membership(walked, inside, heads, seed, proxy=proxy, constants=constants)
    task.check_time("phase 5: span")
    angles = []
    if heads > 1:
        others = {"linear optimisation": span_by_queries(body, heads, seed)}
        if rows is not None:
            trusted = constants.trusted_rows * task.d**2
            others["eigenvectors"] = fit_shape(rows, heads, trusted, constants).span
        angles = [(name, span_angle(span, other)) for name, other in others.items()]
    return replace(span, angles=tuple(angles))


PRACTICAL = Plan(
    name="practical",
    crude_sum=_crude_sum,
    certify=certify_and_confirm,
    sculpt=_fit_shape,
    refine_sum=partial(_refine, robust=True),
    span=_span_of_shape,
    net=search_net_step,
)
"""The default: least squares, eigenvectors and random starts. Trust: a heuristic."""
DECODE = replace(PRACTICAL, name="decode", span=_span_of_eigenvectors, decode=decode_rows)
"""The same, after which every row is decoded. Trust: a heuristic."""
LITERAL = Plan(
    name="literal",
    crude_sum=_paper_sum,
    certify=_certify_every_row,
    sculpt=_sculpt_within,
    refine_sum=partial(_refine, robust=False),
    span=_span_by_membership,
    net=literal_net_step,
    literal=True,
)
"""The algorithm of Chen & Li, as far as its sources state it, with numbers of ours where they leave
them open. Trust: their theorem has no constants, so that nothing is proved at these; each step says
what may be said of it."""
_NAMED = dict(zip(PLANS, (PRACTICAL, LITERAL, DECODE), strict=True))


def find_plan(plan: str | Plan) -> Plan:
    """A plan by its name, or the plan itself."""
    if isinstance(plan, Plan):
        return plan
    if plan not in _NAMED:
        raise ValueError(f"plan={plan!r}: pass one of {', '.join(_NAMED)}, or a Plan")
    return _NAMED[plan]
