"""What is certain: a certificate in sentences, in numbers, and its spectrum."""

from __future__ import annotations

import math

import numpy as np
from markupsafe import Markup

from mhalearn.judge.certificate import Certificate
from mhalearn.report import figures
from mhalearn.report.numbers import number


def list_certainties(
    certificate: Certificate | None, error: float | None, *, empty: bool
) -> list[str]:
    """What is certain, and how far, in full sentences.

    error: the largest one of a parameter, where the truth is known. empty: there is no layer.
    """
    if empty:
        return ["The run ended before it had a layer, so nothing is known about its heads."]
    facts = []
    if error is not None:
        facts.append(
            "The truth was given: after matching heads, the largest relative parameter error is "
            f"{number(error)}."
        )
    if certificate is None:
        return [*facts, "No certificate was made, so nothing is promised about unseen inputs."]
    promised = certificate.tail_bound < 1
    if promised or certificate.refitted:
        facts.append(certificate.statement)
    else:
        facts.append(
            f"Nothing is promised about unseen inputs: {certificate.n_exceeding} of "
            f"{certificate.n_examples} fresh examples have a relative error above "
            f"{number(certificate.threshold)}."
        )
    facts.append(_identified(certificate))
    if certificate.span is not None:
        span = certificate.span
        facts.append(
            f"Tokens span {span.dimension} of {span.features} dimensions, and everything here is "
            f"said of inputs there. {span.n_open} of {span.n_parameters} numbers of the layer are "
            f"open, and set to least norm. {'. '.join(span.words)}."
        )
    if promised:
        facts.append(
            "The statement about unseen inputs holds for inputs drawn as the certifying examples "
            "were, independent of one another and of the learning."
        )
    return facts


def _identified(certificate: Certificate) -> str:
    if certificate.null_dimension is None:
        return (
            "The layer is too large for its spectrum, and a random change of its parameters did "
            "not show that no other layer nearby fits as well."
        )
    if certificate.null_dimension > 0:
        return (
            f"The inputs leave {certificate.null_dimension} directions in parameter space open: "
            "parameters that touch them are not known."
        )
    if certificate.spectrum is None:
        return (
            "The layer is too large for its spectrum; a random change of its parameters is seen "
            "in the outputs: numerical evidence that no other layer nearby fits as well, not a "
            "proof that none exists far away."
        )
    return (
        "No direction of change at this layer leaves the outputs alone: numerical evidence "
        "that no other layer nearby fits as well, not a proof that none exists far away."
    )


def list_numbers(certificate: Certificate) -> list[tuple[str, str]]:
    """The certificate as a table."""
    promised = certificate.tail_bound < 1
    before = ", before the last fit to all examples" if certificate.refitted else ""
    rows = [
        ("Certifying examples", number(certificate.n_examples)),
        (f"Relative squared error on them{before}", number(certificate.relative_mse)),
        (f"Relative error on them, its root{before}", number(math.sqrt(certificate.relative_mse))),
        ("Precision of the labels", certificate.label_precision),
        ("Relative error that counts as exact there", f"at most {number(certificate.floor)}"),
        ("Noise level, in units of the labels", _noise_level(certificate)),
        ("Relative error t that is asked for", number(certificate.threshold)),
        (f"Certifying examples with an error above t{before}", number(certificate.n_exceeding)),
        (
            "Share of inputs that may exceed t",
            f"at most {number(certificate.tail_bound)}" if promised else "all: no bound holds",
        ),
        ("Confidence", f"{100 * (1 - certificate.delta):g} %"),
        ("Directions the inputs leave open", _open_directions(certificate)),
    ]
    if certificate.span is not None:
        span = certificate.span
        rows.append(("Dimensions that tokens span", f"{span.dimension} of {span.features}"))
        rows.append(("Numbers no such token can show", f"{span.n_open} of {span.n_parameters}"))
    if certificate.undetected is not None and certificate.claims:
        seen = f"up to {number(certificate.undetected)} of the labels"
        rows.append(("Smooth deviation from a layer that would not be seen", seen))
    if certificate.n_seen:
        rows.append(("Left out because they were learned from", number(certificate.n_seen)))
    if certificate.intervals is not None:
        symbols = {"theta": "Θ", "w": "W", "key_vector": "v", "out_bias": "c"}
        for name, widths in certificate.intervals.arrays.items():
            known = widths[np.isfinite(widths)]
            if known.size:
                said = f"{number(np.median(known))} median, {number(known.max())} widest"
                rows.append((f"Half-width of the intervals for {symbols.get(name, name)}", said))
    return rows


def _noise_level(certificate: Certificate) -> str:
    if certificate.noise_level is None:
        return "none: what is left is not known to be noise"
    return number(certificate.noise_level)


def _open_directions(certificate: Certificate) -> str:
    if certificate.null_dimension is None:
        return "not known: too large"
    asked = " found: a random one was asked" if certificate.spectrum is None else ""
    return number(certificate.null_dimension) + asked


def draw_spectrum(certificate: Certificate, width: float, name: str) -> Markup | None:
    """The eigenvalues behind the number of open directions; None where there are none."""
    if certificate.spectrum is None:
        return None
    values, null = certificate.spectrum, certificate.null_dimension or 0
    title = (
        f"{values.size} eigenvalues of the reduced normal matrix, ascending, on a log axis: "
        f"from {number(abs(values[0]))} to {number(abs(values[-1]))}"
    )
    return figures.spectrum(values, null, width, name, title)
