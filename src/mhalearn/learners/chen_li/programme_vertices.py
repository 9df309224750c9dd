"""The linear programme of certification solved by looking at all of its vertices.

For weights p that sum to one, the residual y_i - sum_j p_j V_ji is sum_j p_j (y_i - V_ji): a linear
form without constant term. The objective is linear between the planes on which a residual or a
weight is zero, so that its least value is where k - 1 of them meet in the simplex. With few tokens
there are few such points, and many rows are solved together.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

from mhalearn._runtime.programs import in_float64
from mhalearn._runtime.types import Array, Float, Float64

# Vertices of a row up to which they are looked at; beyond, a simplex method meets far fewer.
_MOST_VERTICES = 1024
# Vertices looked at together, over all rows of a block.
_TOGETHER = 2**16
# A weight as little below zero is rounding.
_ROUNDING = 1e-12


def has_few_vertices(k: int, e: int) -> bool:
    """Whether programmes over k tokens and labels of e entries are solved faster this way."""
    return 1 < k < 5 and math.comb(e + k, k - 1) <= _MOST_VERTICES


@in_float64
def solve_by_vertices(images: Float64, labels: Float64, upper: Float64) -> Float64:
    """argmin |y - p V|_1 over probability vectors p <= upper, each entry of which is 0 or 1.

    images: (c, k, e); labels: (c, e); upper: (c, k), with a one in every row.
    Cost: O(c e^k) time for k tokens. Trust: exact but for rounding: every point looked at is in
    the simplex, and its residual is that of the point itself.
    """
    c, k, e = images.shape
    planes = np.array(list(itertools.combinations(range(e + k), k - 1)), np.int32)
    block = max(1, min(c, _TOGETHER // len(planes)))
    found = []
    for start in range(0, c, block):
        part = slice(start, start + block)
        padding = ((0, block - len(images[part])), (0, 0))
        solved = _best_vertices(
            np.pad(images[part], (*padding, (0, 0))),
            np.pad(labels[part], padding),
            np.pad(upper[part], padding, constant_values=1.0),
            planes,
        )
        found.append(np.asarray(solved)[: len(images[part])])
    return np.concatenate(found) if found else np.zeros((0, k))


@jax.jit
def _best_vertices(
    images: Float[Array, "c k e"],
    labels: Float[Array, "c e"],
    upper: Float[Array, "c k"],
    planes: Array,
) -> Float[Array, "c k"]:
    c, k, _ = images.shape
    forms = labels[:, None] - images
    forms = forms / jnp.maximum(jnp.max(jnp.abs(forms), axis=(1, 2), keepdims=True), 1e-300)
    eye = jnp.broadcast_to(jnp.eye(k), (c, k, k))
    every = jnp.concatenate([jnp.swapaxes(forms, 1, 2), eye], axis=1)  # (c, e + k, k)
    p = _meet([[every[:, planes[:, i], j] for j in range(k)] for i in range(k - 1)])
    mass = sum(p)
    # Planes that do not meet in one point meet nowhere for certain.
    regular = jnp.abs(mass) > 1e-14 * sum(jnp.abs(one) for one in p)
    p = [jnp.where(regular, one / jnp.where(regular, mass, 1.0), -1.0) for one in p]
    inside = [
        (one >= -_ROUNDING) & (one <= upper[:, None, j] + _ROUNDING) for j, one in enumerate(p)
    ]
    p = [jnp.clip(one, 0.0, upper[:, None, j]) for j, one in enumerate(p)]

    def add(left: Array, form: Array) -> tuple[Array, None]:
        return left + jnp.abs(sum(one * form[:, j, None] for j, one in enumerate(p))), None

    left, _ = jax.lax.scan(add, jnp.zeros_like(mass), jnp.moveaxis(forms, 2, 0))
    best = jnp.argmin(jnp.where(jnp.stack(inside).all(axis=0), left, jnp.inf), axis=1)
    chosen = jnp.stack(p, axis=-1)[jnp.arange(c), best]
    return chosen / jnp.sum(chosen, axis=-1, keepdims=True)


def _meet(planes: list[list[Array]]) -> list[Array]:
    """The vector orthogonal to k - 1 others: their generalised cross product, entry by entry."""
    k = len(planes) + 1
    signs = [(-1.0) ** j for j in range(k)]
    return [
        signs[j] * _determinant([[one for i, one in enumerate(row) if i != j] for row in planes])
        for j in range(k)
    ]


def _determinant(rows: list[list[Array]]) -> Array:
    if len(rows) == 1:
        return rows[0][0]
    minors = [[row[:j] + row[j + 1 :] for row in rows[1:]] for j in range(len(rows))]
    terms = [(-1.0) ** j * rows[0][j] * _determinant(minors[j]) for j in range(len(rows))]
    return sum(terms[1:], terms[0])
