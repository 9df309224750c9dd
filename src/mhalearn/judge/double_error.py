"""How far outputs that are computed in double precision are from the layer's own.

A layer is computed once more with more digits, by a plain loop over heads. Where the machine has no
wider numbers, single precision stands in: what it loses, over 2^29, is about what doubles lose.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.types import Float64
from mhalearn.layer.layer import AttentionLayer

# Digits of float64's mantissa over float32's; the rounding of numbers that count as wider.
_DIGITS, _WIDER = 29, 2.0**-60


def outputs_in(layer: AttentionLayer, x: Any, dtype: Any) -> NDArray[Any]:
    """The outputs (n, k, e) for x (n, k, d), every operation in this precision."""
    x = np.asarray(x, dtype)
    k = x.shape[1]
    seen = np.tri(k, dtype=bool) if layer.causal else np.ones((k, k), bool)
    total = np.zeros((*x.shape[:2], layer.out_dim), dtype)
    for i, (theta, w) in enumerate(zip(layer.theta, layer.w, strict=True)):
        logits = np.einsum("nrd,de,nje->nrj", x, theta.astype(dtype), x)
        if layer.key_vector is not None:
            logits = logits + (x @ layer.key_vector[i].astype(dtype))[:, None]
        logits = np.where(seen, logits, dtype(-np.inf))
        p = np.exp(logits - logits.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        total += np.einsum("nrj,njd,de->nre", p, x, w.astype(dtype))
    return total if layer.out_bias is None else total + layer.out_bias.astype(dtype)


def computing_deviation(layer: AttentionLayer, x: Float64) -> float:
    """Root mean square error of outputs that are computed in double precision.

    Cost: O(n k m (d^2 + k d + d e)) in NumPy. Trust: of this way of computing; boxes that order
    their sums otherwise are off by about as much.
    """
    if np.finfo(np.longdouble).eps < _WIDER:
        apart = layer(x) - outputs_in(layer, x, np.longdouble)
        return float(np.sqrt(np.mean(np.asarray(apart, np.float64) ** 2)))
    few, exact = (outputs_in(layer, x.astype(np.float32), way) for way in (np.float32, np.float64))
    return float(np.sqrt(np.mean((few - exact) ** 2))) * 2.0**-_DIGITS
