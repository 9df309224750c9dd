"""The fitting problem in the solver's own units: scaled, padded, cut into chunks, in float64."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from mhalearn.attention import Chunk, in_float64, on_device
from mhalearn.examples import Examples
from mhalearn.layer import AttentionLayer, make_chunk

# Doubles a chunk's intermediates may hold, where the normal matrix is formed: 128 MiB on a CPU.
WORKSPACE = 2**24


@dataclass(frozen=True)
class Problem:
    """Examples of one shape, with tokens and labels near unit size.

    The scales are powers of two, so changing units rounds nothing.
    """

    data: Chunk  # with a leading chunk axis
    k: int
    d: int
    out_dim: int
    bias: bool
    causal: bool
    x_scale: float
    y_scale: float
    rows: int  # rows that count
    energy: float  # sum of squared scaled labels over those rows

    @property
    def query_dim(self) -> int:
        return self.d + self.bias

    def layer(self, theta: NDArray[np.float64], w: NDArray[np.float64]) -> AttentionLayer:
        """Solver units (m, q, d), (p, e) -> the layer in the user's units."""
        theta, w = np.asarray(theta), np.asarray(w)
        m, d = theta.shape[0], self.d
        return AttentionLayer(
            theta[:, :d] / self.x_scale**2,
            w[: m * d].reshape(m, d, -1) * (self.y_scale / self.x_scale),
            theta[:, d] / self.x_scale if self.bias else None,
            w[m * d] * self.y_scale if self.bias else None,
            self.causal,
        )

    def zero_layer(self, n_heads: int) -> AttentionLayer:
        width = n_heads * self.d + self.bias
        return self.layer(
            np.zeros((n_heads, self.query_dim, self.d)), np.zeros((width, self.out_dim))
        )

    def theta(self, layer: AttentionLayer) -> NDArray[np.float64]:
        """The attention parameters (m, q, d) of a layer, in solver units."""
        theta = layer.theta * self.x_scale**2
        if not self.bias:
            return theta
        vector = np.zeros((layer.n_heads, self.d)) if layer.key_vector is None else layer.key_vector
        return np.concatenate([theta, vector[:, None] * self.x_scale], axis=1)

    def w(self, layer: AttentionLayer) -> NDArray[np.float64]:
        """The stacked projections (p, e) of a layer, in solver units."""
        w = layer.w.reshape(-1, self.out_dim) * (self.x_scale / self.y_scale)
        if not self.bias:
            return w
        bias = np.zeros(self.out_dim) if layer.out_bias is None else layer.out_bias
        return np.vstack([w, bias / self.y_scale])


@in_float64
def make_problem(
    examples: Examples, n_heads: int, *, bias: bool, causal: bool, narrow: bool = False
) -> Problem:
    """Bring examples into solver units. Memory: one float64 copy of the examples, padded.

    The number of examples is padded to three leading bits, so that fits of nearly the same size
    share one compiled program. narrow: for numerics in the factors of heads, which hold less a row.
    """
    x, y, lengths = examples.arrays()
    n, k, d = x.shape
    inside = np.arange(k) < lengths[:, None]
    x_scale = _power_of_two_near(_rms(x, inside))
    y_scale = _power_of_two_near(_rms(y, inside))
    query_dim, width, out_dim = d + bias, n_heads * d + bias, y.shape[2]
    # Of a row; the products C_i W_i are there three times, as a sum, centred and transposed.
    held = (n_heads * d) ** 2 + 3 * n_heads * d * out_dim + query_dim * (width + query_dim)
    if narrow:
        held = n_heads * (k + 2 * d + out_dim)
    padded = _few_bits_above(n)
    chunks = -(-padded * k * held // on_device(WORKSPACE))
    size = -(-padded // chunks)
    parts = [
        make_chunk(
            x[start : start + size] / x_scale,
            lengths[start : start + size],
            key_vector=bias,
            out_bias=bias,
            causal=causal,
            labels=y[start : start + size] / y_scale,
            size=size,
        )
        for start in range(0, size * chunks, size)
    ]
    data = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
    return Problem(
        data=data,
        k=k,
        d=d,
        out_dim=out_dim,
        bias=bias,
        causal=causal,
        x_scale=x_scale,
        y_scale=y_scale,
        rows=int(inside.sum()),
        energy=float(jnp.sum((data.labels * data.weight[..., None]) ** 2)),
    )


def _rms(array: NDArray[Any], inside: NDArray[np.bool_]) -> float:
    squares = np.einsum("nkd,nkd->nk", array, array, dtype=np.float64, casting="unsafe")
    return float(np.sqrt(np.mean(squares[inside]) / array.shape[2]))


def _power_of_two_near(value: float) -> float:
    return float(2.0 ** np.round(np.log2(value))) if value > 0 else 1.0


def _few_bits_above(n: int) -> int:
    step = 1 << max(0, n.bit_length() - 3)
    return -(-n // step) * step
