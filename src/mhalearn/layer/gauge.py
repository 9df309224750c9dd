"""Choices where a function leaves some: balanced factors, signs, phases, sizes."""

from typing import Any

import numpy as np

from mhalearn._runtime.types import Float64


def balanced(left: Float64, right: Float64) -> tuple[Float64, Float64]:
    """Factors of left right^T with the same singular values, as many columns as they have, and a
    positive largest entry in each column of the left one."""
    q, r = np.linalg.qr(left)
    p, t = np.linalg.qr(right)
    u, s, vt = np.linalg.svd(r @ t.T, full_matrices=False)
    missing = ((0, 0), (0, left.shape[1] - len(s)))  # a narrow product has fewer of them
    left, right = (np.pad(x * np.sqrt(s), missing) for x in (q @ u, p @ vt.T))
    flip = sign(left)
    return left * flip, right * flip


def sign(columns: Float64) -> Float64:
    """Signs that make the largest entry of each column positive."""
    return np.where(_largest(columns) < 0, -1.0, 1.0)


def phase(columns: Any) -> Any:
    """Numbers of modulus one that make the largest entry of each column real and positive."""
    largest = _largest(columns)
    size = np.abs(largest)
    return np.where(size > 0, largest.conj() / np.where(size > 0, size, 1.0), 1.0)


def ratio(over: Float64, under: Float64) -> Float64:
    """One where either vanishes."""
    there = (over > 0) & (under > 0)
    return np.where(there, over, 1.0) / np.where(there, under, 1.0)


def _largest(columns: Any) -> Any:
    return np.take_along_axis(columns, np.abs(columns).argmax(axis=0)[None], axis=0)[0]
