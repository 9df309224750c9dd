"""The paper's assumptions as numbers, from a known layer.

Chen & Li ask, with constants hidden in O-notation, for incoherent heads, effective rank, dense
Theta, a well-conditioned sum of projections, and few heads and tokens. The thresholds here are
ours: random Gaussian layers of d >= 8 pass, the families of `hardness` do not. Trust: a
report of how far a layer is from the theorem's assumptions, not a proof that they hold.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from mhalearn._runtime.programs import in_float64
from mhalearn._runtime.threads import one_lapack_thread
from mhalearn._runtime.types import Float64
from mhalearn.data.inputs import sample_inputs
from mhalearn.layer.attention import attend
from mhalearn.layer.batches import make_chunk
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.projected_layer import ProjectedLayer, by_matrices

# Rows whose patterns are looked at. Of layers so large that this would take more multiplications,
# as many as take no more; but about so many that one of them is the least share asked for.
_ROWS, _ROWS_AT_ONCE = 100_000, 8192
_WORK = 1e10
_LEAST_SHARE = 1e-4


@dataclass(frozen=True)
class Condition:
    """One assumption: `value` must be at most (or at least) `threshold`."""

    name: str
    value: float
    threshold: float
    at_most: bool
    explanation: str

    @property
    def ok(self) -> bool:
        return self.value <= self.threshold if self.at_most else self.value >= self.threshold


@dataclass(frozen=True)
class NondegeneracyReport:
    items: tuple[Condition, ...]

    @property
    def ok(self) -> bool:
        return all(item.ok for item in self.items)


def check_nondegeneracy(
    layer: AttentionLayer | ProjectedLayer, *, k: int, seed: int = 0
) -> NondegeneracyReport:
    """Every non-degeneracy condition of the paper, as a number with a threshold.

    The frequency of matched patterns is measured from the heads' own attention on random +-1
    inputs of k tokens. Cost: about 100,000 rows of attention; 10,000 of layers as wide as d = 384.
    """
    if k < 2:
        raise ValueError(f"k={k}: attention needs at least two tokens")
    with one_lapack_thread():
        return NondegeneracyReport(_measure(by_matrices(layer), k, seed))


def _measure(layer: AttentionLayer, k: int, seed: int) -> tuple[Condition, ...]:
    w_sum = layer.w.sum(axis=0)
    spectrum = np.linalg.svd(w_sum, compute_uv=False)
    together = float(np.sqrt(np.sum(layer.w**2)))
    crowd = layer.n_heads * (k - 1) / layer.out_dim
    return (
        Condition(
            "coherence of Theta",
            _coherence(layer.theta),
            0.9,
            True,
            "largest |cosine| between two attention matrices",
        ),
        Condition(
            "coherence of W",
            _coherence(layer.w),
            0.9,
            True,
            "largest |cosine| between two projection matrices",
        ),
        Condition(
            "effective rank of Theta",
            _least_effective_rank(layer.theta),
            2.0,
            False,
            "smallest squared Frobenius over squared operator norm of a head's Theta",
        ),
        Condition(
            "effective rank of W",
            _least_effective_rank(layer.w),
            min(2.0, 0.999 * layer.out_dim),
            False,
            "smallest squared Frobenius over squared operator norm of a head's W",
        ),
        Condition(
            "density of Theta",
            _least_density(layer.theta),
            2.5,
            False,
            "fewest effective entries (squared l1 over squared l2 norm) in a row or column",
        ),
        Condition(
            "size of the sum of W",
            float(np.linalg.norm(w_sum)) / together if together > 0 else 0.0,
            0.1,
            False,
            "norm of the sum of projections over the norm of all of them",
        ),
        Condition(
            "conditioning of the sum of W",
            float(spectrum[-1] / spectrum[0]) if spectrum[0] > 0 else 0.0,
            1e-3,
            False,
            "smallest over largest singular value of the sum of projections",
        ),
        Condition(
            "heads and tokens against width",
            crowd,
            1.0,
            True,
            "m (k - 1) / e: above one, certified rows have false positives",
        ),
        Condition(
            "matched sparse patterns",
            _matched_frequency(layer, k, seed),
            _LEAST_SHARE,
            False,
            "share of rows where all heads put the same weight on the same two tokens",
        ),
    )


def _coherence(matrices: Float64) -> float:
    flat = matrices.reshape(len(matrices), -1)
    norms = np.linalg.norm(flat, axis=1)
    if len(flat) == 1:
        return 0.0
    if norms.min() == 0:  # a vanishing head is as degenerate as a repeated one
        return 1.0
    cosines = np.abs((flat / norms[:, None]) @ (flat / norms[:, None]).T)
    return float(np.max(cosines - np.eye(len(flat))))


def _least_effective_rank(matrices: Float64) -> float:
    operator = np.linalg.norm(matrices, ord=2, axis=(1, 2))
    if operator.min() == 0:
        return 0.0
    return float(np.min(np.sum(matrices**2, axis=(1, 2)) / operator**2))


def _least_density(matrices: Float64) -> float:
    def entries(axis: int) -> float:
        l1, l2 = np.abs(matrices).sum(axis=axis), np.square(matrices).sum(axis=axis)
        return float(np.min(np.where(l2 > 0, l1**2 / np.where(l2 > 0, l2, 1.0), 0.0)))

    return min(entries(1), entries(2))


def _count_rows(layer: AttentionLayer, k: int) -> int:
    """Rows to look at: fewer where each of them costs much."""
    of_a_row = layer.n_heads * layer.d * (layer.d + k)
    return min(_ROWS, max(round(1 / _LEAST_SHARE), round(_WORK / of_a_row)))


@in_float64
def _matched_frequency(layer: AttentionLayer, k: int, seed: int) -> float:
    """Share of rows with two tokens carrying 90 % of every head's attention, the larger at most
    90 %, and every head within total variation 0.05 of the mean pattern."""
    n = max(1, _count_rows(layer, k) // k)
    size = max(1, _ROWS_AT_ONCE // k)
    tokens = sample_inputs("boolean", n, k, layer.d, seed=seed)
    theta = jnp.asarray(layer.query_theta)
    matched = rows = 0
    for start in range(0, n - n % size if n > size else n, size):
        part = tokens[start : start + size]
        chunk = make_chunk(
            part,
            np.full(len(part), k),
            key_vector=layer.key_vector is not None,
            out_bias=False,
            causal=layer.causal,
        )
        p = np.asarray(attend(theta, chunk).p)
        centre = p.mean(axis=2, keepdims=True)
        apart = np.abs(p - centre).sum(axis=-1).max(axis=2) / 2
        top = -np.partition(-p, 1, axis=-1)[..., :2]
        sparse = (top.sum(axis=-1).min(axis=2) >= 0.9) & (top.max(axis=(2, 3)) <= 0.9)
        matched += int(np.sum((apart <= 0.05) & sparse))
        rows += apart.size
    return matched / rows
