"""Heads as whole matrices: Theta (m, q, d) and the stacked W (p, e), of which W is eliminated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from mhalearn._runtime.programs import in_float64
from mhalearn._runtime.types import Array, Float
from mhalearn.layer import attention
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.attention import LinearFit, Tangent
from mhalearn.layer.base import Layer
from mhalearn.layer.batches import Chunk
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.parametrisation import Parametrisation
from mhalearn.layer.units import Units


class DenseHeads(NamedTuple):
    """All heads of a layer; a leading axis makes it several starts."""

    theta: Float[Array, "*s m q d"]
    w: Float[Array, "*s p e"]


class DenseTangent(NamedTuple):
    """What products at one point share."""

    heads: Tangent
    design: Float[Array, "*c b k p"]


@dataclass(frozen=True)
class Dense(Parametrisation):
    """Theta of any rank, or retracted to the architecture's; W of any rank."""

    architecture: Architecture
    scales = True

    @in_float64
    def init(self, rng: np.random.Generator) -> DenseHeads:
        """Theta of norm one, so that no pattern is saturated; W as for outputs of size one."""
        a = self.architecture
        theta = rng.normal(size=(a.heads, a.query_dim, a.d))
        theta /= np.linalg.norm(theta, axis=(1, 2), keepdims=True)
        w = rng.normal(size=(a.heads * a.d + a.bias, a.outputs)) / math.sqrt(a.heads * a.d)
        return DenseHeads(jnp.asarray(theta), jnp.asarray(w))

    def forward(self, params: DenseHeads, chunk: Chunk) -> Float[Array, "b k e"]:
        return attention.forward(params.theta, params.w, chunk)

    outputs = forward  # padding rows have a weight of zero in the design matrix

    def linearise(self, params: DenseHeads, chunk: Chunk) -> DenseTangent:
        m, _, d = params.theta.shape
        pattern = attention.attend(params.theta, chunk)
        heads = attention.stacked_heads(params.w, m, d)
        at = attention.tangent(pattern.p, heads, chunk)
        return DenseTangent(at, attention.design_matrix(pattern, chunk))

    def jvp(
        self, params: DenseHeads, at: DenseTangent, chunk: Chunk, step: DenseHeads
    ) -> Float[Array, "b k e"]:
        return attention.jvp(at.heads, chunk, step.theta) + at.design @ step.w

    def vjp(
        self, params: DenseHeads, at: DenseTangent, chunk: Chunk, change: Float[Array, "b k e"]
    ) -> DenseHeads:
        of_w = jnp.einsum("brp,bre->pe", at.design, change)
        return DenseHeads(attention.vjp(at.heads, chunk, change), of_w)

    def eliminate(self, params: DenseHeads, data: Chunk, ridge: Float[Array, ""]) -> LinearFit:
        """The best W for given attention matrices."""
        return attention.fit_projections(params.theta, data, ridge)

    def retract(self, params: DenseHeads) -> DenseHeads:
        """The nearest Theta of the architecture's rank."""
        rank = self.architecture.head_dim
        if rank is None:
            return params
        return params._replace(theta=truncate(params.theta, rank))

    def term_sizes(self, params: DenseHeads, chunk: Chunk) -> Float[Array, "b k e"]:
        m, _, d = params.theta.shape
        p = attention.attend(params.theta, chunk).p
        at = attention.tangent(p, attention.stacked_heads(params.w, m, d), chunk)
        sizes = jnp.einsum("brmj,bmje->bre", at.p, jnp.abs(at.values))
        constant = jnp.abs(chunk.constant * chunk.weight[..., None])
        return sizes + constant @ jnp.abs(params.w[m * d :])

    def to_layer(self, params: DenseHeads, units: Units) -> AttentionLayer:
        return units.layer(np.asarray(params.theta), np.asarray(params.w), self.architecture)

    @in_float64
    def from_layer(self, layer: Layer, units: Units) -> DenseHeads:
        assert isinstance(layer, AttentionLayer)
        bias = self.architecture.bias
        # Arrays of the host: to place each on a device would compile a program for its shape.
        return DenseHeads(units.theta(layer, bias), units.w(layer, bias))  # type: ignore[arg-type]

    def size(self) -> int:
        a = self.architecture
        return a.heads * a.query_dim * a.d + (a.heads * a.d + a.bias) * a.outputs

    def count(self) -> int:
        return self.architecture.with_any_rank().count()


def truncate(theta: Float[Array, "*s m q d"], rank: int) -> Float[Array, "*s m q d"]:
    """The nearest matrices of a rank."""
    u, s, vt = jnp.linalg.svd(theta, full_matrices=False)
    return (u[..., :, :rank] * s[..., None, :rank]) @ vt[..., :rank, :]
