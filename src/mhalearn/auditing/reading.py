"""A layer as a program: every step of its forward pass is a field that a fault may change.

An `Architecture` can say only what layers may rightly have. A box may sum over the wrong tokens,
rotate by the wrong sign or round its values, so the record here has more fields than that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mhalearn._runtime.types import Float64
from mhalearn.interop.factors import carried_factors
from mhalearn.layer.base import Layer
from mhalearn.layer.latent import Latent
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.position_bias import PositionBias
from mhalearn.layer.projected import Projected
from mhalearn.layer.projected_layer import ProjectedLayer
from mhalearn.layer.qk_norm import QKNorm
from mhalearn.layer.rope import Rope


@dataclass(frozen=True)
class Reading:
    """How attention is computed: weights, and the steps between them.

    params: query (m, d, h), key (g, d, h), value (g, d, v), out (m, v, e), and biases, gains, sink
    and position table where there are such; with a latent, those of `Projected`. kv_of: which key
    head each head meets.
    factored: whether these are a port's own weights, and not matrices multiplied out.
    """

    params: Mapping[str, Float64]
    kv_of: tuple[int, ...]
    head_dim: int
    scale: float
    factored: bool = True
    causal: bool = False
    ahead: int = 0  # a causal row r sees keys up to r + ahead
    inverted: bool = False  # a causal row sees keys from itself on
    window: int | None = None
    window_kind: str = "last"  # "first": the first tokens; "far": those it should not see
    softcap: float | None = None
    cap_after_mask: bool = False
    rope: Rope | None = None
    frequencies: Float64 | None = None  # instead of the rope's own
    magnitude: float | None = None  # instead of the rope's own
    sign: int = 1
    query_shift: float = 0.0
    rotated: tuple[str, ...] = ("query", "key")
    norm: QKNorm | None = None
    normed: tuple[str, ...] = ("query", "key")
    norm_last: bool = False
    latent: Latent | None = None
    latents_normed: tuple[str, ...] = ("latent", "query_latent")
    position_bias: PositionBias | None = None
    slopes: Float64 | None = None  # instead of ALiBi's own
    attends_padding: bool = False
    idle_keys: int = 0  # zero logits that the softmax counts beside the tokens
    over_queries: bool = False
    rounding: Mapping[str, str] = field(default_factory=dict)  # by "values", "weights", "sum"
    untransposed: str = ""  # heads and tokens reshaped into each other: "split" or "joined"
    adds_tokens: bool = False  # to the outputs: a residual path
    empty: str = "zero"  # what a row that sees no token gives: "zero" or "uniform"

    @property
    def n_heads(self) -> int:
        return len(self.kv_of)

    @property
    def groups(self) -> int:
        return int(self.params["key"].shape[0])

    @property
    def d(self) -> int:
        return int(self.params["query"].shape[1])

    @property
    def out_dim(self) -> int:
        return int(self.params["out"].shape[2])

    def with_(self, **changes: Any) -> Reading:
        return replace(self, **changes)

    def with_params(self, **changes: Float64 | None) -> Reading:
        """Other parameters; those that are None are left out."""
        every = dict(self.params) | changes
        return replace(
            self, params={name: leaf for name, leaf in every.items() if leaf is not None}
        )


def read_layer(layer: Layer) -> Reading:
    """The program of a layer; a ValueError says which heads an audit does not know."""
    if isinstance(layer, AttentionLayer):
        return _read_matrices(layer)
    if not (isinstance(layer, ProjectedLayer) and type(layer.parametrisation) is Projected):
        raise ValueError(
            f"{type(layer).__name__}: an audit reads AttentionLayer and ProjectedLayer alone"
        )
    a = layer.architecture
    each = a.heads // a.groups
    return Reading(
        params=dict(layer.params),
        kv_of=tuple(i // each for i in range(a.heads)),
        head_dim=a.qk_rank,
        scale=a.qk_rank**-0.5 if a.logit_scale is None else float(a.logit_scale),
        causal=a.causal,
        window=a.window,
        softcap=None if a.softcap is None else float(a.softcap),
        rope=a.rope,
        norm=a.norm,
        latent=a.latent,
        position_bias=a.distance_bias,
    )


def _read_matrices(layer: AttentionLayer) -> Reading:
    """By the factors that the layer carries, or else by Theta and W, keys and values the tokens."""
    factors = carried_factors(layer)
    if factors is not None:
        named = {name: leaf.astype(np.float64) for name, leaf in factors.arrays().items()}
        for side in ("query", "key", "value"):
            named[side] = named[side].swapaxes(1, 2)
        heads = tuple(range(factors.n_heads))
        h = factors.head_dim
        return Reading(named, heads, h, h**-0.5, causal=layer.causal)
    tokens = np.eye(layer.d)[None]
    params = {"query": layer.theta, "key": tokens, "value": tokens, "out": layer.w}
    if layer.key_vector is not None:
        params["query_bias"] = layer.key_vector
    if layer.out_bias is not None:
        params["out_bias"] = layer.out_bias
    rank = layer.architecture.head_dim or layer.d
    none = (0,) * layer.n_heads
    return Reading(params, none, rank, 1.0, factored=False, causal=layer.causal)
