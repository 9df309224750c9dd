"""The six phases of Chen & Li in their order."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from mhalearn._runtime.devices import any_process
from mhalearn._runtime.threads import one_lapack_thread
from mhalearn._runtime.types import Float64
from mhalearn.data import Examples
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.dense import Dense
from mhalearn.layer.layer import AttentionLayer
from mhalearn.learners.builtin import ChenLi
from mhalearn.learners.chen_li.body_shape import BodyShape, fit_shape
from mhalearn.learners.chen_li.breakdown import (
    TRUSTED,
    Breakdown,
    check_feasible,
    check_label_dimension,
    check_rank,
    check_rows,
    check_strength,
)
from mhalearn.learners.chen_li.events import (
    certification_stage,
    emit_breakdown,
    emit_crude,
    emit_heads,
    emit_net,
    emit_one_head,
    emit_rows,
    emit_shape,
    emit_span,
    emit_sum,
    emit_theory,
)
from mhalearn.learners.chen_li.phase1_crude_sum import CrudeSum, estimate_projection_sum
from mhalearn.learners.chen_li.phase2_body import ConvexBody, sculpt_body
from mhalearn.learners.chen_li.phase2_certification import CertifiedRows, certify_rows, screen_pairs
from mhalearn.learners.chen_li.phase3_refined_sum import (
    MarginRows,
    RefinedSum,
    large_margin_rows,
    refine_projection_sum,
)
from mhalearn.learners.chen_li.phase5_span import span_angle, span_by_queries
from mhalearn.learners.chen_li.phase6_net import NetResult, search_net
from mhalearn.learners.chen_li.streaming import Watcher
from mhalearn.learners.options import ChenLiOptions
from mhalearn.run.checkpoint import from_arrays, to_arrays
from mhalearn.run.outcome import Candidate, Outcome
from mhalearn.run.run import Run
from mhalearn.solvers.scaled_problem import make_problem

_DEFAULTS = ChenLiOptions()


class OutOfTime(Exception):
    """The time limit came in this phase."""


@dataclass(frozen=True)
class Phases:
    """Everything the phases found, to be looked at."""

    crude: CrudeSum
    rows: tuple[CertifiedRows, ...]  # with the crude sum, then with each refined one
    body: ConvexBody
    shapes: tuple[BodyShape, ...]  # from these rows
    margins: tuple[MarginRows, ...]
    sums: tuple[RefinedSum, ...]
    span_angle: float  # sine between the span by eigenvectors and by queries to the body
    net: NetResult


def learn_chen_li(
    examples: Examples,
    architecture: Architecture,
    run: Run,
    options: ChenLiOptions = _DEFAULTS,
) -> Candidate:
    """Learn a layer by the six phases, from random examples alone.

    What needs few examples takes them from the working set.
    Trust: the phases are those of Chen & Li (STOC 2025), proved for uniform +-1 inputs under their
    non-degeneracy conditions with N = (kd)^Theta(m) examples and (kd)^O(m^3) time; run as here,
    with robust least squares and far fewer examples, they are a heuristic.
    """
    if (reason := ChenLi().supports(architecture)) is not None:
        raise ValueError(reason)
    if examples.has_lengths:
        raise ValueError("lengths: the paper's phases need examples of one length; use newton")
    try:
        phases = run_phases(examples, architecture.n_heads, run, options)
    except Breakdown as breakdown:
        emit_breakdown(breakdown.phase, str(breakdown), breakdown.numbers, run)
        reason = f"{breakdown.phase}: {breakdown}"
        return Candidate(_nothing(examples), Outcome.STUCK, reason=reason)
    except OutOfTime as late:
        reason = f"the time limit came in {late}, before there was a layer"
        return Candidate(_nothing(examples), Outcome.TIME_LIMIT, reason=reason)
    layer, error = phases.net.layer, phases.net.error
    run.keep(layer, error)
    if run.is_over():
        return Candidate(layer, Outcome.TIME_LIMIT)
    if error > options.worst_error:
        reason = f"phase 6: net: its best candidate leaves {error:.2g} of the held-out labels"
        if architecture.n_heads is None:
            heads = f"{layer.n_heads} head{'s' * (layer.n_heads != 1)}"
            reason += f" with {heads}: give n_heads if it is known"
        return Candidate(layer, Outcome.STUCK, reason=reason)
    return Candidate(layer, Outcome.FITTED)


def _nothing(examples: Examples) -> AttentionLayer:
    d, e = examples.d, examples.out_dim
    return AttentionLayer(np.zeros((1, d, d)), np.zeros((1, d, e)))


def run_phases(
    examples: Examples, n_heads: int | None, run: Run, options: ChenLiOptions = _DEFAULTS
) -> Phases:
    """The algorithm. Without `n_heads` the count comes from the body after the first refined sum.

    Trust: as each phase says; phase 6's held-out examples were streamed through phases 1 to 5 too.
    """
    few = examples.working_set
    emit_theory(examples, n_heads, run)
    check_feasible(few, n_heads, run)
    d = examples.d

    # Phase 1: a crude sum of the projections.
    watch = _watcher("phase 1: crude sum", run)
    crude = CrudeSum.from_arrays(
        run.checkpoint.once(
            "crude sum", lambda: estimate_projection_sum(examples, watch=watch).to_arrays()
        )
    )
    emit_crude(crude, run)
    check_strength("phase 1: crude sum", crude.strength)
    total, width = crude.estimate, crude.label_rank
    check_label_dimension(n_heads or 1, examples.k, width)
    # Phase 2: rows on which all heads attend alike; their body is shaped where a round begins.
    rows = [certify_and_confirm(examples, total, options.first_rows * d**2, run, options=options)]
    heads = n_heads or 2
    shapes: list[BodyShape] = []
    margins: list[MarginRows] = []
    sums: list[RefinedSum] = []
    for round_ in range(1, options.rounds + 1):
        shape = _shape(rows[-1], heads, round_, run)
        if n_heads is None and sums:
            heads = count_heads(few, total, shape, width, run, options)
            if heads > 1:
                emit_theory(examples, heads, run)
            shape = _shape(rows[-1], heads, round_, run)
        emit_shape(shape, round_ - 1, run)
        # Phase 3: the body's centre as a proxy, and a refined sum from rows it is sure of.
        watch = _watcher("phase 3: refined sum", run)
        count = options.margin_rows * d
        search = partial(large_margin_rows, examples, shape.proxy, count, watch=watch)
        ahead = _once(MarginRows, f"margin rows {round_}", search, run)
        refine = partial(refine_projection_sum, ahead, total)
        refined = _once(RefinedSum, f"refined sum {round_}", refine, run)
        emit_sum(ahead, refined, round_, run)
        growth = np.sum(refined.estimate**2) / np.sum(crude.estimate**2)
        check_strength("phase 3: refined sum", crude.strength * float(growth))
        total = refined.estimate
        check_rank(total, examples.k)
        # Phase 4: the same rows again with the better sum, and a tighter body.
        count = options.later_rows[heads > 2] * d**2
        rows.append(certify_and_confirm(examples, total, count, run, round_, options))
        shapes.append(shape)
        margins.append(ahead)
        sums.append(refined)
    shape = _shape(rows[-1], heads, options.rounds + 1, run)
    shapes.append(shape)
    emit_shape(shape, options.rounds, run)
    # Phase 5: the span of the attention matrices, from the body's wide directions.
    _check_time("phase 5: span", run)
    body, angle = _check_span(rows[-1], shape, run, options)
    # Phase 6: candidates in the span; examples set aside choose.
    _check_time("phase 6: net", run)
    net = search_phase(few, shape, heads, run, options)
    return Phases(crude, tuple(rows), body, tuple(shapes), tuple(margins), tuple(sums), angle, net)


Result = TypeVar("Result")


def _once(kind: type[Result], name: str, work: Callable[[], Result], run: Run) -> Result:
    """A phase's result, a dataclass of arrays, which a resumed run does not work out again."""
    names = list(kind.__dataclass_fields__)  # type: ignore[attr-defined]
    found = run.checkpoint.once(name, lambda: vars(work()), needs=names)
    return kind(**{name: found[name] for name in names})


