"""What a wider class of heads has learned, read as parameters of the class asked for.

The eigenvalues of a matrix that turns keys are exp(+-i w_f), and its eigenvectors the dimensions of
each frequency. Under a norm bases are orthonormal: what the eigenvectors leave open is a turn of
each pair of dimensions, and the one after which they are orthogonal has the gains as their sizes.
Heads are put in the order of their slopes; a size is the root of one epsilon over another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from scipy.optimize import linear_sum_assignment

from mhalearn._runtime.types import Float64
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.position_bias import Alibi
from mhalearn.layer.projected_canonical import fix_gains, put_rows, rows_of
from mhalearn.layer.rope import Rope

Params = dict[str, Float64]

# Of the epsilon asked for, the least that is read: what is learned may be zero or less by rounding.
_LEAST_EPSILON = 1e-4


def rotation(rope: Rope, h: int) -> Float64:
    """By one position: (h, h)."""
    real, imaginary = rope.pairs(h)
    angles, turn = rope.frequencies(h), np.eye(h)
    turn[real, real] = turn[imaginary, imaginary] = np.cos(angles)
    turn[real, imaginary], turn[imaginary, real] = -np.sin(angles), np.sin(angles)
    return turn


def rotations(a: Architecture) -> Rope:
    """Of what a turn turns: all dimensions, or beside a latent those that are rotated alone."""
    assert a.rope is not None
    return a.rope if a.latent is None else replace(a.rope, fraction=1.0)


def rotary_basis(rope: Rope, turn: Float64) -> Float64:
    """Columns in which a turn (h, h) is the rotation whose frequencies are next to its own; the
    identity where there are none."""
    h = len(turn)
    real, imaginary = rope.pairs(h)
    values, vectors = np.linalg.eig(turn)
    wanted = np.exp(1j * rope.frequencies(h))
    # An eigenvalue of modulus one and its conjugate make one pair of dimensions.
    _, chosen = linear_sum_assignment(np.abs(wanted[:, None] - values[None]))
    basis = np.zeros((h, h))
    basis[:, real] = vectors[:, chosen].real
    basis[:, imaginary] = -vectors[:, chosen].imag
    rotated = rope.rotated(h)
    if rotated < h:  # what is not turned: next to one, of those that are left
        left = np.setdiff1d(np.arange(h), chosen)
        still = left[np.argsort(np.abs(values[left] - 1))[: h - rotated]]
        both = np.concatenate([vectors[:, still].real, vectors[:, still].imag], axis=1)
        basis[:, rotated:] = np.linalg.svd(both)[0][:, : h - rotated]
    return basis if np.linalg.matrix_rank(basis) == h else np.eye(h)


def _inverse(matrix: Float64) -> Float64:
    return np.asarray(np.linalg.inv(matrix), np.float64)


def straighten(a: Architecture, params: Params, turn: Float64) -> None:
    """Bring groups into the bases in which their turns (g, h, h) are rotations, in place."""
    assert a.rope is not None
    for g in range(a.groups):
        basis = rotary_basis(a.rope, turn[g])
        _change_basis(params, "query", _heads(a, g), basis)
        _change_basis(params, "key", slice(g, g + 1), _inverse(basis).T)


def straighten_shared(a: Architecture, params: Params, turn: Float64) -> None:
    """The same of the rotary key that all heads share beside a latent."""
    basis, first = rotary_basis(rotations(a), turn), len(turn)
    params["rotary_key"] = params["rotary_key"] @ _inverse(basis).T
    for name in ("query", "query_bias"):
        if name in params:
            params[name][..., :first] = params[name][..., :first] @ basis


def read_norms(a: Architecture, params: Params, turn: Float64 | None) -> None:
    """Gains that all heads share, and bases in which they are, in place of a matrix "meet" of each
    head between its normalised queries and keys."""
    assert a.norm is not None
    meet = params.pop("meet")
    ours, theirs = np.ones((a.heads, a.qk_rank)), np.ones((a.groups, a.qk_rank))
    for g in range(a.groups):
        rows = _orthogonal_rows(a, meet[_heads(a, g)], None if turn is None else turn[g])
        theirs[g] = _sizes(rows, 1)
        _change_basis(
            params, "key", slice(g, g + 1), _nearest_rotation(rows / theirs[g][:, None]).T
        )
        back = _inverse(rows)
        for i in range(a.heads)[_heads(a, g)]:
            columns = meet[i] @ back
            ours[i] = _sizes(columns, 0)
            _change_basis(params, "query", slice(i, i + 1), _nearest_rotation(columns / ours[i]))
    if not a.norm.has_gains:
        return
    # Of each group its own gains, which is what a norm of all heads together has.
    own = replace(a, qk_norm=replace(a.norm, across_heads=True))
    params["query_gain"], params["key_gain"] = ours, theirs
    query, key = (rows_of(params, side, slice(None)) for side in ("query", "key"))
    fix_gains(own, params, query, key)
    put_rows(params, "query", slice(None), query)
    put_rows(params, "key", slice(None), key)
    for name in ("query_gain", "key_gain"):
        params[name] = np.exp(np.mean(np.log(params[name]), axis=0))


def order_by_slope(a: Architecture, params: Params, slope: Float64) -> None:
    """Heads to the places that have slopes next to theirs, in place."""
    bias = a.distance_bias
    assert isinstance(bias, Alibi)
    if a.groups != a.heads:
        return
    known = np.log(bias.slopes(a.heads))
    found = np.log(np.maximum(slope, 0.1 * np.exp(known.min())))
    _, order = linear_sum_assignment((known[:, None] - found[None]) ** 2)
    sides = ("query", "key", "value", "out", "query_bias", "key_bias", "value_bias", "sink")
    for name in sides:
        if name in params:
            params[name] = params[name][order]


def unit_sizes(params: Params, epsilons: Mapping[str, float]) -> None:
    """What is normalised to unit size on tokens of unit size, with epsilons that make the same of
    it, in place. Those that have one stay."""
    for name, epsilon in epsilons.items():
        if f"{name}_epsilon" in params:
            continue
        weight = params[name]
        factors = np.asarray(np.sqrt(weight.shape[-1]) / _sizes(weight, (-2, -1)))
        _scale(params, name, factors)
        params[f"{name}_epsilon"] = np.asarray(epsilon * factors**2)


def read_sizes(params: Params, epsilons: Mapping[str, float]) -> None:
    """The sizes at which these epsilons do what those learned do, in place."""
    for name, epsilon in epsilons.items():
        learned = params.pop(f"{name}_epsilon", None)
        if learned is not None:
            least = _LEAST_EPSILON * epsilon
            _scale(params, name, np.asarray(np.sqrt(epsilon / np.maximum(learned, least))))


def _orthogonal_rows(a: Architecture, meet: Float64, turn: Float64 | None) -> Float64:
    """Of one group: the dimensions (h, h) of normalised keys, by their gains."""
    if turn is None:
        return _principal_axes(meet)
    assert a.rope is not None
    basis = rotary_basis(a.rope, turn)
    rows = _inverse(basis)
    for pair in np.stack(a.rope.pairs(a.qk_rank), axis=1):
        axes = np.linalg.eigh(rows[pair] @ rows[pair].T)[1]
        axes[:, :1] *= np.sign(np.linalg.det(axes))  # a turn, no mirror image
        rows[pair] = axes.T @ rows[pair]
    first = a.rotated
    if first < a.qk_rank:  # of what is not turned eigenvectors say no more than the span
        rows[first:] = _principal_axes(meet @ basis[:, first:] @ rows[first:])[: a.qk_rank - first]
    return rows


def _principal_axes(matrices: Float64) -> Float64:
    """Rows along which matrices (n, h, h) together are largest, the largest first."""
    square = np.sum(matrices.swapaxes(1, 2) @ matrices, axis=0)
    return np.asarray(np.linalg.eigh(square)[1].T[::-1])


def _heads(a: Architecture, g: int) -> slice:
    each = a.heads // a.groups
    return slice(g * each, (g + 1) * each)


def _change_basis(params: Params, side: str, which: slice, change: Float64) -> None:
    for name in (side, f"{side}_bias"):
        if name in params:
            params[name][which] = params[name][which] @ change


def _scale(params: Params, name: str, factors: Float64) -> None:
    params[name] = params[name] * factors[..., None, None]
    if f"{name}_bias" in params:
        params[f"{name}_bias"] = params[f"{name}_bias"] * factors[..., None]


def _sizes(part: Float64, axes: int | tuple[int, ...]) -> Float64:
    sizes = np.sqrt(np.sum(part**2, axis=axes))
    return np.where(sizes > 0, sizes, 1.0)


def _nearest_rotation(matrix: Float64) -> Float64:
    """The nearest orthogonal matrix."""
    left, _, right = np.linalg.svd(matrix)
    return np.asarray(left @ right)
