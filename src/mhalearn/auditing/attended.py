"""Which keys, or which distances between a row and its keys, a residual is made of."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.types import Float64
from mhalearn.auditing.forward import Forward
from mhalearn.auditing.reading import Reading

# Rows that are regressed on, output dimensions they are seen in, and heads whose own scale in every
# row is left open, over these dimensions at most.
_ROWS, _SKETCH, _OPEN = 384, 64, 0.5
# Weights of a few keys explain a residual if they leave at most this share of its square; few are
# those whose coefficients are not below this part of the largest, and no more than this share of
# all.
_LEFT, _CLEAR, _FEW = 0.35, 0.3, 0.35


class Attended(NamedTuple):
    """Keys, counted from 0, or distances from a row back to a key, whose weights differ; both empty
    where neither alone explains a residual."""

    keys: tuple[int, ...] = ()
    distances: tuple[int, ...] = ()


def find_attended(
    forward: Forward,
    reading: Reading,
    residual: Float64,
    heads: tuple[int, ...],
    rows: tuple[int, ...],
) -> Attended:
    """Regress a residual (n, k, e) on what the claim takes from each key, and at each distance.

    Rows may be normalised anew, so that the scale of every head is free in each row. heads: those
    that hold the residual, and rows: those that do; empty for all.
    Cost: one forward pass of a few sequences and two least-squares problems of 2 k unknowns.
    Trust: it says where weights differ, not why. Weights of rows that are normalised anew change by
    more than one factor, so that a third may be left; where more is, nothing is said.
    """
    k = residual.shape[1]
    squares = (residual**2).sum((1, 2))
    chosen = np.sort(np.argsort(-squares, kind="stable")[: max(2, _ROWS // k)])
    there = np.isin(np.arange(k), rows) if rows else np.ones(k, bool)
    some = forward.some(chosen)
    parts, means, target = _contributions(some, reading, residual[chosen], heads, there)
    if not (np.isfinite(parts).all() and target.any()):
        return Attended()
    together, target = _scale_free(parts, means, target)
    row = np.tile(np.arange(k), len(chosen))
    back = np.arange(k)[None] - row[:, None]
    by_key = np.broadcast_to(np.arange(k), (len(row), k))
    keys, keys_leave = _regress(together, target, by_key, k)
    gaps, gaps_leave = _regress(together, target, k - 1 - back, 2 * k - 1)
    if min(keys_leave, gaps_leave) > _LEFT:
        return Attended()
    if keys_leave <= gaps_leave:
        return Attended(keys=keys)
    return Attended(distances=tuple(sorted(place - (k - 1) for place in gaps)))


def _contributions(
    forward: Forward,
    reading: Reading,
    residual: Float64,
    heads: tuple[int, ...],
    differing: NDArray[np.bool_],
) -> tuple[Float64, Float64, Float64]:
    """What every key adds to every row by the claim, had it not been masked: (rows, j, s); what
    each head adds as claimed, (m, rows, s); and the residual in the same s output dimensions. Rows
    that pad, or do not differ, are zero."""
    claimed = forward.weights(reading)
    free = forward.weights(
        reading.with_(causal=False, window=None, inverted=False, ahead=0, window_kind="last")
    )
    seen = claimed > 0
    scale = claimed.sum(-1) / np.maximum((free * seen).sum(-1), 1e-300)
    weights = np.minimum(free * scale[..., None], 1e3) * forward.keys[:, None, None, :]
    few = list(heads) or list(range(reading.n_heads))
    e = residual.shape[2]
    onto = np.eye(e)
    if e > _SKETCH:
        onto = np.linalg.qr(np.random.default_rng(0).standard_normal((e, _SKETCH)))[0]
    values = forward.values(reading)
    shared = values.shape[1] == 1  # one key head for all
    values = (values if shared else values[:, few]) @ (reading.params["out"][few] @ onto)
    there = (forward.rows & differing).astype(float)
    parts = np.einsum("bmrj,bmjs,br->brjs", weights[:, few], values, there, optimize=True)
    means = np.einsum("bmrj,bmjs,br->mbrs", claimed[:, few], values, there, optimize=True)
    b, k, _, s = parts.shape
    target = (residual * there[..., None]) @ onto
    return parts.reshape(b * k, k, s), means.reshape(-1, b * k, s), target.reshape(b * k, s)


def _scale_free(parts: Float64, means: Float64, target: Float64) -> tuple[Float64, Float64]:
    """Parts and target without what another scale of each head would explain in each row."""
    m, _, s = means.shape
    if m > _OPEN * s:
        return parts, target
    left, size, _ = np.linalg.svd(means.transpose(1, 2, 0), full_matrices=False)
    left = left * (size > 1e-9 * size.max(initial=1e-300))[:, None, :]

    def rest(a: Float64) -> Float64:
        return np.asarray(a - np.einsum("rsm,rtm,r...t->r...s", left, left, a, optimize=True))

    return rest(parts), rest(target)


def _regress(
    together: Float64, target: Float64, group: NDArray[np.int64], count: int
) -> tuple[tuple[int, ...], float]:
    """Which groups of keys have coefficients that are not small, and what they alone leave."""
    rows, _, s = together.shape
    design = np.zeros((count, rows, s))
    for r in range(rows):
        np.add.at(design[:, r], group[r], together[r])
    flat = design.reshape(count, -1)
    gram, along = flat @ flat.T, flat @ target.ravel()
    known = np.flatnonzero(np.diag(gram) > 1e-12 * np.diag(gram).max(initial=1e-300))
    if not len(known):
        return (), 1.0
    found = np.linalg.lstsq(gram[np.ix_(known, known)], along[known], rcond=1e-10)[0]
    # Of keys that are hardly attended to the coefficient says nothing, and of those that are much
    # a small one is none: what a group changes must not be small, nor its coefficient.
    sizes = np.abs(found) * np.sqrt(np.diag(gram)[known])
    typical = np.abs(found)[np.argmax(sizes)]
    clear = known[(sizes >= _CLEAR * sizes.max()) & (np.abs(found) >= _CLEAR * typical)]
    if not 0 < len(clear) <= max(1, _FEW * len(known)):
        return (), 1.0
    inner = gram[np.ix_(clear, clear)]
    kept = np.linalg.lstsq(inner, along[clear], rcond=1e-10)[0]
    whole = float(np.sum(target**2))
    left = 1 - float(2 * kept @ along[clear] - kept @ inner @ kept) / whole
    return tuple(clear.tolist()), left
