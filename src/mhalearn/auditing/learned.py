"""The layer that a box does compute, learned outright and compared with the claim head by head."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from mhalearn.data import Examples
from mhalearn.estimator import AttentionRegressor
from mhalearn.judge.certify import certify
from mhalearn.layer.base import Layer
from mhalearn.layer.comparison import compare
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.projected_layer import ProjectedLayer
from mhalearn.run.outcome import Outcome
from mhalearn.run.run import Run
from mhalearn.solvers.damping import ROUNDING
from mhalearn.solvers.gauss_newton import JOINT, init_state, take_step
from mhalearn.solvers.polish import polish
from mhalearn.solvers.scaled_problem import Problem, make_problem

# Times the counting limit that examples must be, unknowns that a layer may have, and seconds that
# are worth beginning for, and that a search without the claim may take.
_PLENTY, _MOST_UNKNOWNS, _LEAST_SECONDS, _MOST_SECONDS = 2.0, 4000, 5.0, 20.0
# A descent that leaves more of the squared labels has not found the box's layer; below the second
# number, what it leaves may be digits that steps with a normal matrix lose.
_FOUND, _NEARLY = 1e-5, 1e-16
# Heads whose matrices differ by less, relatively, are the claimed ones.
_SAME = 1e-4
# Steps for the last digits at most, and what one must leave at most to be followed by another.
_LAST_STEPS, _LITTLE = 4, 0.5
# Every so-many-th example is kept to certify on.
_EVERY = 4


@dataclass(frozen=True)
class Learned:
    """layer: recovered from the box's labels. heads: of the claim, those that differ from it,
    counted from 0; theta_errors and w_errors: how much each does, relatively."""

    layer: Layer
    outcome: Outcome
    heads: tuple[int, ...]
    theta_errors: tuple[float, ...]
    w_errors: tuple[float, ...]

    def describe(self) -> str:
        said = f"the layer that the box computes was learned ({self.outcome.name})"
        if not self.heads:
            return f"{said}: its heads are those that were claimed"
        each = [
            f"head {i + 1} (Theta by {self.theta_errors[i]:.1e}, W by {self.w_errors[i]:.1e})"
            for i in self.heads
        ]
        return f"{said}: it differs in {', '.join(each)}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "outcome": self.outcome.name,
            "heads": list(self.heads),
            "theta_errors": list(self.theta_errors),
            "w_errors": list(self.w_errors),
        }


def learn_instead(claimed: Layer, examples: Examples, seconds: float) -> Learned | None:
    """The layer of the claim's class that the labels show; None where it is not recovered.

    Only where the examples are twice the counting limit. It is descended to from the claim, of
    which most is right as a rule; of heads of one Theta and one W, it is then looked for without.
    Trust: `RECOVERED` is the certificate's word, on examples that were not fitted.
    """
    a = claimed.architecture
    if seconds < _LEAST_SECONDS or a.count() > _MOST_UNKNOWNS:
        return None
    lengths = examples.lengths if examples.has_lengths else examples.k
    if examples.n < _PLENTY * a.counting_limit(lengths):
        return None
    until = time.monotonic() + seconds
    found = _descend(claimed, examples, seconds)
    left = min(_MOST_SECONDS, until - time.monotonic())
    if found is None and isinstance(claimed, AttentionLayer) and left >= _LEAST_SECONDS:
        model = AttentionRegressor(
            n_heads=claimed.n_heads,
            head_dim=a.head_dim,
            bias=a.bias,
            causal=claimed.causal,
            max_seconds=left,
        ).fit(examples)
        if model.outcome_ in (Outcome.RECOVERED, Outcome.RECOVERED_ON_SPAN):
            found = model.layer_, model.outcome_
    return None if found is None else _compare(*found, claimed)


def _descend(claimed: Layer, examples: Examples, seconds: float) -> tuple[Layer, Outcome] | None:
    """From the claim to the nearest layer that explains the labels, certified on others."""
    kept = np.arange(examples.n) % _EVERY == _EVERY - 1
    train, fresh = (examples.subset(np.flatnonzero(one)) for one in (~kept, kept))
    a = claimed.architecture
    problem, run = make_problem(train, a.parametrisation()), Run(seconds / 2)
    found = polish(claimed, problem, run)
    if not found.loss < _FOUND:
        return None
    layer = found.layer
    certificate = certify(layer, fresh, learned_from=train, architecture=a)
    if not certificate.claims and found.loss < _NEARLY:
        layer = _last_digits(layer, problem)
        certificate = certify(layer, fresh, learned_from=train, architecture=a)
    if not certificate.claims:
        return None
    whole = certificate.recovered
    return layer, Outcome.RECOVERED if whole else Outcome.RECOVERED_ON_SPAN


def _last_digits(layer: Layer, problem: Problem) -> Layer:
    """Steps without the normal matrix, whose condition number is squared, while they gain."""
    start = problem.parametrisation.from_layer(layer, problem.units)
    state = init_state({name: np.asarray(leaf)[None] for name, leaf in start.items()})
    loss = float("inf")
    for _ in range(_LAST_STEPS):
        state = take_step(state, problem, JOINT)
        before, loss = loss, float(state.loss[0])
        if loss < ROUNDING or loss > _LITTLE * before:
            break
    found: Layer = problem.to_layer({name: leaf[0] for name, leaf in state.params.items()})
    return found


def _compare(layer: Layer, outcome: Outcome, claimed: Layer) -> Learned | None:
    known = (AttentionLayer, ProjectedLayer)
    if not (isinstance(layer, known) and isinstance(claimed, known)):
        return None
    found = compare(layer, claimed)
    if not found.comparable:
        return None
    theta, w = (np.asarray(one, float) for one in (found.theta_errors, found.w_errors))
    apart = np.flatnonzero(np.maximum(theta, w) > _SAME)
    return Learned(layer, outcome, tuple(apart.tolist()), tuple(theta.tolist()), tuple(w.tolist()))
