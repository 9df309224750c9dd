"""Ridge continuation: descend while a penalty on Theta and W is annealed away.

The penalised objective is a maximum a posteriori estimate whose assumed noise, g times the label
variance, shrinks: early on only what many examples agree on moves the parameters, which helps most
where examples are few.
"""

from collections.abc import Callable

import jax
import numpy as np
from numpy.typing import NDArray

from mhalearn.newton.start import Scales
from mhalearn.outcome import Trace
from mhalearn.polish import NO_RIDGE, ROUNDING, Ridge, State, begin, descend, freed, settled
from mhalearn.problem import Problem

_FIRST, _SHAPED = 3.0, 1e-2
_FREE_STEPS = 150
_OFFER_SECONDS = 5.0
# A loss from which finishing is worth direct steps, and how many.
_CLOSE, _FINISHING_STEPS = 1e-4, 40


def ridge_at(g: float, scales: Scales, problem: Problem) -> Ridge:
    """The penalty of a Gaussian prior with the given scales under noise of variance g mean(Y^2)."""
    share = g / (problem.rows * problem.out_dim)
    entries = problem.query_dim * problem.d
    return Ridge(share * entries / scales.theta**2, share / scales.w**2)


def _schedule(steps: int, last: float) -> NDArray[np.float64]:
    """Slowly through the strengths at which heads take shape, then quickly on to `last`."""
    slow = np.geomspace(_FIRST, _SHAPED, steps)
    if last >= _SHAPED:
        return slow
    return np.concatenate([slow, np.geomspace(_SHAPED, last, 1 + steps // 4)[1:]])


def anneal(
    theta: NDArray[np.float64],
    problem: Problem,
    scales: Scales,
    trace: Trace,
    offer: Callable[[State], None],
    *,
    stage: str,
    steps: int,
    last: float,
    head_dim: int | None,
    direct: bool = False,
) -> State:
    """Anneal g from 3 to `last`, in `steps` steps and a quarter more; then descend freely.

    Free descent ends when every start has settled, or one has hit rounding.
    The end is offered to the choice among starts, and on long runs what there is every few seconds,
    so that an interrupted run keeps it.
    """
    state = begin(theta, problem)
    offered = trace.seconds
    schedule = _schedule(steps, last)
    steps = len(schedule)
    for step in range(steps + _FREE_STEPS):
        free = step >= steps
        ridge = NO_RIDGE if free else ridge_at(float(schedule[step]), scales, problem)
        if step == steps:
            state = freed(state)
        state = descend(state, problem, ridge, head_dim, direct=direct)
        losses = np.asarray(state.loss)
        best = float(np.nanmin(losses, initial=np.inf))
        trace.emit(stage, step, best)
        if trace.expired or (free and (best < ROUNDING or settled(state).all())):
            break
        if trace.seconds - offered > _OFFER_SECONDS:
            offer(state)
            offered = trace.seconds
    offer(state)
    return state


def finish(
    state: State, problem: Problem, trace: Trace, offer: Callable[[State], None], *, stage: str
) -> None:
    """Take the best start on by direct steps, if it is close: saturated attention stalls others."""
    best = int(np.argmin(np.nan_to_num(np.asarray(state.loss), nan=np.inf)))
    one = jax.tree.map(lambda leaf: leaf[best : best + 1], state)
    if not ROUNDING < float(one.loss[0]) < _CLOSE:
        return
    one = freed(one)
    for step in range(_FINISHING_STEPS):
        one = descend(one, problem, direct=True)
        trace.emit(stage, step, float(one.loss[0]))
        if trace.expired or settled(one).all():
            break
    offer(one)
