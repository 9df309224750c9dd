"""Heads that have found keys and values of their own, and turn out to share them."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.types import Array, Float, Float64

# The least mean square cosine of the principal angles between spaces that are one.
_SAME = 0.9


def group_by_values(value: Float[np.ndarray, "m d h"], groups: int) -> NDArray[np.int64] | None:
    """An order of the heads in which those that share values stand side by side; None where spaces
    of values do not fall into as many groups of the same size.

    Cost: O(m^2 d h^2).
    """
    heads, _, h = value.shape
    each, bases = heads // groups, np.linalg.qr(value).Q
    if each == 1:
        return np.arange(heads)
    alike = np.array([[np.sum((one.T @ other) ** 2) / h for other in bases] for one in bases])
    left, order = np.arange(heads), np.array([], np.int64)
    while len(left):
        nearest = left[np.argsort(-alike[left[0], left], kind="stable")[:each]]
        if np.min(alike[left[0], nearest]) < _SAME:
            return None
        order, left = np.concatenate([order, nearest]), np.setdiff1d(left, nearest)
    return order


def share_values(
    value: Array | Float64, out: Array | Float64, order: NDArray[np.int64], groups: int
) -> tuple[Array, Array]:
    """Values (g, d, h) in whose spaces those of the heads (m, d, h) of a group are, and outputs
    (m, h, e) that make of these what they wrote, in the given order."""
    h = value.shape[2]
    value, out = np.asarray(value)[order], np.asarray(out)[order]
    bases = np.linalg.qr(value).Q
    side = bases.reshape(groups, -1, *bases.shape[1:]).transpose(0, 2, 1, 3)
    shared: Float64 = np.linalg.svd(side.reshape(*side.shape[:2], -1), full_matrices=False).U
    shared = shared[:, :, :h]
    met = np.repeat(shared, len(value) // groups, axis=0).swapaxes(1, 2) @ value
    return jnp.asarray(shared), jnp.asarray(met @ out)


def share_keys(readers: Mapping[str, Array]) -> dict[str, Array]:
    """Of the heads (g, n, ...) of groups, each with keys of its own, those with the first's keys.

    Where keys K_i are K_1 C, queries of the others, or what stands between them and normalised
    keys, take C, and the first's turn of keys is the group's.
    """
    found = dict(readers)
    key = found["key"]
    if key.shape[1] == 1:
        return found
    rows = [key] + ([found["key_bias"][:, :, None]] if "key_bias" in found else [])
    whole = jnp.concatenate(rows, axis=2)
    change = jnp.linalg.pinv(whole[:, :1]) @ whole
    for name in ("meet",) if "meet" in found else ("query", "query_bias"):
        if name == "query_bias" and name in found:
            found[name] = jnp.einsum("gnh,gnih->gni", found[name], change)
        elif name in found:
            found[name] = found[name] @ change.swapaxes(-1, -2)
    for name in ("key", "key_bias", "turn"):
        if name in found:
            found[name] = found[name][:, :1]
    return found
