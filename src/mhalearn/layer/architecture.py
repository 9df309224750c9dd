"""The class of layers considered, and the only place that counts what is unknown about one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from mhalearn._runtime.types import Float64
from mhalearn._runtime.validation import check_count

if TYPE_CHECKING:
    from mhalearn.layer.base import Layer
    from mhalearn.layer.parametrisation import Parametrisation

# A singular value this far below the largest does not count for the rank.
_RANK = 1e-9
# Attention unknowns, all ranks allowed, from which on heads of known rank are better searched for
# by their factors.
_LARGE = 8_000


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
    bias: every head has a key-side vector v_i, and the layer an output bias c.
    causal: token r sees tokens 0..r only.
    attention: a kind of attention that this package does not have, as a class of `Parametrisation`;
        None for softmax heads.
    """

    d: int
    n_heads: int | None = None
    head_dim: int | None = None
    out_dim: int | None = None
    bias: bool = False
    causal: bool = False
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
    def ov_rank(self) -> int:
        """Rank of a W_i."""
        return min(self.qk_rank, self.outputs)

    @property
    def is_low_rank(self) -> bool:
        """Whether the rank of softmax heads is less than matrices of these sizes have."""
        return self.attention is None and self._has_low_rank

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
        said = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.attention is not None:
            said["attention"] = getattr(self.attention, "__qualname__", repr(self.attention))
        return said

    def parametrisation(self) -> Parametrisation:
        """How its layers are written as numbers: by factors where their rank is low."""
        from mhalearn.layer.dense import Dense
        from mhalearn.layer.factored import Factored

        if self.attention is not None:
            return self.attention(self)
        return Factored(self) if self.is_low_rank else Dense(self)

    def count(self) -> int:
        """Unknowns of a layer: the dimension of the set of layers, which no gauge enlarges."""
        if self.attention is not None:
            return self.parametrisation().count()
        return self.count_by_kind().total

    def count_by_kind(self) -> ParameterCount:
        """Matrices (q, d) and (d, e) of ranks h and h' are h (q + d - h) and h' (d + e - h')."""
        return self._count(self.outputs)

    def _count(self, outputs: int) -> ParameterCount:
        m, d, h, r = self.heads, self.d, self.qk_rank, self.ov_rank
        return ParameterCount(
            theta=m * h * (2 * d - h),
            key_vectors=m * h * self.bias,
            w=m * r * (d + outputs - r),
            out_bias=outputs * self.bias,
        )

    def _count_sum(self, outputs: int) -> int:
        """Unknowns that rows which see one token speak about: sum_i W_i, and c."""
        rank = min(self.d, outputs, self.heads * self.ov_rank)
        return rank * (self.d + outputs - rank) + outputs * self.bias

    @property
    def output_span(self) -> int:
        """Dimensions that the outputs of all heads span, the bias apart."""
        return min(self.outputs, self.heads * self.ov_rank)

    def attention_scalars(self, tokens_seen: ArrayLike) -> Float64:
        """Scalars of rows that see so many tokens which speak about attention.

        A row that sees t tokens has m (t - 1) free attention weights, and shows at most as many
        of them as its outputs have dimensions.
        """
        others = np.asarray(tokens_seen, np.float64) - 1
        return np.minimum(self.output_span, self.heads * others)

    def counting_limit(self, lengths: int | ArrayLike) -> float:
        """The number of examples below which no method can determine the layer: N_min.

        lengths: the number of tokens of an example, k, or the lengths of all examples where they
        differ.

        The largest of several counts of unknowns over scalars. All unknowns over the k e scalars of
        an example; those of attention over the scalars that speak about it; all that rows which see
        one token, x sum_i W_i + c, do not tell over the scalars of the others. And, because outputs
        lie in a space of few dimensions where heads are narrow, the unknowns left when that space
        is known over the scalars inside it.
        Trust: necessary for the Jacobian to be injective, and nearly sufficient for generic layers.
        """
        sizes, times = np.unique(np.atleast_1d(np.asarray(lengths)), return_counts=True)
        seen = [np.arange(1, t + 1) if self.causal else np.full(t, t) for t in sizes.tolist()]
        n, rows = int(times.sum()), int(times @ sizes)
        about_attention = float(times @ [self.attention_scalars(tokens).sum() for tokens in seen])
        if about_attention == 0:  # no row sees two tokens: attention is constant
            return math.inf
        # Whole numbers are divided once, so that a limit that is one comes out as one.
        if self.attention is not None:
            return n * self.count() / (rows * self.outputs)
        mixing = int(times @ [np.sum(tokens > 1) for tokens in seen])
        limits = [n * self.count_by_kind().attention / about_attention]
        for width in (self.outputs, self.output_span):
            unknowns = self._count(width).total
            limits.append(n * unknowns / (rows * width))
            limits.append(n * (unknowns - self._count_sum(width)) / (mixing * width))
        return max(limits)

    def contains(self, layer: Layer) -> bool:
        """Whether a layer belongs to this class: sizes, mask, biases, and ranks up to rounding."""
        from mhalearn.layer.layer import AttentionLayer

        sizes = (layer.d, layer.out_dim, layer.causal) == (self.d, self.outputs, self.causal)
        heads = self.n_heads is None or layer.n_heads == self.n_heads
        if self.attention is not None or not isinstance(layer, AttentionLayer):
            return sizes and heads and layer.architecture.attention == self.attention
        biases = self.bias or (layer.key_vector is None and layer.out_bias is None)
        return (
            sizes
            and heads
            and biases
            and _has_rank(layer.query_theta, self.qk_rank)
            and _has_rank(layer.w, self.ov_rank)
        )

    def describe_rank(self) -> str:
        """What is known of the rank, to follow 'all layers' in a sentence; empty if nothing is."""
        return f" of rank {self.head_dim}" if self.is_low_rank else ""


def _has_rank(matrices: Float64, rank: int) -> bool:
    """Whether all matrices have at most this rank, up to rounding."""
    if rank >= min(matrices.shape[1:]):
        return True
    values = np.linalg.svd(matrices, compute_uv=False)
    return bool(np.all(values[:, rank:] <= _RANK * values[:, :1]))
