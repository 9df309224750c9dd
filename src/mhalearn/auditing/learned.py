"""The layer that a box does compute, learned outright and compared with the claim head by head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mhalearn.data import Examples
from mhalearn.estimator import AttentionRegressor
from mhalearn.layer.base import Layer
from mhalearn.layer.comparison import compare
from mhalearn.layer.layer import AttentionLayer
from mhalearn.run.outcome import Outcome

# Times the counting limit that examples must be, unknowns that a layer may have, and seconds that
# are worth beginning for.
_PLENTY, _MOST_UNKNOWNS, _LEAST_SECONDS = 2.0, 4000, 5.0
# Heads whose matrices differ by less, relatively, are the claimed ones.
_SAME = 1e-4


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

    Only for heads of one Theta and one W each, where the examples are twice the counting limit.
    Trust: `RECOVERED` is the judge's word, on examples that were not fitted.
    """
    if not isinstance(claimed, AttentionLayer) or seconds < _LEAST_SECONDS:
        return None
    a = claimed.architecture
    lengths = examples.lengths if examples.has_lengths else examples.k
    few = examples.n < _PLENTY * a.counting_limit(lengths)
    if few or a.count() > _MOST_UNKNOWNS:
        return None
    model = AttentionRegressor(
        n_heads=claimed.n_heads,
        head_dim=a.head_dim,
        bias=a.bias,
        causal=claimed.causal,
        max_seconds=seconds,
    ).fit(examples)
    if model.outcome_ not in (Outcome.RECOVERED, Outcome.RECOVERED_ON_SPAN):
        return None
    found = compare(model.layer_, claimed)
    if not found.comparable:
        return None
    theta, w = (np.asarray(one, float) for one in (found.theta_errors, found.w_errors))
    apart = np.flatnonzero(np.maximum(theta, w) > _SAME)
    return Learned(
        model.layer_,
        model.outcome_,
        tuple(apart.tolist()),
        tuple(theta.tolist()),
        tuple(w.tolist()),
    )
