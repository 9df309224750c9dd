"""Ridge continuation: descend while a penalty on Theta and W is annealed away.

The penalised objective is a maximum a posteriori estimate whose assumed noise, g times the label
variance, shrinks: early on only what many examples agree on moves the parameters, which helps most
where examples are few.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mhalearn.newton.start import Scales
from mhalearn.outcome import Trace
from mhalearn.polish import NO_RIDGE, ROUNDING, Ridge, State, begin, descend, freed, settled
from mhalearn.problem import Problem

_FIRST, _LAST = 3.0, 1e-2
_FREE_STEPS = 80
_OFFER_SECONDS = 5.0


def ridge_at(g: float, scales: Scales, problem: Problem) -> Ridge:
    """The penalty of a Gaussian prior with the given scales under noise of variance g mean(Y^2)."""
    share = g / (problem.rows * problem.out_dim)
    entries = problem.query_dim * problem.d
    return Ridge(share * entries / scales.theta**2, share / scales.w**2)


def run_continuation(
    theta: NDArray[np.float64],
    problem: Problem,
    scales: Scales,
    trace: Trace,
    offer: Callable[[State], None],
    *,
    stage: str,
    anneal_steps: int,
    head_dim: int | None,
) -> None:
    """Anneal, then descend freely until every start has freed, settled or one has hit rounding.

    The end is offered to the choice among starts, and on long runs what there is every few seconds,
    so that an interrupted run keeps it.
    """
    state = begin(theta, problem)
    offered = trace.seconds
    schedule = np.geomspace(_FIRST, _LAST, anneal_steps)
    for step in range(anneal_steps + _FREE_STEPS):
        free = step >= anneal_steps
        ridge = NO_RIDGE if free else ridge_at(float(schedule[step]), scales, problem)
        if step == anneal_steps:
            state = freed(state)
        state = descend(state, problem, ridge, head_dim)
        losses = np.asarray(state.loss)
        best = float(np.nanmin(losses, initial=np.inf))
        trace.emit(stage, step, best)
        if trace.expired or (free and (best < ROUNDING or settled(state).all())):
            break
        if trace.seconds - offered > _OFFER_SECONDS:
            offer(state)
            offered = trace.seconds
    offer(state)
