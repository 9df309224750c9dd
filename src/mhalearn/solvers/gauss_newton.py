"""Damped Gauss-Newton (Levenberg-Marquardt) for any parametrisation, down to machine precision.

One step, batched over starts: the objective and its quadratic model at a point, a step that is
solved for by conjugate gradients, a retraction, and a decision by the ratio of actual to predicted
reduction. Where a parametrisation eliminates its linear part, the equations are the reduced ones
(`variable_projection`), otherwise those in all parameters (`normal_equations`).
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.devices import replicate
from mhalearn._runtime.programs import compiled, in_float64
from mhalearn._runtime.types import Array, Bool, Float
from mhalearn.layer.attention import LinearFit
from mhalearn.layer.batches import Chunk, merge_chunks
from mhalearn.layer.dense import Dense, DenseHeads
from mhalearn.layer.factored import Factored
from mhalearn.layer.parametrisation import Parametrisation, Params
from mhalearn.layer.projected import Projected
from mhalearn.solvers.damping import IDLE, IDLE_STEPS, ROUNDING, update_damping
from mhalearn.solvers.factor_preconditioner import FactorPreconditioner, precondition_factors
from mhalearn.solvers.host_steps import Descent, step_on_host
from mhalearn.solvers.last_step import Known, LastStep
from mhalearn.solvers.normal_equations import (
    Step,
    descent_direction,
    solve_normal_equations,
    squared_residual,
)
from mhalearn.solvers.projection_preconditioner import (
    ProjectionPreconditioner,
    precondition_projections,
)
from mhalearn.solvers.scaled_problem import Problem
from mhalearn.solvers.variable_projection import solve_reduced_normal_equations

Preconditioner = FactorPreconditioner | ProjectionPreconditioner

# Parameters of projected heads from which on a preconditioner is worth its program.
_MANY_PARAMETERS = 6144
# Equations in all parameters are damped in proportion to the label energy, by this much.
_JOINT_DAMPING = 0.1


@dataclass(frozen=True)
class StepOptions:
    """How a step is solved for.

    direct: factor the reduced normal matrix instead of approximating it. It costs more, much more
        with many unknowns, and goes on where saturated attention or near-equal heads stall the
        other.
    single: solve in single precision, which is faster and mostly exact enough for a direction;
        residuals, eliminated parameters and the decision to take the step stay in double.
    cg_steps: conjugate-gradient steps at most. Generic layers need about twenty with W eliminated;
        nearly equal heads use them all. In all parameters more are needed.
    """

    direct: bool = False
    single: bool = False
    cg_steps: int = 200


# With the exact factor as preconditioner they only make good for its rounding.
DIRECT = StepOptions(direct=True, cg_steps=8)
ITERATIVE = StepOptions()
QUICK = StepOptions(single=True)
JOINT_SINGLE, JOINT = StepOptions(single=True, cg_steps=400), StepOptions(cg_steps=400)
# Where W can be eliminated instead, steps in all parameters that are not solved for end them; and
# fewer products do where that has left nothing but W of more rank than heads have.
CUT_SHORT, FINISHING = StepOptions(single=True, cg_steps=400), StepOptions(single=True, cg_steps=60)


class Ridge(NamedTuple):
    """Penalties on |Theta|^2 and |W|^2, or on the squares of the factors of either, in units of the
    problem's label energy."""

    theta: Float[Array, ""] | float
    w: Float[Array, ""] | float


NO_RIDGE = Ridge(0.0, 0.0)


class State(NamedTuple):
    """Starts on their way down: every leaf has a leading axis of starts."""

    params: Params
    loss: Float[Array, "*s"]  # |Y - F|^2 over the label energy, penalties left out
    damping: Float[Array, "*s"]
    idle: Float[Array, "*s"]  # steps since the objective last fell by more than a thousandth
    solved: Bool[Array, "*s"]  # whether the equations of the last step were solved


@in_float64
def init_state(params: Params) -> State:
    """Starts before their first step."""
    # Made on a device, arrays of each shape would compile a program of their own.
    s = len(jax.tree.leaves(params)[0])
    return _state(params, np.ones(s), np.full(s, 1e-2), np.zeros(s), np.ones(s, bool))


