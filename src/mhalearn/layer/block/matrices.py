"""The arrays of a block as the matrices that they make together.

A linear map, its bias and what is added to the same outputs meet one input each, row by row; heads
stand side by side. What is no linear map (gains, scales) stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax.numpy as jnp

from mhalearn._runtime.types import Array

# Rows that are stacked: an array (inputs, outputs); one of heads (m, inputs, h), side by side, or
# (m, h, outputs), one under the other; a bias.
_PLAIN, _WIDE, _TALL, _ROW = range(4)
_STACKS = {
    "queries": (("attention.query", _WIDE), ("attention.query_bias", _ROW)),
    "keys": (("attention.key", _WIDE), ("attention.key_bias", _ROW)),
    "values": (("attention.value", _WIDE), ("attention.value_bias", _ROW)),
    "outs": (("attention.out", _TALL), ("attention.w", _TALL), ("attention.out_bias", _ROW)),
    "thetas": (("attention.theta", _WIDE), ("attention.key_vector", _ROW)),
    "up": (("feed_forward.up", _PLAIN), ("feed_forward.up_bias", _ROW)),
    "gate": (("feed_forward.gate", _PLAIN), ("feed_forward.gate_bias", _ROW)),
    "down": (
        ("feed_forward.down", _PLAIN),
        ("feed_forward.linear", _PLAIN),
        ("feed_forward.down_bias", _ROW),
    ),
}
STACKED = tuple(_STACKS)


def to_matrices(params: Mapping[str, Array]) -> dict[str, Array]:
    """Matrices by their names, and the other arrays by theirs."""
    found, left = {}, dict(params)
    for stack, parts in _STACKS.items():
        rows = [_to_rows(left.pop(name), how) for name, how in parts if name in left]
        if rows:
            found[stack] = jnp.concatenate(rows)
    return found | left


def from_matrices(
    matrices: Mapping[str, Array], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Array]:
    """The arrays of these shapes again."""
    found = {name: leaf for name, leaf in matrices.items() if name not in _STACKS}
    for stack, parts in _STACKS.items():
        begun = 0
        for name, how in parts:
            if name not in shapes:
                continue
            rows = _rows(shapes[name], how)
            found[name] = _from_rows(matrices[stack][begun : begun + rows], shapes[name], how)
            begun += rows
    return found


def _to_rows(leaf: Array, how: int) -> Array:
    if how == _WIDE:
        return jnp.moveaxis(leaf, 0, 1).reshape(leaf.shape[1], -1)
    if how == _ROW:
        return leaf.reshape(1, -1)
    return leaf.reshape(-1, leaf.shape[-1])


def _from_rows(rows: Array, shape: tuple[int, ...], how: int) -> Array:
    if how == _WIDE:
        return jnp.moveaxis(rows.reshape(shape[1], shape[0], shape[2]), 1, 0)
    return rows.reshape(shape)


def _rows(shape: tuple[int, ...], how: int) -> int:
    return {_PLAIN: shape[0], _WIDE: shape[-2] if len(shape) > 1 else 0, _ROW: 1}.get(
        how, math.prod(shape[:-1])
    )
