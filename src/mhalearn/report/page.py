"""What the report says: a run turned into the words, numbers and figures of one page."""

from __future__ import annotations

import hashlib
import math
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from mhalearn import storage
from mhalearn.certificate import Certificate
from mhalearn.layer import AttentionLayer
from mhalearn.matching import Comparison, compare
from mhalearn.nondegeneracy import NondegeneracyReport, check_nondegeneracy
from mhalearn.outcome import Outcome, Solution
from mhalearn.report import figures
from mhalearn.report.numbers import number, short
from mhalearn.report.phases import describe_phases

Float64 = NDArray[np.float64]

# Heads that are drawn, and that are listed: what keeps the file under 2 MB at any size.
_MOST_DRAWN, _MOST_LISTED = 12, 256
_MOST_STAGES = 40
# Inches of figures that span the page: on a desk, and on a telephone.
_WIDE, _NARROW = 10.4, 4.6

# Each outcome as a headline, and its colour on the page.
_HEADLINES = {
    Outcome.RECOVERED: ("The layer was recovered", "good"),
    Outcome.FITTED: ("The examples are fitted; exactness is not certified", "fair"),
    Outcome.NOT_IDENTIFIED: ("The examples do not single out one layer", "fair"),
    Outcome.STUCK: ("No layer was found that explains the examples", "bad"),
    Outcome.TOO_FEW_EXAMPLES: ("There are too few examples to determine the layer", "bad"),
    Outcome.TIME_LIMIT: ("The time limit came first", "fair"),
    Outcome.NONFINITE: ("The solver diverged", "bad"),
}


@dataclass(frozen=True)
class Head:
    """One head of the learned layer, in the truth's order where the truth is known."""

    name: str
    theta_norm: float
    w_norm: float
    theta_error: float | None
    w_error: float | None
    rows: list[list[tuple[str, Markup]]]  # labelled figures: a row for Theta, a row for W


@dataclass(frozen=True)
class Match:
    """The truth beside the learned layer, and how far apart they are."""

    truth: AttentionLayer
    found: Comparison


def write_report(
    run: Any, path: str | os.PathLike[str], truth: AttentionLayer | None = None
) -> None:
    """Write one HTML file that explains a run; it opens without a network.

    run: a `Solution` or a fitted estimator. truth: the layer it should have found, if known.
    """
    solution = getattr(run, "solution_", run)
    if not isinstance(solution, Solution):
        raise ValueError(
            f"cannot report on {type(run).__name__}: pass a Solution or a fitted AttentionRegressor"
        )
    storage.check_writable(path)
    storage.write_atomically(path, render(solution, truth).encode())


