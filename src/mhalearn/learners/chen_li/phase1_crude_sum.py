"""Phase 1: a crude estimate of the sum of the projection matrices.

The paper's: `correlate`, the correlation of all tokens with all labels, which is one gradient step
of a one-head student that starts at Theta = 0. Ours: the regression on the other tokens and its
scales, vertex certification and the choice by it (`vertex_sum.py`).
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mhalearn._runtime.devices import shard_locally, sum_over_processes
from mhalearn._runtime.programs import in_float64
from mhalearn._runtime.types import Array, Float, Float64
from mhalearn.data import Examples
from mhalearn.learners.chen_li.streaming import Watcher, walk
from mhalearn.learners.chen_li.vertex_sum import refine_by_vertices, score_by_vertices
from mhalearn.learners.options import Constants

_DEFAULTS = Constants()
# Share of the strongest direction's label energy below which a direction carries nothing.
_VISIBLE = 1e-6


@dataclass(frozen=True)
class SumEstimate:
    name: str
    estimate: Float64
    score: float  # mean log distance of its nearest rows; NaN where none was asked for


@dataclass(frozen=True)
class CrudeSum:
    """The chosen estimate, and all candidates with their scores."""

    estimate: Float64
    candidates: tuple[SumEstimate, ...]
    strength: float  # variance of x W over that of a label: 0 if the W_i cancel
    label_rank: int  # directions that carry labels: at most e, fewer where the W_i are low in rank

    @property
    def chosen(self) -> SumEstimate:
        return next(one for one in self.candidates if np.array_equal(one.estimate, self.estimate))

    def to_arrays(self) -> dict[str, Any]:
        """As a checkpoint and a file keep it."""
        names = "\n".join(candidate.name for candidate in self.candidates)
        return vars(self) | {
            "candidates": np.stack([candidate.estimate for candidate in self.candidates]),
            "scores": np.array([candidate.score for candidate in self.candidates]),
            "names": np.frombuffer(names.encode(), np.uint8),
        }

    @classmethod
    def from_arrays(cls, arrays: dict[str, Any]) -> "CrudeSum":
        names = np.asarray(arrays["names"]).tobytes().decode().split("\n")
        rows = zip(names, arrays["candidates"], arrays["scores"].tolist(), strict=True)
        candidates = tuple(SumEstimate(*row) for row in rows)
        strength, rank = float(arrays["strength"]), int(arrays["label_rank"])
        return cls(arrays["estimate"], candidates, strength, rank)


@dataclass(frozen=True)
class Moments:
    """Sums over all rows of 1, the other tokens, the own token and the label: second moments of
    one long vector, in this order; and the correlation of all tokens with all labels."""

    second: Float64  # (1 + 2 d + e, 1 + 2 d + e)
    correlation: Float64  # (d, e), of sums over an example
    first: Float64  # (d + e,), sums over tokens and labels
    k: int
    d: int

    @property
    def rows(self) -> float:
        return float(self.second[0, 0])

    @property
    def token_covariance(self) -> Float64:
        own = slice(1 + self.d, 1 + 2 * self.d)
        mean = self.second[0, own] / self.rows
        return self.second[own, own] / self.rows - np.outer(mean, mean)


@jax.jit
def _sums(
    x: Array, y: Float[Array, "b k e"], real: Float[Array, " b"]
) -> tuple[Float[Array, "f f"], Float[Array, "d e"]]:
    tokens = x.astype(y.dtype)
    summed = tokens.sum(axis=1)
    ones = jnp.broadcast_to(real[:, None, None], (*y.shape[:2], 1))
    long = jnp.concatenate([ones, summed[:, None] - tokens, tokens, y], axis=-1)
    long = long.reshape(-1, long.shape[2])
    return long.T @ long, summed.T @ y.sum(axis=1)


@in_float64
def take_moments(examples: Examples, *, watch: Watcher | None = None) -> Moments:
    """All that phase 1 needs, in one pass. Cost: O(n k (d + e)^2) time, O((d + e)^2) memory."""
    d, e = examples.d, examples.out_dim
    second, correlation = np.zeros((1 + 2 * d + e, 1 + 2 * d + e)), np.zeros((d, e))
    for part in walk(examples, watch=watch):
        real = (np.arange(len(part.x)) < part.real).astype(np.float64)
        parts = _sums(shard_locally(part.x), shard_locally(part.y), shard_locally(real))
        second += np.asarray(parts[0])
        correlation += np.asarray(parts[1])
    second, correlation = sum_over_processes(second), sum_over_processes(correlation)
    first = np.concatenate([second[0, 1 + d : 1 + 2 * d], second[0, 1 + 2 * d :]])
    return Moments(second, correlation, first, examples.k, d)


def correlate(moments: Moments) -> Float64:
    """(1/k) E[X^T J Y], J all ones.

    Source: phase 1 of Chen & Li.
    Trust: for uniform +-1 inputs its error is what the paper's conditions keep small (theirs is the
    proof); measured, it is a bias that falls with d. For standard Gaussian ones it is
    sum_i (I + Theta_i E C_i) W_i exactly. Elsewhere tokens are whitened and centred first
    (`correlate_centred`).
    """
    return moments.correlation / moments.rows


def correlate_centred(moments: Moments) -> Float64:
    """The same correlation of centred tokens and labels, over the tokens' covariance."""
    d, examples = moments.d, moments.rows / moments.k
    means = moments.first / examples  # of an example's summed tokens, and of its summed labels
    centred = moments.correlation - examples * np.outer(means[:d], means[d:])
    solved = np.linalg.lstsq(moments.token_covariance, centred / moments.rows, rcond=1e-9)[0]
    return solved.astype(np.float64)


