"""What the phases found as figures for a paper: what is drawn; `figures.py` has how."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mhalearn._runtime.types import Float64
from mhalearn.layer.comparison import compare
from mhalearn.layer.layer import AttentionLayer
from mhalearn.learners.chen_li.input_distribution import to_whitened
from mhalearn.learners.chen_li.panels import Curve, Lines, Named, Panel
from mhalearn.learners.chen_li.phase2_body import ConvexBody
from mhalearn.learners.chen_li.phase2_certification import CertifiedRows
from mhalearn.learners.chen_li.phases import Phases
from mhalearn.learners.chen_li.span import Span, exact_span, span_angle

# Points of a curve: more are not seen, and make a file large.
_POINTS = 240
# Directions of the body whose widths are shown.
_WIDTHS = 8
# Error of its log-odds up to which a certified row counts as true.
_TRUE_ROW = 1.0


def plot(phases: Phases, truth: AttentionLayer | None = None) -> dict[str, Any]:
    """Matplotlib figures of what each phase found, by its name: "phase 1" to "phase 6", "decode".

    A figure is one column of a paper wide; `figures["phase 2"].savefig("rows.pdf")` embeds its
    fonts, and an SVG keeps its text. Phases that did not run, or have nothing to show, are left
    out.
    truth: the layer that made the labels. With it come errors: of each candidate for the sum, the
    precision of the certified rows, the distance of each head from the body and from the span, and
    the errors of the layer's heads.
    Cost: with the truth, a quadratic programme for each head and each body of the literal plan.
    """
    from mhalearn.learners.chen_li.figures import draw  # matplotlib is slow to import

    return {name: draw(panels) for name, panels in list_panels(phases, truth).items()}


def list_panels(phases: Phases, truth: AttentionLayer | None = None) -> dict[str, list[Panel]]:
    """What there is to draw of each phase, by its name."""
    _check_sizes(phases, truth)
    here = truth  # in the coordinates of the phases
    if truth is not None and phases.whitening is not None:
        here = to_whitened(truth, phases.whitening)
    panels = {
        "phase 1": _crude_sum(phases, here),
        "phase 2": _rows_and_body(phases, here, (0,)),
        "phase 3": _refined_sum(phases, here),
        "phase 4": _rows_and_body(phases, here, tuple(range(1, len(phases.bodies)))),
        "phase 5": _span(phases, here),
        # Layers are in the coordinates of the inputs.
        "phase 6": _net(phases, truth),
        "decode": _decoded(phases, truth),
    }
    return {name: found for name, found in panels.items() if found}


def _check_sizes(phases: Phases, truth: AttentionLayer | None) -> None:
    if truth is None or phases.crude is None:
        return
    sizes = phases.crude.estimate.shape
    if (truth.d, truth.out_dim) != sizes:
        raise ValueError(
            f"truth has {truth.d} features and {truth.out_dim} outputs, the phases {sizes[0]} and "
            f"{sizes[1]}: pass the layer that made the labels"
        )


# Phases 1 and 3: the sum of the projections.


def _crude_sum(phases: Phases, truth: AttentionLayer | None) -> list[Panel]:
    if phases.crude is None:
        return []
    found, chosen = phases.crude.candidates, phases.crude.chosen.name
    names = [one.name + " (chosen)" * (one.name == chosen and len(found) > 1) for one in found]
    panels: list[Panel] = []
    if all(np.isfinite(one.score) for one in found):
        scores = [(name, "", one.score) for name, one in zip(names, found, strict=True)]
        panels.append(Named("mean log score", tuple(scores)))
    if truth is not None:
        total = truth.w.sum(axis=0)
        errors = [
            (name, "", _relative(one.estimate, total))
            for name, one in zip(names, found, strict=True)
        ]
        panels.append(Named("relative error", tuple(errors), from_zero=True))
    if not panels:
        values = np.linalg.svd(phases.crude.estimate, compute_uv=False).astype(np.float64)
        curve = Curve("", np.arange(1.0, len(values) + 1), values, dots=True)
        panels.append(Lines("singular values of the sum", "direction", (curve,)))
    return panels


def _refined_sum(phases: Phases, truth: AttentionLayer | None) -> list[Panel]:
    if not phases.sums:
        return []
    rows = [
        Curve(_name(round_), one.margin, one.residual, dots=True)
        for round_, one in enumerate(phases.sums, start=1)
        if len(one.residual)
    ]
    panels: list[Panel] = []
    if rows:
        panels.append(
            Lines("residual over typical label", "margin of the proxy", tuple(rows), log="y")
        )
    if truth is not None:
        total = truth.w.sum(axis=0)
        estimates = [] if phases.crude is None else [phases.crude.estimate]
        estimates += [one.estimate for one in phases.sums]
        first = len(phases.sums) + 1 - len(estimates)
        errors = [(_name(first + i), "", _relative(one, total)) for i, one in enumerate(estimates)]
        panels.append(Named("relative error of the sum", tuple(errors), log=True))
        panels.append(_proxy_products(phases, truth))
    return panels


def _proxy_products(phases: Phases, truth: AttentionLayer) -> Panel:
    """Of the minimum-norm point of the hull they are one, of every head."""
    entries = []
    for round_, body in enumerate(phases.bodies[: len(phases.sums)]):
        proxy = body.proxy
        along = np.einsum("mde,de->m", truth.theta, proxy) / np.sum(proxy**2)
        entries += [(f"head {i + 1}", _name(round_), float(one)) for i, one in enumerate(along)]
    return Named("<proxy, head> / |proxy|\N{SUPERSCRIPT TWO}", tuple(entries), level=1.0)


# Phases 2 and 4: certified rows, and the body that they cut out.


def _rows_and_body(
    phases: Phases, truth: AttentionLayer | None, rounds: Sequence[int]
) -> list[Panel]:
    # A start may have bodies and no rows; those that a run adds come last.
    without = len(phases.bodies) - len(phases.rows)
    rows = {r: phases.rows[r - without] for r in rounds if without <= r < len(phases.bodies)}
    panels: list[Panel] = []
    if rows:
        scores = [_ranked(_name(r), np.sort(found.score)) for r, found in rows.items()]
        panels.append(Lines("score", "share of the rows", tuple(scores), log="y"))
        last = max(rows)
        panels.append(_constraint_errors(rows[last], phases.bodies[last], truth))
    if truth is None:
        return panels
    if rows:
        precision = [_ranked(_name(r), _precision(one, truth.theta)) for r, one in rows.items()]
        axis = "share of the rows, best first"
        panels.append(Lines("precision", axis, tuple(precision), top=1.0))
    distances = [
        (f"head {i + 1}", _name(r), distance)
        for r in rounds
        if r < len(phases.bodies)
        for i, theta in enumerate(truth.theta)
        if (distance := _distance(phases.bodies[r], theta)) is not None
    ]
    if distances:
        panels.append(Named("distance from the body", tuple(distances), log=True))
    return panels


def _constraint_errors(rows: CertifiedRows, body: Any, truth: AttentionLayer | None) -> Panel:
    """How far a point is from satisfying each row, in units of the row's score: that of the proxy,
    and with the truth those of the heads. Below one it is in the literal plan's body."""
    points = {"proxy": body.proxy}
    if truth is not None:
        points |= {f"head {i + 1}": theta for i, theta in enumerate(truth.theta)}
    curves = [
        _ranked(name, np.sort(_log_odds_errors(rows, point) / np.maximum(rows.score, 1e-300)))
        for name, point in points.items()
    ]
    level = 1.0 if isinstance(body, ConvexBody) else None
    return Lines(
        "log-odds error over score",
        "share of the rows",
        tuple(curves),
        log="y",
        level=level,
        level_name="tolerance",
    )


