"""A layer's outputs in plain NumPy, and what is put in a layer's place to mislead."""

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

Array = np.ndarray
Weigh = Callable[[Array], Array]  # logits (n, m, k, k) to weights of the same shape
Box = Callable[[Array], Array]  # inputs (n, k, d) to labels (n, k, e)

# Relative spacing of numbers; NumPy itself knows no bfloat16.
UNITS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


class Heads(NamedTuple):
    """The arrays of a layer, which is all that is taken from the library."""

    theta: Array
    w: Array
    key_vector: Array | None = None
    out_bias: Array | None = None
    causal: bool = False


def heads_of(layer: Any) -> Heads:
    return Heads(*(getattr(layer, name) for name in Heads._fields))


def rms(y: Array) -> float:
    return float(np.sqrt(np.mean(np.square(y))))


def softmax(logits: Array) -> Array:
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def logits_of(
    layer: Any, x: Array, lengths: Array | None = None, keys: Array | None = None
) -> Array:
    """(n, m, k, k), minus infinity where a token is not seen.

    keys: tokens in place of x on both sides of Theta. A padding token sees itself alone.
    """
    tokens = x if keys is None else keys
    logits = np.stack([tokens @ theta @ tokens.swapaxes(1, 2) for theta in layer.theta], axis=1)
    if layer.key_vector is not None:
        logits += np.einsum("njd,md->nmj", tokens, layer.key_vector)[:, :, None]
    seen = seen_tokens(*x.shape[:2], lengths, layer.causal)
    return np.where(seen[:, None], logits, -np.inf)


def seen_tokens(n: int, k: int, lengths: Array | None, causal: bool) -> Array:
    """(n, k, k): whether token r of an example sees token j."""
    seen = np.ones((n, k, k), bool)
    if lengths is not None:
        inside = np.arange(k) < np.asarray(lengths)[:, None]
        seen = inside[:, None, :] | (~inside[:, :, None] & np.eye(k, dtype=bool))
    return seen & np.tri(k, dtype=bool) if causal else seen


def mix(layer: Any, weights: Array, x: Array, lengths: Array | None = None) -> Array:
    """Outputs from weights (n, m, k, k); zero at padding."""
    y = sum(p @ x @ w for p, w in zip(weights.swapaxes(0, 1), layer.w, strict=True))
    if layer.out_bias is not None:
        y = y + layer.out_bias
    if lengths is not None:
        y[np.arange(x.shape[1]) >= np.asarray(lengths)[:, None]] = 0.0
    return y


def forward(layer: Any, x: Array, lengths: Array | None = None, weigh: Weigh = softmax) -> Array:
    """What a layer makes of inputs, in doubles."""
    return mix(layer, weigh(logits_of(layer, x, lengths)), x, lengths)


def round_to(precision: str, y: Array) -> Array:
    """Rounded, in doubles."""
    dtype = ml_dtypes.bfloat16 if precision == "bfloat16" else precision
    return y.astype(dtype).astype(float)


def stored(precision: str, y: Array) -> Array:
    """Rounded, in the narrowest type that NumPy has for it: bfloat16 widened to float32."""
    return round_to(precision, y).astype("float32" if precision == "bfloat16" else precision)


def forward_in(precision: str, layer: Any, x: Array) -> Array:
    """What a box that computes in a precision makes: every operation rounds its result.

    Sums inside a product of matrices are exact, as accelerators keep them wider.
    """

    def r(values: Array) -> Array:
        return round_to(precision, values)

    tokens, y = r(x), 0.0
    for theta, w in zip(r(layer.theta), r(layer.w), strict=True):
        logits = r(r(tokens @ theta) @ tokens.swapaxes(1, 2))
        weights = r(np.exp(r(logits - logits.max(axis=-1, keepdims=True))))
        p = r(weights / r(weights.sum(axis=-1, keepdims=True)))
        y = r(y + r(r(p @ tokens) @ w))
    return y