def regress_on_others(moments: Moments) -> Float64:
    """k times the coefficient of the other tokens' sum, when a label is regressed on that sum, on
    its own token and on 1: biased by the weight on the query token itself.

    Source: ours (math: the cross terms of the softmax cancel but for the query token's own).
    """
    features = slice(0, 1 + 2 * moments.d)
    gram, right = moments.second[features, features], moments.second[features, 1 + 2 * moments.d :]
    solved = np.linalg.lstsq(gram, right, rcond=1e-12)[0][1 : 1 + moments.d]
    return (moments.k * solved).astype(np.float64)


def beyond_linear(moments: Moments) -> float:
    """The share of the labels' variance that no linear map of an example's tokens explains, as far
    as it treats the other tokens alike: next to nothing where attention is flat."""
    features, labels = slice(0, 1 + 2 * moments.d), slice(1 + 2 * moments.d, None)
    gram, right = moments.second[features, features], moments.second[features, labels]
    explained = float(np.sum(right * np.linalg.lstsq(gram, right, rcond=1e-12)[0]))
    mean = float(np.sum(moments.second[0, labels] ** 2)) / moments.rows
    total = float(np.trace(moments.second[labels, labels]))
    return max(total - explained, 0.0) / max(total - mean, 1e-300)


def paper_sum(examples: Examples, *, watch: Watcher | None = None) -> CrudeSum:
    """The paper's estimator alone."""
    moments = take_moments(examples, watch=watch)
    estimate = SumEstimate("all tokens", correlate(moments), float("nan"))
    return _summary(moments, estimate, (estimate,))


def estimate_projection_sum(
    examples: Examples, constants: Constants = _DEFAULTS, *, watch: Watcher | None = None
) -> CrudeSum:
    """Estimate the sum of the projection matrices from input-label correlations.

    Candidates: the paper's correlation; the regression on the other tokens, times a scale each; and
    the best of these refined by vertex certification. The one whose nearest rows are nearest is
    chosen, so its scale is estimated and not given.
    Source: phase 1 of Chen & Li; the choice is ours. Cost: one pass, O(n k (d + e)^2), and screens
    of a subset. Trust: `correlate` is the paper's, the others and the choice are heuristics.
    """
    moments = take_moments(examples, watch=watch)
    regression = regress_on_others(moments)
    estimates = {"all tokens": correlate_centred(moments)}
    estimates |= {f"{scale:g} x other tokens": scale * regression for scale in constants.scales}
    candidates = [
        _scored(examples, name, estimate, constants, watch) for name, estimate in estimates.items()
    ]
    best = min(candidates, key=lambda candidate: candidate.score)
    if beyond_linear(moments) <= constants.least_beyond_linear:
        # Attention is flat: no row is at a vertex, near ones fit a multiple of the sum, and the
        # regression is exact.
        best = SumEstimate("other tokens", regression, float("nan"))
        candidates.append(best)
    elif constants.vertex_rounds:
        refined = refine_by_vertices(examples, best.estimate, constants, watch=watch).estimate
        candidates.append(_scored(examples, "vertex rows", refined, constants, watch))
        best = min(candidates, key=lambda candidate: candidate.score)
    return _summary(moments, best, tuple(candidates))


def _summary(moments: Moments, best: SumEstimate, candidates: tuple[SumEstimate, ...]) -> CrudeSum:
    labels = slice(1 + 2 * moments.d, None)
    mean = moments.second[0, labels] / moments.rows
    spread = moments.second[labels, labels] / moments.rows - np.outer(mean, mean)
    energies = np.linalg.eigvalsh(spread)
    imaged = float(np.sum(best.estimate * (moments.token_covariance @ best.estimate)))
    strength = imaged / max(float(energies.sum()), 1e-300)
    rank = int(np.sum(energies > _VISIBLE * energies[-1]))
    return CrudeSum(best.estimate, candidates, strength, rank)


def _scored(
    examples: Examples, name: str, estimate: Float64, constants: Constants, watch: Watcher | None
) -> SumEstimate:
    return SumEstimate(
        name, estimate, score_by_vertices(examples, estimate, constants, watch=watch)
    )
