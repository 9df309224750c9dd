"""Heads as small pictures: entries of their matrices as bytes."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mhalearn.layer.comparison import Comparison, compare
from mhalearn.layer.layer import AttentionLayer

# Most cells of a picture on a side, and most heads that are drawn.
MOST_CELLS, MOST_HEADS = 32, 16


def draw_heads(
    layer: AttentionLayer, found: Comparison | None, limits: tuple[float, float]
) -> list[dict[str, Any]]:
    """Each head as two pictures and its errors, in the order of the heads it is matched with.

    found: the comparison with the layer to be matched, None where there is none. limits: what the
    strongest colours of Theta and of W stand for.
    """
    known = found if found is not None and found.comparable else None
    order = range(layer.n_heads) if known is None else known.order.tolist()
    return [
        {
            "theta": draw_matrix(layer.theta[head], limits[0]),
            "w": draw_matrix(layer.w[head], limits[1]),
            "theta_error": None if known is None else float(known.theta_errors[i]),
            "w_error": None if known is None else float(known.w_errors[i]),
        }
        for i, head in enumerate(list(order)[:MOST_HEADS])
    ]


def in_order_of(layer: AttentionLayer, before: AttentionLayer | None) -> AttentionLayer:
    """The same layer with heads in the order of those they are most like."""
    if before is None or before.n_heads != layer.n_heads:
        return layer
    found = compare(layer, before)
    if not found.comparable:
        return layer
    vector = None if layer.key_vector is None else layer.key_vector[found.order]
    return layer.replace(theta=layer.theta[found.order], w=layer.w[found.order], key_vector=vector)


def scales(layer: AttentionLayer) -> tuple[float, float]:
    """The largest entries of Theta and of W."""
    return float(np.abs(layer.theta).max()) or 1.0, float(np.abs(layer.w).max()) or 1.0


def draw_matrix(matrix: NDArray[np.float64], limit: float) -> dict[str, Any]:
    """Entries as signed bytes: 127 is the limit. Of many, each cell is its block's largest."""
    for axis in (0, 1):
        size = matrix.shape[axis]
        if size > MOST_CELLS:
            starts = np.linspace(0, size, MOST_CELLS, endpoint=False).astype(int)
            low = np.minimum.reduceat(matrix, starts, axis=axis)
            high = np.maximum.reduceat(matrix, starts, axis=axis)
            matrix = np.where(high >= -low, high, low)
    entries = np.clip(np.rint(matrix * (127 / limit)), -127, 127).astype(np.int8)
    rows, columns = entries.shape
    return {
        "rows": rows,
        "columns": columns,
        "bytes": base64.b64encode(entries.tobytes()).decode(),
    }
