"""Which kind of heads open ones have become: rotary, windowed, beside a sink, capped, shared.

Each number of `OpenHeads` is read where it lies next to what a kind has there, and the parameters
are brought into the class of that kind. What no kind has is not read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

from mhalearn._runtime.types import Float64
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.open_heads import OpenHeads, turns
from mhalearn.layer.parametrisation import Params
from mhalearn.layer.position_bias import Alibi, PositionBias, T5Bias
from mhalearn.layer.relaxed import Relaxed
from mhalearn.layer.rope import Rope

# Frequencies below this, in radians a token, are not told from none.
_STILL = 1e-4
# Of a frequency, how far it may be from the geometric row that others make.
_IN_ROW = 1e-2
# Frequencies that are nearer to those asked for are the same.
_SAME = 1e-6
# A base or a cap this near to a number of few digits, relative, is that number, where so near is
# this share of the way between two of them.
_DIGITS, _ROUND, _CHANCE = range(1, 7), 1e-9, 1e-2
_ANY_BASE = 10000.0


@dataclass(frozen=True)
class Reading:
    """A kind, and parameters of `Projected` in it, next to those that were read."""

    architecture: Architecture
    params: dict[str, Float64]


def read_kind(
    params: Params, kind: OpenHeads, tolerance: float, asked: Architecture
) -> Reading | None:
    """The kind that open heads have become, keys and values not shared; None where there is none.

    tolerance: how far numbers may be off. asked: a kind whose ways of saying the same are kept: the
    order of rotated dimensions, a scaling, a window longer than sequences, the scale of logits.
    Trust: what is read is a guess by nearness, to be tried on examples.
    """
    a = replace(kind.architecture, logit_scale=asked.logit_scale)
    found = {name: np.array(leaf, np.float64) for name, leaf in params.items()}
    spin, reach = found.pop("spin"), np.abs(found.pop("reach"))
    sinks, bend = np.abs(found.pop("sink_weight")), float(np.abs(found.pop("bend")[0]))
    if (sinks > tolerance).any():
        a = replace(a, sinks=True)
        found["sink"] = np.log(np.maximum(sinks, 1e-300))
    if bend > tolerance:
        a = replace(a, softcap=round_number(bend**-0.5, tolerance))
    turn = turns(spin)
    if np.abs(np.linalg.eigvals(turn) - 1).max() > max(_STILL, tolerance):
        rope = _read_rope(turn, tolerance, asked.rope)
        if rope is None:
            return None
        a, found["turn"] = replace(a, rope=rope), turn
    scale = a.qk_rank**-0.5 if a.logit_scale is None else a.logit_scale
    magnitude = 1.0 if a.rope is None else a.rope.magnitude
    for name in {"query", "query_bias"} & found.keys():
        found[name] /= scale * a.qk_rank**0.5 * magnitude**2
    weighed = _read_reach(a, reach, kind.tokens, tolerance, asked)
    if weighed is None and a.bias:  # which can make weights by distance of its own
        weighed = a, {}
    if weighed is None:
        return None
    a, added = weighed
    return Reading(a, Relaxed(a).read(found | added))


def round_number(value: float, tolerance: float) -> float:
    """The roundest number next to a value, relative; the value itself where none is, or where one
    would be so near by chance."""
    near = max(tolerance, _ROUND)
    for digits in _DIGITS:
        rounder = float(f"{value:.{digits - 1}e}")
        if abs(rounder / value - 1) <= near <= _CHANCE * 10.0**-digits:
            return rounder
    return value


def _read_rope(turn: Float64, tolerance: float, asked: Rope | None) -> Rope | None:
    """Rotary positions that all heads have; None where frequencies are those of none.

    Frequencies are those asked for, or a geometric row from one on, or from less where positions
    are divided by a factor. Those slower than can be told count where the row goes on so.
    """
    h, still = turn.shape[-1], max(_STILL, tolerance)
    angles = np.sort(np.angle(np.linalg.eigvals(turn)), axis=1)[:, ::-1][:, : h // 2]
    angles = np.median(angles, axis=0)
    if asked is not None:
        wanted = np.zeros(h // 2)
        wanted[: asked.rotated(h) // 2] = np.sort(asked.frequencies(h))[::-1]
        if np.abs(wanted - angles).max() <= max(tolerance, _SAME):
            return asked
    layout = "half" if asked is None else asked.layout
    seen = angles[angles > still]
    if len(seen) == 0:
        return None
    first = 1.0 if abs(seen[0] - 1) <= max(tolerance, _SAME) else float(seen[0])
    if first > 1:
        return None
    scaling = (
        None
        if first == 1.0
        else {"rope_type": "linear", "factor": round_number(1 / first, tolerance)}
    )
    if len(seen) == 1:
        return Rope(_ANY_BASE, 2 / h, layout, scaling)
    row = np.arange(1, len(seen))
    # An error of an angle tells in the ratio of two by one over its size and its place.
    best = int(np.argmax(row * seen[1:])) + 1
    ratio = (seen[best] / first) ** (1 / best)
    if np.abs(first * ratio**row / seen[1:] - 1).max() > _IN_ROW:
        return None
    slower = first * ratio ** len(seen) <= still
    rotated = h - h % 2 if slower else 2 * len(seen)
    base = round_number(float(ratio ** (-rotated / 2)), tolerance)
    return Rope(base, rotated / h, layout, scaling)


def _read_reach(
    a: Architecture, reach: Float64, tokens: int, tolerance: float, asked: Architecture
) -> tuple[Architecture, dict[str, Float64]] | None:
    """A window, a mask and a bias by distance, from weights by distance (m, distances)."""
    farthest = tokens - 1
    steps = np.arange(1.0, tokens)
    if not a.causal:
        steps = np.concatenate([np.arange(-farthest, 0.0), steps])
    if not a.causal and (reach[:, steps < 0] <= tolerance).all():
        a, reach, steps = replace(a, causal=True), reach[:, steps > 0], steps[steps > 0]
    unseen = np.max(reach, axis=0) <= tolerance
    window = tokens
    while window > 1 and unseen[np.abs(steps) == window - 1].all():
        window -= 1
    if unseen[np.abs(steps) < window].any():
        return None
    if window < tokens:
        a = replace(a, window=window)
    elif (asked.window or 0) >= tokens:
        a = replace(a, window=asked.window)
    near = np.abs(steps) < window
    weights, steps = reach[:, near], steps[near]
    if (np.abs(weights - 1) <= tolerance).all():
        return a, {}
    if (weights <= tolerance).any():
        return None
    return _read_bias(a, np.log(weights), steps, tolerance, asked.distance_bias)


def _read_bias(
    a: Architecture, bias: Float64, steps: Float64, tolerance: float, asked: PositionBias | None
) -> tuple[Architecture, dict[str, Float64]] | None:
    """ALiBi where each head has one of its slopes, else T5's table where distances of one bucket
    have one number."""
    away = np.abs(steps)
    slopes = -(bias @ away) / (away @ away)
    straight = np.abs(bias + slopes[:, None] * away).max() <= tolerance
    if straight and np.allclose(np.sort(slopes), np.sort(Alibi().slopes(a.heads)), tolerance):
        return replace(a, position_bias=Alibi()), {"slope": slopes}
    kind = asked if isinstance(asked, T5Bias) else T5Bias(bidirectional=not a.causal)
    # Distances are the key's position less the query's.
    buckets = np.asarray(kind.bucket(jnp.asarray(-steps)))
    table = np.zeros((kind.buckets, a.heads))
    for bucket in np.unique(buckets):
        here = bias[:, buckets == bucket]
        table[bucket] = here.mean(axis=1)
        if np.abs(here - table[bucket][:, None]).max() > tolerance:
            return None
    if (buckets == int(kind.bucket(jnp.zeros(1))[0])).any():
        return None
    return replace(a, position_bias=kind), {"position_table": table}
