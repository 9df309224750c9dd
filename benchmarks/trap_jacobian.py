"""How many directions inputs leave open at a layer, from a Jacobian taken by complex steps."""

import numpy as np

from benchmarks.traps.boxes import Array, Heads, rms, seen_tokens
from benchmarks.traps.draw import Trap

# Entries of a Jacobian beyond which it is not taken.
LARGEST = 3e7


def is_too_large(layer: Heads, trap: Trap) -> bool:
    m, d, e = layer.w.shape
    return trap.x.shape[0] * trap.x.shape[1] * e * m * d * (d + e) > LARGEST


def jacobian(layer: Heads, trap: Trap) -> tuple[Array, int]:
    """dF / d(Theta, v, W, c), a column each, and how many are of Theta and v."""
    n, k, d = trap.x.shape
    bias, head_dim = int(trap.settings.get("bias", False)), trap.settings.get("head_dim")
    inside = np.arange(k) < (np.full(n, k) if trap.lengths is None else trap.lengths)[:, None]
    seen = seen_tokens(n, k, trap.lengths, layer.causal)
    queries = np.concatenate([trap.x, np.ones((n, k, bias))], axis=-1)
    vector = np.zeros((len(layer.theta), d)) if layer.key_vector is None else layer.key_vector
    thetas = np.concatenate([layer.theta, vector[:, None]], axis=1)[:, : d + bias].astype(complex)

    def mean_tokens(theta: Array) -> Array:
        logits = np.where(seen, queries @ theta @ trap.x.swapaxes(1, 2), -np.inf)
        p = np.exp(logits - logits.real.max(axis=-1, keepdims=True))
        return (p / p.sum(axis=-1, keepdims=True) @ trap.x)[inside]

    of_theta, of_w, step = [], [], 1e-30  # a complex step has no cancellation to fear
    for theta, w in zip(thetas, layer.w, strict=True):
        for direction in tangent_basis(theta.real, head_dim):
            moved = mean_tokens(theta + 1j * step * direction).imag / step
            of_theta.append((moved @ w).ravel())
        means = mean_tokens(theta).real
        of_w += [(means @ direction).ravel() for direction in tangent_basis(w, head_dim)]
    if bias:
        rows = int(inside.sum())
        of_w += [np.tile(unit, rows) for unit in np.eye(layer.w.shape[2])]
    return np.stack([*of_theta, *of_w], axis=1), len(of_theta)


def tangent_basis(matrix: Array, rank: int | None) -> Array:
    """An orthonormal basis of the directions a matrix may move in: all, or those that keep it of
    a rank."""
    q, d = matrix.shape
    if rank is None or rank >= min(q, d):
        return np.eye(q * d).reshape(-1, q, d)
    u, _, vt = np.linalg.svd(matrix)
    left = np.einsum("ah,bc->hcab", u[:, :rank], np.eye(d)).reshape(-1, q * d)
    right = np.einsum("ac,hb->hcab", np.eye(q), vt[:rank]).reshape(-1, q * d)
    _, values, basis = np.linalg.svd(np.concatenate([left, right]), full_matrices=False)
    return basis[values > 1e-9].reshape(-1, q, d)


def null_dimension(layer: Heads, trap: Trap) -> int | None:
    """Directions the inputs leave open at a layer; None where that is a matter of thresholds."""
    if is_too_large(layer, trap):
        return None
    columns, count = jacobian(layer, trap)
    sizes = np.linalg.norm(columns, axis=0)
    # Theta's columns have other units than W's, and may all be rounding of zero.
    of_theta = np.arange(len(sizes)) < count
    of_w = sizes[~of_theta].max()
    largest = np.where(of_theta, of_w * rms(trap.x) * size_of(layer.w), of_w)

    def rank(least: float, relative: float) -> int:
        there = sizes > least * largest
        if not there.any():
            return 0
        values = np.linalg.svd(columns[:, there] / sizes[there], compute_uv=False)
        return int(np.sum(values > relative * values[0]))

    strict, generous = rank(1e-10, 1e-6), rank(1e-15, 1e-13)
    return len(sizes) - strict if strict == generous else None


def allowed_error(truth: Heads, trap: Trap, rounding: float) -> float:
    """What relative rounding of labels can do to the worst parameter, relative to its head."""
    if is_too_large(truth, trap):
        return 1e-6 if rounding < 1e-10 else 1e-2
    columns, count = jacobian(truth, trap)
    r = np.linalg.qr(columns, mode="r")
    if min(r.shape) < r.shape[1] or np.min(np.abs(np.diag(r))) <= 1e-14 * np.max(np.abs(r)):
        return 1e-6
    reach = rounding * np.linalg.norm(trap.y.astype(float))
    reach = reach * np.linalg.norm(np.linalg.inv(r), axis=1)
    worst = max(reach[:count].max() / size_of(truth.theta), reach[count:].max() / size_of(truth.w))
    return float(np.clip(worst, 1e-6, 1e-2))


def size_of(heads: Array) -> float:
    return float(np.sqrt(np.mean(np.sum(heads**2, axis=(1, 2))))) or 1.0