def _precision(rows: CertifiedRows, thetas: Float64) -> Float64:
    """Of the best rows, the share on which all heads have the row's log-odds to within one."""
    errors = np.max([_log_odds_errors(rows, theta) for theta in thetas], axis=0)
    return np.cumsum(errors < _TRUE_ROW) / np.arange(1, len(rows) + 1)


def _log_odds_errors(rows: CertifiedRows, theta: Float64) -> Float64:
    applied = np.einsum("cd,de,ce->c", rows.query, theta, rows.difference, optimize=True)
    return np.abs(applied - rows.log_odds)


def _distance(body: Any, theta: Float64) -> float | None:
    """From the nearest point of a body of constraints, which may be violated at their price, or
    from the affine hull of the proxy and the wide directions; over the head's norm. None of a body
    that has neither."""
    if isinstance(body, ConvexBody):
        around = replace(body, offsets=-body.errors(theta))
        apart = around.minimum_norm_point()
    elif not hasattr(body, "wide"):
        return None
    else:
        apart = theta - body.proxy
        apart = apart - np.einsum("wde,wab,ab->de", body.wide, body.wide, apart)
    return float(np.linalg.norm(apart) / np.linalg.norm(theta))


# Phases 5 and 6, and decoding.


def _span(phases: Phases, truth: AttentionLayer | None) -> list[Panel]:
    if phases.span is None:
        return []
    sines = [(f"by {name}", "", sine) for name, sine in phases.span.angles]
    if truth is not None:
        sines += [
            (f"head {i + 1}", "", _sine_to_span(phases.span, theta))
            for i, theta in enumerate(truth.theta)
        ]
        if truth.n_heads == phases.span.n_heads:
            exact = exact_span(np.asarray(truth.theta))
            sines.append(("the true span", "", span_angle(phases.span, exact)))
    panels: list[Panel] = [Named("sine to the span", tuple(sines), log=True)] if sines else []
    eigenvalues = getattr(phases.bodies[-1], "eigenvalues", None) if phases.bodies else None
    if eigenvalues is not None and len(eigenvalues):
        widths = np.maximum(eigenvalues[:_WIDTHS], 1e-16) ** -0.5
        curve = Curve("", np.arange(1.0, len(widths) + 1), widths, dots=True)
        between = phases.span.n_heads - 0.5
        panels.append(Lines("width of the body", "direction", (curve,), log="y", divide=between))
    return panels


