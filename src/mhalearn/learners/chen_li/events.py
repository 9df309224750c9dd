"""What each phase tells: one event a phase, with the few numbers a report can draw.

Stages are named after the paper: 1 crude sum, 2 certification and body, 3 refined sum, 4 the same
certification and a tighter body with the better sum, 5 span, 6 net. `round` in the data is the
number of refined sums behind a result, which tells the repetitions of phases 3 and 4 apart. Events
with `of` in the data are progress within a phase, and not told here.
"""

from typing import Any

import numpy as np

from mhalearn._runtime.types import Float64
from mhalearn.data import Examples
from mhalearn.learners.chen_li.body_shape import BodyShape
from mhalearn.learners.chen_li.phase1_crude_sum import CrudeSum
from mhalearn.learners.chen_li.phase2_body import ConvexBody
from mhalearn.learners.chen_li.phase2_certification import CertifiedRows
from mhalearn.learners.chen_li.phase3_refined_sum import MarginRows, RefinedSum
from mhalearn.learners.chen_li.phase6_net import NetResult
from mhalearn.run.run import Run

# Most numbers of one kind in an event: quantiles of a distribution, leading eigenvalues.
_QUANTILES, _EIGENVALUES = 64, 8
# A gap in the eigenvalues that leaves no doubt about the number of heads.
_CLEAR_GAP = 4.0


def certification_stage(round_: int) -> str:
    """Certification with the crude sum is phase 2, with a refined one phase 4."""
    return "phase 4: certification" if round_ else "phase 2: certification"


def emit_theory(examples: Examples, n_heads: int | None, run: Run) -> None:
    """The theorem's figures, without its constants, beside what is used."""
    m = n_heads or 2
    digits = float(np.log10(examples.k * examples.d))
    run.emit(
        "theory",
        detail=(
            f"theorem: N of order (kd)^m = 10^{m * digits:.1f} examples, time (kd)^(m^3) = "
            f"10^{m**3 * digits:.1f}; used: {examples.n} examples"
        ),
        log10_examples=m * digits,
        log10_time=m**3 * digits,
        heads=m,
        tokens=examples.k,
        d=examples.d,
        examples=examples.n,
    )


def emit_crude(crude: CrudeSum, run: Run) -> None:
    singular = np.linalg.svd(crude.estimate, compute_uv=False)
    scores = {candidate.name: candidate.score for candidate in crude.candidates}
    run.emit(
        "phase 1: crude sum",
        detail=f"chosen: {crude.chosen.name}",
        chosen=crude.chosen.name,
        strength=float(crude.strength),
        conditioning=float(singular[-1] / max(singular[0], 1e-300)),
        candidates={name: score for name, score in scores.items() if np.isfinite(score)},
    )


def emit_rows(
    screened: CertifiedRows, confirmed: CertifiedRows, round_: int, examples: Examples, run: Run
) -> None:
    """Scores and weights of the screened rows, best first, and how many the programme confirmed."""
    certified = len(confirmed)
    run.emit(
        certification_stage(round_),
        detail=f"{certified} rows certified of {len(screened)} screened",
        round=round_,
        screened=len(screened),
        certified=certified,
        frequency=certified / (examples.n * examples.k),
        median_score=float(np.median(confirmed.score if certified else screened.score)),
        scores=quantiles(screened.score),
        weights=quantiles(screened.weight),
    )


def emit_heads(heads: int, gap: float, run: Run) -> None:
    clear = "" if gap >= _CLEAR_GAP else ", which is not clear: give n_heads if it is known"
    run.emit(
        "head count",
        detail=f"{heads} heads by a gap of {gap:.1f} in the body's eigenvalues{clear}",
        heads=heads,
        gap=gap,
    )


def emit_one_head(share: float, run: Run) -> None:
    run.emit(
        "head count",
        detail=f"1 head: any row is explained by one pattern, to {share:.1g} of its label",
        heads=1,
        share=share,
    )


def emit_shape(shape: BodyShape, round_: int, run: Run) -> None:
    """The body's widths are inverse to the square roots of the relative eigenvalues."""
    norm = float(np.linalg.norm(shape.proxy))
    run.emit(
        "phase 4: tighter body" if round_ else "phase 2: body",
        detail=f"proxy of norm {norm:.3g}",
        round=round_,
        heads=len(shape.wide) + 1,
        eigenvalues=shape.eigenvalues[:_EIGENVALUES].tolist(),
        proxy_norm=norm,
    )


def emit_sum(rows: MarginRows, refined: RefinedSum, round_: int, run: Run) -> None:
    """Residuals of the margin rows in units of the typical label, as the inliers are counted."""
    typical = max(float(np.median(np.linalg.norm(rows.label, axis=1))), 1e-300)
    run.emit(
        "phase 3: refined sum",
        detail=f"{refined.inliers:.0%} of the margin rows agree",
        round=round_,
        inliers=refined.inliers,
        margin_rows=len(refined.residual),
        smallest_margin=float(rows.margin.min()),
        median_margin=float(np.median(rows.margin)),
        residuals=quantiles(refined.residual / typical),
    )


def emit_span(shape: BodyShape, body: ConvexBody, angle: float, run: Run) -> None:
    detail = f"sine {angle:.2g} between the eigenvectors' span and that by queries to the body"
    if np.isnan(angle):
        detail = "by eigenvectors; too large to be checked by queries to the body"
    run.emit(
        "phase 5: span",
        detail=detail,
        heads=len(shape.wide) + 1,
        angle=None if np.isnan(angle) else angle,
        violation=body.membership(shape.proxy).violation,
    )


def emit_net(net: NetResult, run: Run) -> None:
    agree = int(np.sum(net.candidates < 1.5 * net.candidates[0]))
    run.emit(
        "phase 6: net",
        loss=net.error,
        detail=f"{agree} of {len(net.candidates)} starts agree",
        agree=agree,
        starts=len(net.candidates),
        candidates=net.candidates[np.isfinite(net.candidates)].tolist(),
    )


def emit_breakdown(phase: str, reason: str, numbers: dict[str, Any], run: Run) -> None:
    run.emit(phase, detail=reason, broke_down=True, **numbers)


def quantiles(values: Float64) -> list[float]:
    """The values ascending, or at most 64 of them that are spread evenly by rank."""
    places = np.linspace(0, len(values) - 1, min(_QUANTILES, len(values)))
    return [float(value) for value in np.sort(values)[np.rint(places).astype(int)]]
