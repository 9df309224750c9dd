"""Is what a fit leaves of coarse labels their rounding, and nothing else?

Rounding errors of the true layer are bounded by half a step, have mean zero and do not depend on
the inputs. A residual of a few units in the last place may still be that of a box that computed in
the labels' precision, or a deviation that many examples show together. So residuals are tested for
size, against what computing in that precision leaves, and for departures of every kind that
`departures` knows, with a power that grows with the number of examples.
"""

from typing import NamedTuple

import numpy as np

from mhalearn._runtime.types import Float64
from mhalearn.data import Examples
from mhalearn.judge.computing_error import computing_margin, expected_row_errors
from mhalearn.judge.departures import Departure, find_departures
from mhalearn.judge.fitted_attention import look_at
from mhalearn.judge.residuals import Residuals
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.base import Layer
from mhalearn.layer.layer import AttentionLayer

# A departure of less than this many units in the last place is let pass: computing in the labels'
# precision makes such, too.
_LET_PASS = 0.5
# Of another kind of attention, which is not computed coarsely here, so many units are.
_UNITS = 2.0


class RoundingTest(NamedTuple):
    """Sizes are relative to the labels."""

    residual: float
    expected: float  # that computing in the labels' precision leaves
    allowed: float
    departure: Departure | None  # that explains the most, if it is large enough to matter
    undetected: float  # the largest deviation that would not have been seen

    @property
    def passed(self) -> bool:
        return self.residual <= self.allowed and self.departure is None

    def describe(self, residuals: Residuals) -> str:
        """Why it was not passed."""
        told = f"the relative residual {self.residual:.2g} is more than rounding of the labels"
        if self.departure is None:
            return (
                f"{told}, and more than evaluating the layer in {residuals.precision} leaves "
                f"({self.expected:.2g}): its cause is not known"
            )
        units = np.sqrt(self.departure.share) * self.residual / residuals.unit
        return (
            f"{told}, and {units:.1f} ulp (units in the last place) of it depend on the inputs: "
            f"{self.departure.alternative.suggests}, or something similar"
        )


def run_rounding_test(
    layer: Layer,
    examples: Examples,
    architecture: Architecture,
    residuals: Residuals,
    seed: int = 0,
) -> RoundingTest:
    """residuals: of the layer on the examples, whose labels are float32, float16 or bfloat16.

    Cost: that of `find_departures`.
    """
    unit = residuals.unit
    if not isinstance(layer, AttentionLayer):
        size = residuals.root_relative
        return RoundingTest(size, residuals.rounding, _UNITS * unit, None, size)
    fitted, labels = look_at(layer, examples, architecture, seed)
    errors = expected_row_errors(fitted, labels, residuals.labels)
    inside = fitted.inside
    norm = float(np.sqrt(np.mean(labels[inside] ** 2))) or 1.0
    residual = float(np.sqrt(np.mean(fitted.residual[inside] ** 2))) / norm
    expected = float(np.sqrt(np.mean(errors[inside] ** 2))) / norm
    departures = find_departures(fitted, weights=1 / np.where(errors > 0, errors, np.inf))
    large = [
        departure
        for departure in departures.found
        if np.sqrt(departure.share) * residual > _LET_PASS * unit
    ]
    return RoundingTest(
        residual=residual,
        expected=expected,
        allowed=computing_margin(examples.d) * expected,
        departure=large[0] if large else None,
        undetected=max(
            _LET_PASS * unit,
            float(np.sqrt(departures.undetected)) * residual,
            # What is more than rounding may be computing, or a deviation as large.
            float(np.sqrt(max(0.0, residual**2 - residuals.rounding**2))),
        ),
    )


def compare_rows(
    layer: Layer, examples: Examples, architecture: Architecture, residuals: Residuals
) -> Float64 | None:
    """What is left of each row over what computing in the labels' precision leaves of it.

    None for another kind of attention. A few huge rows outweigh all others in sums, and hide them.
    """
    if not isinstance(layer, AttentionLayer):
        return None
    fitted, labels = look_at(layer, examples, architecture, seed=0)
    errors = expected_row_errors(fitted, labels, residuals.labels)
    left = np.sqrt(np.mean(fitted.residual**2, axis=-1))
    there = fitted.inside & (errors > 0)
    return left[there] / errors[there]
