"""The squared error of a layer as a function of one vector, for optimisers of any library."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from mhalearn._runtime.types import Array, Float64
from mhalearn.data import Examples
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.batches import Chunk
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.parametrisation import Parametrisation, Params
from mhalearn.learners.baselines.descent import Descent, DescentTask
from mhalearn.learners.baselines.starts import best_of_starts
from mhalearn.learners.baselines.student import value_and_gradient
from mhalearn.run.outcome import Candidate
from mhalearn.run.run import Run

if TYPE_CHECKING:
    from mhalearn.learners.own_optimiser import OwnOptimiser

# Relative squared error at which nothing is left to gain but rounding.
GOAL = 1e-20


class Objective:
    """The relative squared error |F - Y|^2 / |Y|^2 over the training examples.

    start: a random vector of all parameters, in units in which tokens and labels have size one.
    goal: an error at which to stop.
    Cost: a forward pass for `loss` and `residuals`, about three for a gradient.
    """

    def __init__(self, task: DescentTask, student: Params, start: int) -> None:
        self._task = task
        self._number = start
        flat, self._unflatten = ravel_pytree(student)
        self._calls = 0
        self._told = math.inf
        self.start: Float64 = np.asarray(flat)
        self.goal = GOAL

    def loss(self, flat: Any) -> float:
        """At a vector; it is told to the run."""
        return self._tell(flat, self._task.loss(self._params(flat)))

    def loss_and_gradient(self, flat: Any) -> tuple[float, Float64]:
        """Both at a vector, as SciPy's optimisers take them; the loss is told to the run."""
        task = self._task
        params = self._params(flat)
        static = task.problem.parametrisation
        loss, gradient = _value_and_gradient(params, task.data, task.energy, static)
        return self._tell(flat, float(loss)), np.asarray(ravel_pytree(gradient)[0])

    def residuals(self, flat: Any) -> Array:
        """All of them, in one vector whose squares sum to the loss; traceable, so that `jax.jvp`,
        `jax.vjp` and `jax.jit` apply."""
        task = self._task
        return _residuals(self._params(flat), task.data, task.energy, task.problem.parametrisation)

    def is_over(self) -> bool:
        """Whether time is up: return what there is."""
        return self._task.run.is_over()

    def layer(self, flat: Any) -> AttentionLayer:
        """The layer of a vector, in the units of the examples."""
        return self._task.problem.to_layer(self._params(flat))

    def _params(self, flat: Any) -> Params:
        return self._unflatten(jnp.asarray(flat, jnp.float64))

    def _tell(self, flat: Any, loss: float) -> float:
        self._calls += 1
        # Not every evaluation: a listener needs progress, and an optimiser its time.
        if loss < 0.9 * self._told or loss <= self.goal < self._told:
            self._told = loss
            at_hand = partial(self.layer, np.array(flat))
            run = self._task.run
            run.emit("own optimiser", self._calls, loss, at_hand=at_hand, start=self._number)
        return loss


@partial(jax.jit, static_argnums=3)
def _value_and_gradient(
    params: Params, data: Chunk, energy: Array, kind: Parametrisation
) -> tuple[Array, Params]:
    return value_and_gradient(kind, params, data, energy)


@partial(jax.jit, static_argnums=3)
def _residuals(params: Params, data: Chunk, energy: Array, kind: Parametrisation) -> Array:
    def left(chunk: Chunk) -> Array:
        return kind.outputs(params, chunk) - chunk.labels * chunk.weight[..., None]

    return jax.lax.map(left, data).ravel() / jnp.sqrt(energy)


def descend_from_starts(
    learner: OwnOptimiser,
    examples: Examples,
    architecture: Architecture,
    run: Run,
    starts: int,
) -> Candidate:
    """Let the function descend from random starts, and keep the best on held-out examples."""

    def descend(task: DescentTask, student: Params, start: int) -> Descent:
        objective = Objective(task, student, start)
        flat = learner.ends_at(objective)
        loss = objective.loss(flat)
        if not math.isfinite(loss):
            return Descent(student, task.loss(student), False)
        return Descent(objective._params(flat), loss, True)

    return best_of_starts(descend, examples, architecture, run, starts)
