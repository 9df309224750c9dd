"""Which distribution inputs come from, and the coordinates in which the phases see their tokens.

The proof needs upper and lower tails of dense linear forms in the tokens, and not the cube. So no
distribution is refused: what is neither uniform +-1 nor standard Gaussian is whitened, and named
with the number that speaks against it.
"""

from dataclasses import dataclass

import numpy as np

from mhalearn._runtime.types import Float64
from mhalearn.data import Examples
from mhalearn.layer.layer import AttentionLayer

_EXAMPLES = 4096
# Share of the largest variance below which a direction of the tokens is not stretched.
_FLAT = 1e-9


@dataclass(frozen=True)
class Inputs:
    """kind: "boolean", "gaussian" or "other". against: the number that speaks against the first
    two. between_tokens: the largest canonical correlation of two tokens of an example."""

    kind: str
    against: str
    between_tokens: float


def recognise_inputs(examples: Examples) -> Inputs:
    """The kind of the inputs, from a first chunk, and the number that speaks against it.

    +-1 inputs are known by their values, Gaussian ones by their fourth moment, and both by mean 0
    and covariance I, over all tokens of an example; each within six standard errors.
    Trust: a test of moments; a distribution that shares them passes.
    """
    x, _, _ = examples.subset(slice(0, _EXAMPLES)).arrays()
    flat = x.reshape(len(x), -1).astype(np.float64)
    n = len(flat)
    boolean = bool(np.all(np.abs(flat) == 1.0))
    covariance = flat.T @ flat / n - np.eye(flat.shape[1])
    found = {
        "mean": np.abs(flat.mean(axis=0)).max() * np.sqrt(n),
        "covariance": np.abs(covariance).max() * np.sqrt(n / (1 if boolean else 2)),
    }
    if not boolean:
        fourth = (flat**4).reshape(-1, examples.d).mean(axis=0)
        found["fourth moment"] = np.abs(fourth - 3).max() * np.sqrt(n * examples.k / 96)
    named = "uniform +-1 inputs" if boolean else "a standard Gaussian"
    between = _between_tokens(x.astype(np.float64))
    for name, value in found.items():
        if value >= 6:
            return Inputs(
                "other", f"the {name} is {value:.0f} standard errors off that of {named}", between
            )
    return Inputs("boolean" if boolean else "gaussian", "", between)


def _between_tokens(x: Float64) -> float:
    """The largest mean correlation of one whitened feature over two neighbouring tokens."""
    if x.shape[1] < 2:
        return 0.0
    z = (x - x.mean(axis=(0, 1))) @ whiten_tokens(x)
    crossed = np.einsum("nkd,nke->de", z[:, 1:], z[:, :-1]) / (len(z) * (z.shape[1] - 1))
    return float(np.abs(np.linalg.eigvalsh((crossed + crossed.T) / 2)).max())


def whiten_tokens(x: Float64) -> Float64:
    """The symmetric matrix that gives tokens the covariance I; directions that do not occur stay
    as they are."""
    flat = x.reshape(-1, x.shape[2])
    values, basis = np.linalg.eigh(np.cov(flat.T).reshape(flat.shape[1], -1))
    stretch = np.where(values > _FLAT * values[-1], values, values[-1]) if values[-1] > 0 else 1.0
    return (basis / np.sqrt(stretch)) @ basis.T


def from_whitened(layer: AttentionLayer, matrix: Float64) -> AttentionLayer:
    """A layer of tokens x M as one of tokens x: x M Theta M^T y and x M W."""
    theta = np.einsum("ab,mbc,dc->mad", matrix, layer.theta, matrix)
    return layer.replace(theta=theta, w=np.einsum("ab,mbe->mae", matrix, layer.w))


def to_whitened(layer: AttentionLayer, matrix: Float64) -> AttentionLayer:
    """The inverse of `from_whitened`."""
    return from_whitened(layer, np.linalg.inv(matrix).astype(np.float64))
