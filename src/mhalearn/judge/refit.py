"""Under noise a layer that was judged is fitted once more, to all examples."""

from collections.abc import Callable
from typing import NamedTuple

from mhalearn.judge.certificate import Certificate
from mhalearn.judge.consistency_checks import has_outliers, is_noise_without_outliers
from mhalearn.judge.evidence import Evidence
from mhalearn.judge.noise import refitted
from mhalearn.judge.residuals import measure_residuals
from mhalearn.judge.verdict import Verdict
from mhalearn.layer.base import Layer
from mhalearn.layer.layer import AttentionLayer
from mhalearn.run.outcome import Outcome
from mhalearn.run.watch import Watch
from mhalearn.solvers.polish import polish_on
from mhalearn.solvers.streaming_bfgs import fit_streamed


class Refit(NamedTuple):
    """A layer, its certificate, and words that end the reason."""

    layer: Layer
    certificate: Certificate
    told: str


def may_refit(verdict: Verdict, evidence: Evidence) -> bool:
    """Whether what is left is noise, and there is time to fit all examples."""
    fitted = verdict.outcome is Outcome.FITTED and verdict.has_error_bars
    return fitted and not evidence.run.is_over() and is_noise_without_outliers(evidence)


def refit(
    certificate: Certificate,
    evidence: Evidence,
    cause: str,
    metadata: Callable[[int], dict[str, str]],
) -> Refit:
    """Under noise what certified, or was left where it is, is worth more fitted.

    Unless that shows wrong labels among it: then all stays as it was.
    cause: of the errors, "Noise" or "Rounding". metadata: of a layer of so many examples.
    """
    layer, subsets, run, told = evidence.layer, evidence.subsets, evidence.run, ""
    examples, working_set = subsets.every, subsets.working_set
    architecture = evidence.architecture
    layer = polish_on(working_set, layer, architecture, run).layer
    if subsets.has_more:
        streamed = None
        if isinstance(layer, AttentionLayer):
            streamed = fit_streamed(layer, examples, working_set, architecture, run)
        if streamed is not None:
            layer = streamed
        elif examples.in_memory:
            layer = polish_on(examples, layer, architecture, run).layer
        else:
            told = f"; estimated from {working_set.n} of {examples.n} examples"
            examples = working_set
    layer = layer.replace(metadata=metadata(examples.n))
    residuals = measure_residuals(layer, examples, evidence.label_precision)
    if has_outliers(residuals):
        return Refit(evidence.layer, certificate, "")
    watch = Watch(run, "identifiability")
    made = refitted(
        certificate, layer, examples, architecture, residuals, working_set, cause, watch
    )
    return Refit(layer, made, told)
