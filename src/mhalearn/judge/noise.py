"""The level of label noise, from what a fit leaves of the examples it was fitted to.

Examples that were not fitted say too much: their residual holds the error of the estimate beside
the noise, and near the counting limit, where attention is sharp, many times as much. What is left
of the fitted ones holds less than the noise, by as much as the unknowns took: for a minimum of the
squared error, sigma^2 = |residual|^2 / (scalars - unknowns), to first order.
Trust: unbiased for linear models; within 5 % here from twice the counting limit on, where the layer
is the right one.
"""

import math
from contextlib import suppress
from dataclasses import replace

from scipy.stats import norm

from mhalearn.data import Examples
from mhalearn.judge.certificate import Certificate
from mhalearn.judge.identifiability import half_widths
from mhalearn.judge.jacobian_spectrum import measure_spectrum
from mhalearn.judge.residuals import Residuals, measure_residuals
from mhalearn.judge.spectrum import Parameters
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.base import Layer
from mhalearn.run.watch import OutOfTime, Watch


def estimate_noise(residuals: Residuals, scalars: int, unknowns: int) -> float:
    """The standard deviation of label noise; that of the residual where nothing is left over.

    residuals: of the examples that were fitted. unknowns: that were determined by them.
    """
    share = 1 - unknowns / scalars
    return residuals.noise_level / math.sqrt(share) if share > 0 else residuals.noise_level


def with_noise(certificate: Certificate, noise: float | None) -> Certificate:
    """The certificate with this noise in place of the residual of its examples, if it is known."""
    if noise is None:
        return certificate
    intervals = certificate.intervals
    if intervals is not None and certificate.noise_level:
        intervals = half_widths(intervals, noise / certificate.noise_level)
    return replace(certificate, noise_level=noise, intervals=intervals)


def refitted(
    certificate: Certificate,
    layer: Layer,
    examples: Examples,
    architecture: Architecture,
    residuals: Residuals | None = None,
    working_set: Examples | None = None,
    cause: str = "Noise",
    watch: Watch | None = None,
) -> Certificate:
    """The certificate of a layer that was fitted to all examples after it was certified.

    residuals: of the layer on the examples, where they are known. working_set: random ones of them,
    in memory, whose inputs stand for all. cause: of the errors, "Noise" or "Rounding".
    watch: told of progress; where time is up there are no intervals.

    The noise and the intervals, both to first order, are those of that fit. No example is left to
    vouch for fresh inputs, so the tail is given up.
    """
    inputs = examples if working_set is None else working_set
    residuals = residuals or measure_residuals(layer, examples)
    spectrum = None
    with suppress(OutOfTime):
        spectrum = measure_spectrum(layer, inputs, architecture, watch=watch)
    null = 0 if spectrum is None else spectrum.null_dimension
    determined = architecture.with_heads(layer.n_heads).count() - null
    noise = estimate_noise(residuals, examples.rows * layer.out_dim, determined)
    intervals: Parameters | None = None
    if spectrum is not None:
        width = norm.ppf(1 - certificate.delta / 2) * noise
        intervals = half_widths(spectrum.deviations, width * math.sqrt(inputs.rows / examples.rows))
    return replace(
        certificate,
        noise_level=noise,
        tail_bound=1.0,
        spectrum=None if spectrum is None else spectrum.theta,
        null_dimension=None if spectrum is None else spectrum.null_dimension,
        intervals=intervals,
        statement=(
            f"{cause} of level {noise:.3g} is estimated from the residual"
            + (
                f", and with it, to first order, an interval of confidence "
                f"{1 - certificate.delta:.10g} for each parameter. "
                if intervals is not None
                else ". "
            )
            + "The layer was fitted to all examples: nothing is promised about fresh inputs."
        ),
        refitted=True,
    )
