"""Gauss-Newton steps on factors under a penalty that fades.

Where examples are few, or attention is sharp, many layers fit nearly as well once no penalty is
left, and a descent ends at one of them. The minimum under a penalty is a continuous function of its
strength, and ends at the layer of least nuclear norm that fits: steps of Gauss-Newton follow it,
one for each strength (iteratively regularised Gauss-Newton, Bakushinskii 1992), where first-order
steps have lost it long before.
"""

from functools import partial

import jax
import numpy as np

from mhalearn.layer.factored import Factors
from mhalearn.run.run import Run
from mhalearn.solvers.gauss_newton import CUT_SHORT, Ridge, best_layer, init_state, take_step
from mhalearn.solvers.scaled_problem import Problem

# A penalty falls to this share of the loss, by no more than so much a step: what is left of a bent
# path would else be walked without one.
_SHARE, _FADE = 0.5, 10.0
# Steps without a gain after which noise is all that is left. Steps at most.
_IDLE, _STEPS = 3, 40


def follow_penalty(
    heads: Factors, problem: Problem, run: Run, strength: float, *, goal: float, stage: str
) -> tuple[Factors, float]:
    """The minimum that the one under `strength` leads to as the penalty fades, and what is left of
    the strength: up to a loss, or until noise is all that is left.

    Cost: a Gauss-Newton step a decade, some tens where the path is bent. Trust: a heuristic; where
    it bends too fast, or minima meet, another minimum may be found.
    """
    state = init_state(jax.tree.map(lambda leaf: leaf[None], heads))
    loss = float("inf")
    for step in range(_STEPS):
        before = loss
        state = take_step(state, problem, CUT_SHORT, ridge=Ridge(strength, strength))
        loss = float(state.loss[0])
        run.emit(stage, step, loss, at_hand=partial(best_layer, state, problem))
        if loss != before:  # the step was taken
            share = _SHARE * loss / max(_squares(state.params), 1e-300)
            strength = min(strength, max(strength / _FADE, share))
        done = loss < goal or float(state.idle[0]) >= _IDLE
        if done or run.is_over() or not np.isfinite(loss):
            break
    found: Factors = jax.tree.map(lambda leaf: leaf[0], state.params)
    return found, strength


def _squares(heads: Factors) -> float:
    """Of all factors, as a penalty counts them."""
    return sum(float(np.sum(np.square(leaf, dtype=np.float64))) for leaf in heads[:4])
