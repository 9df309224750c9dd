"""What a box would leave that computes the layer in the precision of its labels.

Labels in float32 are seldom a layer's outputs rounded once: logits, patterns and sums were rounded
on the way. How much that makes is not guessed but computed, by doing the same.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.types import Float64
from mhalearn.data.label_precision import Precision
from mhalearn.judge.fitted_attention import FittedAttention

# Boxes that order their sums otherwise leave up to so many times as much, of few features and of
# many: torch's module in float32 was seen at 1.02 up to d = 16, and at 1.34 from d = 32 to 128
# (benchmarks/studies/computing_error.py).
_FEW, _FEW_MARGIN = 16, 1.1
_MANY, _MANY_MARGIN = 32, 1.45


def computing_margin(d: int) -> float:
    """How many times what computing here leaves is let pass."""
    share = np.clip(np.log(d / _FEW) / np.log(_MANY / _FEW), 0.0, 1.0)
    return float(_FEW_MARGIN + share * (_MANY_MARGIN - _FEW_MARGIN))


def expected_row_errors(fitted: FittedAttention, labels: Float64, precision: Precision) -> Float64:
    """Root mean square error of each row (n, k) that computing and rounding leave together.

    labels (n, k, e). What computing leaves goes with the size of the terms that a row is a sum of.
    Cost: a forward pass in NumPy. Trust: an estimate; see `computing_margin`.
    """
    steps = np.mean(precision.steps(labels) ** 2, axis=-1) / 12
    terms = np.sqrt(np.mean(np.sum(np.abs(fitted.outputs), axis=1) ** 2, axis=-1))
    inside = fitted.inside
    exact = fitted.outputs.sum(axis=1)
    if fitted.layer.out_bias is not None:
        exact = exact + fitted.layer.out_bias
    ways = compute_coarsely(fitted, precision.name), compute_by_factors(fitted, precision.name)
    error = max(float(np.sqrt(np.mean((way - exact)[inside] ** 2))) for way in ways)
    size = np.sqrt(np.mean(terms[inside] ** 2)) or 1.0
    # The last rounding is counted once, by the labels' steps.
    of_terms = max(0.0, error**2 - float(np.mean(steps[inside]))) / size**2
    return np.sqrt(steps + of_terms * terms**2)


def compute_coarsely(fitted: FittedAttention, name: str) -> Float64:
    """The layer's outputs (n, k, e), in float32, or with every result rounded to half precision."""
    layer, round_to = fitted.layer, _ROUNDINGS[name]
    x, theta, w = (round_to(array) for array in (fitted.x, layer.theta, layer.w))
    keyed = round_to(x[:, None] @ theta)
    patterns = _patterns(fitted, round_to(keyed @ x[:, None].swapaxes(2, 3)), name)
    heads = round_to(round_to(patterns @ x[:, None]) @ w)
    return _sum_of_heads(fitted, heads, name)


def compute_by_factors(fitted: FittedAttention, name: str) -> Float64:
    """The same by queries, keys, values and their projection, as most boxes do."""
    round_to = _ROUNDINGS[name]
    x, logits, heads = round_to(fitted.x), [], []
    for theta in fitted.layer.theta:
        left, right = _balanced(theta)
        queries, keys = round_to(x @ round_to(left)), round_to(x @ round_to(right))
        logits.append(round_to(queries @ keys.swapaxes(1, 2)))
    patterns = _patterns(fitted, np.stack(logits, axis=1), name)
    for i, w in enumerate(fitted.layer.w):
        left, right = _balanced(w)
        values = round_to(x @ round_to(left))
        heads.append(round_to(round_to(patterns[:, i] @ values) @ round_to(right.T)))
    return _sum_of_heads(fitted, np.stack(heads, axis=1), name)


def _patterns(fitted: FittedAttention, logits: NDArray[Any], name: str) -> NDArray[Any]:
    layer, round_to = fitted.layer, _ROUNDINGS[name]
    if layer.key_vector is not None:
        keys = round_to(np.einsum("mb,njb->nmj", round_to(layer.key_vector), round_to(fitted.x)))
        logits = round_to(logits + keys[:, :, None])
    scores = np.where(fitted.allowed, logits, -np.inf)
    weights = round_to(np.exp(scores - scores.max(axis=-1, keepdims=True)))
    return round_to(weights / weights.sum(axis=-1, keepdims=True))


def _sum_of_heads(fitted: FittedAttention, heads: NDArray[Any], name: str) -> Float64:
    round_to, bias = _ROUNDINGS[name], fitted.layer.out_bias
    outputs = round_to(heads.sum(axis=1))
    if bias is not None:
        outputs = round_to(outputs + round_to(bias))
    return outputs.astype(np.float64)


def _balanced(matrix: Float64) -> tuple[Float64, Float64]:
    """Factors of equal size, of the rank that the matrix has."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    there = values > 1e-10 * values[0] if values[0] > 0 else values >= 0
    root = np.sqrt(values[there])
    return left[:, there] * root, right[there].T * root


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
