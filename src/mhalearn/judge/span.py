"""What is said of a layer that was learned in coordinates of the tokens' span, in the user's.

Where tokens do not span the features, labels determine the function on their affine hull, and of
the parameters what acts there. That is recovery on that span: it is called so, and what is open is
told. Where they do, but unevenly, coordinates were whitened: the same parameters are claimed, and
must be resolved, in the user's features.
"""

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from scipy.stats import norm

from mhalearn._runtime.types import Float64
from mhalearn.data import Examples
from mhalearn.data.label_precision import Precision
from mhalearn.judge.certificate import Certificate
from mhalearn.judge.identifiability import RESOLVED, half_widths, parameter_bound
from mhalearn.judge.jacobian_spectrum import measure_spectrum
from mhalearn.judge.open_parameters import OpenParameters, describe_open
from mhalearn.judge.residuals import Residuals, measure_residuals
from mhalearn.judge.spectrum import Parameters, Spectrum
from mhalearn.judge.verdict import Verdict
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.projected_layer import ProjectedLayer
from mhalearn.layer.span_coordinates import SpanCoordinates
from mhalearn.run.outcome import Outcome
from mhalearn.run.watch import OutOfTime, Watch


class Lifted(NamedTuple):
    """A layer and what may be said about it, in the user's features."""

    layer: AttentionLayer | ProjectedLayer
    verdict: Verdict
    certificate: Certificate | None


@dataclass(frozen=True)
class Fit:
    """What was learned and judged in coordinates of the span.

    layer, verdict, certificate: in those coordinates. train, certify: the user's examples, to look
    again; fitted: those in memory that a last fit was made to. precision: of the labels.
    """

    layer: AttentionLayer | ProjectedLayer
    verdict: Verdict
    certificate: Certificate | None
    train: Examples
    certify: Examples | None
    fitted: Examples
    precision: Precision


def lift_fit(fit: Fit, coordinates: SpanCoordinates, watch: Watch | None = None) -> Lifted:
    """The fit in the user's features, with an outcome that holds there.

    watch: told of progress; where time is up there is no spectrum, as where it is too large.
    Cost: a pass over the examples that certify and, where there are intervals or the features are
    spanned, a spectrum.
    """
    layer = coordinates.lift(fit.layer)
    verdict, certificate = fit.verdict, fit.certificate
    opened = describe_open(coordinates, layer.n_heads)
    spectrum = _spectrum(fit, layer, coordinates, watch)
    if certificate is not None:
        certificate = replace(certificate, intervals=_intervals(certificate, spectrum))
    if verdict.outcome is Outcome.RECOVERED:
        objection = _objection(fit, layer, coordinates, spectrum)
        if objection is not None:
            verdict = _first(verdict, *objection)
            if certificate is not None:
                certificate = certificate.withdrawn(verdict.reason)
    if opened is not None:
        verdict = _on_span(verdict, opened)
        if certificate is not None:
            certificate = replace(certificate.on_span(opened), intervals=certificate.intervals)
    return Lifted(layer, verdict, certificate)


def _on_span(verdict: Verdict, opened: OpenParameters) -> Verdict:
    """What was recovered was so on the span; every finding says what it speaks of."""
    findings = []
    for finding in verdict.findings:
        if finding.outcome is Outcome.RECOVERED:
            outcome, said = Outcome.RECOVERED_ON_SPAN, opened.say_recovered
        else:
            outcome, said = finding.outcome, opened.say_considered
        numbers: dict[str, int | float] = {"span_dimension": opened.dimension}
        findings.append(
            replace(
                finding,
                outcome=outcome,
                sentence=said(finding.sentence),
                numbers=finding.numbers | numbers | {"open_parameters": opened.n_open},
            )
        )
    return Verdict(tuple(findings))


def _first(verdict: Verdict, outcome: Outcome, sentence: str) -> Verdict:
    first = replace(verdict.findings[0], outcome=outcome, sentence=sentence)
    return Verdict((first, *verdict.findings[1:]))


