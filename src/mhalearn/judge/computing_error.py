"""What a box would leave that computes the layer in the precision of its labels.

Labels in float32 are seldom a layer's outputs rounded once: logits, patterns and sums were rounded
on the way. How much that makes is not guessed but computed, by doing the same.
"""

import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.types import Float64
from mhalearn.data.label_precision import Precision
from mhalearn.judge.fitted_attention import FittedAttention

# Boxes that order their sums otherwise, or multiply by the factors of Theta and W, were seen at up
# to 1.3 times as much.
COMPUTING_MARGIN = 1.6


def expected_row_errors(fitted: FittedAttention, labels: Float64, precision: Precision) -> Float64:
    """Root mean square error of each row (n, k) that computing and rounding leave together.

    labels (n, k, e). What computing leaves goes with the size of the terms that a row is a sum of.
    Cost: a forward pass in NumPy. Trust: an estimate; see COMPUTING_MARGIN.
    """
    steps = np.mean(precision.steps(labels) ** 2, axis=-1) / 12
    terms = np.sqrt(np.mean(np.sum(np.abs(fitted.outputs), axis=1) ** 2, axis=-1))
    inside = fitted.inside
    exact = fitted.outputs.sum(axis=1)
    if fitted.layer.out_bias is not None:
        exact = exact + fitted.layer.out_bias
    computed = compute_coarsely(fitted, precision.name)
    error = np.sqrt(np.mean((computed - exact)[inside] ** 2))
    size = np.sqrt(np.mean(terms[inside] ** 2)) or 1.0
    # The last rounding is counted once, by the labels' steps.
    of_terms = max(0.0, error**2 - float(np.mean(steps[inside]))) / size**2
    return np.sqrt(steps + of_terms * terms**2)


def compute_coarsely(fitted: FittedAttention, name: str) -> Float64:
    """The layer's outputs (n, k, e), in float32, or with every result rounded to half precision."""
    layer, round_to = fitted.layer, _ROUNDINGS[name]
    x, theta, w = (round_to(array) for array in (fitted.x, layer.theta, layer.w))
    logits = round_to(np.einsum("nra,mab->nmrb", x, theta))
    logits = round_to(logits @ x[:, None].swapaxes(2, 3))
    if layer.key_vector is not None:
        keys = round_to(np.einsum("mb,njb->nmj", round_to(layer.key_vector), x))
        logits = round_to(logits + keys[:, :, None])
    scores = np.where(fitted.allowed, logits, -np.inf)
    weights = round_to(np.exp(scores - scores.max(axis=-1, keepdims=True)))
    patterns = round_to(weights / weights.sum(axis=-1, keepdims=True))
    heads = round_to(round_to(patterns @ x[:, None]) @ w)
    outputs = round_to(heads.sum(axis=1))
    if layer.out_bias is not None:
        outputs = round_to(outputs + round_to(layer.out_bias))
    return outputs.astype(np.float64)


def _single(array: NDArray[np.floating]) -> NDArray[np.float32]:
    return array.astype(np.float32)


def _half(array: NDArray[np.floating]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        return array.astype(np.float16).astype(np.float32)


def _brain(array: NDArray[np.floating]) -> NDArray[np.float32]:
    """bfloat16: the upper half of float32's bits, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.astype(np.uint32).view(np.float32)


_ROUNDINGS = {"float32": _single, "float16": _half, "bfloat16": _brain}
