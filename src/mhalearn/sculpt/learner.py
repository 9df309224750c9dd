"""The six phases of Chen & Li in their order."""

from dataclasses import dataclass

import numpy as np
from threadpoolctl import threadpool_limits

from mhalearn.examples import Examples
from mhalearn.layer import AttentionLayer, Float64
from mhalearn.outcome import Outcome, Solution, Trace
from mhalearn.problem import make_problem
from mhalearn.sculpt.body import ConvexBody, sculpt_body
from mhalearn.sculpt.certification import CertifiedRows, certify_rows, screen_pairs
from mhalearn.sculpt.crude_sum import CrudeSum, estimate_projection_sum
from mhalearn.sculpt.inputs_kind import recognise_inputs
from mhalearn.sculpt.net import NetResult, search_net
from mhalearn.sculpt.refined_sum import RefinedSum, large_margin_rows, refine_projection_sum
from mhalearn.sculpt.shape import BodyShape, fit_shape
from mhalearn.sculpt.span import span_angle, span_by_queries

# Rows kept by the screen and rows trusted in full, in units of d^2, the unknowns of one head.
_FIRST_ROWS, _TRUSTED = 8, 2
_MARGIN_ROWS = 60  # in units of d
_ROUNDS = 2
# What phases need at the least, and where they are said to have failed.
_LEAST_STRENGTH = 0.05
_WORST_SCORE = 1.0
_CLEAR_GAP = 4.0
# Rows of the body that is queried, in units of d^2.
_QUERIED = 3
# Half the box's edge, in units of the proxy's largest entry: it must not cut the chords short.
_BOX = 8
# Weight the programme must leave on the screened pair.
_ON_PAIR = 0.9
# Examples of phase 6 in units of the counting limit (net, refinement), and examples to choose by.
_NET_RATIOS = (20, 200)
_HELD = 4000
_MOST_HEADS = 6


class Breakdown(Exception):
    """A phase that cannot work, with its number; ends the run with an outcome."""

    def __init__(self, phase: str, reason: str) -> None:
        super().__init__(reason)
        self.phase = phase


@dataclass(frozen=True)
class Phases:
    """Everything the phases found, to be looked at."""

    crude: CrudeSum
    rows: CertifiedRows
    body: ConvexBody
    shapes: tuple[BodyShape, ...]
    sums: tuple[RefinedSum, ...]
    span_angle: float  # sine between the span by eigenvectors and by queries to the body
    net: NetResult


def learn(
    examples: Examples,
    *,
    n_heads: int | str,
    bias: bool,
    causal: bool,
    head_dim: int | None,
    seed: int,
    trace: Trace,
) -> Solution:
    """Learn a layer by the six phases, from random examples alone.

    Trust: the phases are those of Chen & Li (STOC 2025), proved for uniform +-1 inputs under their
    non-degeneracy conditions with N = (kd)^Theta(m) examples and (kd)^O(m^3) time; run as here,
    with robust least squares and far fewer examples, they are a heuristic.
    """
    for name, given in (("bias", bias), ("causal", causal), ("head_dim", head_dim)):
        if given:
            raise ValueError(f"{name}={given}: the paper's phases do not know it; use newton")
    if examples.has_lengths:
        raise ValueError("lengths: the paper's phases need examples of one length; use newton")
    try:
        phases = run_phases(examples, n_heads, seed, trace)
    except Breakdown as breakdown:
        trace.emit(breakdown.phase, detail=str(breakdown))
        nothing = AttentionLayer(
            np.zeros((1, examples.d, examples.d)), np.zeros((1, examples.d, examples.out_dim))
        )
        reason = f"{breakdown.phase}: {breakdown}"
        return Solution(nothing, Outcome.STUCK, trace.events, reason=reason)
    trace.keep(phases.net.layer, phases.net.error)
    ended = Outcome.TIME_LIMIT if trace.expired else Outcome.FITTED
    return Solution(phases.net.layer, ended, trace.events)


