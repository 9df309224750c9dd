"""What the report says: a run turned into the words, numbers and figures of one page."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jinja2
from markupsafe import Markup

from mhalearn._runtime import storage
from mhalearn._runtime.threads import one_lapack_thread
from mhalearn.judge.certificate import Certificate
from mhalearn.judge.nondegeneracy import NondegeneracyReport, check_nondegeneracy
from mhalearn.judge.solution import Solution
from mhalearn.layer.base import Layer
from mhalearn.layer.block.block import Block
from mhalearn.layer.layer import AttentionLayer
from mhalearn.report import figures
from mhalearn.report.at_work import show_at_work
from mhalearn.report.block_page import describe_block
from mhalearn.report.certainty import list_certainties, list_numbers
from mhalearn.report.descent import Stage, draw_descent, list_stages, measured_seconds
from mhalearn.report.head_words import describe_extras
from mhalearn.report.heads import MOST_DRAWN, describe_heads, list_matrices, match_heads
from mhalearn.report.numbers import number, typeset
from mhalearn.report.phases import describe_phases
from mhalearn.report.reproduce import describe_again
from mhalearn.run.outcome import Outcome

_MOST_STAGES = 40
# Stages up to which the descent has a key, and one with times; of more, the table tells.
_MOST_NAMED, _MOST_TIMED = 24, 8
# Inches of figures that span the page: on a desk, and on a telephone.
_WIDE, _NARROW = 10.4, 4.2

# Each outcome as a headline, and its colour on the page.
_HEADLINES = {
    Outcome.RECOVERED: ("The layer was recovered", "good"),
    Outcome.RECOVERED_ON_SPAN: ("The layer was recovered on the span of the tokens", "good"),
    Outcome.FITTED: ("The examples are fitted; exactness is not certified", "fair"),
    Outcome.NOT_IDENTIFIED: ("The examples do not single out one layer", "fair"),
    Outcome.STUCK: ("No layer was found that explains the examples", "bad"),
    Outcome.TOO_FEW_EXAMPLES: ("There are too few examples to determine the layer", "bad"),
    Outcome.TIME_LIMIT: ("The run was stopped before it had ended", "fair"),
    Outcome.NONFINITE: ("The solver diverged", "bad"),
}


def write_report(run: Any, path: str | os.PathLike[str], truth: Layer | None = None) -> None:
    """Write one HTML file that explains a run; it opens without a network.

    run: a `Solution` or a fitted estimator. truth: the layer it should have found, if known.
    """
    solution = getattr(run, "solution_", run)
    if not isinstance(solution, Solution):
        raise ValueError(
            f"cannot report on {type(run).__name__}: pass a Solution or a fitted AttentionRegressor"
        )
    storage.check_writable(path)
    with one_lapack_thread():  # for the heads' singular values
        page = render(solution, truth)
    storage.write_atomically(path, page.encode())


def render(solution: Solution, truth: Layer | None = None) -> str:
    """The page as a string."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("mhalearn.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"number": number, "sentence": _sentence, "typeset": typeset}
    if isinstance(solution.layer, Block):
        return environment.get_template("block.html.jinja").render(describe_block(solution, truth))
    layer, trace, settings = solution.layer, solution.trace, solution.settings
    # A run may end before it has a layer.
    empty = isinstance(layer, AttentionLayer) and not layer.w.any()
    certificate = None if empty else solution.certificate
    span = None if certificate is None else certificate.span
    match = None if truth is None or empty else match_heads(layer, truth, span)
    stages = _without_verdict(list_stages(trace), solution)
    drawn = [stage for stage in stages if stage.colour]
    headline, tone = _HEADLINES[solution.outcome]
    asked = settings.get("n_heads")
    return environment.get_template("page.html.jinja").render(
        headline=headline,
        tone=tone,
        outcome=solution.outcome,
        reason=solution.reason,
        layer=layer,
        empty=empty,
        asked=asked if isinstance(asked, int) and asked != layer.n_heads else None,
        examples=settings.get("n"),
        tokens=settings.get("k"),
        truth=truth,
        match=match,
        span=span,
        seconds=trace[-1].seconds if trace else None,
        at_work=None
        if empty or solution.example is None
        else show_at_work(layer, match, solution.example, residual=bool(settings.get("residual"))),
        certain=list_certainties(
            certificate,
            None if match is None else match.found.max_error,
            solution.token_spectrum,
            layer.d,
        ),
        findings=solution.findings,
        certificate=certificate,
        certificate_reason=_certificate_reason(certificate, solution.reason),
        certificate_rows=[] if certificate is None else list_numbers(certificate),
        heads=[]
        if empty
        else describe_heads(
            layer, match, 0 if solution.example is None else len(solution.example.x)
        ),
        most_drawn=MOST_DRAWN,
        softmax=isinstance(layer, AttentionLayer),
        attention=type(layer.parametrisation).__name__,
        extras=describe_extras(layer),
        thinned=any(figures.is_thinned(matrix) for _, _, matrix in list_matrices(layer, 0)),
        phases=describe_phases(trace),
        search=any(stage.name.startswith("round ") for stage in stages),
        stages=stages[-_MOST_STAGES:],
        stages_left_out=max(0, len(stages) - _MOST_STAGES),
        key=drawn if len(drawn) <= _MOST_NAMED else [],
        key_with_times=_MOST_TIMED,
        descent=_both(lambda width, name: draw_descent(trace, width, name), "descent"),
        descent_seconds=measured_seconds(trace),
        conditions=None if empty else _conditions(solution),
        again=describe_again(settings, layer),
    )


def _certificate_reason(certificate: Certificate | None, verdict: str) -> str:
    """The certificate's own reason, where it says what the verdict does not."""
    if certificate is None or certificate.claims or certificate.reason in verdict:
        return ""
    return certificate.reason


def _without_verdict(stages: list[Stage], solution: Solution) -> list[Stage]:
    """Stages without details that say the verdict once more."""

    def repeats(detail: str) -> bool:
        said = detail.removeprefix(f"{solution.outcome.name}: ")
        return said in solution.reason or (bool(solution.reason) and solution.reason in said)

    return [stage._replace(detail="") if repeats(stage.detail) else stage for stage in stages]


def _sentence(text: str) -> str:
    """With a capital letter and a full stop."""
    text = text.strip()
    return text if not text else text[0].upper() + text[1:] + ("" if text[-1] in ".!?" else ".")


def _both(draw: Callable[[float, str], Markup | None], name: str) -> tuple[Markup, Markup] | None:
    """A figure for a desk and for a telephone."""
    wide, narrow = draw(_WIDE, f"{name}-wide"), draw(_NARROW, f"{name}-narrow")
    return None if wide is None or narrow is None else (wide, narrow)


def _conditions(solution: Solution) -> NondegeneracyReport | None:
    """The non-degeneracy report of the learned layer; None where the token count is not known, or
    heads are not softmax heads."""
    tokens, layer = solution.settings.get("k"), solution.layer
    if tokens is None or not isinstance(layer, AttentionLayer):
        return None
    return check_nondegeneracy(layer, k=int(tokens), seed=0)
