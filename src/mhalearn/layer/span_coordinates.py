"""Layers in coordinates of the tokens' span: restricted to it, and lifted back.

With x = o + z S on the span, a layer is one of r features with biases,
    Theta_z = S Theta S^T,  v_z = S (v + Theta^T o),  W_z = S W,  c_z = c + sum_i o W_i,
since logits that are constant in the key cancel in the softmax. Back, with z = (x - o) P,
    Theta = P Theta_z P^T,  v = P v_z - Theta^T o,  W = P W_z,  c = c_z - sum_i o W_i.
Where o = 0 there are no biases in either. Where layers have no biases but the hull passes zero by,
1 = phi . x on it, and v and c go back into the matrices: Theta + phi v^T, W_i + phi c_i^T.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import overload

import numpy as np

from mhalearn._runtime.types import Float64
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.projected_layer import ProjectedLayer
from mhalearn.layer.span_projections import may_change_coordinates, move_projections
from mhalearn.layer.token_span import NEARLY_ISOTROPIC, TokenSpan

Heads = AttentionLayer | ProjectedLayer


@dataclass(frozen=True)
class SpanCoordinates:
    """Coordinates z (r features) of tokens x (d features) in their span, and layers in both.

    given, reduced: the class of layers in x and in z. origin (d,): o, the mean, or zero.
    directions (r, d): S; coordinates (d, r): P.
    constant (d,): phi, where biases in z are to be written without biases in x; None elsewhere.
    """

    span: TokenSpan
    given: Architecture
    reduced: Architecture
    origin: Float64
    directions: Float64
    coordinates: Float64
    constant: Float64 | None = None

    @property
    def leaves_open(self) -> bool:
        """Whether layers that differ in x are one in z: tokens do not span the features."""
        return not self.span.is_full

    def arrays(self) -> dict[str, Float64]:
        """What a run that is resumed must find as it was: a basis may come out otherwise."""
        return {name: getattr(self, name) for name in ("origin", "directions", "coordinates")}

    def recorded(self, arrays: Mapping[str, Float64]) -> SpanCoordinates:
        """The same span in a basis that `arrays` told."""
        origin, directions, coordinates = (
            arrays[name] for name in ("origin", "directions", "coordinates")
        )
        return replace(self, origin=origin, directions=directions, coordinates=coordinates)

    def tokens(self, x: Float64) -> Float64:
        return (x - self.origin) @ self.coordinates

    def inputs(self, z: Float64) -> Float64:
        """The inverse of `tokens`, on the span."""
        return self.origin + z @ self.directions

    def count_open(self, n_heads: int) -> int:
        """Numbers of a layer that no token of the span can show."""
        given, reduced = (a.with_heads(n_heads) for a in (self.given, self.reduced))
        seen = reduced.count()
        if self.constant is not None and _has_narrow_w(given):
            # c is a sum of what the heads' outputs can be, and no more.
            seen -= max(0, given.outputs - n_heads * given.ov_rank)
        return given.count() - seen

    @overload
    def restrict(self, layer: AttentionLayer) -> AttentionLayer: ...
    @overload
    def restrict(self, layer: Heads) -> Heads: ...
    def restrict(self, layer: Heads) -> Heads:
        """The layer of z that is this layer of x on the span. Cost: O(m d^2 r)."""
        if isinstance(layer, ProjectedLayer):
            return move_projections(layer, self.reduced, self.directions, self.origin)
        s, vector, bias = self.directions, layer.key_vector, layer.out_bias
        theta, w = s @ layer.theta @ s.T, s @ layer.w
        if self.reduced.bias:
            keyed = self.origin @ layer.theta
            vector = (keyed if vector is None else vector + keyed) @ s.T
            constant = np.sum(self.origin @ layer.w, axis=0)
            bias = constant if bias is None else bias + constant
        return AttentionLayer(
            theta, w, vector, bias, layer.causal, metadata=layer.metadata, seen=layer.seen
        )

    @overload
    def lift(self, layer: AttentionLayer) -> AttentionLayer: ...
    @overload
    def lift(self, layer: Heads) -> Heads: ...
    def lift(self, layer: Heads) -> Heads:
        """The layer of x that is this layer of z on the span, zero on what is not spanned.

        Heads of low rank keep it exactly: their factors are lifted. Cost: O(m d^2 r).
        """
        if isinstance(layer, ProjectedLayer):
            shift = -self.origin @ self.coordinates
            return move_projections(layer, self.given, self.coordinates, shift)
        m, r, p = layer.n_heads, layer.d, self.coordinates
        vector = np.zeros((m, r)) if layer.key_vector is None else layer.key_vector
        bias = np.zeros(layer.out_dim) if layer.out_bias is None else layer.out_bias
        left, right = _factors(
            np.concatenate([layer.theta, vector[:, None]], axis=1), self.reduced.qk_rank
        )
        keys = right @ p.T
        theta, vector = (p @ left[:, :r]) @ keys, (left[:, r:] @ keys)[:, 0]
        left, right = _factors(layer.w, self.reduced.ov_rank)
        w = (p @ left) @ right
        vector = vector - self.origin @ theta
        bias = bias - np.sum(self.origin @ w, axis=0)
        if self.constant is not None:
            shares = _share(bias, right if _has_narrow_w(self.given) else None, m)
            theta = theta + self.constant[:, None] * vector[:, None]
            w = w + self.constant[:, None] * shares[:, None]
        return AttentionLayer(
            theta,
            w,
            vector if self.given.bias else None,
            bias if self.given.bias else None,
            layer.causal,
            metadata=layer.metadata,
            seen=layer.seen,
        )


def choose_coordinates(
    span: TokenSpan, architecture: Architecture, *, whiten: bool = True
) -> SpanCoordinates | None:
    """The coordinates to learn layers of a class in; None where those of the user will do.

    Where tokens do not span the features, those of their span, whitened. Where they do, whitened
    ones too if the spread is uneven and `whiten`. Layers with biases are centred at the mean.
    None too where tokens are so few that nothing is known of what others would span.
    """
    if architecture.attention is not None or not 0 < span.rank < span.tokens - 1:
        return None
    if not (architecture.is_plain or may_change_coordinates(architecture)):
        return None
    if span.is_full:
        uneven = span.moment_condition
        if architecture.bias:
            uneven = max(uneven, span.covariance_condition)
        if not whiten or uneven <= NEARLY_ISOTROPIC:
            return None
    if not (architecture.bias or span.is_full or span.through_zero or architecture.is_plain):
        return None  # biases there would go back into projections, and not every one could
    if architecture.bias or not (span.is_full or span.through_zero):
        return centred_coordinates(span, architecture)
    return _linear_coordinates(span, architecture)


def centred_coordinates(span: TokenSpan, architecture: Architecture) -> SpanCoordinates:
    """Those in which tokens have mean 0 and covariance I; layers have biases there."""
    off_zero = not (architecture.bias or span.is_full or span.through_zero)
    return SpanCoordinates(
        span,
        architecture,
        _reduce(span, architecture, bias=True),
        span.mean,
        span.directions,
        span.coordinates,
        span.nearest / (span.nearest @ span.nearest) if off_zero else None,
    )


def _linear_coordinates(span: TokenSpan, architecture: Architecture) -> SpanCoordinates:
    """Those in which tokens have second moment I; zero stays zero, and no bias is needed."""
    return SpanCoordinates(
        span,
        architecture,
        _reduce(span, architecture, bias=False),
        np.zeros(span.d),
        span.moment_directions,
        span.moment_coordinates,
    )


def _reduce(span: TokenSpan, architecture: Architecture, *, bias: bool) -> Architecture:
    rank = architecture.head_dim
    if rank is not None and architecture.is_plain:
        rank = min(rank, span.rank)
    return replace(
        architecture,
        d=span.rank,
        head_dim=rank,
        out_dim=architecture.outputs,
        bias=bias,
    )


def _has_narrow_w(architecture: Architecture) -> bool:
    return architecture.ov_rank < min(architecture.d, architecture.outputs)


def _factors(matrices: Float64, rank: int) -> tuple[Float64, Float64]:
    """Factors (m, a, h), (m, h, b) of matrices of a rank; of full rank, one of them is trivial."""
    m, _, b = matrices.shape
    if rank >= min(matrices.shape[1:]):
        return matrices, np.broadcast_to(np.eye(b), (m, b, b))
    u, values, vt = np.linalg.svd(matrices, full_matrices=False)
    return u[:, :, :rank] * values[:, None, :rank], vt[:, :rank]


def _share(bias: Float64, rows: Float64 | None, m: int) -> Float64:
    """The least c_i (m, e) that sum to c: equal ones or, where each W_i may have no new row, of
    the row spaces (m, h, e) of the heads."""
    if rows is None:
        return np.tile(bias / m, (m, 1))
    stacked = rows.reshape(-1, rows.shape[2])
    found = np.linalg.lstsq(stacked.T, bias, rcond=None)[0]
    return np.einsum("mh,mhe->me", found.reshape(m, -1), rows)
