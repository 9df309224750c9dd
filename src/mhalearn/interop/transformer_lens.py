"""A layer under TransformerLens's names: W_Q, W_K, W_V (m, d, h), W_O (m, h, d), and biases."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mhalearn.interop.factors import carried_factors, factorise
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.projected_layer import ProjectedLayer, by_matrices


def to_transformer_lens(
    layer: AttentionLayer | ProjectedLayer,
    layer_index: int = 0,
    *,
    head_dim: int | None = None,
    tolerance: float = 1e-8,
) -> dict[str, NDArray[Any]]:
    """The weights of a HookedTransformer's attention, as NumPy arrays; no torch needed.

    The weights the layer carries, bit by bit, or else its singular vectors. TransformerLens lets
    the head dimension be anything: unless given it is the one carried, or the smallest that holds
    every head, so full-rank heads fit. Biases that a layer does not have are zero.
    """
    layer = by_matrices(layer)
    if layer.out_dim != layer.d:
        raise ValueError(f"out_dim={layer.out_dim} beside d={layer.d}: a residual stream has one d")
    factors = carried_factors(layer)
    if factors is None or head_dim not in (None, factors.head_dim):
        factors = factorise(layer, head_dim, tolerance=tolerance)
    arrays = {
        "W_Q": np.swapaxes(factors.query, 1, 2),
        "W_K": np.swapaxes(factors.key, 1, 2),
        "W_V": np.swapaxes(factors.value, 1, 2),
        "W_O": factors.out,
    }
    zeros = np.zeros((factors.n_heads, factors.head_dim), factors.dtype)
    for letter, bias in zip(
        "QKV", (factors.query_bias, factors.key_bias, factors.value_bias), strict=True
    ):
        arrays[f"b_{letter}"] = zeros if bias is None else bias
    out_bias = factors.out_bias
    arrays["b_O"] = np.zeros(layer.d, factors.dtype) if out_bias is None else out_bias
    return {
        f"blocks.{layer_index}.attn.{name}": np.ascontiguousarray(array)
        for name, array in arrays.items()
    }