def run_phases(examples: Examples, n_heads: int | str, seed: int, trace: Trace) -> Phases:
    """The algorithm. `n_heads="auto"` takes the count from the widths of the first good body."""
    _tell_theory(examples, n_heads, trace)
    _check_feasible(examples, n_heads, trace)
    d = examples.d

    crude = estimate_projection_sum(examples)
    _report_crude(crude, trace)
    total = crude.estimate
    rows = certify(examples, total, _FIRST_ROWS * d**2, trace)
    heads = n_heads if isinstance(n_heads, int) else 2
    shapes, sums = [], []
    for round_ in range(_ROUNDS):
        shape = fit_shape(rows, heads, _TRUSTED * d**2)
        if not isinstance(n_heads, int):
            heads, shape = _count_heads(rows, shape, trace)
        _report_shape(shape, 2 + 2 * round_, trace)
        margins = large_margin_rows(examples, shape.proxy, _MARGIN_ROWS * d)
        refined = refine_projection_sum(margins, total)
        _report_sum(refined, trace)
        growth = np.sum(refined.estimate**2) / np.sum(crude.estimate**2)
        _check_strength("phase 3: refined sum", crude.strength * float(growth))
        total = refined.estimate
        rows = certify(examples, total, (5 if heads == 2 else 10) * d**2, trace)
        shapes.append(shape)
        sums.append(refined)
    shape = fit_shape(rows, heads, _TRUSTED * d**2)
    shapes.append(shape)
    _report_shape(shape, 5, trace)
    body, angle = _check_span(rows, shape, seed, trace)
    net = search_phase(examples, shape, heads, seed, trace)
    return Phases(crude, rows, body, tuple(shapes), tuple(sums), angle, net)


def certify(examples: Examples, total: Float64, count: int, trace: Trace) -> CertifiedRows:
    """Phase 2 (and 4): screen pairs, then keep the rows the linear programme confirms.

    A row is confirmed when, over the whole simplex, the programme still puts its weight on the
    screened pair.
    """
    rows = screen_pairs(examples, total, count)
    usable = rows.select(rows.score <= _WORST_SCORE)
    if len(usable) < _TRUSTED * examples.d**2:
        raise Breakdown(
            "phase 2: certification",
            f"{len(usable)} rows certify at score {_WORST_SCORE:g}, {_TRUSTED * examples.d**2} are "
            "needed: more examples, fewer heads, or a better sum of projections",
        )
    programme = certify_rows(usable.tokens, usable.labels, total)
    on_pair = np.take_along_axis(programme.attention, usable.pair, axis=1).sum(axis=1)
    confirmed = usable.select(on_pair >= _ON_PAIR)
    trace.emit(
        "phase 2: certification",
        detail=f"{len(confirmed)} rows certified of {len(usable)} screened",
        screened=len(usable),
        certified=len(confirmed),
        median_score=float(np.median(confirmed.score)) if len(confirmed) else float("nan"),
        frequency=len(confirmed) / (examples.n * examples.k),
    )
    # A crude sum lets the programme spread a little weight; too few rows are worse than that.
    return confirmed if len(confirmed) >= 4 * examples.d**2 else usable


def _check_span(
    rows: CertifiedRows, shape: BodyShape, seed: int, trace: Trace
) -> tuple[ConvexBody, float]:
    """Phase 5 as in the paper, by queries to the body, beside the eigenvectors that are used."""
    d = rows.query.shape[1]
    body = sculpt_body(rows.select(slice(0, _QUERIED * d**2)), box=_BOX * np.abs(shape.proxy).max())
    queried = span_by_queries(body, len(shape.wide) + 1, seed)
    angle = span_angle(queried, shape.span)
    trace.emit(
        "phase 5: span",
        detail=f"queries to the body find the same span to sine {angle:.2g}",
        angle=angle,
        violation=body.membership(shape.proxy).violation,
    )
    return body, angle