def _shape(rows: CertifiedRows, heads: int, round_: int, run: Run) -> BodyShape:
    fit = partial(fit_shape, rows, heads, TRUSTED * rows.query.shape[1] ** 2)
    return _once(BodyShape, f"shape {round_} of {heads} heads", fit, run)


def _check_time(stage: str, run: Run) -> None:
    if run.is_over():
        raise OutOfTime(stage)


def _watcher(stage: str, run: Run) -> Watcher:
    """Progress of a pass as events, one a second at most; the end of the time ends the pass."""
    told = run.seconds

    def watch(seen: int, of: int) -> None:
        nonlocal told
        _check_time(stage, run)
        if any_process(run.seconds - told >= 1.0):
            told = run.seconds
            run.emit(stage, seen, of=of)

    return watch


def certify_and_confirm(
    examples: Examples,
    total: Float64,
    count: int,
    run: Run,
    round_: int = 0,
    options: ChenLiOptions = _DEFAULTS,
) -> CertifiedRows:
    """Phase 2 (and, with a refined sum, 4): screen pairs, keep the rows the programme confirms.

    A row is confirmed when, over the whole simplex, the linear programme still puts its weight on
    the screened pair.
    """

    def solve() -> CertifiedRows:
        watch = _watcher(certification_stage(round_), run)
        rows = screen_pairs(examples, total, count, watch=watch)
        worst = options.worst_score
        usable = rows.select(rows.score <= worst)
        check_rows(len(usable), f"certify at score {worst:g}", examples.d, round_)
        programme = certify_rows(usable.tokens, usable.labels, total)
        return replace(usable, attention=programme.attention, residual=programme.residual)

    solved = _once(CertifiedRows, f"certified rows {round_}", solve, run)
    on_pair = np.take_along_axis(solved.attention, solved.pair, axis=1).sum(axis=1)
    confirmed = solved.select(on_pair >= options.on_pair)
    emit_rows(solved, confirmed, round_, examples, run)
    check_rows(len(confirmed), "are confirmed by the programme", examples.d, round_)
    return confirmed


