"""The canonical form of heads that read keys and values from a latent.

What no function shows is fixed: gains, which what reads a latent takes up; the basis of a latent,
its size under a norm; of each head an invertible matrix between queries and keys, and between
values and outputs; of a rotary frequency a complex number that all heads share.
"""

from __future__ import annotations

import numpy as np

from mhalearn._runtime.types import Float64
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.gauge import balanced, phase, ratio, sign

Params = dict[str, Float64]


def fix_latents(a: Architecture, params: Params) -> None:
    """Choose one of all projections that compute the same, in place.

    Trust: unique for generic heads that read all of their latents.
    """
    for name, readers in _readers(a).items():
        _fold_gain(params, name, readers)
        _turn(params, name, readers, _basis(a, params[name]))
    if a.rotated:
        _fix_rotary(a, params)
    for i in range(a.heads):
        _balance_head(a, params, i)
    if a.latent is not None and not a.latent.norm:
        # Orthonormal maps so far; what reads them says which basis.
        for name, readers in _readers(a).items():
            read = [_side_by_side(params[reader]) for reader in readers]
            square = np.zeros((len(read[0]),) * 2)  # so that there are as many columns as rows
            whole = np.concatenate([*read, square], axis=1)
            _turn(params, name, readers, np.linalg.svd(whole, full_matrices=False).U)
    for name, readers in _readers(a).items():
        _turn(params, name, readers, np.diag(sign(params[name])))


def _readers(a: Architecture) -> dict[str, tuple[str, ...]]:
    """Each latent, and the projections that read it."""
    assert a.latent is not None
    found: dict[str, tuple[str, ...]] = {"latent": ("key", "value")}
    if a.latent.query_rank is not None:
        found["query_latent"] = ("query",)
    return found


def _fold_gain(params: Params, name: str, readers: tuple[str, ...]) -> None:
    if f"{name}_gain" in params:
        for reader in readers:
            params[reader] = params[f"{name}_gain"][:, None] * params[reader]
        params[f"{name}_gain"] = np.ones_like(params[f"{name}_gain"])


def _basis(a: Architecture, down: Float64) -> Float64:
    """A change of a latent's coordinates: to its principal axes under a norm, of unit size where no
    epsilon shows it; to an orthonormal map without."""
    assert a.latent is not None
    _, values, vt = np.linalg.svd(down, full_matrices=False)
    if not a.latent.norm:
        return vt.T / np.maximum(values, np.finfo(float).eps * values[0])
    size = np.linalg.norm(down) / np.sqrt(len(vt))
    return vt.T / (size if a.latent.epsilon == 0 else 1.0)


def _turn(params: Params, name: str, readers: tuple[str, ...], change: Float64) -> None:
    """Other coordinates of a latent; under a norm what reads it does not see its size."""
    params[name] = params[name] @ change
    normed = f"{name}_gain" in params
    back = change.T if normed else np.linalg.inv(change)
    if normed:
        back = back / np.linalg.norm(back, axis=1, keepdims=True)
    for reader in readers:
        params[reader] = back @ params[reader]


def _fix_rotary(a: Architecture, params: Params) -> None:
    """Queries as large as keys, the largest entry of a key real."""
    assert a.rope is not None
    real, imaginary = a.rope.pairs(a.qk_rank)
    query, key = params["query"], params["rotary_key"]
    ours, theirs = (side[..., real] + 1j * side[..., imaginary] for side in (query, key))
    sizes = np.linalg.norm(ours, axis=(0, 1)), np.linalg.norm(theirs, axis=0)
    factor = np.sqrt(ratio(*sizes)) * phase(theirs)
    for side, turned in ((query, ours / factor.conj()), (key, theirs * factor)):
        side[..., real], side[..., imaginary] = turned.real, turned.imag


def _balance_head(a: Architecture, params: Params, i: int) -> None:
    """Signs by what a head reads of tokens, which no basis of a latent moves."""
    first = a.rotated
    key, query = balanced(params["key"][i], params["query"][i][:, first:])
    flip = sign(params["latent"] @ key)
    params["key"][i], params["query"][i][:, first:] = key * flip, query * flip
    value, out = balanced(params["value"][i], params["out"][i].T)
    flip = sign(params["latent"] @ value)
    params["value"][i], params["out"][i] = value * flip, (out * flip).T


def _side_by_side(heads: Float64) -> Float64:
    return heads.swapaxes(0, 1).reshape(heads.shape[1], -1)
