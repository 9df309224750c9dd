"""L-BFGS on all parameters at once, from several random starts."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mhalearn._runtime.devices import replicate
from mhalearn._runtime.types import Array
from mhalearn.data import Examples
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.batches import Chunk
from mhalearn.layer.parametrisation import Parametrisation, Params
from mhalearn.learners.baselines.descent import Descent, DescentTask
from mhalearn.learners.baselines.starts import best_of_starts
from mhalearn.learners.baselines.student import value_and_gradient
from mhalearn.learners.options import LbfgsOptions
from mhalearn.run.outcome import Candidate
from mhalearn.run.run import Run

_DEFAULTS = LbfgsOptions()
# A block of steps that takes off less than this part of the loss has come to rounding, or to the
# bottom of what cannot be fitted exactly.
_LEAST_GAIN = 1e-6


def learn_lbfgs(
    examples: Examples,
    architecture: Architecture,
    run: Run,
    options: LbfgsOptions = _DEFAULTS,
) -> Candidate:
    """Fit a layer with optax's L-BFGS and its line search.

    Each step sees all examples. A start ends after its steps, at its goal, or when progress ends.
    (SciPy's L-BFGS-B took about twice the time for layers of d = 8, where calling Python once an
    evaluation shows, and about the same for d = 16.)
    Cost: a little over three forward passes a step. Trust: a heuristic.
    """

    def descend(task: DescentTask, student: Params, start: int) -> Descent:
        return _descend(task, student, start, options)

    return best_of_starts(descend, examples, architecture, run, options.starts)


class Iterate(NamedTuple):
    """L-BFGS on its way."""

    student: Params
    memory: Any  # the gradient differences
    step: Array
    loss: Array  # before the last step


def _descend(task: DescentTask, student: Params, start: int, options: LbfgsOptions) -> Descent:
    """Blocks of compiled steps, until the steps, the goal, the clock or a divergence ends it."""
    checkpoint, run, memory = task.run.checkpoint, task.run, options.memory
    # Of leaves without names: optax looks for its own "value" and "grad" in all it is given.
    first = optax.lbfgs(memory_size=memory).init(jax.tree.leaves(student))
    now = Iterate(student, first, jnp.asarray(0), jnp.asarray(math.inf))
    loss = task.loss(student)
    now, loss = checkpoint.recall("walk", like=(now, loss)) or (now, loss)
    student, step = now.student, int(now.step)
    while step < options.steps and loss > options.goal and not run.is_over():
        until, goal = min(step + task.block, options.steps), jnp.asarray(options.goal)
        begun = now._replace(loss=jnp.asarray(math.inf))
        static = (task.problem.parametrisation, memory)
        now = replicate(_advance(begun, jnp.asarray(until), goal, task.data, task.energy, *static))
        latest, step = task.loss(now.student), int(now.step)
        at_hand = partial(task.problem.to_layer, now.student)
        run.emit("lbfgs", step, latest, at_hand=at_hand, start=start)
        if not math.isfinite(latest):
            return Descent(student, loss, False)
        gain = 1 - latest / loss
        student, loss = now.student, latest
        task.keep(student, loss)
        if gain < _LEAST_GAIN:
            break
        checkpoint.record("walk", (now, loss))
    return Descent(student, loss, True)


@partial(jax.jit, static_argnums=(5, 6))
def _advance(
    now: Iterate,
    until: Array,
    goal: Array,
    data: Chunk,
    energy: Array,
    kind: Parametrisation,
    memory: int,
) -> Iterate:
    optimiser = optax.lbfgs(memory_size=memory)
    structure = jax.tree.structure(now.student)

    @jax.custom_vjp
    def objective(leaves: list[Array]) -> Array:
        return with_gradient(leaves)[0]

    # Differentiated chunk by chunk: optax would differentiate through the sum and keep all of them.
    def with_gradient(leaves: list[Array]) -> tuple[Array, list[Array]]:
        student = jax.tree.unflatten(structure, leaves)
        loss, gradient = value_and_gradient(kind, student, data, energy)
        return loss, jax.tree.leaves(gradient)

    def scaled(gradient: list[Array], factor: Array) -> tuple[list[Array]]:
        return ([factor * leaf for leaf in gradient],)

    objective.defvjp(with_gradient, scaled)
    value_and_grad = optax.value_and_grad_from_state(objective)

    def going(now: Iterate) -> Array:
        return (now.step < until) & (now.loss > goal)

    def advance(now: Iterate) -> Iterate:
        leaves = jax.tree.leaves(now.student)
        loss, slope = value_and_grad(leaves, state=now.memory)
        updates, found = optimiser.update(
            slope, now.memory, leaves, value=loss, grad=slope, value_fn=objective
        )
        student = jax.tree.unflatten(structure, optax.apply_updates(leaves, updates))
        return Iterate(student, found, now.step + 1, loss)

    return jax.lax.while_loop(going, advance, now)
