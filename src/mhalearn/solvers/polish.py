"""Descend from a layer until nothing improves."""

from dataclasses import replace
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
from mhalearn.layer.projected import Projected
from mhalearn.run.run import Run
from mhalearn.solvers.damping import NOTHING_LEFT, ROUNDING
from mhalearn.solvers.gauss_newton import (
    CUT_SHORT,
    DIRECT,
    FINISHING,
    ITERATIVE,
    JOINT,
    JOINT_SINGLE,
    QUICK,
    StepOptions,
    best_layer,
    has_converged,
    init_state,
    loss_of,
    reset_damping,
    take_step,
)
from mhalearn.solvers.head_steps import descend_with_normal_matrix, may_form_normal_matrix
from mhalearn.solvers.scaled_problem import Problem, make_problem

# Unknowns of Theta up to which a few direct steps are worth their price, to finish what is nearly
# exact: of a loss below the second number.
MAX_FINISHING_UNKNOWNS, _NEARLY = 2048, 1e-10
# Below this loss steps converge fast, and one that leaves more than this part of it was inexact.
_NEAR, _LITTLE = 1e-6, 0.1
# A step that was solved for, was taken and gained less than this part ended at a stationary point.
_STATIONARY = 1e-6
# Rows, over the columns of the design matrix, from which on W may be eliminated whatever its rank;
# and those columns at most, for their Gram matrix is formed, and another's eigenvectors.
_ROWS_A_COLUMN = 4
_MOST_COLUMNS_CPU, _MOST_COLUMNS = 1280, 6144
# Parameters of projected heads up to which J^T J is formed at once.
_FEW_PARAMETERS = 1024


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
    `problem` say too little to solve for steps, those of `whole` take over; where factors are moved
    and these do not help either, W is eliminated, as long as rows are many.
    Cost: some tens of forward passes a step, some hundred where nothing is eliminated.
    """
    whole = problem if whole is None else whole
    if may_form_normal_matrix(problem):
        return _descend_heads(params, problem, run, stage, max_steps)
    if isinstance(problem.parametrisation, Factored):
        loss = loss_of(params, problem)
        if loss < NOTHING_LEFT:
            return Minimum(params, loss, True)
    if not (may_eliminate(problem) or may_eliminate(whole)):
        gears = _list_gears(problem.parametrisation)
        return _descend(params, problem, run, gears, stage, max_steps, whole)[0]
    found, solved = _descend(params, problem, run, [CUT_SHORT], stage, max_steps, problem)
    if not (solved or found.loss < ROUNDING or run.is_over()) and whole.rows > problem.rows:
        found, solved = _descend(found.params, whole, run, [CUT_SHORT], stage, max_steps, whole)
    # Labels that are not met to rounding are noise, which only all examples average out.
    for given in [problem] if whole.rows <= problem.rows else [problem, whole]:
        if solved or found.loss < ROUNDING or run.is_over():
            return found
        if may_eliminate(given):
            found = descend_eliminated(found.params, given, run, stage=f"{stage}, W eliminated")
    if found.loss < ROUNDING or run.is_over():
        return found
    return _descend(found.params, whole, run, [FINISHING], stage, max_steps, whole)[0]


def _descend_heads(
    params: Params, problem: Problem, run: Run, stage: str, max_steps: int
) -> Minimum:
    """Plain steps as long as they are solved for; then those that begin with J^T J."""
    if problem.parametrisation.size() <= _FEW_PARAMETERS:  # not worth another program
        return Minimum(*descend_with_normal_matrix(params, problem, run, stage=stage))
    found, _ = _descend(params, problem, run, [CUT_SHORT], stage, max_steps, problem)
    if run.is_over() or not ROUNDING < found.loss < np.inf:
        return found
    return Minimum(*descend_with_normal_matrix(found.params, problem, run, stage=stage))


def _descend(
    params: Params,
    problem: Problem,
    run: Run,
    gears: list[StepOptions],
    stage: str,
    max_steps: int,
    whole: Problem,
) -> tuple[Minimum, bool]:
    """Descend by some kinds of steps, one after the other; and whether all steps were solved for.

    The last of steps that are cut short is the first that was not, and gained little.
    """
    gear, loss, converged = 0, float("inf"), False
    state = init_state(jax.tree.map(lambda leaf: leaf[None], params))
    solved = True
    for step in range(max_steps):
        before = loss
        state = take_step(state, problem, gears[gear])
        loss, solved = float(state.loss[0]), bool(state.solved[0])
        run.emit(stage, step, loss, at_hand=partial(best_layer, state, problem))
        if run.is_over():
            break
        if gears[gear] is CUT_SHORT and not (solved or loss < _LITTLE * before):
            break
        if whole.rows > problem.rows and not solved:
            problem, gear, state = whole, 0, reset_damping(state)
            continue
        if solved and 0 < before - loss < _STATIONARY * before:
            converged = True
            break
        if loss < ROUNDING and loss < before / 2:
            continue  # badly conditioned parameters gain even where the loss is rounding
        if has_converged(state).all() or _is_inexact(gears[gear], before, loss):
            gear += 1
            if gear == len(gears) or not _is_worth(gears[gear - 1], gears[gear], loss):
                converged = bool(np.isfinite(loss))
                break
            state = reset_damping(state)
    found = jax.tree.map(lambda leaf: leaf[0], state.params)
    return Minimum(found, loss, converged), solved


def may_eliminate(problem: Problem) -> bool:
    """Whether W, whatever its rank, may be solved for: enough rows, not too many columns."""
    if not isinstance(problem.parametrisation, Factored) or problem.devices > 1:
        return False
    columns = problem.architecture.heads * problem.d + problem.bias
    most = _MOST_COLUMNS_CPU if jax.default_backend() == "cpu" else _MOST_COLUMNS
    return columns <= most and problem.rows >= _ROWS_A_COLUMN * columns


def descend_eliminated(params: Params, problem: Problem, run: Run, *, stage: str) -> Minimum:
    """Descend in Theta of the factors' rank, with the best W of any rank; then cut W to its rank.

    Better conditioned than equations in all factors, with dearer products. If the labels are exact,
    so is the rank of the W found, and nothing is cut.
    Cost: some tens of passes over Theta and W of full size a step. Trust: a stationary point of the
    loss of layers with any W, wherever the given W was.
    """
    dense = replace(problem, parametrisation=Dense(problem.architecture))
    start = dense.parametrisation.from_layer(problem.to_layer(params), problem.units)
    before = loss_of(params, problem)
    found, _ = _descend(start, dense, run, [QUICK, ITERATIVE], stage, 60, dense)
    cut = problem.parametrisation.from_layer(dense.to_layer(found.params), problem.units)
    after = loss_of(cut, problem)
    if not after < before:
        return Minimum(params, before, False)
    return Minimum(cut, after, after < ROUNDING)


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
    where heads are moved by their factors or projections."""
    architecture = architecture.with_heads(layer.n_heads)
    parametrisation = architecture.parametrisation()
    by_factors = isinstance(parametrisation, Factored | Projected)
    if by_factors and architecture.contains(layer):
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
