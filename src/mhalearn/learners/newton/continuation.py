"""Ridge continuation: descend while a penalty on Theta and W is annealed away.

The penalised objective is a maximum a posteriori estimate whose assumed noise, g times the label
variance, shrinks: early on only what many examples agree on moves the parameters, which helps most
where examples are few.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import jax
import numpy as np

from mhalearn._runtime.devices import any_process
from mhalearn.learners.newton.starts import Scales
from mhalearn.run.run import Run
from mhalearn.solvers.damping import ROUNDING
from mhalearn.solvers.gauss_newton import (
    DIRECT,
    NO_RIDGE,
    Ridge,
    State,
    StepOptions,
    best_layer,
    best_start,
    has_converged,
    reset_damping,
    take_step,
)
from mhalearn.solvers.scaled_problem import Problem

# Steps of all starts side by side, and of the best one alone.
_FREE_STEPS, _FINISHING_STEPS = 60, 150
_SHOW_SECONDS = 5.0
# A loss from which finishing is worth direct steps.
_CLOSE = 1e-4


def ridge_at(g: float, scales: Scales, problem: Problem) -> Ridge:
    """The penalty of a Gaussian prior with the given scales under noise of variance g mean(Y^2)."""
    share = g / (problem.rows * problem.out_dim)
    entries = problem.query_dim * problem.d
    return Ridge(share * entries / scales.theta**2, share / scales.w**2)


@dataclass(frozen=True)
class Task:
    """What every start of a round shares."""

    problem: Problem
    run: Run
    offer: Callable[[State], None]  # to the choice among starts
    options: StepOptions
    show: Callable[[State], None] = lambda state: None  # to whoever watches
    enough: float = ROUNDING  # the loss from which on descent is at its end

    def step(self, state: State, ridge: Ridge = NO_RIDGE) -> State:
        return take_step(state, self.problem, self.options, ridge=ridge)

    def tell(self, stage: str, step: int, state: State) -> None:
        at_hand = partial(best_layer, state, self.problem)
        self.run.emit(stage, step, _lowest(state), at_hand=at_hand)


def anneal_ridge(
    state: State, task: Task, scales: Scales, strengths: Iterable[float], *, stage: str
) -> State:
    """One step of every start at each strength g of the ridge."""
    checkpoint = task.run.checkpoint
    begun, state = checkpoint.recall(stage, like=(0, state)) or (0, state)
    for step, g in enumerate(strengths):
        if step < begun:
            continue
        state = task.step(state, ridge_at(float(g), scales, task.problem))
        checkpoint.record(stage, (step + 1, state))
        task.tell(stage, step, state)
        if task.run.is_over():
            break
    return state


def descend_without_ridge(
    state: State, task: Task, *, stage: str, steps: int = _FREE_STEPS
) -> State:
    """Descend without penalty until every start has settled, or one has hit rounding.

    The end is offered to the choice among starts, and on long runs what there is is shown every few
    seconds, so that an interrupted run keeps it.
    """
    run = task.run
    state, shown = reset_damping(state), run.seconds
    begun, state = run.checkpoint.recall(stage, like=(0, state)) or (0, state)
    for step in range(begun, steps):
        if run.is_over() or (step and (_lowest(state) < task.enough or has_converged(state).all())):
            break
        state = task.step(state)
        run.checkpoint.record(stage, (step + 1, state))
        task.tell(stage, step, state)
        if any_process(run.seconds - shown > _SHOW_SECONDS):
            task.show(state)
            shown = run.seconds
    task.offer(state)
    return state


def finish_with_direct_steps(state: State, task: Task, *, stage: str) -> None:
    """Take the best start on by direct steps, if it is close: saturated attention stalls others."""
    best = best_start(state)
    one = jax.tree.map(lambda leaf: leaf[best : best + 1], state)
    if task.enough < float(one.loss[0]) < _CLOSE:
        descend_without_ridge(
            one, replace(task, options=DIRECT), stage=stage, steps=_FINISHING_STEPS
        )


def _lowest(state: State) -> float:
    return float(np.nanmin(np.asarray(state.loss), initial=np.inf))
