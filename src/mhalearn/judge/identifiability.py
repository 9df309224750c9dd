"""How much freedom examples leave a layer's parameters: open directions, a bound, intervals."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from mhalearn._runtime.types import Float64
from mhalearn.data import Examples
from mhalearn.judge.block_rank_test import run_block_rank_test
from mhalearn.judge.jacobian_spectrum import measure_spectrum
from mhalearn.judge.pattern_rank_test import run_pattern_rank_test
from mhalearn.judge.projected_rank_test import run_projected_rank_test
from mhalearn.judge.randomised_rank_test import NULL_TOLERANCE, RankTest, run_rank_test
from mhalearn.judge.residuals import Residuals
from mhalearn.judge.spectrum import Parameters, Spectrum
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.base import Layer
from mhalearn.layer.block.block import Block
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.projected_layer import ProjectedLayer
from mhalearn.run.watch import OutOfTime, Watch

# Attention below this size, against that of logits of order one, is rounding of no attention.
_NO_ATTENTION = 1e-10
# Error of a parameter, relative to the size of a head, that the residual may leave room for.
RESOLVED = 1e-2


class Identifiability(NamedTuple):
    """What inputs and a residual leave open; None where it is not known."""

    null_dimension: int | None
    bound: float | None  # error of the worst parameter that the residual leaves room for
    spectrum: Float64 | None
    intervals: Parameters | None
    # Share of a random change of the parameters that outputs do not show, where that was asked.
    null_component: float | None = None
    is_unfinished: bool = False  # the time limit came first


_UNKNOWN = Identifiability(None, None, None, None)


def assess_identifiability(
    layer: Layer,
    inputs: Examples,
    architecture: Architecture,
    residuals: Residuals,
    width: float,
    watch: Watch | None = None,
) -> Identifiability:
    """By the spectrum, with intervals `width` deviations wide; where that is too large and the fit
    is exact, by a random direction. watch: told of progress; it may end the work."""
    try:
        return _assess(layer, inputs, architecture, residuals, width, watch)
    except OutOfTime:
        return _UNKNOWN._replace(is_unfinished=True)


def _assess(
    layer: Layer,
    inputs: Examples,
    architecture: Architecture,
    residuals: Residuals,
    width: float,
    watch: Watch | None,
) -> Identifiability:
    spectrum = measure_spectrum(layer, inputs, architecture, watch=watch)
    # Labels that happen to be met to the last bit say no more than their rounding allows.
    error = residuals.label_norm * max(residuals.root_relative, residuals.unit / 4)
    n = len(residuals.squared)
    if spectrum is not None:
        bound = parameter_bound(layer, spectrum, error * math.sqrt(inputs.n / n))
        intervals = half_widths(spectrum.deviations, width)
        return Identifiability(spectrum.null_dimension, bound, spectrum.theta, intervals)
    found = None
    scale = error / math.sqrt(n)
    if residuals.exact:
        found = _ask(layer, inputs, architecture, scale, watch)
    if found is None:
        return _UNKNOWN
    null = 0 if found.null_component < NULL_TOLERANCE else None
    return Identifiability(null, found.bound(scale), None, None, found.null_component)


def _ask(
    layer: Layer, inputs: Examples, architecture: Architecture, error: float, watch: Watch | None
) -> RankTest | None:
    """About a random direction; None of heads of which that is not known.

    error: of an example, root mean square. Where patterns tell enough, nothing else is asked.
    """
    if isinstance(layer, AttentionLayer):
        found = run_pattern_rank_test(layer, inputs, architecture, watch=watch)
        if found is not None and found.bound(error) <= RESOLVED:
            return found
        return run_rank_test(layer, inputs, architecture, watch=watch)
    if isinstance(layer, ProjectedLayer):
        return run_projected_rank_test(layer, inputs, watch=watch)
    if isinstance(layer, Block):
        return run_block_rank_test(layer, inputs, watch=watch)
    return None


def parameter_bound(layer: Layer, spectrum: Spectrum, residual: float) -> float:
    """How far the residual lets the worst parameter be from one that fits exactly.

    To first order |error of p| <= |residual| sqrt([(J^T J)^-1]_pp), by Cauchy and Schwarz. Relative
    to the root mean square norm of the heads' Theta (where there is none, that of logits of order
    one) or W; of another kind of attention, to the norm of the array that the parameter is in, and
    of a block's biases, which its gauge may make zero, to that of the part they are in.
    """
    if isinstance(layer, AttentionLayer):
        sizes = _head_sizes(layer, spectrum.token_size)
    else:
        sizes = _array_sizes(layer.params)
    widest = max(
        float(np.max(array)) / sizes.get(name, 1.0)
        for name, array in spectrum.deviations.arrays.items()
    )
    return residual * widest if math.isfinite(widest) else math.inf


def _head_sizes(layer: AttentionLayer, token: float) -> dict[str, float]:
    """Sizes that errors are relative to, by parameter."""
    theta = float(np.sqrt(np.mean(np.sum(layer.theta**2, axis=(1, 2)))))
    if theta * token**2 <= _NO_ATTENTION:
        theta = token**-2
    w = float(np.sqrt(np.mean(np.sum(layer.w**2, axis=(1, 2))))) or 1.0
    return {"theta": theta, "w": w, "key_vector": theta * token, "out_bias": w * token}


def _array_sizes(params: Mapping[str, Float64]) -> dict[str, float]:
    """The norm of each array; of biases of a part of a block, that of the part's arrays."""
    squares = {name: float(np.sum(np.square(leaf))) for name, leaf in params.items()}
    whole: dict[str, float] = {}
    for name, square in squares.items():
        part = name.rpartition(".")[0]
        whole[part] = whole.get(part, 0.0) + square
    for name in squares:
        part = name.rpartition(".")[0]
        if part and name.endswith(("bias", "vector")):
            squares[name] = whole[part]
    return {name: square**0.5 or 1.0 for name, square in squares.items()}


def half_widths(deviations: Parameters, width: float) -> Parameters:
    """Deviations times a width; a parameter that is not determined has none, whatever the noise."""

    def times_width(deviation: Float64) -> Float64:
        known = np.isfinite(deviation)
        return np.where(known, np.where(known, deviation, 0.0) * width, np.inf)

    return Parameters({name: times_width(array) for name, array in deviations.arrays.items()})
