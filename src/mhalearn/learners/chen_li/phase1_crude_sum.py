"""Phase 1: a crude estimate of the sum of the projection matrices."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mhalearn._runtime.devices import shard_locally, sum_over_processes
from mhalearn._runtime.programs import in_float64
from mhalearn._runtime.types import Array, Float, Float64
from mhalearn.data import Examples
from mhalearn.learners.chen_li.phase2_certification import screen_pairs
from mhalearn.learners.chen_li.streaming import Watcher, walk

# Examples on which candidates are compared, and the scales tried for the regression estimate.
_COMPARED = 100_000
_SCALES = (0.8, 0.9, 1.0, 1.1, 1.2)
_NAMES = ("all tokens", *(f"{scale:g} x other tokens" for scale in _SCALES))
# Share of the strongest direction's label energy below which a direction carries nothing.
_VISIBLE = 1e-6


@dataclass(frozen=True)
class SumEstimate:
    name: str
    estimate: Float64
    score: float  # mean log certification score of its best rows


@dataclass(frozen=True)
class CrudeSum:
    """The chosen estimate, and all candidates with their scores."""

    estimate: Float64
    candidates: tuple[SumEstimate, ...]
    strength: float  # squared norm of the estimate over the mean squared label: 0 if W_i cancel
    label_rank: int  # directions that carry labels: at most e, fewer where the W_i are low in rank

    @property
    def chosen(self) -> SumEstimate:
        return min(self.candidates, key=lambda candidate: candidate.score)

    def to_arrays(self) -> dict[str, Any]:
        """As a checkpoint keeps it; names are told by their order."""
        return vars(self) | {
            "candidates": np.stack([candidate.estimate for candidate in self.candidates]),
            "scores": np.array([candidate.score for candidate in self.candidates]),
        }

    @classmethod
    def from_arrays(cls, arrays: dict[str, Any]) -> "CrudeSum":
        rows = zip(_NAMES, arrays["candidates"], arrays["scores"].tolist(), strict=True)
        candidates = tuple(SumEstimate(*row) for row in rows)
        return cls(arrays["estimate"], candidates, arrays["strength"], arrays["label_rank"])


@jax.jit
def _moments(
    x: Array, y: Float[Array, "b k e"]
) -> tuple[Float[Array, "d e"], Float[Array, "f f"], Float[Array, "f e"]]:
    tokens = x.astype(y.dtype)
    summed = tokens.sum(axis=1)
    others = summed[:, None] - tokens
    features = jnp.concatenate([others, tokens], axis=-1).reshape(-1, 2 * tokens.shape[2])
    labels = y.reshape(-1, y.shape[2])
    return summed.T @ y.sum(axis=1), features.T @ features, features.T @ labels


@in_float64
def estimate_projection_sum(examples: Examples, *, watch: Watcher | None = None) -> CrudeSum:
    """Estimate the sum of the projection matrices from input-label correlations.

    Candidates: the correlation of all tokens with all labels, and k times the coefficient of the
    other tokens' sum when a label is regressed on that sum and its own token, times a scale. The
    one whose best rows certify best is chosen, so its scale is estimated and not given.
    Source: phase 1 of Chen & Li. Cost: one pass, O(n k d (d + e)), and a screen of a subset.
    Trust: for uniform +-1 inputs the correlation of all tokens is proved to be close when Theta is
    dense and incoherent and heads and tokens are few against d; the regression, biased by the
    weight on the query token itself, and the choice are heuristics.
    """
    n, k, d = examples.n, examples.k, examples.d
    correlation = np.zeros((d, examples.out_dim))
    gram, right = np.zeros((2 * d, 2 * d)), np.zeros((2 * d, examples.out_dim))
    spread = np.zeros((examples.out_dim, examples.out_dim))
    for part in walk(examples, watch=watch):
        parts = _moments(shard_locally(part.x), shard_locally(part.y))
        correlation += np.asarray(parts[0])
        gram += np.asarray(parts[1])
        right += np.asarray(parts[2])
        labels = part.y.reshape(-1, examples.out_dim)
        spread += labels.T @ labels
    correlation, gram, right, spread = map(sum_over_processes, (correlation, gram, right, spread))
    power = np.trace(gram[d:, d:]) / (n * k * d)  # mean squared entry of a token
    correlation /= n * k * max(power, 1e-300)
    regression = k * np.linalg.lstsq(gram, right, rcond=None)[0][:d].astype(np.float64)
    estimates = [correlation, *(scale * regression for scale in _SCALES)]
    candidates = tuple(
        _scored(examples, name, estimate, watch)
        for name, estimate in zip(_NAMES, estimates, strict=True)
    )
    best = min(candidates, key=lambda candidate: candidate.score)
    energies = np.linalg.eigvalsh(spread)
    strength = float(np.sum(best.estimate**2)) * power * n * k / max(energies.sum(), 1e-300)
    label_rank = int(np.sum(energies > _VISIBLE * energies[-1]))
    return CrudeSum(best.estimate, candidates, strength, label_rank)


def _scored(examples: Examples, name: str, estimate: Float64, watch: Watcher | None) -> SumEstimate:
    rows = screen_pairs(examples, estimate, examples.d**2, most=_COMPARED, watch=watch)
    score = float(np.mean(np.log(np.maximum(rows.score, 1e-12)))) if len(rows) else np.inf
    return SumEstimate(name, estimate, score)
