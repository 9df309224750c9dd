"""How many numbers projected heads have that a function can show: their gauge is left out.

Written for `Architecture`, which is where to ask. With n query heads that share keys and values of
h dimensions in each of g groups, d features, and a constant one where there are biases:

    plain       n h d + h d - h^2 a group      an invertible matrix between queries and keys
    rotary      n h d + h d - h a group        a complex number a frequency
    QK-norm     n h d + h d - (n + 1) a group  a scale each, and what gains show
    values      n h e + h d - h^2 a group      an invertible matrix between values and outputs
    latent      d r - r (r - 1) / 2 - 1        a rotation of it and its size; r^2 without a norm
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mhalearn._runtime.types import Float64

if TYPE_CHECKING:
    from mhalearn.layer.architecture import Architecture
    from mhalearn.layer.latent import Latent


class _Sizes(NamedTuple):
    """What counts are made of."""

    heads: int
    groups: int
    rotated: int  # dimensions of a head
    still: int
    query_rows: int  # features, and the constant one where its bias shows
    rotated_key_rows: int
    still_key_rows: int

    @property
    def sharing(self) -> int:
        """Query heads a group."""
        return self.heads // self.groups


def _sizes(a: Architecture) -> _Sizes:
    rotated = a.rotated
    # The same number on all logits of a row cancels, unless something beside them is compared.
    shows = a.sinks or a.softcap is not None or a.norm is not None
    return _Sizes(
        heads=a.heads,
        groups=a.groups,
        rotated=rotated,
        still=a.qk_rank - rotated,
        query_rows=a.d + a.bias,
        rotated_key_rows=a.key_features + a.bias,
        still_key_rows=a.key_features + (a.bias and shows),
    )


def count_attention(a: Architecture, tokens: int | None) -> int:
    """What decides the patterns: queries, keys, gains, sinks, position biases.

    tokens: of the longest sequence, which bounds the distances that are seen; None: any.
    Trust: equal to the rank of a Jacobian wherever that was measured. Scales that only a norm's
    epsilon shows are not counted; frequencies must differ.
    """
    beside = a.heads * a.sinks
    if a.distance_bias is not None:
        beside += a.heads * a.distance_bias.unknowns(_distances(a, tokens))
    if a.latent is not None:
        return _count_latent_attention(a, a.latent) + beside
    s = _sizes(a)
    entries = s.rotated * (s.sharing * s.query_rows + s.rotated_key_rows)
    entries += s.still * (s.sharing * s.query_rows + s.still_key_rows)
    count = s.groups * entries + beside
    if a.norm is None:
        count -= s.groups * (s.rotated + s.still**2)
    elif a.norm.across_heads:
        count += _count_common_norm(s) - s.groups * (s.rotated + s.still**2)
    else:
        count -= s.groups * (s.sharing + 1)  # a scale each
        if a.norm.has_gains:  # shared by the heads; of a pair's four numbers, an outer product
            count += s.still + 3 * s.rotated // 2
        else:
            count -= s.groups * (s.rotated // 2 + s.still * (s.still - 1) // 2)
    return count


def _count_latent_attention(a: Architecture, latent: Latent) -> int:
    """Queries against what is read from the latent, and against the rotary key that heads share;
    the queries' own latent. That of keys and values is counted with the values.

    Trust: for heads that read all of a latent, and latents no wider than that.
    """
    rows = a.d if latent.query_rank is None else latent.query_rank
    rank = min(a.qk_rank - a.rotated, rows, latent.rank)
    count = a.heads * rank * (rows + latent.rank - rank)
    if a.rotated:
        count += a.rotated * (a.heads * rows + a.key_features - 1)
    return count + (0 if latent.query_rank is None else _count_latent(a.d, rows, latent.norm))


def _count_latent(features: int, rank: int, norm: bool) -> int:
    """Of a map into a latent: rotations, and under a norm its size, are taken up by what reads it;
    without a norm any invertible matrix is."""
    return features * rank - (rank * (rank - 1) // 2 + 1 if norm else rank**2)


def count_latent_sum(a: Architecture, latent: Latent, outputs: int) -> int:
    """What rows that see one token tell of a layer with a latent: the latent, and sum_i W_i."""
    d, rank = a.key_features, min(latent.rank, outputs)
    if not latent.norm:
        return rank * (d + outputs - rank)
    return _count_latent(d, latent.rank, True) + latent.rank * outputs


def _count_common_norm(s: _Sizes) -> int:
    """What a norm over all heads shows beside the heads: two quadratic forms, of the sizes of all
    queries and of all keys, by as many gains and gauges as there are, up to a scale each."""
    forms = s.query_rows * (s.query_rows + 1) // 2
    each = 3 * s.rotated // 2 + s.still * (s.still + 1) // 2
    shown = min(forms, s.heads * each) + min(forms, s.groups * each)
    held = s.rotated // 2 * (2 * s.sharing + 3) + s.still * (s.still + s.sharing)
    return min(shown, s.groups * held) - 2


def count_projections(a: Architecture, outputs: int) -> int:
    """W of all heads, the output bias apart. With a sink the weights of a row do not sum to one, so
    that value biases show head by head."""
    if a.latent is not None:
        rank = min(a.values, a.latent.rank, outputs)
        read = a.heads * rank * (a.latent.rank + outputs - rank)
        return read + _count_latent(a.key_features, a.latent.rank, a.latent.norm)
    sharing = a.heads // a.groups
    rows = a.key_features + (a.bias and a.sinks)
    rank = min(a.values, rows, sharing * outputs)
    return a.groups * rank * (sharing * outputs + rows - rank)


def _distances(a: Architecture, tokens: int | None) -> Float64:
    """Key positions less query positions that occur."""
    farthest = getattr(a.distance_bias, "max_distance", 0) if tokens is None else tokens - 1
    if a.window is not None:
        farthest = min(farthest, a.window - 1)
    return np.arange(-farthest, 1 if a.causal else farthest + 1, dtype=np.float64)
