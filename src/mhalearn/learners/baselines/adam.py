"""Adam on all parameters at once, from several random starts: the common way to fit a layer."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from mhalearn._runtime.types import Array
from mhalearn.data import Examples
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.batches import Chunk
from mhalearn.learners.baselines.descent import Descent, DescentTask, Walk, descend_in_blocks
from mhalearn.learners.baselines.starts import best_of_starts
from mhalearn.learners.baselines.student import Student, student_rng, value_and_gradient
from mhalearn.learners.options import AdamOptions
from mhalearn.run.outcome import Candidate
from mhalearn.run.run import Run

_DEFAULTS = AdamOptions()
# The usual constants but for eps, which would otherwise stop progress once gradients are small.
_ADAM = optax.scale_by_adam(b1=0.9, b2=0.999, eps=1e-16)


def learn(
    examples: Examples,
    architecture: Architecture,
    run: Run,
    options: AdamOptions = _DEFAULTS,
) -> Candidate:
    """Fit a layer with Adam, the learning rate falling to zero along a half cosine.

    Each step sees all examples, or one of several equal mini-batches, in random order, where a
    gradient over all of them would need more than 128 MiB.
    Cost: about three forward passes over a batch a step. Trust: a heuristic.
    """
    schedule = _Schedule(options.learning_rate, options.steps, options.goal)

    def descend(task: DescentTask, student: Student, start: int) -> Descent:
        return _descend(task, student, start, schedule, run.seed)

    return best_of_starts(descend, examples, architecture, run, options.starts)


class _Schedule(NamedTuple):
    """An argument of the compiled program: another setting compiles nothing anew."""

    learning_rate: float
    steps: int
    goal: float


def _descend(
    task: DescentTask, student: Student, start: int, schedule: _Schedule, seed: int
) -> Descent:
    count = task.data.weight.shape[0]

    def advance(walk: Walk, until: Array) -> Walk:
        order = jnp.asarray(student_rng(seed, 3, start, int(walk.step)).permutation(count))
        return _advance(walk, until, order, schedule, task.data, task.energy)

    return descend_in_blocks(
        task,
        advance,
        student,
        _ADAM.init(student),
        stage="adam",
        start=start,
        steps=schedule.steps,
        goal=schedule.goal,
        least_gain=-math.inf,
    )


@jax.jit
def _advance(
    walk: Walk, until: Array, order: Array, schedule: _Schedule, data: Chunk, energy: Array
) -> Walk:
    count = order.shape[0]

    def going(walk: Walk) -> Array:
        return (walk.step < until) & (walk.loss > schedule.goal)

    def advance(walk: Walk) -> Walk:
        chosen = order[walk.step % count]
        batch = jax.tree.map(lambda leaf: leaf[chosen][None], data) if count > 1 else data
        loss, slope = value_and_gradient(walk.student, batch, energy / count)
        updates, memory = _ADAM.update(slope, walk.memory)
        progress = walk.step / schedule.steps
        rate = schedule.learning_rate * 0.5 * (1 + jnp.cos(jnp.pi * progress))
        student = jax.tree.map(lambda old, update: old - rate * update, walk.student, updates)
        return Walk(student, memory, walk.step + 1, loss)

    return jax.lax.while_loop(going, advance, walk)