def _spectrum(
    fit: Fit,
    layer: AttentionLayer | ProjectedLayer,
    coordinates: SpanCoordinates,
    watch: Watch | None,
) -> Spectrum | None:
    """Of the layer's Jacobian in the user's features, where something is to be read off it."""
    wanted = fit.certificate is not None and fit.certificate.intervals is not None
    if not (wanted or (fit.verdict.outcome is Outcome.RECOVERED and not coordinates.leaves_open)):
        return None
    inputs = fit.train if fit.certificate is None or not fit.certificate.refitted else fit.fitted
    given = coordinates.given.with_heads(layer.n_heads)
    with suppress(OutOfTime):
        return measure_spectrum(layer, inputs, given, watch=watch)
    return None


def _intervals(certificate: Certificate, spectrum: Spectrum | None) -> Parameters | None:
    """Those of the user's parameters; of one that touches an open direction there is none."""
    if certificate.intervals is None or spectrum is None or certificate.noise_level is None:
        return None
    width = norm.ppf(1 - certificate.delta / 2) * certificate.noise_level
    return half_widths(spectrum.deviations, width)


def _objection(
    fit: Fit,
    layer: AttentionLayer | ProjectedLayer,
    coordinates: SpanCoordinates,
    spectrum: Spectrum | None,
) -> tuple[Outcome, str] | None:
    """What speaks against a recovered layer once it is written in the user's features."""
    looked = measure_residuals(layer, fit.certify or fit.train, fit.precision)
    if not looked.exact:
        return (
            Outcome.FITTED,
            f"the fit is exact in whitened coordinates of the tokens' span, but has a relative "
            f"residual of {looked.root_relative:.2g} in the features as they are: their covariance "
            "is too ill-conditioned for double precision; rescale or whiten the features",
        )
    if coordinates.leaves_open:
        return None
    bound = _bound(fit, layer, looked, coordinates, spectrum)
    if bound <= RESOLVED:
        return None
    return (
        Outcome.NOT_IDENTIFIED,
        f"the relative residual {looked.root_relative:.2g} is at the precision of the "
        f"{looked.precision} labels, but tokens vary so little in some direction that a parameter "
        f"is left uncertain by {bound:.2g} times the norm of a head (at most {RESOLVED:g} counts "
        "as determined)",
    )


def _bound(
    fit: Fit,
    layer: AttentionLayer | ProjectedLayer,
    residuals: Residuals,
    coordinates: SpanCoordinates,
    spectrum: Spectrum | None,
) -> float:
    """Error of the worst of the user's parameters, relative to the size of a head.

    By the spectrum in the user's features; where that sees no further than rounding, by that of
    the whitened ones, of which a parameter is a sum: |P E P^T| <= |P|^2 |E|, for Theta.
    """
    if spectrum is not None and spectrum.null_dimension == 0:
        error = residuals.label_norm * max(residuals.root_relative, residuals.unit / 4)
        return parameter_bound(
            layer, spectrum, error * math.sqrt(fit.train.n / len(residuals.squared))
        )
    whitened = None if fit.certificate is None else fit.certificate.parameter_bound
    if whitened is None:
        return math.inf
    stretch = float(np.linalg.norm(coordinates.coordinates, 2))
    r = coordinates.reduced.d
    inside, outside = _sizes(fit.layer), _sizes(layer)
    of_theta = r * stretch**2 * inside[0] / outside[0]
    of_w = r * stretch * inside[1] / outside[1]
    return whitened * max(of_theta, of_w)


def _sizes(layer: AttentionLayer | ProjectedLayer) -> tuple[float, float]:
    """Root mean square norms of the heads' Theta and W, whatever turns keys."""
    if isinstance(layer, AttentionLayer):
        return _size(layer.theta), _size(layer.w)
    params = layer.params
    each = layer.n_heads // len(params["key"])
    key, value = (np.repeat(params[side], each, axis=0) for side in ("key", "value"))
    return _size(params["query"] @ key.swapaxes(1, 2)), _size(value @ params["out"])


def _size(matrices: Float64) -> float:
    """Root mean square norm of the heads'."""
    return float(np.sqrt(np.mean(np.sum(matrices**2, axis=(1, 2))))) or 1.0