@in_float64
def init_dense(theta: NDArray[np.float64], problem: Problem) -> State:
    """Starts from attention matrices (s, m, q, d) alone: the first step eliminates W."""
    s, m = theta.shape[:2]
    w = np.zeros((s, m * problem.d + problem.bias, problem.out_dim))
    return init_state(DenseHeads(theta, w))  # type: ignore[arg-type]


def _state(params: Params, *leaves: Any) -> State:
    """From arrays of a device or of the host."""
    return State(params, *leaves)


@in_float64
def reset_damping(state: State) -> State:
    """The same starts with a fresh, light damping, for when the objective changes under them."""
    s = len(state.loss)
    return _state(state.params, state.loss, np.full(s, 1e-3), np.zeros(s), state.solved)


def has_converged(state: State) -> NDArray[np.bool_]:
    """Which starts have nothing left to gain: at rounding, idle for four steps, or not finite."""
    loss = np.asarray(state.loss)
    return (loss < ROUNDING) | (np.asarray(state.idle) >= IDLE_STEPS) | ~np.isfinite(loss)


def best_start(state: State) -> int:
    return int(np.argmin(np.nan_to_num(np.asarray(state.loss), nan=np.inf)))


def layer_of(state: State, start: int, problem: Problem) -> Any:
    """One of the starts as a layer."""
    return problem.to_layer(jax.tree.map(lambda leaf: np.asarray(leaf)[start], state.params))


def best_layer(state: State, problem: Problem) -> Any:
    """The start with the lowest loss, as a layer."""
    return layer_of(state, best_start(state), problem)


@in_float64
def take_step(
    state: State,
    problem: Problem,
    options: StepOptions = ITERATIVE,
    *,
    ridge: Ridge = NO_RIDGE,
    span: Float[Array, "s q d"] | None = None,
) -> State:
    """One damped Gauss-Newton step of every start; the objective never rises.

    ridge: of heads by Theta or by factors, a penalty. span: of dense heads alone, matrices whose
    span Theta stays in.

    Cost: some tens of forward passes a start. Memory: O(n k m (k + d + e)) a start, and with
    `direct` that of `reduced_normal_matrix`.
    """
    if span is None and problem.on_host:
        return _step_on_host(state, problem, ridge)
    # Side by side, twelve starts were seen to hang in XLA's CPU thread pool; fewer gain nothing.
    one_by_one = jax.default_backend() == "cpu"
    static = (problem.parametrisation, options, one_by_one, problem.devices)
    metric = _precondition(state, problem, ridge)
    data, energy, params = problem.data, problem.energy, state.params
    if not isinstance(params, DenseHeads):
        return replicate(_step(state, data, energy, ridge, span, metric, None, *static)[0])
    of_w = float(ridge.w)
    known = problem.last_step.recall(params, of_w, options.single)
    state, last = replicate(_step(state, data, energy, ridge, span, metric, known, *static))
    problem.last_step.note(state.params, of_w, options.single, known, last)
    return state


def _precondition(state: State, problem: Problem, ridge: Ridge) -> Preconditioner | None:
    """Of every start, where factors or many projections are moved; None elsewhere."""
    level = np.sqrt(np.minimum(1.0, np.asarray(state.loss))) * np.asarray(state.damping)
    found = [
        precondition(
            jax.tree.map(lambda leaf, start=start: leaf[start], state.params),
            problem,
            damping=float((_JOINT_DAMPING * damping + ridge.theta) * problem.energy),
        )
        for start, damping in enumerate(np.nan_to_num(level))
    ]
    if found[0] is None:
        return None
    stacked: Preconditioner = jax.tree.map(lambda *leaves: np.stack(leaves), *found)
    return stacked


