"""The class of layers considered, and the only place that counts what is unknown about one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mhalearn._runtime.types import Float64
from mhalearn._runtime.validation import check_count
from mhalearn.layer.latent import Latent
from mhalearn.layer.position_bias import PositionBias, read_position_bias
from mhalearn.layer.projected_fields import check_projections
from mhalearn.layer.qk_norm import QKNorm, read_norm
from mhalearn.layer.rope import Rope
from mhalearn.layer.token_columns import TokenColumns, find_columns
from mhalearn.layer.unknowns import count_attention, count_latent_sum, count_projections

if TYPE_CHECKING:
    from mhalearn.layer.base import Layer
    from mhalearn.layer.parametrisation import Parametrisation

# Attention unknowns, all ranks allowed, from which on heads of known rank are better searched for
# by their factors.
_LARGE = 8_000
# Fields of heads that are held by their projections.
_PROJECTED = (
    "kv_heads",
    "rope",
    "window",
    "sinks",
    "softcap",
    "qk_norm",
    "position_bias",
    "logit_scale",
    "value_dim",
    "memory",
    "latent",
)


class ParameterCount(NamedTuple):
    """Unknowns by kind: dimensions of the set of layers, not entries of arrays."""

    theta: int  # of all Theta_i
    key_vectors: int  # of all v_i
    w: int  # of all W_i
    out_bias: int  # of c

    @property
    def attention(self) -> int:
        """What decides the patterns."""
        return self.theta + self.key_vectors

    @property
    def total(self) -> int:
        return sum(self)


@dataclass(frozen=True)
class Architecture:
    """The class of layers considered, fixed before any example is seen.

    d: features of a token. n_heads: None where the number of heads is to be found.
    head_dim: rank of every Theta_i and of every W_i; None where any rank is allowed.
    out_dim: output features, d unless given.
    bias: every head has a key-side vector v_i, and the layer an output bias c; heads that are held
        by their projections have biases of queries, keys, values and outputs.
    causal: token r sees tokens 0..r only.

    What follows makes heads of projections, of head_dim dimensions, which must be given:
    kv_heads: keys and values are shared by n_heads / kv_heads heads in a row.
    rope: rotary positions. window: tokens see none at a distance of `window` or more.
    sinks: every head has one more key, with a logit of its own and the value zero.
    softcap: logits l are c tanh(l / c). logit_scale: 1 / sqrt(head_dim) where it is None.
    qk_norm: queries and keys are normalised: True, "rms", "l2", or a `QKNorm`.
    position_bias: numbers added to logits by distance: "alibi", "t5", or one of
        `layer.position_bias`.
    value_dim: dimensions of a head's values, head_dim where it is None.
    memory: keys and values are of a second sequence, whose tokens have so many features.
    latent: keys and values of all heads are read from one narrow vector a token: a `Latent`.
    attention: a kind of attention that this package does not have, as a class of `Parametrisation`;
        None for softmax heads.
    """

    d: int
    n_heads: int | None = None
    head_dim: int | None = None
    out_dim: int | None = None
    bias: bool = False
    causal: bool = False
    kv_heads: int | None = None
    rope: Rope | None = None
    window: int | None = None
    sinks: bool = False
    softcap: float | int | None = None
    qk_norm: QKNorm | bool | str = False
    position_bias: PositionBias | str | None = None
    logit_scale: float | int | None = None
    value_dim: int | None = None
    memory: int | None = None
    latent: Latent | None = None
    attention: Callable[[Architecture], Parametrisation] | None = None

    def __post_init__(self) -> None:
        check_count("d", self.d)
        if self.n_heads is not None:
            check_count("n_heads", self.n_heads)
        if self.head_dim is not None and check_count("head_dim", self.head_dim) > self.d:
            raise ValueError(
                f"head_dim={self.head_dim}: a head of d = {self.d} features has rank at most "
                f"{self.d}"
            )
        if self.out_dim is None:
            object.__setattr__(self, "out_dim", self.d)
        check_count("out_dim", self.outputs)
        if self.n_heads is not None and self.kv_heads == self.n_heads:
            object.__setattr__(self, "kv_heads", None)
        if self.value_dim is not None and self.value_dim == self.head_dim:
            object.__setattr__(self, "value_dim", None)
        object.__setattr__(self, "qk_norm", read_norm(self.qk_norm) or False)
        said = read_position_bias(self.position_bias, self.causal)
        object.__setattr__(self, "position_bias", said)
        if not self.is_plain:
            check_projections(self)

    def extras(self) -> list[str]:
        """The names of what its heads have beside one Theta and one W each."""
        return [name for name in _PROJECTED if getattr(self, name) not in (None, False)]

    @property
    def is_plain(self) -> bool:
        """Whether heads are softmax heads of one Theta and one W each, or of the user's own kind,
        and nothing is known of them beside their rank."""
        return not self.extras()

    @property
    def shares_only(self) -> bool:
        """Whether heads have one Theta and one W each, although they are held by projections."""
        return replace(self, kv_heads=None, logit_scale=None, value_dim=None).is_plain

    @property
    def groups(self) -> int:
        """How many different keys and values there are."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def norm(self) -> QKNorm | None:
        return self.qk_norm if isinstance(self.qk_norm, QKNorm) else None

    @property
    def distance_bias(self) -> PositionBias | None:
        return self.position_bias if isinstance(self.position_bias, PositionBias) else None

    @property
    def has_positions(self) -> bool:
        """Whether it matters at which positions tokens stand."""
        inside = getattr(self.attention, "has_positions", False)  # of the heads of a block
        return self.rope is not None or self.position_bias is not None or bool(inside)

    @property
    def key_features(self) -> int:
        """Features of the tokens that keys and values are of."""
        return self.d if self.memory is None else self.memory

    @property
    def rotated(self) -> int:
        """How many of a head's dimensions are rotated."""
        return 0 if self.rope is None else self.rope.rotated(self.qk_rank)

    def columns(self, width: int) -> TokenColumns:
        """What tokens of this width hold, or a ValueError where they are not such a layer's."""
        return find_columns(width, self.d, self.memory, self.has_positions)

    @property
    def outputs(self) -> int:
        """Output features."""
        return self.d if self.out_dim is None else self.out_dim

    @property
    def heads(self) -> int:
        """The number of heads, where it is given."""
        if self.n_heads is None and self.attention is not None:
            return 1
        if self.n_heads is None:
            raise ValueError("n_heads is open in this architecture: give it a number first")
        return self.n_heads

    @property
    def query_dim(self) -> int:
        """Rows of Theta_i with the key-side vector, where there is one, as the last."""
        return self.d + self.bias

    @property
    def qk_rank(self) -> int:
        """Rank of a Theta_i."""
        return self.d if self.head_dim is None else self.head_dim

    @property
    def values(self) -> int:
        """Dimensions of a head's values."""
        return self.qk_rank if self.value_dim is None else self.value_dim

    @property
    def ov_rank(self) -> int:
        """Rank of a W_i."""
        return min(self.values, self.key_features, self.outputs)

    @property
    def is_low_rank(self) -> bool:
        """Whether the rank of softmax heads is less than matrices of these sizes have."""
        return self.attention is None and self.is_plain and self._has_low_rank

    @property
    def _has_low_rank(self) -> bool:
        return self.qk_rank < self.d or self.ov_rank < min(self.d, self.outputs)

    @property
    def prefers_factors(self) -> bool:
        """Whether heads are so many, of so low a rank, that their factors are searched for."""
        low = self.is_low_rank and 2 * self.qk_rank <= self.d
        return low and (self.n_heads or self.usual_heads()) * self.d**2 > _LARGE

    def usual_heads(self) -> int:
        """As many heads as transformers have: of rank h, together they fill the d features."""
        return -(-self.d // self.qk_rank)

    def with_heads(self, n_heads: int | None) -> Architecture:
        return replace(self, n_heads=n_heads)

    def with_any_rank(self) -> Architecture:
        return replace(self, head_dim=None)

    def describe(self) -> dict[str, int | bool | str | None]:
        """Its fields as JSON has them, to know a run again by."""
        beyond = self.extras()
        named = [one.name for one in fields(self) if one.name not in _PROJECTED]
        said = {name: getattr(self, name) for name in named}
        said |= {name: repr(getattr(self, name)) for name in beyond}
        if self.attention is not None:
            said["attention"] = getattr(self.attention, "__qualname__", repr(self.attention))
        return said

    def parametrisation(self) -> Parametrisation:
        """How its layers are written as numbers: by factors where their rank is low."""
        from mhalearn.layer.dense import Dense
        from mhalearn.layer.factored import Factored
        from mhalearn.layer.projected import Projected

        if self.attention is not None:
            return self.attention(self)
        if not self.is_plain:
            return Projected(self)
        return Factored(self) if self.is_low_rank else Dense(self)

    def count(self) -> int:
        """Unknowns of a layer: the dimension of the set of layers, which no gauge enlarges."""
        if self.attention is not None:
            return self.parametrisation().count()
        return self.count_by_kind().total

    def count_by_kind(self) -> ParameterCount:
        """Matrices (q, d) and (d, e) of ranks h and h' are h (q + d - h) and h' (d + e - h')."""
        return self._count(self.outputs)

    def _count(self, outputs: int, tokens: int | None = None) -> ParameterCount:
        if not self.is_plain:
            attention = count_attention(replace(self, bias=False), tokens)
            return ParameterCount(
                theta=attention,
                key_vectors=count_attention(self, tokens) - attention,
                w=count_projections(self, outputs),
                out_bias=outputs * self.bias,
            )
        m, d, h, r = self.heads, self.d, self.qk_rank, self.ov_rank
        return ParameterCount(
            theta=m * h * (2 * d - h),
            key_vectors=m * h * self.bias,
            w=m * r * (d + outputs - r),
            out_bias=outputs * self.bias,
        )

    def _count_sum(self, outputs: int) -> int:
        """Unknowns that rows which see one token speak about: sum_i W_i, and c."""
        if self.sinks:  # against which the one token is weighed
            return 0
        if self.latent is not None:
            return count_latent_sum(self, self.latent, outputs)
        d = self.key_features
        rank = min(d, outputs, self.groups * self.ov_rank)
        return rank * (d + outputs - rank) + outputs * self.bias

    @property
    def output_span(self) -> int:
        """Dimensions that the outputs of all heads span, the bias apart."""
        return min(self.outputs, self.heads * self.ov_rank)

    def attention_scalars(self, tokens_seen: ArrayLike) -> Float64:
        """Scalars of rows that see so many tokens which speak about attention.

        A row that sees t tokens has m (t - 1) free attention weights (m t beside sinks), and shows
        at most as many of them as its outputs have dimensions.
        """
        others = np.asarray(tokens_seen, np.float64) - (not self.sinks)
        return np.minimum(self.output_span, self.heads * others)

    def counting_limit(
        self, lengths: int | ArrayLike, memory_lengths: int | ArrayLike | None = None
    ) -> float:
        """The number of examples below which no method can determine the layer: N_min.

        lengths: the number of tokens of an example, k, or the lengths of all examples where they
        differ. memory_lengths: those of the second sequence, if there is one; the same unless
        given.

        The largest of several counts of unknowns over scalars. All unknowns over the k e scalars of
        an example; those of attention over the scalars that speak about it; all that rows which see
        one token, x sum_i W_i + c, do not tell over the scalars of the others. And, because outputs
        lie in a space of few dimensions where heads are narrow, the unknowns left when that space
        is known over the scalars inside it.
        Trust: necessary for the Jacobian to be injective, and nearly sufficient for generic layers.
        """
        pairs, times = _count_pairs(lengths, lengths if memory_lengths is None else memory_lengths)
        sizes = pairs[:, 0]
        seen = [self._tokens_seen(*pair) for pair in pairs.tolist()]
        n, rows = int(times.sum()), int(times @ sizes)
        about_attention = float(times @ [self.attention_scalars(tokens).sum() for tokens in seen])
        if about_attention == 0:  # no row sees two tokens: attention is constant
            return math.inf
        # Whole numbers are divided once, so that a limit that is one comes out as one.
        if self.attention is not None:
            return n * self.count() / (rows * self.outputs)
        mixing = int(times @ [np.sum(tokens > (not self.sinks)) for tokens in seen])
        longest = int(sizes.max())
        limits = [n * self._count(self.outputs, longest).attention / about_attention]
        for width in (self.outputs, self.output_span):
            unknowns = self._count(width, longest).total
            limits.append(n * unknowns / (rows * width))
            limits.append(n * (unknowns - self._count_sum(width)) / (mixing * width))
        return max(limits)

    def _tokens_seen(self, tokens: int, memory: int) -> Float64:
        """By each row of a sequence."""
        if self.memory is not None:
            return np.full(tokens, float(memory))
        rows = np.arange(tokens)
        reach = tokens if self.window is None else self.window
        before = np.minimum(rows, reach - 1)
        after = 0 if self.causal else np.minimum(tokens - 1 - rows, reach - 1)
        return np.asarray(1 + before + after, np.float64)

    def contains(self, layer: Layer) -> bool:
        """Whether a layer belongs to this class: sizes, mask, biases, and ranks up to rounding."""
        from mhalearn.layer.membership import belongs  # which knows the kinds of layers

        return belongs(layer, self)

    def describe_rank(self) -> str:
        """What is known of the rank, to follow 'all layers' in a sentence; empty if nothing is."""
        return f" of rank {self.head_dim}" if self.is_low_rank else ""


def _count_pairs(
    lengths: int | ArrayLike, memory: int | ArrayLike
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The different pairs of lengths (p, 2), and how many examples have each."""
    if isinstance(lengths, int) and isinstance(memory, int):  # as mostly, and asked for often
        return np.array([[lengths, memory]]), np.ones(1, np.int64)
    both = np.broadcast_arrays(lengths, memory, np.zeros(1, int))
    return np.unique(np.stack(both[:2], axis=1), axis=0, return_counts=True)
