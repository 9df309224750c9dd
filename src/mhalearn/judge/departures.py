"""Ways in which labels may depart from a layer, and how much of what it leaves each explains.

A departure is a set of directions in which outputs would move if attention were a little different:
if logits were capped, if they depended on distances, if tokens were passed on besides. What a fit
leaves is regressed on them, beyond what a change of the layer's own parameters would explain: the
score test of Rao, or Lagrange multiplier test. The share of the residual that they explain is
compared with what as many directions explain of independent noise, by the F test.

Trust: exact for Gaussian noise of one size and a layer near the best fit, where the directions off
the tangent space were computed. For noise of other kinds, and for what a search has missed, a
second test must agree, a sign test that lets every example have errors of its own size. What is
found says that labels depend on the inputs so; it does not say that they depend on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom
from scipy.stats import f as f_distribution

from mhalearn._runtime.seeds import Stream, generator
from mhalearn._runtime.types import Float64
from mhalearn.judge.fitted_attention import FittedAttention
from mhalearn.judge.tangent_space import TangentSpace, flatten, measure_tangent_space

# The probability of so large a share under noise, and of so many examples that agree on it.
_UNLIKELY, _UNLIKELY_TOO = 1e-9, 1e-6
_FOLDS = 4
# Fewer examples than this cannot agree on anything.
_FEW_EXAMPLES = 3.0
# Random combinations of outputs in which constants are looked for.
_CONSTANTS = 8
# Scalars for each unknown and direction.
_SCALARS_EACH = 3
_MOST_DIRECTIONS = 300
_MOST_NUMBERS = 2e7
# Directions that stick out of the span of others by less do not count.
_NEW = 1e-3

Directions = Iterator[Float64]


@dataclass(frozen=True)
class Alternative:
    """What labels may depend on. `few` and `many` make directions (q, n, k, e) of what a fitted
    layer does: a scalar or two a head, and a whole Theta or W a head, where there are enough
    examples for that."""

    name: str
    suggests: str
    few: Callable[[FittedAttention], Directions]
    many: Callable[[FittedAttention], Directions] | None = None
    positional: bool = False  # no layer without positions does this, however many heads it has


class Departure(NamedTuple):
    """An alternative that explains more than chance would of what is left."""

    alternative: Alternative
    share: float  # explained in examples by coefficients from the others
    spread: float = 1.0  # share of the examples that have most of what is left


class Departures(NamedTuple):
    """What was found, the largest share first, and what would not have been."""

    found: tuple[Departure, ...]
    undetected: float  # share of the residual's square that noise may have; a departure of less


def find_departures(
    fitted: FittedAttention,
    tangent: TangentSpace | None = None,
    weights: Float64 | None = None,
) -> Departures:
    """Which alternatives explain what the layer leaves, if any.

    weights (n, k): one over the expected size of each row's error, where sizes are known to differ.
    tangent: of the layer, without weights, where it is known.
    Cost: that of a tangent space, O(N p^2) for N scalars and p unknowns; of larger layers a few
    directions are tried without it.
    """
    scale = np.ones(fitted.inside.shape) if weights is None else weights
    scale = np.where(fitted.inside, scale, 0.0)[..., None]
    if tangent is None or weights is not None:
        tangent = measure_tangent_space(fitted, weights)
    left = tangent.project((fitted.residual * scale).reshape(1, -1))[0]
    scalars = fitted.n_scalars - tangent.rank
    effective = _effective_examples(left, len(fitted.x))
    if effective < _FEW_EXAMPLES:
        return Departures((), 1.0)
    found = []
    undetected = 0.0
    for alternative in ALTERNATIVES:
        directions = _directions(alternative, fitted, tangent)
        basis = _new_directions(directions, scale, tangent)
        if basis is None or scalars <= 2 * len(basis):
            continue
        explained, total = float(np.sum((basis @ left) ** 2)), float(left @ left)
        share = explained / total if total > 0 else 0.0
        by_chance = _share_by_chance(len(basis), scalars - len(basis))
        undetected = max(undetected, by_chance)
        if share > by_chance and _holds_for_examples(basis, left, len(fitted.x)):
            share = _share_of_others(basis, left, len(fitted.x))
            found.append(Departure(alternative, share, effective / len(fitted.x)))
    found = sorted((one for one in found if one.share > 0), key=lambda one: -one.share)
    return Departures(tuple(found), min(1.0, undetected))


def _directions(
    alternative: Alternative, fitted: FittedAttention, tangent: TangentSpace
) -> Float64:
    """As many as the examples allow."""
    few = np.concatenate([flatten(part) for part in alternative.few(fitted)])
    if alternative.many is None or tangent.columns is None:
        return few
    most = min(
        _MOST_NUMBERS / fitted.residual.size,
        fitted.n_scalars / _SCALARS_EACH - tangent.rank,
        _MOST_DIRECTIONS,
    )
    found = [few]
    for part in alternative.many(fitted):
        if sum(len(array) for array in found) + len(part) > most:
            return few
        found.append(flatten(part))
    return np.concatenate(found)


def _new_directions(rows: Float64, scale: Float64, tangent: TangentSpace) -> Float64 | None:
    """An orthonormal basis (q, N) of what directions add to the tangent space."""
    e = rows.shape[1] // scale.size
    rows = rows * np.repeat(scale.reshape(-1), e)
    size = np.linalg.norm(rows, axis=1, keepdims=True)
    rows = rows[size[:, 0] > 0] / size[size[:, 0] > 0]
    beyond = tangent.project(rows)
    length = np.linalg.norm(beyond, axis=1)
    beyond = beyond[length > _NEW] / length[length > _NEW, None]
    if len(beyond) == 0:
        return None
    values, vectors = np.linalg.eigh(beyond @ beyond.T)
    new = values > _NEW**2 * values[-1]
    return (vectors[:, new] / np.sqrt(values[new])).T @ beyond


# Two tests


def _share_by_chance(q: int, others: int) -> float:
    """The share that q directions explain of noise less often than once in a billion times."""
    ratio = float(f_distribution.isf(_UNLIKELY, q, others)) * q / others
    return ratio / (1 + ratio)


def _holds_for_examples(basis: Float64, left: Float64, n: int) -> bool:
    """Whether examples agree on it: what most of them explain points the same way in the others.

    A sign test, by folds: where there is nothing but chance, and be it a few examples with most of
    what is left, an example goes with what the other folds show as often as against it.
    """
    scores = np.einsum("qns,ns->nq", basis.reshape(len(basis), n, -1), left.reshape(n, -1))
    fold = np.arange(n) % _FOLDS
    shown = np.stack([scores[fold != each].sum(axis=0) for each in range(_FOLDS)])
    with_others = np.sum(scores * shown[fold], axis=1)
    agreeing, count = int(np.sum(with_others > 0)), int(np.sum(with_others != 0))
    return bool(binom.sf(agreeing - 1, count, 0.5) < _UNLIKELY_TOO)


def _effective_examples(left: Float64, n: int) -> float:
    """How many examples have most of what is left."""
    energy = np.sum(left.reshape(n, -1) ** 2, axis=1)
    return float(energy.sum() ** 2 / max(float(np.sum(energy**2)), 1e-300))


def _share_of_others(basis: Float64, left: Float64, n: int) -> float:
    """Cross-validated: many directions explain the few examples that have most of what is left, but
    not those that were left out."""
    rows = basis.reshape(len(basis), n, -1)
    targets = left.reshape(n, -1)
    fold = np.arange(n) % _FOLDS
    wrong = 0.0
    for each in range(_FOLDS):
        others, here = fold != each, fold == each
        known = rows[:, others].reshape(len(basis), -1)
        gram = known @ known.T + 1e-9 * np.eye(len(basis))
        coefficients = np.linalg.solve(gram, known @ targets[others].reshape(-1))
        told = np.tensordot(coefficients, rows[:, here], axes=1)
        wrong += float(np.sum((targets[here] - told) ** 2))
    return 1 - wrong / float(left @ left)


# The alternatives


def _positions(fitted: FittedAttention) -> Float64:
    """Of rows, about zero."""
    k = fitted.x.shape[1]
    return (np.arange(k) - (k - 1) / 2) / max(k - 1, 1)


def _distances(fitted: FittedAttention) -> tuple[Float64, Float64]:
    """Between a row and another key (n, 1, k, k), about zero for each row: its own token, which all
    orders have at distance zero, says nothing of positions."""
    k = fitted.x.shape[1]
    steps = np.arange(k)[:, None] - np.arange(k)
    others = fitted.allowed & ~np.eye(k, dtype=bool)
    return _centred(np.abs(steps), others), _centred(np.sign(steps), others)


def _centred(change: NDArray[Any], where: NDArray[np.bool_]) -> Float64:
    count = np.maximum(where.sum(axis=-1, keepdims=True), 1)
    middle = np.sum(np.where(where, change, 0.0), axis=-1, keepdims=True) / count
    return np.where(where, change - middle, 0.0)


def _by_distance(fitted: FittedAttention) -> Directions:
    away, side = _distances(fitted)
    k = fitted.x.shape[1]
    next_to = np.abs(np.arange(k)[:, None] - np.arange(k)) == 1
    others = fitted.allowed & ~np.eye(k, dtype=bool)
    yield fitted.along(away)
    yield fitted.along(side)
    yield fitted.along(_centred(next_to, others))


def _theta_by_distance(fitted: FittedAttention) -> Directions:
    for weight in _distances(fitted):
        yield from fitted.along_theta(weight)


def _by_position(fitted: FittedAttention) -> Directions:
    rows = _positions(fitted)
    k = len(rows)
    others = fitted.allowed & ~np.eye(k, dtype=bool)
    yield fitted.along(rows[:, None] * fitted.logits)
    yield fitted.along(_centred(np.arange(k) == 0, others))
    yield np.moveaxis(fitted.outputs * rows[:, None], 1, 0)


def _theta_and_w_by_position(fitted: FittedAttention) -> Directions:
    rows = _positions(fitted)
    yield from fitted.along_theta(rows[:, None] * np.ones(fitted.allowed.shape))
    yield from fitted.along_w(rows)


def _by_logits(fitted: FittedAttention) -> Directions:
    size = float(np.sqrt(np.mean(fitted.logits**2))) or 1.0
    scaled = fitted.logits / size
    yield fitted.along(scaled**2)
    yield fitted.along(scaled**3)


def _by_sink(fitted: FittedAttention) -> Directions:
    scores = np.where(fitted.allowed, fitted.logits, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    total = np.log(np.exp(scores - top).sum(axis=-1)) + top[..., 0]
    shares = np.exp(total.min() - total)
    yield np.moveaxis(fitted.outputs * shares[..., None], 1, 0)


def _by_norm(fitted: FittedAttention) -> Directions:
    squared = np.sum(fitted.x**2, axis=-1)
    mean = float(squared[fitted.inside].mean())
    about = (squared / (mean or 1.0) - 1.0) * fitted.inside
    yield fitted.along(about[:, None, :, None] * fitted.logits)
    yield fitted.along(about[:, None, None, :] * fitted.logits)
    yield np.moveaxis(fitted.outputs * about[:, None, :, None], 1, 0)
    yield np.moveaxis(fitted.patterns @ (fitted.values * about[:, None, :, None]), 1, 0)


def _by_own_token(fitted: FittedAttention) -> Directions:
    own = np.eye(fitted.x.shape[1])
    yield fitted.along(own)
    yield np.moveaxis(fitted.values * fitted.inside[:, None, :, None], 1, 0)
    if fitted.x.shape[2] == fitted.residual.shape[2]:
        yield fitted.x[None]


def _own_token_by_any_map(fitted: FittedAttention) -> Directions:
    eye = np.eye(fitted.residual.shape[2])
    yield np.einsum("nrd,ef->dfnre", fitted.x, eye).reshape(-1, *fitted.residual.shape)


def _by_constant(fitted: FittedAttention) -> Directions:
    """Constants in a few random combinations of outputs, and keys that all have one bias."""
    e = fitted.residual.shape[2]
    signs = generator(0, Stream.CONSTANTS).choice([-1.0, 1.0], size=(min(e, _CONSTANTS), e))
    yield fitted.inside[..., None] * signs[:, None, None]
    yield fitted.along(fitted.x.sum(axis=-1)[:, None, None, :])


def _any_bias(fitted: FittedAttention) -> Directions:
    eye = np.eye(fitted.residual.shape[2])
    yield np.moveaxis(fitted.inside[..., None, None] * eye, 2, 0)
    for feature in np.moveaxis(fitted.x, 2, 0):
        yield fitted.along(feature[:, None, None, :])


def _by_outputs(fitted: FittedAttention) -> Directions:
    outputs = fitted.outputs.sum(axis=1)
    scaled = outputs / (float(np.sqrt(np.mean(outputs**2))) or 1.0)
    yield np.stack([scaled**2, scaled**3, scaled * np.abs(scaled)])


ALTERNATIVES = (
    Alternative(
        "distance",
        "attention depends on the distance between tokens, as rotary or relative positions and "
        "windows make it",
        _by_distance,
        _theta_by_distance,
        positional=True,
    ),
    Alternative(
        "position",
        "labels depend on the position of a token: positions that were added, or a mask",
        _by_position,
        _theta_and_w_by_position,
        positional=True,
    ),
    Alternative(
        "own token",
        "a row's own token counts beside the heads, as a residual path y = x + F(x) makes it",
        _by_own_token,
        _own_token_by_any_map,
    ),
    Alternative(
        "biases",
        "labels have a constant part, or keys a bias: learn with bias=True",
        _by_constant,
        _any_bias,
    ),
    Alternative(
        "logits",
        "attention is another function of its logits than their softmax, as a soft cap makes it",
        _by_logits,
    ),
    Alternative(
        "sink",
        "the weights of a row do not sum to one, as beside a sink",
        _by_sink,
    ),
    Alternative(
        "norm",
        "the norms of tokens count, as where tokens, queries or keys are normalised",
        _by_norm,
    ),
    Alternative(
        "outputs",
        "labels are a nonlinear function of what a layer computes",
        _by_outputs,
    ),
)