def precondition(
    params: Params, problem: Problem, *, damping: float = 0.0
) -> Preconditioner | None:
    """For the equations in all parameters at a point; None where none is known or worth it."""
    kind, data, devices = problem.parametrisation, problem.data, problem.devices
    if isinstance(kind, Factored):
        return precondition_factors(kind, params, data, devices, damping=damping)
    if isinstance(kind, Projected) and kind.size() > _MANY_PARAMETERS:
        return precondition_projections(kind, params, data, devices, damping=damping)
    return None


@in_float64
def loss_of(params: Params, problem: Problem) -> float:
    """|Y - F|^2 over the label energy. Cost: a forward pass."""
    squared = _squared(params, problem.data, problem.parametrisation, problem.devices)
    return float(replicate(squared)) / problem.energy


@partial(compiled, static_argnums=(2, 3))
def _squared(
    params: Params, data: Chunk, parametrisation: Parametrisation, devices: int
) -> Float[Array, ""]:
    return squared_residual(parametrisation, params, data, devices)


def _step_on_host(state: State, problem: Problem, ridge: Ridge) -> State:
    """The same for a problem so small that NumPy solves it sooner than a program is compiled."""
    theta, damping, idle = (np.asarray(a) for a in (state.params.theta, state.damping, state.idle))
    same, last = (problem.host_rows, problem.energy, ridge), problem.host_points

    def step_one(start: int) -> Descent:
        at = theta[start], float(damping[start]), float(idle[start])
        found = step_on_host(*at, *same, last.get(start))
        last[start] = found.point
        return found

    if len(theta) == 1:
        ends = [step_one(0)]
    else:
        with ThreadPoolExecutor(min(len(theta), os.cpu_count() or 1)) as threads:
            ends = list(threads.map(step_one, range(len(theta))))
    points = [end.point for end in ends]
    return _state(
        DenseHeads(*(np.stack([p[field] for p in points]) for field in (0, 1))),  # type: ignore[arg-type]
        np.array([point.squared / problem.energy for point in points]),
        *(np.array([end[field] for end in ends]) for field in (1, 2, 3)),
    )


class _Point(NamedTuple):
    """The objective at a point, with what is linear eliminated."""

    params: Params
    objective: Float[Array, ""]  # |Y - F|^2 and penalties
    squared: Float[Array, ""]  # |Y - F|^2
    fit: LinearFit | None  # what eliminates W, where that is done


@partial(compiled, static_argnums=(7, 8, 9, 10))
def _step(
    state: State,
    data: Chunk,
    energy: Array,
    ridge: Ridge,
    span: Float[Array, "s q d"] | None,
    metric: Preconditioner | None,
    known: Known | None,
    parametrisation: Parametrisation,
    options: StepOptions,
    one_by_one: bool,
    devices: int,
) -> tuple[State, LastStep | None]:
    equations: _Reduced | _Joint
    penalty = Ridge(ridge.theta * energy, ridge.w * energy)
    if isinstance(parametrisation, Dense):
        if not options.direct:
            data = merge_chunks(data, state.params.theta.shape[1], devices)
        equations = _Reduced(parametrisation, data, options, penalty, span)
    else:
        equations = _Joint(parametrisation, data, options, penalty, energy, devices)

    def step_one(
        one: tuple[State, Preconditioner | None, LastStep | None],
    ) -> tuple[State, LastStep | None]:
        state, metric, last = one
        mine = None if known is None or last is None else known._replace(last=last)
        here = equations.evaluate(state.params, mine)
        # Damping in proportion to the residual's norm keeps convergence quadratic on data that can
        # be fitted exactly (Fan & Yuan 2005).
        level = jnp.sqrt(jnp.minimum(1.0, here.objective / energy))
        found = equations.solve(here, state.damping * level, level, metric, mine)
        trial = parametrisation.retract(jax.tree.map(jnp.add, here.params, found.step))
        there = equations.evaluate(trial, None)
        gain = here.objective - there.objective
        kept = jax.tree.map(lambda new, old: jnp.where(gain > 0, new, old), there, here)
        end = State(
            params=kept.params,
            loss=kept.squared / energy,
            damping=update_damping(state.damping, gain / found.predicted_reduction),
            idle=jnp.where(gain > IDLE * here.objective, 0.0, state.idle + 1),
            solved=found.solved,
        )
        return end, None if kept.fit is None else LastStep(kept.fit, found.metric)

    starts = state, metric, None if known is None else known.last
    return jax.lax.map(step_one, starts) if one_by_one else jax.vmap(step_one)(starts)


