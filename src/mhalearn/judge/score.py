"""The coefficient of determination, as scikit-learn's regressors score themselves."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mhalearn._runtime.types import Float64
from mhalearn._runtime.validation import check_inputs
from mhalearn.data import Examples


def determination(
    predict: Callable[[NDArray[Any]], Float64],
    examples: Examples,
    sample_weight: ArrayLike | None = None,
) -> float:
    """R^2 over all outputs: 1 - |Y - F|^2 / |Y - mean Y|^2, the mean that of each column."""
    x, labels, _ = examples.arrays()
    y, predicted = labels.astype(np.float64), predict(x)
    if y.shape != predicted.shape:
        raise ValueError(f"Y has {y.shape[2]} columns, the layer has {predicted.shape[2]}")
    weights = np.ones(len(y)) if sample_weight is None else _check_weights(sample_weight, len(y))
    each = weights[:, None, None]
    middle = np.sum(each * y, axis=(0, 1)) / (each.sum() * y.shape[1])
    spread = float(np.sum(each * (y - middle) ** 2))
    wrong = float(np.sum(each * (y - predicted) ** 2))
    return 1.0 - wrong / spread if spread > 0 else float(wrong == 0.0)


def add_tokens(outputs: Float64, x: ArrayLike, lengths: ArrayLike | None) -> Float64:
    """Outputs with the residual path; rows past an example's length stay zero."""
    tokens, sizes = check_inputs(x, None, lengths)
    inside = np.arange(tokens.shape[1]) < sizes[:, None]
    return outputs + np.where(inside[..., None], tokens, 0).astype(np.float64)


def _check_weights(sample_weight: ArrayLike, n: int) -> Float64:
    try:
        weights = np.asarray(sample_weight, dtype=np.float64)
    except (ValueError, TypeError):
        weights = np.zeros(0)
    if weights.shape != (n,):
        raise ValueError(f"sample_weight must have one number for each of {n} examples")
    if not (np.isfinite(weights).all() and weights.min() >= 0 and weights.sum() > 0):
        raise ValueError("sample_weight: pass finite numbers of at least 0, not all of them 0")
    return weights
