"""The loop around an optimiser: blocks of compiled steps, and a look at the clock between them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from mhalearn._types import Array
from mhalearn.attention import Chunk
from mhalearn.baselines.student import Student, expand, relative_loss
from mhalearn.devices import known
from mhalearn.layer import AttentionLayer
from mhalearn.outcome import Trace
from mhalearn.problem import Problem

# Multiplications of forward passes between two looks at the clock, some hundredths of a second, and
# the fewest and most steps. Not by the clock itself: where blocks end decides where descent does.
_WORK = 2e8
_LEAST_BLOCK, _MOST_BLOCK = 8, 1024


@dataclass(frozen=True)
class Run:
    """What every start of a run shares."""

    problem: Problem
    data: Chunk  # the problem's examples, cut for gradients
    energy: Array
    trace: Trace

    def layer(self, student: Student) -> AttentionLayer:
        theta, w = expand(student)
        return self.problem.layer(np.asarray(theta), np.asarray(w))

    def keep(self, student: Student, loss: float) -> None:
        """Give the trace what is known so far, not more often than is worth its cost."""
        if loss < 0.5 * self.trace.best_loss:
            self.trace.keep(self.layer(student), loss)


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
    run: Run,
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
    journal = run.trace.journal
    walk = Walk(student, memory, jnp.asarray(0), jnp.asarray(math.inf))
    loss = float(relative_loss(student, run.data, run.energy))
    walk, loss = journal.recall("walk", like=(walk, loss)) or (walk, loss)
    student, step, block = walk.student, int(walk.step), _block(run, expand(student)[0].shape[0])
    while step < steps and loss > goal and not run.trace.expired:
        until = jnp.asarray(min(step + block, steps))
        walk = known(advance(walk._replace(loss=jnp.asarray(math.inf)), until))
        latest, step = float(relative_loss(walk.student, run.data, run.energy)), int(walk.step)
        at_hand = partial(run.layer, walk.student)
        run.trace.emit(stage, step, latest, at_hand=at_hand, start=start)
        if not math.isfinite(latest):
            return Descent(student, loss, False)
        gain = 1 - latest / loss
        student, loss = walk.student, latest
        run.keep(student, loss)
        if gain < least_gain:
            break
        journal.record("walk", (walk, loss))
    return Descent(student, loss, True)


def _block(run: Run, n_heads: int) -> int:
    """Steps between two looks at the clock."""
    k, d, e = run.problem.k, run.problem.d, run.problem.out_dim
    work = run.data.weight.size * n_heads * d * (d + k + e)
    return int(2 ** np.floor(np.log2(np.clip(_WORK / work, _LEAST_BLOCK, _MOST_BLOCK))))
