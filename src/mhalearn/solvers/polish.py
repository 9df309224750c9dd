"""Descend from a layer until nothing improves."""

from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from mhalearn.data import Examples
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.base import Layer
from mhalearn.layer.dense import Dense
from mhalearn.layer.factored import Factored
from mhalearn.layer.parametrisation import Parametrisation, Params
from mhalearn.run.run import Run
from mhalearn.solvers.gauss_newton import (
    DIRECT,
    ITERATIVE,
    JOINT,
    JOINT_SINGLE,
    QUICK,
    ROUNDING,
    StepOptions,
    best_layer,
    has_converged,
    init_state,
    reset_damping,
    take_step,
)
from mhalearn.solvers.scaled_problem import Problem, make_problem

# Unknowns of Theta up to which a few direct steps are worth their price, to finish what is nearly
# exact: of a loss below the second number.
MAX_FINISHING_UNKNOWNS, _NEARLY = 2048, 1e-10
# Below this loss steps converge fast, and one that leaves more than this part of it was inexact.
_NEAR, _LITTLE = 1e-6, 0.1


def max_direct_unknowns() -> int:
    """Unknowns of Theta up to which a direct step costs no more than a few of the others."""
    return 512 if jax.default_backend() == "cpu" else MAX_FINISHING_UNKNOWNS


class Polished(NamedTuple):
    """A layer, its loss, and whether descent ended because nothing improved."""

    layer: Any  # of the kind that was given
    loss: float  # relative squared error
    converged: bool


class Minimum(NamedTuple):
    """Parameters, their loss, and whether descent ended because nothing improved."""

    params: Params
    loss: float
    converged: bool


def polish(
    layer: Layer,
    problem: Problem,
    run: Run,
    *,
    stage: str = "polish",
    max_steps: int = 200,
) -> Polished:
    """Descend from a layer until nothing improves.

    Trust: a stationary point of the training loss, to rounding. Not a certificate.
    """
    if problem.energy == 0.0:
        return Polished(problem.zero_layer_like(layer), 0.0, True)
    start = problem.parametrisation.from_layer(layer, problem.units)
    found = minimise(start, problem, run, stage=stage, max_steps=max_steps)
    if not np.isfinite(found.loss):  # nothing to fit W to: a design of rank zero, say
        return Polished(layer, float("inf"), False)
    return Polished(problem.to_layer(found.params), found.loss, found.converged)


def minimise(
    params: Params,
    problem: Problem,
    run: Run,
    *,
    stage: str,
    max_steps: int = 200,
    whole: Problem | None = None,
) -> Minimum:
    """Descend from parameters until nothing improves.

    Steps get more exact, and dearer, where cheaper ones no longer gain. Where the examples of
    `problem` say too little to solve for steps, those of `whole` take over.
    Cost: some tens of forward passes a step, some hundred where nothing is eliminated.
    """
    gears = _list_gears(problem.parametrisation)
    gear, loss, converged = 0, float("inf"), False
    state = init_state(jax.tree.map(lambda leaf: leaf[None], params))
    for step in range(max_steps):
        before = loss
        state = take_step(state, problem, gears[gear])
        loss = float(state.loss[0])
        run.emit(stage, step, loss, at_hand=partial(best_layer, state, problem))
        if run.is_over():
            break
        if whole is not None and whole.rows > problem.rows and not state.solved[0]:
            problem, gear, state = whole, 0, reset_damping(state)
            continue
        if loss < ROUNDING and loss < before / 2:
            continue  # badly conditioned parameters gain even where the loss is rounding
        if has_converged(state).all() or _is_inexact(gears[gear], before, loss):
            gear += 1
            if gear == len(gears) or not _is_worth(gears[gear - 1], gears[gear], loss):
                converged = bool(np.isfinite(loss))
                break
            state = reset_damping(state)
    found = jax.tree.map(lambda leaf: leaf[0], state.params)
    return Minimum(found, loss, converged)


def _list_gears(parametrisation: Parametrisation) -> list[StepOptions]:
    """Kinds of steps, the cheapest that pays first."""
    architecture = parametrisation.architecture
    if not isinstance(parametrisation, Dense):
        return [JOINT_SINGLE, JOINT]
    if architecture.head_dim is not None:
        return [ITERATIVE]
    unknowns = architecture.heads * architecture.query_dim * architecture.d
    if unknowns <= max_direct_unknowns():
        return [QUICK, DIRECT]  # the program of quick steps is mostly there already
    return [ITERATIVE, DIRECT] if unknowns <= MAX_FINISHING_UNKNOWNS else [ITERATIVE]


def _is_inexact(options: StepOptions, before: float, after: float) -> bool:
    """Whether a step in single precision gained little where exact ones would converge fast."""
    return options.single and _LITTLE * before < after < _NEAR


def _is_worth(last: StepOptions, options: StepOptions, loss: float) -> bool:
    """Whether dearer steps could gain something: those that factor large matrices only where what
    is left is nearly nothing."""
    return loss > ROUNDING and (last.single or not options.direct or loss < _NEARLY)


def polish_on(
    examples: Examples,
    layer: Layer,
    architecture: Architecture,
    run: Run,
) -> Polished:
    """`polish` on examples within an architecture; what already fits to rounding stays as it is,
    where heads are moved by their factors."""
    architecture = architecture.with_heads(layer.n_heads)
    parametrisation = architecture.parametrisation()
    if isinstance(parametrisation, Factored) and architecture.contains(layer):
        loss = relative_error(layer, examples)
        if loss < ROUNDING:
            return Polished(layer, loss, True)
    return polish(layer, make_problem(examples, parametrisation), run)


def relative_error(layer: Layer, examples: Examples) -> float:
    """|Y - F|^2 over |Y|^2, in the user's units. Memory: that of one chunk of examples."""
    wrong = energy = 0.0
    for x, y, lengths in examples.chunks(1024):
        inside = np.arange(examples.k) < lengths[:, None]
        labels = y[inside].astype(np.float64)
        wrong += float(np.sum((layer(x, lengths)[inside] - labels) ** 2))
        energy += float(np.sum(labels**2))
    return wrong / (energy or 1.0)
