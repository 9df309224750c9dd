"""Whether what was said about a trap is true; see fails_safely.py for the rules."""

import math
import re

import numpy as np

import mhalearn as mha
from benchmarks.ledger import Record, finite
from benchmarks.traps import Array, Layer, Trap, rms

COMPUTED = 1e-12  # what computing a layer in doubles loses, relative to its outputs


def jacobian(layer: Layer, trap: Trap) -> tuple[Array, list[slice]]:
    """dF / d(Theta, v, W, c), a column each, by complex steps; Theta's columns head by head."""
    n, k, d = trap.x.shape
    bias = int(trap.settings.get("bias", False))
    inside = np.arange(k) < (np.full(n, k) if trap.lengths is None else trap.lengths)[:, None]
    seen = inside[:, None, :] | (~inside[:, :, None] & np.eye(k, dtype=bool))
    seen = seen & np.tri(k, dtype=bool) if layer.causal else seen
    queries = np.concatenate([trap.x, np.ones((n, k, bias))], axis=-1)
    vector = np.zeros((layer.n_heads, d)) if layer.key_vector is None else layer.key_vector
    thetas = np.concatenate([layer.theta, vector[:, None]], axis=1)[:, : d + bias].astype(complex)

    def mean_tokens(theta: Array) -> Array:
        logits = np.where(seen, queries @ theta @ trap.x.swapaxes(1, 2), -np.inf)
        p = np.exp(logits - logits.real.max(axis=-1, keepdims=True))
        return (p / p.sum(axis=-1, keepdims=True) @ trap.x)[inside]

    columns, heads, step = [], [], 1e-30  # a complex step has no cancellation to fear
    for theta, w in zip(thetas, layer.w, strict=True):
        directions = tangent_basis(theta.real, trap.settings.get("head_dim"))
        heads.append(slice(len(columns), len(columns) + len(directions)))
        moved = [mean_tokens(theta + 1j * step * b).imag / step for b in directions]
        columns += [(means @ w).ravel() for means in moved]
    means = [mean_tokens(theta).real for theta in thetas]
    means += [np.ones((len(means[0]), 1))] * bias
    of_w = np.kron(np.concatenate(means, axis=1), np.eye(layer.out_dim)).T
    return np.stack([*columns, *of_w], axis=1), heads


def tangent_basis(theta: Array, head_dim: int | None) -> Array:
    """An orthonormal basis of the directions a head may move in: all, or those that keep a rank."""
    q, d = theta.shape
    if head_dim is None:
        return np.eye(q * d).reshape(-1, q, d)
    u, _, vt = np.linalg.svd(theta)
    left = np.einsum("ah,bc->hcab", u[:, :head_dim], np.eye(d)).reshape(-1, q * d)
    right = np.einsum("ac,hb->hcab", np.eye(q), vt[:head_dim]).reshape(-1, q * d)
    _, values, basis = np.linalg.svd(np.concatenate([left, right]), full_matrices=False)
    return basis[values > 1e-9].reshape(-1, q, d)


def null_dimension(layer: Layer, trap: Trap) -> int | None:
    """Directions the inputs leave open at a layer; None where that is a matter of thresholds."""
    columns, heads = jacobian(layer, trap)
    sizes = np.linalg.norm(columns, axis=0)
    # Theta's columns have other units than W's, and may all be rounding of zero.
    of_theta = np.arange(len(sizes)) < heads[-1].stop
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


def family_dimension(trap: Trap) -> int | None:
    """Of the layers that fit with the heads asked for: the largest of the family's pieces.

    Heads beyond the truth's have any attention and no W, or share the attention of another.
    """
    truth = trap.truth.canonical(tolerance=1e-14)
    extra = 0 if trap.heads == "auto" else int(trap.heads) - truth.n_heads
    if extra < 0:
        return None
    rng = np.random.default_rng(0)
    shape = (extra, *truth.w.shape[1:])
    free = rng.standard_normal((extra, truth.d, truth.d)), np.zeros(shape)
    shared = np.repeat(truth.theta[:1], extra, axis=0), rng.standard_normal(shape)
    found = []
    for theta, w in (free, shared):
        least = truth.w - np.eye(truth.n_heads)[0][:, None, None] * w.sum(axis=0)
        layer = Layer(np.concatenate([truth.theta, theta]), np.concatenate([least, w]))
        found.append(null_dimension(layer, trap))
    return None if None in found else max(found)


def allowed_error(trap: Trap) -> float:
    """What rounding can do to the worst parameter, relative to its head: that of the labels, or of
    computing a layer in double precision."""
    columns, heads = jacobian(trap.truth, trap)
    r = np.linalg.qr(columns, mode="r")
    if np.min(np.abs(np.diag(r))) <= 1e-14 * np.max(np.abs(r)):
        return 1e-6
    rounding = max(COMPUTED, trap.last_place) * np.linalg.norm(trap.y.astype(float))
    reach = rounding * np.linalg.norm(np.linalg.inv(r), axis=1)
    of_theta, of_w = reach[: heads[-1].stop], reach[heads[-1].stop :]
    worst = max(of_theta.max() / size_of(trap.truth.theta), of_w.max() / size_of(trap.truth.w))
    return float(np.clip(worst, 1e-6, 1e-2))


def size_of(heads: Array) -> float:
    return float(np.sqrt(np.mean(np.sum(heads**2, axis=(1, 2))))) or 1.0


def compare(learned: Layer, trap: Trap) -> tuple[bool, float]:
    """Whether the learned layer is the truth, and its error."""
    truth = trap.truth
    if truth is None and trap.made is not None:
        error = rms(trap.made - learned(trap.x)) / rms(trap.made)
        return trap.y.dtype != np.float64 and error <= trap.last_place, error
    if truth is None:
        return False, math.inf
    allowed = allowed_error(trap)
    if trap.x.shape[1] == 2:
        error = apart_on_fresh_inputs(learned, trap)
        return error <= allowed, error
    canonical = truth.canonical(tolerance=1e-14)
    if learned.n_heads < canonical.n_heads:
        error = apart_on_fresh_inputs(learned, trap)
        return error <= max(COMPUTED, trap.last_place), error
    error = mha.compare(learned, canonical).max_error
    return error <= allowed, error


def apart_on_fresh_inputs(learned: Layer, trap: Trap) -> float:
    """Relative distance of two functions; Gaussian inputs stand in for all of this size."""
    x = np.random.default_rng(0).standard_normal((500, *trap.x.shape[1:])) * rms(trap.x)
    true = trap.truth(x)
    return rms(learned(x) - true) / (rms(true) or 1.0)


def judge(trap: Trap, learner: mha.AttentionRegressor) -> Record:
    outcome, layer, reason = learner.outcome_.name, learner.layer_, learner.solution_.reason
    family = None
    if trap.truth is not None and trap.y.dtype == np.float64:
        true = trap.truth(trap.x, trap.lengths)
        seen_exactly = rms(trap.y - true) <= 1e-14 * rms(true)
        family = family_dimension(trap) if seen_exactly else None
    found: Record = {"outcome": outcome, "reason": reason, "family": family, "false": False}
    if outcome == "RECOVERED":
        right, error = compare(layer, trap)
        found |= {"false": not right or bool(family), "error": finite(error)}
    stated = re.search(r"dimension (at least )?(\d+)", reason)
    if outcome == "NOT_IDENTIFIED" and stated:
        found["stated"] = int(stated[2])
        if not stated[1]:
            found["of_layer"] = null_dimension(layer, trap)
        if trap.heads != "auto":
            found["of_asked"] = family
    return found
