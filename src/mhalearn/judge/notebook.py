"""What a notebook shows for a certificate and for a solution."""

import math

from markupsafe import Markup

from mhalearn._runtime import html
from mhalearn.judge.certificate import Certificate
from mhalearn.judge.solution import Solution
from mhalearn.layer.notebook import describe_layer
from mhalearn.run.outcome import Outcome

# Findings that are listed.
_MOST_LISTED = 40
# Outcomes that promise less than exactness, and are no failure; the others are one.
_FAIR = (Outcome.FITTED, Outcome.NOT_IDENTIFIED, Outcome.TIME_LIMIT)


def describe_certificate(certificate: Certificate) -> Markup:
    """What is certain in sentences, and the numbers behind them folded."""
    parts = [html.paragraph(certificate.reason), html.paragraph(certificate.statement)]
    if certificate.span is not None:
        opened = certificate.span
        parts.append(
            html.paragraph(
                f"Tokens span {opened.dimension} of {opened.features} dimensions, which leaves "
                f"{opened.n_open} of {opened.n_parameters} numbers of the layer open:"
            )
        )
        parts += [html.paragraph(words) for words in opened.words]
    parts.append(html.folded("numbers", html.table(_list_numbers(certificate))))
    heading = html.title("Certificate") + _say_recovered(certificate)
    return html.card(heading, parts)


def describe_solution(solution: Solution) -> Markup:
    """The outcome and its reason, the heads; findings and certificate folded."""
    outcome, certificate = solution.outcome, solution.certificate
    claims = outcome in (Outcome.RECOVERED, Outcome.RECOVERED_ON_SPAN)
    tone: html.Tone = "good" if claims else "fair" if outcome in _FAIR else "bad"
    parts = [html.paragraph(solution.reason), describe_layer(solution.layer)]
    if solution.findings:
        found = [(one.name, one.sentence) for one in solution.findings[:_MOST_LISTED]]
        parts.append(html.folded("all that was found", html.table(found)))
    if certificate is not None:
        parts.append(html.folded("certificate", describe_certificate(certificate)))
    if solution.trace:
        seconds = solution.trace[-1].seconds
        parts.append(html.paragraph(f"{seconds:.3g} seconds, {len(solution.trace)} events"))
    return html.card(html.title("Solution") + html.badge(outcome.name, tone), parts)


def _say_recovered(certificate: Certificate) -> Markup:
    if certificate.recovered:
        return html.badge("recovered", "good")
    if certificate.recovered_on_span:
        return html.badge("recovered on the span of the tokens", "good")
    return html.badge("not recovered", "fair")


def _list_numbers(certificate: Certificate) -> list[tuple[str, str]]:
    opened, noise = certificate.null_dimension, certificate.noise_level
    return [
        ("fresh examples", str(certificate.n_examples)),
        ("relative error on them", f"{math.sqrt(certificate.relative_mse):.2g}"),
        ("labels", certificate.label_precision),
        ("error that counts as exact there", f"{certificate.floor:.2g}"),
        (f"of them above {certificate.threshold:g}", str(certificate.n_exceeding)),
        ("share of inputs that may exceed it", f"at most {certificate.tail_bound:.3g}"),
        ("confidence", f"{1 - certificate.delta:.6g}"),
        ("directions left open", "not known" if opened is None else str(opened)),
        ("noise level", "not known" if noise is None else f"{noise:.2g}"),
    ]
