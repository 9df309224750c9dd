"""The solver's units: tokens and labels near unit size, by powers of two, which round nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mhalearn._runtime.types import Float64
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.layer import AttentionLayer


@dataclass(frozen=True)
class Units:
    """Scales of tokens and labels: a scaled array is the user's divided by them."""

    x_scale: float = 1.0
    y_scale: float = 1.0

    def layer(self, theta: Float64, w: Float64, architecture: Architecture) -> AttentionLayer:
        """Solver units (m, q, d), (p, e) -> the layer in the user's units."""
        theta, w = np.asarray(theta), np.asarray(w)
        m, d, bias = theta.shape[0], architecture.d, architecture.bias
        return AttentionLayer(
            theta[:, :d] / self.x_scale**2,
            w[: m * d].reshape(m, d, -1) * (self.y_scale / self.x_scale),
            theta[:, d] / self.x_scale if bias else None,
            w[m * d] * self.y_scale if bias else None,
            architecture.causal,
        )

    def theta(self, layer: AttentionLayer, bias: bool) -> Float64:
        """The attention parameters (m, q, d) of a layer, in solver units."""
        theta = layer.theta * self.x_scale**2
        if not bias:
            return theta
        vector = (
            np.zeros((layer.n_heads, layer.d)) if layer.key_vector is None else layer.key_vector
        )
        return np.concatenate([theta, vector[:, None] * self.x_scale], axis=1)

    def w(self, layer: AttentionLayer, bias: bool) -> Float64:
        """The stacked projections (p, e) of a layer, in solver units."""
        w = layer.w.reshape(-1, layer.out_dim) * (self.x_scale / self.y_scale)
        if not bias:
            return w
        out_bias = np.zeros(layer.out_dim) if layer.out_bias is None else layer.out_bias
        return np.vstack([w, out_bias / self.y_scale])
