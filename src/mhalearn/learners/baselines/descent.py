"""The loop around an optimiser: blocks of compiled steps, and a look at the clock between them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from mhalearn._runtime.devices import replicate
from mhalearn._runtime.types import Array
from mhalearn.layer.batches import Chunk
from mhalearn.layer.layer import AttentionLayer
from mhalearn.learners.baselines.student import Student, expand, relative_loss
from mhalearn.run.run import Run
from mhalearn.solvers.scaled_problem import Problem

# Multiplications of forward passes between two looks at the clock, some hundredths of a second, and
# the fewest and most steps. Not by the clock itself: where blocks end decides where descent does.
_WORK = 2e8
_LEAST_BLOCK, _MOST_BLOCK = 8, 1024


@dataclass(frozen=True)
class DescentTask:
    """What every start of a task shares."""

    problem: Problem
    data: Chunk  # the problem's examples, cut for gradients
    energy: Array
    run: Run

    def layer(self, student: Student) -> AttentionLayer:
        theta, w = expand(student)
        return self.problem.layer(np.asarray(theta), np.asarray(w))

    def keep(self, student: Student, loss: float) -> None:
        """Give the run what is known so far, not more often than is worth its cost."""
        if loss < 0.5 * self.run.best_loss:
            self.run.keep(self.layer(student), loss)


class Descent(NamedTuple):
    """Where a start ended: its last finite student, and whether it stayed finite."""

    student: Student
    loss: float
    finite: bool


class Walk(NamedTuple):
    """An optimiser on its way."""

    student: Student
    memory: Any  # the optimiser's own
    step: Array
    loss: Array  # of the batch that the last step saw, before it


def descend_in_blocks(
    task: DescentTask,
    advance: Callable[[Walk, Array], Walk],
    student: Student,
    memory: Any,
    *,
    stage: str,
    start: int,
    steps: int,
    goal: float,
    least_gain: float,
) -> Descent:
    """Blocks of compiled steps, until the steps, the goal, the clock or a divergence ends it.

    advance(walk, until) makes steps up to number `until`, or to the goal, a relative training
    error. least_gain: the fraction of the loss a block must take off for another to follow.
    """
    checkpoint = task.run.checkpoint
    walk = Walk(student, memory, jnp.asarray(0), jnp.asarray(math.inf))
    loss = float(relative_loss(student, task.data, task.energy))
    walk, loss = checkpoint.recall("walk", like=(walk, loss)) or (walk, loss)
    student, step, block = walk.student, int(walk.step), _block(task, expand(student)[0].shape[0])
    while step < steps and loss > goal and not task.run.is_over():
        until = jnp.asarray(min(step + block, steps))
        walk = replicate(advance(walk._replace(loss=jnp.asarray(math.inf)), until))
        latest, step = float(relative_loss(walk.student, task.data, task.energy)), int(walk.step)
        at_hand = partial(task.layer, walk.student)
        task.run.emit(stage, step, latest, at_hand=at_hand, start=start)
        if not math.isfinite(latest):
            return Descent(student, loss, False)
        gain = 1 - latest / loss
        student, loss = walk.student, latest
        task.keep(student, loss)
        if gain < least_gain:
            break
        checkpoint.record("walk", (walk, loss))
    return Descent(student, loss, True)


def _block(task: DescentTask, n_heads: int) -> int:
    """Steps between two looks at the clock."""
    k, d, e = task.problem.k, task.problem.d, task.problem.out_dim
    work = task.data.weight.size * n_heads * d * (d + k + e)
    return int(2 ** np.floor(np.log2(np.clip(_WORK / work, _LEAST_BLOCK, _MOST_BLOCK))))