def render(solution: Solution, truth: AttentionLayer | None = None) -> str:
    """The page as a string."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("mhalearn.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"number": number, "sentence": _sentence}
    layer, trace, certificate = solution.layer, solution.trace, solution.certificate
    match = None if truth is None else _match(layer, truth)
    stages = figures.stages(trace)
    headline, tone = _HEADLINES[solution.outcome]
    return environment.get_template("page.html.jinja").render(
        headline=headline,
        tone=tone,
        outcome=solution.outcome,
        reason=solution.reason,
        layer=layer,
        truth=truth,
        match=match,
        seconds=trace[-1].seconds if trace else None,
        certain=_certainties(certificate, match),
        certificate=certificate,
        certificate_rows=[] if certificate is None else _certificate_rows(certificate),
        spectrum=None if certificate is None else _spectrum(certificate),
        heads=_heads(layer, match),
        most_drawn=_MOST_DRAWN,
        thinned=figures.is_thinned(layer.theta[0]) or figures.is_thinned(layer.w[0]),
        phases=describe_phases(trace),
        stages=stages[-_MOST_STAGES:],
        stages_left_out=max(0, len(stages) - _MOST_STAGES),
        descent=_wide_and_narrow(
            lambda width, name: figures.descent(
                trace, width, name, "Relative squared error against seconds, on a log axis"
            ),
            "descent",
        ),
        conditions=_conditions(solution),
        settings=_settings(solution.settings),
        call=_call(solution.settings),
        versions=_versions(),
        digest=_digest(solution),
    )


def _sentence(text: str) -> str:
    """With a capital letter and a full stop."""
    text = text.strip()
    return text if not text else text[0].upper() + text[1:] + ("" if text[-1] in ".!?" else ".")


# Heads


def _match(layer: AttentionLayer, truth: AttentionLayer) -> Match | None:
    """Head by head, where both layers have heads of the same shape, number and mask."""
    found = compare(layer, truth)
    return Match(truth, found) if found.comparable else None


def _heads(layer: AttentionLayer, match: Match | None) -> list[Head]:
    order = range(layer.n_heads) if match is None else match.found.order.tolist()
    heads = []
    for i, learned in enumerate(order[:_MOST_LISTED]):
        theta, w = layer.theta[learned], layer.w[learned]
        drawn = [] if i >= _MOST_DRAWN else [("Θ", "theta", theta), ("W", "w", w)]
        heads.append(
            Head(
                name=f"Head {i + 1}",
                theta_norm=float(np.linalg.norm(theta)),
                w_norm=float(np.linalg.norm(w)),
                theta_error=None if match is None else float(match.found.theta_errors[i]),
                w_error=None if match is None else float(match.found.w_errors[i]),
                rows=[
                    _panels(
                        matrix,
                        None if match is None else getattr(match.truth, parameter)[i],
                        symbol,
                        f"head-{i + 1}-{parameter}",
                    )
                    for symbol, parameter, matrix in drawn
                ],
            )
        )
    return heads


def _panels(
    matrix: Float64, truth: Float64 | None, symbol: str, name: str
) -> list[tuple[str, Markup]]:
    """A matrix of a head: as learned, as it truly is, the difference, its singular values."""
    title = name.replace("-", " ").capitalize()
    shown = [("learned", matrix)] if truth is None else [("learned", matrix), ("truth", truth)]
    limit = max(float(np.abs(m).max()) for _, m in shown)
    panels = [
        (
            f"{symbol}, {what}",
            figures.heat_map(m, limit, f"{name}-{what}", f"{title}, {what}: heat map"),
        )
        for what, m in shown
    ]
    if truth is not None:
        difference = matrix - truth
        largest = float(np.abs(difference).max())
        described = f"{title}, learned minus truth: at most {short(largest)} in size"
        panels.append(
            ("difference", figures.heat_map(difference, largest, f"{name}-difference", described))
        )
    values, of_truth = _singular_values(matrix), None if truth is None else _singular_values(truth)
    described = (
        f"{title}: {values.size} singular values between {short(float(values[-1]))} "
        f"and {short(float(values[0]))}"
    )
    panels.append(
        (
            f"singular values of {symbol}",
            figures.singular_values(values, of_truth, f"{name}-values", described),
        )
    )
    return panels


def _singular_values(matrix: Float64) -> Float64:
    return np.asarray(np.linalg.svd(matrix, compute_uv=False), np.float64)


# The certificate


def _certainties(certificate: Certificate | None, match: Match | None) -> list[str]:
    """What is certain, and how far, in full sentences."""
    facts = []
    if match is not None:
        facts.append(
            "The truth was given: after matching heads, the largest relative parameter error is "
            f"{number(match.found.max_error)}."
        )
    if certificate is None:
        return [*facts, "No certificate was made, so nothing is promised about unseen inputs."]
    facts.append(certificate.statement)
    if certificate.null_dimension is None:
        facts.append(
            "The layer is too large for its spectrum, and a random change of its parameters did "
            "not show that no other layer nearby fits as well."
        )
    elif certificate.null_dimension == 0:
        facts.append(
            "No direction of change at this layer leaves the outputs alone: numerical evidence "
            "that no other layer nearby fits as well, not a proof that none exists far away."
        )
    else:
        facts.append(
            f"The inputs leave {certificate.null_dimension} directions in parameter space open: "
            "parameters that touch them are not known."
        )
    facts.append(
        "The statement about unseen inputs holds for inputs drawn as the certifying examples were, "
        "independent of one another and of the learning."
    )
    return facts


def _certificate_rows(certificate: Certificate) -> list[tuple[str, str]]:
    rows = [
        ("Certifying examples", number(certificate.n_examples)),
        ("Relative squared error on them", number(certificate.relative_mse)),
        ("Relative error on them, its root", number(math.sqrt(certificate.relative_mse))),
        ("Precision of the labels", certificate.label_precision),
        ("Relative error that counts as exact there", f"at most {number(certificate.floor)}"),
        ("Noise level, in units of the labels", number(certificate.noise_level)),
        ("Relative error t that is promised", number(certificate.threshold)),
        ("Certifying examples with an error above t", number(certificate.n_exceeding)),
        ("Share of inputs that may exceed t", f"at most {number(certificate.tail_bound)}"),
        ("Confidence of that bound", f"{100 * (1 - certificate.delta):g} %"),
        ("Directions the inputs leave open", number(certificate.null_dimension)),
    ]
    if certificate.n_seen:
        rows.append(("Left out because they were learned from", number(certificate.n_seen)))
    if certificate.intervals is not None:
        for symbol, widths in (
            ("Θ", certificate.intervals.theta),
            ("W", certificate.intervals.w),
        ):
            known = widths[np.isfinite(widths)]
            if known.size:
                said = f"{number(np.median(known))} median, {number(known.max())} widest"
                rows.append((f"Half-width of the intervals for {symbol}", said))
    return rows


def _spectrum(certificate: Certificate) -> tuple[Markup, Markup] | None:
    if certificate.spectrum is None:
        return None
    values, null = certificate.spectrum, certificate.null_dimension or 0
    title = f"{values.size} eigenvalues of the reduced normal matrix, ascending, on a log axis"
    return _wide_and_narrow(
        lambda width, name: figures.spectrum(values, null, width, name, title), "spectrum"
    )


def _wide_and_narrow(
    draw: Callable[[float, str], Markup | None], name: str
) -> tuple[Markup, Markup] | None:
    wide, narrow = draw(_WIDE, f"{name}-wide"), draw(_NARROW, f"{name}-narrow")
    return None if wide is None or narrow is None else (wide, narrow)


# Conditions, and how to run it again


def _conditions(solution: Solution) -> NondegeneracyReport | None:
    """The non-degeneracy report of the learned layer; None where the token count is not known."""
    tokens = solution.settings.get("k")
    return None if tokens is None else check_nondegeneracy(solution.layer, k=int(tokens), seed=0)


def _settings(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(str(name), _said(value)) for name, value in settings.items()]


def _said(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 400 else text[:400] + "…"


def _call(settings: Mapping[str, Any]) -> str:
    """The estimator call that repeats the run, from those settings that are its arguments."""
    names = ("n_heads", "method", "head_dim", "bias", "causal", "polish", "random_state")
    known = [f"{name}={settings[name]!r}" for name in names if name in settings]
    return f"mha.AttentionRegressor({', '.join(known)}).fit(examples)"


def _versions() -> list[tuple[str, str]]:
    found = [("Python", platform.python_version()), ("mhalearn", storage.mhalearn_version())]
    for package in ("jax", "jaxlib", "numpy", "scipy"):
        try:
            found.append((package, version(package)))
        except PackageNotFoundError:
            found.append((package, "unknown"))
    return found


def _digest(solution: Solution) -> str | None:
    """A digest of the examples learned from, whatever their order."""
    seen = np.sort(solution.layer.seen)
    return hashlib.sha256(seen.astype("<u8").tobytes()).hexdigest() if seen.size else None
