"""How many numbers projected heads have that a function can show: their gauge is left out.

Written for `Architecture`, which is where to ask. With n query heads that share keys and values of
h dimensions in each of g groups, d features, and a constant one where there are biases:

    plain       n h d + h d - h^2 a group      an invertible matrix between queries and keys
    rotary      n h d + h d - h a group        a complex number a frequency
    QK-norm     n h d + h d - (n + 1) a group  a scale each, and what gains show
    values      n h e + h d - h^2 a group      an invertible matrix between values and outputs
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mhalearn._runtime.types import Float64

if TYPE_CHECKING:
    from mhalearn.layer.architecture import Architecture


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
    rotated = 0 if a.rope is None else a.rope.rotated(a.qk_rank)
    # The same number on all logits of a row cancels, unless something beside them is compared.
    shows = a.sinks or a.softcap is not None or a.norm is not None
    return _Sizes(
        heads=a.heads,
        groups=a.groups,
        rotated=rotated,
        still=a.qk_rank - rotated,
        query_rows=a.d + a.bias,
        rotated_key_rows=a.d + a.bias,
        still_key_rows=a.d + (a.bias and shows),
    )


def count_attention(a: Architecture, tokens: int | None) -> int:
    """What decides the patterns: queries, keys, gains, sinks, position biases.

    tokens: of the longest sequence, which bounds the distances that are seen; None: any.
    Trust: equal to the rank of a Jacobian wherever that was measured. Scales that only a norm's
    epsilon shows are not counted; frequencies must differ.
    """
    s = _sizes(a)
    entries = s.rotated * (s.sharing * s.query_rows + s.rotated_key_rows)
    entries += s.still * (s.sharing * s.query_rows + s.still_key_rows)
    count = s.groups * entries + a.heads * a.sinks
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
    if a.distance_bias is not None:
        count += a.heads * a.distance_bias.unknowns(_distances(a, tokens))
    return count


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
    sharing = a.heads // a.groups
    rows = a.d + (a.bias and a.sinks)
    rank = min(a.qk_rank, rows, sharing * outputs)
    return a.groups * rank * (sharing * outputs + rows - rank)


def _distances(a: Architecture, tokens: int | None) -> Float64:
    """Key positions less query positions that occur."""
    farthest = getattr(a.distance_bias, "max_distance", 0) if tokens is None else tokens - 1
    if a.window is not None:
        farthest = min(farthest, a.window - 1)
    return np.arange(-farthest, 1 if a.causal else farthest + 1, dtype=np.float64)