def _check_span(
    rows: CertifiedRows, shape: BodyShape, run: Run, options: ChenLiOptions
) -> tuple[ConvexBody, float]:
    """Phase 5 as in the paper, by queries to the body, beside the eigenvectors that are used."""
    d = rows.query.shape[1]
    body = sculpt_body(rows.select(slice(0, options.queried_rows * d**2)), shape.proxy)

    def query() -> float:
        return span_angle(span_by_queries(body, len(shape.wide) + 1, run.seed).basis, shape.span)

    angle = float("nan")
    if d <= options.largest_queried:
        angle = float(run.checkpoint.once("span angle", query))
    emit_span(shape, body, angle, run)
    return body, angle


def search_phase(
    examples: Examples,
    shape: BodyShape,
    n_heads: int,
    run: Run,
    options: ChenLiOptions = _DEFAULTS,
) -> NetResult:
    """Phase 6 on the first examples: few for the net, more for its refinement, others to choose."""
    architecture = examples.architecture(n_heads)
    limit = examples.counting_limit(architecture)
    sizes = [int(np.ceil(ratio * limit)) for ratio in options.net_ratios]
    spared = min(options.select, examples.n // 4)
    sizes = [min(size, examples.n - spared) for size in sizes]
    chosen = examples.subset(slice(0, sizes[1] + spared))
    coarse, fine, select = (
        make_problem(chosen.subset(part), Dense(architecture))
        for part in (slice(0, sizes[0]), slice(0, sizes[1]), slice(sizes[1], None))
    )

    def search() -> dict[str, Any]:
        with one_lapack_thread():
            net = search_net(
                shape,
                coarse,
                fine,
                select,
                run,
                n_starts=options.net_starts,
                most_steps=options.net_steps,
            )
        return to_arrays(net.layer) | {"error": net.error, "candidates": net.candidates}

    found = run.checkpoint.once(
        "net", search, needs=("theta", "w", "causal", "error", "candidates")
    )
    net = NetResult(from_arrays(found), found["error"], found["candidates"])
    emit_net(net, run)
    return net


def count_heads(
    examples: Examples,
    total: Float64,
    shape: BodyShape,
    width: int,
    run: Run,
    options: ChenLiOptions = _DEFAULTS,
) -> int:
    """The number of heads from the gap in the body's widths.

    One head shows before that: every row is its own certificate, whatever its pattern.
    Trust: a heuristic, as good as the gap is clear.
    """
    x, y, _ = examples.subset(slice(0, options.one_head_rows)).arrays()
    left = certify_rows(x.astype(np.float64), y[:, 0].astype(np.float64), total).residual
    share = float(np.median(left / np.maximum(np.abs(y[:, 0]).sum(axis=1), 1e-300)))
    if share < options.one_head:
        emit_one_head(share, run)
        return 1
    most = min(options.most_heads, width // (examples.k - 1))
    if most < 2:
        return 1
    heads, gap = shape.guess_heads(most + 1)
    heads = min(heads, most)
    emit_heads(heads, gap, run)
    return heads