@dataclass(frozen=True)
class _Reduced:
    """Equations for Theta, W eliminated."""

    parametrisation: Dense
    data: Chunk
    options: StepOptions
    penalty: Ridge
    span: Float[Array, "s q d"] | None

    def evaluate(self, params: DenseHeads, known: Known | None) -> _Point:
        def eliminate() -> LinearFit:
            return self.parametrisation.eliminate(params, self.data, jnp.asarray(self.penalty.w))

        fit = (
            eliminate()
            if known is None
            else jax.lax.cond(known.fit, lambda: known.last.fit, eliminate)
        )
        objective = fit.loss + self.penalty.theta * jnp.sum(params.theta**2)
        squared = fit.loss - self.penalty.w * jnp.sum(fit.w**2)
        return _Point(DenseHeads(params.theta, fit.w), objective, squared, fit)

    def solve(
        self, here: _Point, damping: Array, level: Array, _: Any, known: Known | None
    ) -> Step:
        theta, max_steps = here.params.theta, self.options.cg_steps
        assert here.fit is not None
        if self.span is not None:  # there are only so many directions to search
            max_steps = 2 * theta.shape[0] * len(self.span)
        # As exact as the residual is small (Dembo, Eisenstat & Steihaug 1982). A quick look is less
        # so: cut short far from the end, as in a trust region, its steps lead down as far.
        tolerance = jnp.clip(level, 1e-3, 1e-1)
        if self.options.single and not self.options.direct:
            tolerance = jnp.clip(3 * level, 1e-3, 5e-1)
        with jax.default_matmul_precision("highest"):  # in single precision, of tensor cores too
            found = solve_reduced_normal_equations(
                theta,
                here.fit,
                self.data,
                ridge=jnp.asarray(self.penalty.theta),
                damping=damping,
                tolerance=tolerance,
                max_steps=max_steps,
                head_dim=self.parametrisation.architecture.head_dim,
                span=self.span,
                direct=self.options.direct,
                single=self.options.single,
                known=None if known is None else (known.metric, known.last.metric),
            )
        return found._replace(step=DenseHeads(found.step, jnp.zeros_like(here.params.w)))


@dataclass(frozen=True)
class _Joint:
    """Equations in all parameters."""

    parametrisation: Parametrisation
    data: Chunk
    options: StepOptions
    penalty: Ridge
    energy: Array
    devices: int

    def evaluate(self, params: Params, _: Known | None) -> _Point:
        squared = squared_residual(self.parametrisation, params, self.data, self.devices)
        weights = self.parametrisation.penalties(params, *self.penalty)
        squares = jax.tree.map(lambda weight, leaf: weight * jnp.sum(leaf**2), weights, params)
        return _Point(params, squared + sum(jax.tree.leaves(squares)), squared, None)

    def solve(
        self,
        here: _Point,
        damping: Array,
        level: Array,
        metric: Preconditioner | None,
        __: Known | None,
    ) -> Step:
        downhill, _ = descent_direction(self.parametrisation, here.params, self.data, self.devices)
        weights = self.parametrisation.penalties(here.params, *self.penalty)
        downhill = jax.tree.map(
            lambda slope, weight, leaf: slope - weight * leaf, downhill, weights, here.params
        )
        # Fast convergence at the least price: as exact as the residual is small.
        tightest = 1e-4 if self.options.single else 1e-10
        return solve_normal_equations(
            self.parametrisation,
            here.params,
            self.data,
            downhill,
            damping=_JOINT_DAMPING * damping * self.energy,
            penalty=weights,
            tolerance=jnp.clip(level, tightest, 1e-2),
            max_steps=self.options.cg_steps,
            single=self.options.single,
            devices=self.devices,
            inverse=None if metric is None else metric.prepare(),
        )