def search_phase(
    examples: Examples, shape: BodyShape, n_heads: int, seed: int, trace: Trace
) -> NetResult:
    """Phase 6 on the first examples: few for the net, more for its refinement, others to choose."""
    limit = examples.counting_limit(n_heads)
    sizes = [int(np.ceil(ratio * limit)) for ratio in _NET_RATIOS]
    held = min(_HELD, examples.n // 4)
    sizes = [min(size, examples.n - held) for size in sizes]
    chosen = examples.subset(slice(0, sizes[1] + held))
    coarse, fine, rest = (
        make_problem(chosen.subset(part), n_heads, bias=False, causal=False)
        for part in (slice(0, sizes[0]), slice(0, sizes[1]), slice(sizes[1], None))
    )
    # LAPACK's threads would fight XLA's for the same cores.
    with threadpool_limits(1, user_api="blas"):
        net = search_net(shape, coarse, fine, rest, trace, seed=seed)
    agree = int(np.sum(net.candidates < 1.5 * net.candidates[0]))
    trace.emit(
        "phase 6: net",
        loss=net.error,
        detail=f"{agree} of {len(net.candidates)} starts agree",
        candidates=net.candidates.tolist(),
    )
    return net


def _count_heads(rows: CertifiedRows, shape: BodyShape, trace: Trace) -> tuple[int, BodyShape]:
    """The number of heads from the gap in the body's widths, and the shape with that many."""
    heads, gap = shape.guess_heads(_MOST_HEADS)
    clear = "" if gap >= _CLEAR_GAP else ", which is not clear: give n_heads if it is known"
    trace.emit(
        "head count",
        detail=f"{heads} heads by a gap of {gap:.1f} in the body's widths{clear}",
        heads=heads,
        gap=gap,
    )
    return heads, fit_shape(rows, heads, _TRUSTED * rows.query.shape[1] ** 2)


def _check_feasible(examples: Examples, n_heads: int | str, trace: Trace) -> None:
    """Say what cannot work before an hour is spent on it."""
    kind, why = recognise_inputs(examples)
    if kind == "other":
        raise Breakdown("inputs", f"neither uniform +-1 nor standard Gaussian: {why}")
    trace.emit("inputs", detail=kind)
    heads = n_heads if isinstance(n_heads, int) else 1
    crowd = heads * (examples.k - 1)
    if crowd > examples.out_dim:
        raise Breakdown(
            "phase 2: certification",
            f"m (k - 1) = {crowd} is above the output width {examples.out_dim}: every row would "
            "certify; use newton",
        )


def _tell_theory(examples: Examples, n_heads: int | str, trace: Trace) -> None:
    """The theorem's figures, without its constants, beside what is used."""
    m = n_heads if isinstance(n_heads, int) else 2
    digits = np.log10(examples.k * examples.d)
    trace.emit(
        "theory",
        detail=(
            f"theorem: N of order (kd)^m = 1e{m * digits:.1f} examples, time (kd)^(m^3) = "
            f"1e{m**3 * digits:.1f}; used: {examples.n:.2g} examples"
        ),
        log10_examples=m * digits,
        log10_time=m**3 * digits,
    )


def _report_crude(crude: CrudeSum, trace: Trace) -> None:
    singular = np.linalg.svd(crude.estimate, compute_uv=False)
    trace.emit(
        "phase 1: crude sum",
        detail=f"chosen: {crude.chosen.name}",
        strength=crude.strength,
        conditioning=float(singular[-1] / max(singular[0], 1e-300)),
        candidates={candidate.name: candidate.score for candidate in crude.candidates},
    )
    _check_strength("phase 1: crude sum", crude.strength)


def _check_strength(phase: str, strength: float) -> None:
    """A sum of projections that explains next to nothing of the labels certifies nothing."""
    if strength < _LEAST_STRENGTH:
        raise Breakdown(
            phase, f"its squared norm is {strength:.2g} of the labels': the projections cancel"
        )


def _report_shape(shape: BodyShape, phase: int, trace: Trace) -> None:
    trace.emit(
        f"phase {phase}: body" if phase < 5 else "phase 5: span",
        detail=f"proxy of norm {np.linalg.norm(shape.proxy):.3g}",
        eigenvalues=shape.eigenvalues[:_MOST_HEADS].tolist(),
        proxy_norm=float(np.linalg.norm(shape.proxy)),
    )


def _report_sum(refined: RefinedSum, trace: Trace) -> None:
    trace.emit(
        "phase 3: refined sum",
        detail=f"{refined.inliers:.0%} of the margin rows agree",
        inliers=refined.inliers,
        margin_rows=len(refined.residual),
    )
