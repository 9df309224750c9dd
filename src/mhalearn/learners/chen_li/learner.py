"""The six phases of Chen & Li in their order, by one plan or another."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from mhalearn._runtime.devices import n_processes
from mhalearn._runtime.types import Float64
from mhalearn.data import Examples
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.layer import AttentionLayer
from mhalearn.learners.builtin import ChenLi
from mhalearn.learners.chen_li.body_shape import fit_shape
from mhalearn.learners.chen_li.breakdown import (
    Breakdown,
    check_label_dimension,
    check_rank,
    check_strength,
)
from mhalearn.learners.chen_li.events import (
    emit_body,
    emit_breakdown,
    emit_crude,
    emit_decoded,
    emit_heads,
    emit_net,
    emit_one_head,
    emit_span,
    emit_sum,
    emit_theory,
    warn,
)
from mhalearn.learners.chen_li.input_distribution import (
    from_whitened,
    recognise_inputs,
    to_whitened,
    whiten_tokens,
)
from mhalearn.learners.chen_li.phase1_crude_sum import CrudeSum
from mhalearn.learners.chen_li.phase2_certification import CertifiedRows, certify_rows
from mhalearn.learners.chen_li.phase3_refined_sum import RefinedSum
from mhalearn.learners.chen_li.phases import Phases
from mhalearn.learners.chen_li.plans import Plan, find_plan
from mhalearn.learners.chen_li.task import Task
from mhalearn.learners.options import ChenLiOptions, Constants
from mhalearn.run.outcome import Candidate, Outcome
from mhalearn.run.run import Run
from mhalearn.run.watch import OutOfTime

_DEFAULTS = ChenLiOptions()
# Correlation of neighbouring tokens from which on it is told.
_CHAINED = 0.6


def learn_chen_li(
    examples: Examples, architecture: Architecture, run: Run, options: ChenLiOptions = _DEFAULTS
) -> Candidate:
    """Learn a layer by the six phases, from random examples alone.

    What needs few examples takes them from the working set.
    Trust: the literal plan is the algorithm of Chen & Li (STOC 2025) as far as its sources tell it,
    proved for uniform +-1 inputs under their non-degeneracy conditions, from N = (kd)^Theta(m) +
    poly(m, k, d) log(1/delta) examples, in (kd)^O(m^3) time, to an error of (kd)^-Omega(m). At any
    given N, and by the other plans, it is a heuristic: the judge decides.
    """
    if (reason := ChenLi().supports(architecture)) is not None:
        raise ValueError(reason)
    if examples.has_lengths:
        raise ValueError("lengths: the paper's phases need examples of one length; use newton")
    plan, constants = find_plan(options.plan), options.constants
    try:
        phases = run_phases(examples, architecture.n_heads, run, plan, constants)
    except Breakdown as breakdown:
        emit_breakdown(breakdown.phase, str(breakdown), breakdown.numbers, run)
        reason = f"{breakdown.phase}: {breakdown}" + _blame_inputs(run)
        return Candidate(_nothing(examples), Outcome.STUCK, reason=reason)
    except OutOfTime as late:
        reason = f"the time limit came in {late}, before there was a layer"
        return Candidate(_nothing(examples), Outcome.TIME_LIMIT, reason=reason)
    layer, error = phases.layer, phases.error
    run.keep(layer, error)
    if run.is_over():
        return Candidate(layer, Outcome.TIME_LIMIT, phases=phases)
    if error > constants.worst_error:
        last = "the best candidate of phase 6" if phases.decoded is None else "the decoded layer"
        reason = f"{last} has relative squared error {error:.2g} on held-out examples"
        reason += _blame_inputs(run)
        if architecture.n_heads is None:
            heads = f"{layer.n_heads} head{'s' * (layer.n_heads != 1)}"
            reason += f" with {heads}: give n_heads if it is known"
        return Candidate(layer, Outcome.STUCK, reason=reason, phases=phases)
    return Candidate(layer, Outcome.FITTED, phases=phases)


def _blame_inputs(run: Run) -> str:
    """What the inputs may have to do with a failure."""
    told = [event.data["between_tokens"] for event in run.events if event.stage == "inputs"]
    return f"; {_say_chained(told[-1])}" if told and told[-1] >= _CHAINED else ""


def _nothing(examples: Examples) -> AttentionLayer:
    d, e = examples.d, examples.out_dim
    return AttentionLayer(np.zeros((1, d, d)), np.zeros((1, d, e)))


def run(
    examples: Examples,
    n_heads: int | None,
    plan: str | Plan = "practical",
    start: Phases | None = None,
    constants: Constants | None = None,
    *,
    seed: int = 0,
) -> Phases:
    """The phases alone, without polish, certificate or verdict.

    start: what is known already, such as `exact(layer).before(5)` or `load_phases(path).before(3)`.
    A phase that cannot work raises `Breakdown`, with its name and its numbers.
    """
    return run_phases(examples, n_heads, Run(seed=seed), plan, constants or Constants(), start)


def run_phases(
    examples: Examples,
    n_heads: int | None,
    run: Run,
    plan: str | Plan = "practical",
    constants: Constants = _DEFAULTS.constants,
    start: Phases | None = None,
) -> Phases:
    """The algorithm. Without `n_heads` the count comes from the body after the first refined sum.

    Trust: as each phase says. Phase 6's held-out examples were streamed through phases 1 to 5 too,
    but for the literal plan, which sets its validation examples apart.
    """
    plan = find_plan(plan)
    known = start or Phases()
    emit_theory(examples, n_heads, plan.name, run)
    check_label_dimension(n_heads or 1, examples.k, examples.out_dim)
    held = min(constants.select, examples.n // 4) if plan.literal else 0
    examples, whitening = _look_at_inputs(examples, examples.n - held, known, run)
    task = _make_task(examples, held, n_heads, run, constants)
    known = replace(known, plan=plan.name, whitening=whitening)
    if whitening is not None and known.net is not None:
        known = replace(known, net=_with_layer(known.net, to_whitened, whitening))

    # Phase 1: a crude sum of the projections.
    if known.crude is None:
        known = replace(known, crude=_crude_sum(task, plan))
    crude = known.crude
    assert crude is not None
    check_label_dimension(n_heads or 1, examples.k, crude.label_rank)
    total, heads = crude.estimate, n_heads or 2
    # Phase 2: rows on which all heads attend alike, and their body.
    if known.span is None and not known.bodies:
        known = _certify_and_sculpt(known, task, plan, total, heads, 0)
    rounds = 0 if _is_sculpted(known) else constants.rounds
    for round_ in range(1, rounds + 1):
        # Phase 3: the body's proxy, and a refined sum from rows it is sure of.
        if len(known.sums) < round_:
            refined = _refined_sum(known.bodies[-1], total, round_, crude, task, plan)
            known = replace(known, sums=(*known.sums, refined))
        total = known.sums[round_ - 1].estimate
        check_rank(total, examples.k, constants)
        # Phase 4: the same rows again with the better sum, and a tighter body.
        if len(known.bodies) <= round_:
            rows = plan.certify(task, total, round_)
            known = replace(known, rows=(*known.rows, rows))
            if n_heads is None and round_ == 1:
                heads = count_heads(rows, total, crude.label_rank, task)
                emit_theory(examples, heads, plan.name, run)
            known = _sculpt(known, task, plan, rows, heads, round_)
    # Phase 5: the span of the attention matrices.
    task.check_time("phase 5: span")
    if known.span is None:
        rows_ = known.rows[-1] if known.rows else None
        known = replace(known, span=plan.span(task, known.bodies[-1], rows_, heads))
    assert known.span is not None
    emit_span(known.span, run)
    # Phase 6: candidates in the span; examples set aside choose.
    task.check_time("phase 6: net")
    if known.net is None:
        known = replace(known, net=plan.net(task, known.span))
    assert known.net is not None
    emit_net(known.net, run)
    # Past it: every row is decoded.
    if plan.decode is not None and not run.is_over():
        decoded = plan.decode(task, known.net.layer)
        emit_decoded(decoded, run)
        known = replace(known, decoded=decoded)
    if whitening is not None:
        known = replace(
            known,
            net=_with_layer(known.net, from_whitened, whitening),
            decoded=_with_layer(known.decoded, from_whitened, whitening),
        )
    return known


def _is_sculpted(start: Phases) -> bool:
    """Whether phase 4 is behind a start, in however many rounds: its last sum has a body."""
    return start.span is not None or len(start.bodies) > len(start.sums) > 0


def _say_chained(between: float) -> str:
    return (
        f"neighbouring tokens correlate, by {between:.2f} in one feature, so that labels show the "
        "sum of the projections less"
    )


def _with_layer(result: Any, change: Any, whitening: Float64) -> Any:
    return None if result is None else replace(result, layer=change(result.layer, whitening))


def _look_at_inputs(
    examples: Examples, seen: int, known: Phases, run: Run
) -> tuple[Examples, Float64 | None]:
    """The examples in the coordinates of the phases: whitened, by the first of them, unless they
    are +-1 or Gaussian."""
    few = examples.working_set
    if seen < examples.n:
        few = examples.subset(slice(0, min(seen, few.n)))
    inputs = recognise_inputs(few)
    run.emit("inputs", detail=inputs.kind, between_tokens=inputs.between_tokens)
    if inputs.between_tokens >= _CHAINED:
        warn("inputs", _say_chained(inputs.between_tokens), run)
    if inputs.kind != "other":
        return examples, None
    whiten = n_processes() == 1
    warn(
        "inputs",
        f"neither uniform +-1 nor standard Gaussian ({inputs.against}), for which the paper proves "
        f"its phases: tokens are {'whitened' if whiten else 'taken as they are'}",
        run,
        between_tokens=inputs.between_tokens,
    )
    if not whiten:
        return examples, None
    matrix = known.whitening
    if matrix is None:
        x, _, _ = few.arrays()
        matrix = whiten_tokens(x.astype(np.float64))
    return examples.multiplied(matrix), matrix


def _make_task(
    examples: Examples, held: int, n_heads: int | None, run: Run, constants: Constants
) -> Task:
    """The last examples, where some are held back, validate the net, and no phase sees them."""
    few = examples.working_set
    if not held:
        return Task(examples, few, few, run, constants, n_heads)
    seen = examples.view(slice(0, examples.n - held))
    few = seen.subset(slice(0, min(seen.n, few.n)))
    validation = examples.subset(slice(examples.n - held, None))
    return Task(seen, few, validation, run, constants, n_heads)


def _crude_sum(task: Task, plan: Plan) -> CrudeSum:
    work = partial(plan.crude_sum, task)
    found = task.run.checkpoint.once("crude sum", lambda: work().to_arrays())
    crude = CrudeSum.from_arrays(found)
    emit_crude(crude, task.run)
    check_strength("phase 1: crude sum", crude.strength, task.constants)
    return crude


def _certify_and_sculpt(
    known: Phases, task: Task, plan: Plan, total: Float64, heads: int, round_: int
) -> Phases:
    rows = plan.certify(task, total, round_)
    known = replace(known, rows=(*known.rows, rows))
    return _sculpt(known, task, plan, rows, heads, round_)


def _sculpt(
    known: Phases, task: Task, plan: Plan, rows: CertifiedRows, heads: int, round_: int
) -> Phases:
    task.check_time("phase 4: tighter body" if round_ else "phase 2: body")
    body = plan.sculpt(task, rows, heads, round_)
    emit_body(body, heads, round_, task.run)
    return replace(known, bodies=(*known.bodies, body))


def _refined_sum(
    body: Any, total: Float64, round_: int, crude: CrudeSum, task: Task, plan: Plan
) -> RefinedSum:
    work = partial(plan.refine_sum, task, body, total, round_)
    refined = task.once(RefinedSum, f"refined sum {round_}", work)
    emit_sum(refined, round_, task.run)
    growth = np.sum(refined.estimate**2) / max(float(np.sum(crude.estimate**2)), 1e-300)
    check_strength("phase 3: refined sum", crude.strength * float(growth), task.constants)
    return refined


def count_heads(rows: CertifiedRows, total: Float64, width: int, task: Task) -> int:
    """The number of heads from the gap in the body's widths.

    One head shows before that: every row is its own certificate, whatever its pattern.
    Source: ours. Trust: a heuristic, as good as the gap is clear.
    """
    constants, few = task.constants, task.few
    x, y, _ = few.subset(slice(0, constants.one_head_rows)).arrays()
    first = y[:, 0].astype(np.float64)
    left = certify_rows(x.astype(np.float64), first, total).residual
    share = float(np.median(left / np.maximum(np.abs(first).sum(axis=1), 1e-300)))
    if share < constants.one_head:
        emit_one_head(share, task.run)
        return 1
    most = min(constants.most_heads, width // (few.k - 1))
    if most < 2:
        return 1
    trusted = constants.trusted_rows * task.d**2
    shape = fit_shape(rows, 2, trusted, constants, sought=most + 3)
    heads, gap = shape.guess_heads(most + 1)
    heads = min(heads, most)
    emit_heads(heads, gap, task.run)
    return heads
