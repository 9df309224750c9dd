"""Which heads have the same keys and values, and such heads brought to hold them once.

Of a head's projections only spaces are determined: keys may be replaced by K A and queries by
Q A^-T, where A is invertible and, beside rotary positions, turns and stretches each frequency's
pair alone. So heads share keys where principal angles between the columns of their K are zero, for
rotary heads those between complex columns, one a frequency; and likewise values.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mhalearn._runtime.types import Float64
from mhalearn.layer.architecture import Architecture

Params = dict[str, Float64]


def share_keys(
    architecture: Architecture, params: Params, groups: int, tolerance: float
) -> tuple[Architecture, Params] | None:
    """The same heads with so many sets of keys and values; None where they have more.

    params: of `Projected`, of heads that share nothing. tolerance: sine of the largest principal
    angle between spaces that are taken for one.
    """
    m = architecture.heads
    found = {name: np.array(leaf, np.float64) for name, leaf in params.items()}
    members: list[list[int]] = []
    for head in range(m):
        for group in members:
            if _join(architecture, found, group[0], head, tolerance):
                group.append(head)
                break
        else:
            members.append([head])
    if len(members) > groups or m % groups:
        return None
    members = _evened(members, m // groups)
    if len(members) != groups:
        return None
    order = [head for group in members for head in group]
    first = [group[0] for group in members]
    for name in ("query", "out", "query_bias", "sink"):
        if name in found:
            found[name] = found[name][order]
    for name in ("key", "value", "key_bias", "value_bias"):
        if name in found:
            found[name] = found[name][first]
    if "position_table" in found:
        found["position_table"] = found["position_table"][:, order]
    return replace(architecture, kv_heads=groups), found


def _evened(members: list[list[int]], size: int) -> list[list[int]]:
    """Groups of so many heads each: larger ones are cut, as copies of keys may be held twice."""
    return [
        group[start : start + size]
        for group in members
        for start in range(0, len(group), size)
        if len(group) % size == 0
    ]


def _join(a: Architecture, params: Params, one: int, other: int, tolerance: float) -> bool:
    """Let a head use another's keys and values, if its own span the same; else change nothing."""
    ours, theirs = (_with_bias(params, "key", head) for head in (one, other))
    by_keys = _find_change(a, ours, theirs, tolerance)
    ours, theirs = (_with_bias(params, "value", head) for head in (one, other))
    by_values = _span_change(ours, theirs, tolerance)
    if by_keys is None or by_values is None:
        return False
    for name in ("query", "query_bias"):
        if name in params:
            params[name][other] = params[name][other] @ by_keys.T
    params["out"][other] = by_values @ params["out"][other]
    return True


def _with_bias(params: Params, side: str, head: int) -> Float64:
    """A head's projection, with its bias as one more row."""
    rows = params[side][head]
    bias = params.get(f"{side}_bias")
    return rows if bias is None else np.concatenate([rows, bias[head][None]])


def _find_change(a: Architecture, one: Float64, other: Float64, tolerance: float) -> Float64 | None:
    """A with other = one A that no logit shows."""
    if a.rope is None:
        return _span_change(one, other, tolerance)
    h = a.qk_rank
    change = np.zeros((h, h))
    for real, imaginary in zip(*a.rope.pairs(h), strict=True):
        ours = one[:, real] + 1j * one[:, imaginary]
        theirs = other[:, real] + 1j * other[:, imaginary]
        factor = np.vdot(ours, theirs) / np.vdot(ours, ours).real
        if np.linalg.norm(theirs - factor * ours) > tolerance * np.linalg.norm(theirs):
            return None
        block = np.array([[factor.real, factor.imag], [-factor.imag, factor.real]])
        change[np.ix_([real, imaginary], [real, imaginary])] = block
    still = slice(a.rope.rotated(h), h)
    if a.rope.rotated(h) < h:
        plain = _span_change(one[:, still], other[:, still], tolerance)
        if plain is None:
            return None
        change[still, still] = plain
    return change


def _span_change(one: Float64, other: Float64, tolerance: float) -> Float64 | None:
    """A with other = one A; None where some column of the other is out of the first's span."""
    change = np.linalg.lstsq(one, other)[0]
    basis = np.linalg.qr(other)[0]
    left = basis - one @ np.linalg.lstsq(one, basis)[0]
    return np.asarray(change) if np.linalg.norm(left, 2) <= tolerance else None
