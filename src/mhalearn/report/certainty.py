"""What is certain: a certificate in sentences, figures and numbers."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from mhalearn._runtime.types import Float64
from mhalearn.judge.certificate import Certificate
from mhalearn.judge.open_parameters import OpenParameters
from mhalearn.judge.tail_bound import say_needed
from mhalearn.report import certainty_figures as figures
from mhalearn.report.numbers import number


class Certainty(NamedTuple):
    """One thing that is known, how far, and the figure that shows it."""

    heading: str
    sentences: list[str]
    caption: str = ""
    figure: Markup | None = None


def list_certainties(
    certificate: Certificate | None, error: float | None, tokens: Float64 | None, features: int
) -> list[Certainty]:
    """What is certain on unseen inputs, of the parameters, and what inputs leave open.

    error: the largest one of a parameter, where the truth is known. tokens: eigenvalues of the
    covariance of tokens, as far as they span the features, where they spread unevenly.
    """
    if certificate is None:
        sentences = ["No certificate was made, so nothing is promised about unseen inputs."]
        found = [Certainty("On unseen inputs", [*_against_truth(error, None), *sentences])]
    else:
        found = [_on_unseen(certificate), _of_parameters(certificate, error)]
    if tokens is not None and tokens.size:
        found.append(_of_inputs(tokens, features))
    if certificate is not None and certificate.span is not None:
        found.append(_left_open(certificate.span))
    return found


def _on_unseen(certificate: Certificate) -> Certainty:
    n, exceeding = certificate.n_examples, certificate.n_exceeding
    promised = certificate.tail_bound < 1
    if promised or certificate.refitted or not n:
        sentences = [certificate.statement]
    else:
        sentences = [
            f"Nothing is promised about unseen inputs: {exceeding} of {n} fresh examples have a "
            f"relative error above {number(certificate.threshold)}."
        ]
    if promised:
        more = say_needed(exceeding, certificate.tail_bound, certificate.delta)
        sentences += [more] if more else []
        sentences.append(
            "This holds for inputs drawn as the fresh examples were, independent of one another "
            "and of the learning."
        )
    heading = "On unseen inputs"
    if certificate.errors is None or not n:
        return Certainty(heading, sentences)
    before = ", before the last fit to all" if certificate.refitted else ""
    title = (
        f"Relative errors of {n} fresh examples, ascending, on a log axis: from "
        f"{number(certificate.errors[0])} to {number(certificate.errors[-1])}; "
        f"{exceeding} above {number(certificate.threshold)}"
    )
    caption = f"Relative errors of {n} fresh examples, in ascending order{before}."
    if promised:
        caption += " Of the shaded share of inputs nothing is promised."
    drawn = figures.fresh_errors(
        certificate.errors,
        n,
        certificate.threshold,
        certificate.tail_bound,
        "fresh-errors",
        title,
    )
    return Certainty(heading, sentences, caption, drawn)


def _of_parameters(certificate: Certificate, error: float | None) -> Certainty:
    sentences = [*_against_truth(error, certificate.span), _identified(certificate)]
    heading = "Of the parameters"
    if certificate.spectrum is None:
        return Certainty(heading, sentences)
    values, null = certificate.spectrum, certificate.null_dimension or 0
    title = (
        f"{values.size} eigenvalues of the reduced normal matrix, ascending, on a log axis: "
        f"from {number(abs(values[0]))} to {number(abs(values[-1]))}"
    )
    caption = (
        "Eigenvalues of the reduced normal matrix. A drop to rounding error would be a direction "
        "that the examples leave open."
    )
    if null:
        caption = "Eigenvalues of the reduced normal matrix; the open directions in orange."
    return Certainty(heading, sentences, caption, figures.spectrum(values, null, "spectrum", title))


def _against_truth(error: float | None, span: OpenParameters | None) -> list[str]:
    if error is None:
        return []
    compared = "a parameter" if span is None else "what inputs can show"
    return [
        "The truth was given: after matching heads, the largest relative error of "
        f"{compared} is {number(error)}."
    ]


def _of_inputs(tokens: Float64, features: int) -> Certainty:
    ratio, rank = number(tokens[0] / tokens[-1]), len(tokens)
    apart = f"the widest direction has {ratio} times the variance of the narrowest"
    said, beyond = f"Tokens span all {features} dimensions, unevenly: {apart}.", ""
    if rank < features:
        said = (
            f"Tokens span {rank} of {features} dimensions, and everything here is said of inputs "
            f"there. Within them {apart}."
        )
        beyond = " Shaded: directions in which they do not spread at all."
    title = (
        f"{rank} eigenvalues of the tokens' covariance, of {features} features, descending, on a "
        f"log axis: from {number(tokens[0])} to {number(tokens[-1])}"
    )
    return Certainty(
        "Where inputs lie",
        [said],
        f"Eigenvalues of the tokens' covariance.{beyond}",
        figures.token_spectrum(tokens, features, "token-spectrum", title),
    )


def _left_open(span: OpenParameters) -> Certainty:
    shares = np.sum(span.normals**2, axis=0)
    most = int(np.argmax(shares))
    title = (
        f"Share of each of {span.features} features in directions that are not spanned: at most "
        f"{number(shares[most])}, of feature {most + 1}"
    )
    said = f"{span.n_open} of {span.n_parameters} numbers of the layer are open: set to least norm."
    return Certainty(
        "What they leave open",
        [said, *(f"{words}." for words in span.words)],
        "How much of each feature lies in directions that tokens never show.",
        figures.open_features(np.asarray(shares, np.float64), "open-features", title),
    )


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
