"""Weights of all heads in one array, cut into heads."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Weights = Mapping[str, NDArray[Any]]


def take(weights: Weights, name: str, ndim: int) -> NDArray[Any]:
    """A weight that must be there; a KeyError names it if not."""
    array = weights[name]
    if array.ndim != ndim or array.size == 0:
        raise ValueError(f"{name} has shape {array.shape}: expected {ndim} axes, none empty")
    return array


def count_heads(n_heads: int | None, name: str, array: NDArray[Any]) -> int:
    if n_heads is None:
        raise ValueError(
            f"n_heads is missing: {name} of shape {array.shape} does not tell the number of heads; "
            "pass n_heads (--heads), num_attention_heads in a model's config.json"
        )
    if n_heads < 1:
        raise ValueError(f"n_heads={n_heads}: a layer has at least one head")
    return n_heads


def rows_of_heads(name: str, matrix: NDArray[Any], heads: int) -> NDArray[Any]:
    """(m h, d) as (m, h, d)."""
    if matrix.shape[0] % heads:
        raise ValueError(
            f"n_heads={heads}: the {name} weight has shape {matrix.shape}, "
            "which does not divide into so many heads"
        )
    return matrix.reshape(heads, -1, matrix.shape[1])


def shared_rows(name: str, matrix: NDArray[Any], heads: int, h: int) -> NDArray[Any]:
    """(g h, d), each of which serves as many heads in a row, as (m, h, d)."""
    if len(matrix) % h or not divides(len(matrix) // h, heads):
        raise ValueError(
            f"n_heads={heads} of {h} rows each: the {name} weight has shape {matrix.shape}, which "
            "does not divide among so many heads"
        )
    groups = matrix.reshape(-1, h, matrix.shape[1])
    return np.repeat(groups, heads // len(groups), axis=0)


def shared_entries(
    bias: NDArray[Any] | None, heads: int, h: int | None = None
) -> NDArray[Any] | None:
    """(g h,) as (m, h); without h, one for all heads."""
    if bias is None:
        return None
    if bias.ndim != 1 or bias.size == 0:
        raise ValueError(f"a bias has shape {bias.shape}: expected one axis, not empty")
    return shared_rows("bias", bias[:, None], heads, h or len(bias))[..., 0]


def divides(groups: int, heads: int) -> bool:
    return groups > 0 and heads % groups == 0


def entries_of_heads(bias: NDArray[Any] | None, heads: int) -> NDArray[Any] | None:
    """(m h,) as (m, h)."""
    if bias is None:
        return None
    if bias.ndim != 1 or bias.size == 0 or bias.size % heads:
        raise ValueError(f"a bias has shape {bias.shape}, which does not divide into {heads} heads")
    return bias.reshape(heads, -1)


def packed_biases(bias: NDArray[Any] | None, heads: int) -> dict[str, Any]:
    if bias is None:
        return {}
    if bias.ndim != 1 or bias.size % 3:
        raise ValueError(f"the packed bias has shape {bias.shape}: expected (3 d,)")
    names = ("query_bias", "key_bias", "value_bias")
    return {
        name: entries_of_heads(part, heads)
        for name, part in zip(names, np.split(bias, 3), strict=True)
    }
