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
from mhalearn.learners.chen_li.decode import Decoded
from mhalearn.learners.chen_li.phase1_crude_sum import CrudeSum
from mhalearn.learners.chen_li.phase2_body import ConvexBody
from mhalearn.learners.chen_li.phase2_certification import CertifiedRows
from mhalearn.learners.chen_li.phase3_refined_sum import RefinedSum
from mhalearn.learners.chen_li.phase6_net import NetResult
from mhalearn.learners.chen_li.span import Span
from mhalearn.run.run import Run

# Most numbers of one kind in an event: quantiles of a distribution, leading eigenvalues.
_QUANTILES, _EIGENVALUES, _CANDIDATES = 64, 8, 64
# A gap in the eigenvalues that leaves no doubt about the number of heads.
_CLEAR_GAP = 4.0


THEOREM = (
    "theorem: from N = (kd)^Theta(m) + poly(m, k, d) log(1/delta) uniform +-1 examples, in time "
    "(kd)^O(m^3), an error of (kd)^-Omega(m) with probability 1 - delta, for non-degenerate layers"
)


def certification_stage(round_: int) -> str:
    """Certification with the crude sum is phase 2, with a refined one phase 4."""
    return "phase 4: certification" if round_ else "phase 2: certification"


def emit_theory(examples: Examples, n_heads: int | None, plan: str, run: Run) -> None:
    """The theorem as it is stated, beside what is used. Its constants are not given, so that no
    number follows from it."""
    heads = "m" if n_heads is None else str(n_heads)
    run.emit(
        "theory",
        detail=f"{THEOREM}; used: {examples.n} examples, {heads} heads, plan {plan}",
        theorem=THEOREM,
        heads=n_heads,
        tokens=examples.k,
        d=examples.d,
        examples=examples.n,
        plan=plan,
    )


def warn(stage: str, reason: str, run: Run, **numbers: Any) -> None:
    """What a reader should know, though the run goes on."""
    run.emit("warning", detail=f"{stage}: {reason}", **numbers)


def emit_crude(crude: CrudeSum, run: Run) -> None:
    singular = np.linalg.svd(crude.estimate, compute_uv=False)
    scores = {one.name: one.score for one in crude.candidates}
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
    ranked = confirmed.score if certified else screened.score
    run.emit(
        certification_stage(round_),
        detail=f"{certified} rows certified of {len(screened)} screened",
        round=round_,
        screened=len(screened),
        certified=certified,
        frequency=certified / (examples.n * examples.k),
        median_score=float(np.median(ranked)) if len(ranked) else None,
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


def emit_body(body: Any, heads: int, round_: int, run: Run) -> None:
    """The body's widths are inverse to the square roots of the relative eigenvalues, where it has
    any; a body of constraints tells how many."""
    norm = float(np.linalg.norm(body.proxy))
    told: dict[str, Any] = {"proxy_norm": norm, "heads": heads}
    if hasattr(body, "eigenvalues"):
        told["eigenvalues"] = body.eigenvalues[:_EIGENVALUES].tolist()
    if isinstance(body, ConvexBody):
        member = body.membership(body.proxy)
        told |= {"constraints": len(body.offsets), "violated": member.violated}
    stage = "phase 4: tighter body" if round_ else "phase 2: body"
    run.emit(stage, detail=f"proxy of norm {norm:.3g}", round=round_, **told)


def emit_sum(refined: RefinedSum, round_: int, run: Run) -> None:
    """Residuals of the margin rows in units of the typical label, as the inliers are counted."""
    run.emit(
        "phase 3: refined sum",
        detail=f"{refined.inliers:.0%} of the margin rows agree",
        round=round_,
        inliers=refined.inliers,
        margin_rows=len(refined.residual),
        smallest_margin=float(refined.margin.min()),
        median_margin=float(np.median(refined.margin)),
        residuals=quantiles(refined.residual),
    )


def emit_span(span: Span, run: Run) -> None:
    angles = dict(span.angles)
    said = ", ".join(f"{sine:.2g} to that by {name}" for name, sine in angles.items())
    run.emit(
        "phase 5: span",
        detail=f"sine {said}" if said else "by eigenvectors; not checked by queries to the body",
        heads=span.n_heads,
        angle=angles.get("linear optimisation"),
        angles=angles,
        queries=span.queries,
    )


def emit_net(net: NetResult, run: Run) -> None:
    best = net.candidates[:_CANDIDATES]
    agree = int(np.sum(net.candidates < 1.5 * net.candidates[0]))
    detail, told = f"{agree} of {len(net.candidates)} candidates agree", {}
    if (stated := net.generalisation) is not None:
        told = {name: getattr(stated, name) for name in ("bound", "delta", "clip")}
        told["validation"] = stated.examples
        detail += (
            f"; with probability {1 - stated.delta:g} over {stated.examples} validation examples "
            f"the expected error, clipped at {stated.clip:g}, is at most {stated.bound:.2g}"
        )
    run.emit(
        "phase 6: net",
        loss=net.error,
        detail=detail,
        agree=agree,
        starts=len(net.candidates),
        candidates=best[np.isfinite(best)].tolist(),
        **told,
    )


def emit_decoded(decoded: Decoded, run: Run) -> None:
    run.emit(
        "decoded",
        loss=decoded.error,
        detail=f"{len(decoded.errors) - 1} decodings of {decoded.examples} examples; the last used "
        f"{decoded.used:.0%} of the rows and heads",
        errors=decoded.errors[np.isfinite(decoded.errors)].tolist(),
        used=decoded.used,
    )


def emit_breakdown(phase: str, reason: str, numbers: dict[str, Any], run: Run) -> None:
    run.emit(phase, detail=reason, broke_down=True, **numbers)


def quantiles(values: Float64) -> list[float]:
    """The values ascending, or at most 64 of them that are spread evenly by rank."""
    places = np.linspace(0, len(values) - 1, min(_QUANTILES, len(values)))
    return [float(value) for value in np.sort(values)[np.rint(places).astype(int)]]