def _sine_to_span(span: Span, theta: Float64) -> float:
    basis = span.basis
    outside = theta - np.einsum("sde,sab,ab->de", basis, basis, theta)
    return float(np.linalg.norm(outside) / np.linalg.norm(theta))


def _net(phases: Phases, truth: AttentionLayer | None) -> list[Panel]:
    if phases.net is None:
        return []
    errors = phases.net.candidates[np.isfinite(phases.net.candidates)]
    ranks = np.unique(np.rint(np.geomspace(1, max(len(errors), 1), _POINTS)).astype(int))
    curves = [Curve("candidates", ranks * 1.0, errors[ranks - 1], dots=len(errors) < 50)]
    stated = phases.net.generalisation
    if stated is not None:
        said = f"bound ({1 - stated.delta:.0%})"
        curves.append(Curve(said, np.ones(1), np.array([stated.bound]), dots=True))
    panels: list[Panel] = [
        Lines(
            "relative squared error",
            "candidate, best first",
            tuple(curves) if len(errors) else (),
            log="xy" if len(errors) >= 50 else "y",
            level=phases.net.error,
            level_name="the layer",
        )
    ]
    return panels + _head_errors(phases.net.layer, truth)


def _decoded(phases: Phases, truth: AttentionLayer | None) -> list[Panel]:
    if phases.decoded is None:
        return []
    errors = phases.decoded.errors
    curve = Curve("", np.arange(float(len(errors))), errors, dots=True)
    panels: list[Panel] = [Lines("relative squared error", "decoding", (curve,), log="y")]
    return panels + _head_errors(phases.decoded.layer, truth)


def _head_errors(layer: AttentionLayer, truth: AttentionLayer | None) -> list[Panel]:
    """Relative errors of the matched heads; nothing where heads cannot be matched."""
    if truth is None or not (found := compare(layer, truth)).comparable:
        return []
    entries = [
        (f"head {i + 1}", name, float(error))
        for name, errors in (
            ("\N{GREEK CAPITAL LETTER THETA}", found.theta_errors),
            ("W", found.w_errors),
        )
        for i, error in enumerate(errors)
    ]
    return [Named("relative error", tuple(entries), log=True)]


def _ranked(name: str, values: Float64) -> Curve:
    """Values in their order against the share of them that came so far, as few points."""
    places = np.unique(np.rint(np.linspace(0, len(values) - 1, _POINTS)).astype(int))
    return Curve(name, (places + 1) / len(values), values[places])


def _name(round_: int) -> str:
    """Of what was made with the crude sum, or with the sum of a round."""
    return f"round {round_}" if round_ else "crude"


def _relative(estimate: Float64, exact: Float64) -> float:
    return float(np.linalg.norm(estimate - exact) / np.linalg.norm(exact))
