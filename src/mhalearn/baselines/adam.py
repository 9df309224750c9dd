"""Adam on all parameters at once, from several random starts: the common way to fit a layer."""

import math
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mhalearn._types import Array
from mhalearn.attention import Chunk
from mhalearn.baselines import (
    Descent,
    Run,
    Student,
    best_of_starts,
    relative_loss,
    value_and_gradient,
)
from mhalearn.examples import Examples
from mhalearn.outcome import Solution, Trace

# The usual constants but for eps, which would otherwise stop progress once gradients are small.
_ADAM = optax.scale_by_adam(b1=0.9, b2=0.999, eps=1e-16)
_SECONDS = 0.05  # of compiled steps between two looks at the clock, and the fewest of them
_LEAST_BLOCK = 8


def learn(
    examples: Examples,
    *,
    n_heads: int,
    bias: bool,
    causal: bool,
    head_dim: int | None,
    seed: int,
    trace: Trace,
    learning_rate: float = 0.03,
    steps: int = 10_000,
    starts: int = 3,
    goal: float = 1e-20,
) -> Solution:
    """Fit a layer with Adam, the learning rate falling to zero along a half cosine.

    Each step sees all examples, or one of several equal mini-batches, in random order, where a
    gradient over all of them would need more than 128 MiB. A start ends after `steps`, or at a
    relative training error of `goal`; with exact labels few need all their steps. (Below 1e-20
    Adam's steps turn unstable until the rate has fallen: little accuracy for many steps.)
    The defaults were tuned at ten times the counting limit on teachers (heads, d, k) = (2, 8, 8),
    (4, 8, 8) and (3, 16, 8) with ||Theta|| = 2 and 6: rates of 0.01 and 0.1 are slower or lose
    heads, and 3000 steps are too few at norm 6.
    Cost: about three forward passes over a batch a step. Trust: a heuristic.
    """
    settings = {"method": "adam", "learning_rate": learning_rate, "steps": steps, "goal": goal}
    schedule = _Schedule(learning_rate, steps, goal)

    def descend(run: Run, student: Student, start: int) -> Descent:
        return _descend(run, student, start, schedule, np.random.default_rng([seed, start]))

    return best_of_starts(
        descend,
        examples,
        n_heads=n_heads,
        bias=bias,
        causal=causal,
        head_dim=head_dim,
        seed=seed,
        starts=starts,
        goal=goal,
        trace=trace,
        settings=settings,
    )


class _Schedule(NamedTuple):
    """An argument of the compiled program: another setting compiles nothing anew."""

    learning_rate: float
    steps: int
    goal: float


class _State(NamedTuple):
    student: Student
    moments: optax.OptState
    step: Array
    loss: Array  # of the last batch, before its step


def _descend(
    run: Run, student: Student, start: int, schedule: _Schedule, rng: np.random.Generator
) -> Descent:
    """Blocks of compiled steps, until the schedule, the goal, the clock or a divergence ends it."""
    count = run.data.weight.shape[0]
    state = _State(student, _ADAM.init(student), jnp.asarray(0), jnp.asarray(math.inf))
    good, loss = student, float(relative_loss(student, run.data, run.energy))
    step, block = 0, _LEAST_BLOCK
    while step < schedule.steps and loss > schedule.goal and not run.trace.expired:
        began = time.perf_counter()
        order = jnp.asarray(rng.permutation(count))
        until = min(step + block, schedule.steps)
        state = state._replace(loss=jnp.asarray(math.inf))
        state = _advance(state, jnp.asarray(until), order, schedule, run.data, run.energy)
        latest, step = float(relative_loss(state.student, run.data, run.energy)), int(state.step)
        run.trace.emit("adam", step, latest, start=start)
        if not math.isfinite(latest):
            return Descent(good, loss, False)
        good, loss = state.student, latest
        run.keep(good, loss)
        quick = time.perf_counter() - began < _SECONDS
        block = 2 * block if quick else max(_LEAST_BLOCK, block // 2)
    return Descent(good, loss, True)


@jax.jit
def _advance(
    state: _State, until: Array, order: Array, schedule: _Schedule, data: Chunk, energy: Array
) -> _State:
    """Steps up to number `until`, or to a batch at the goal, or to a loss that is no number."""
    count = order.shape[0]

    def going(state: _State) -> Array:
        return (state.step < until) & (state.loss > schedule.goal)

    def advance(state: _State) -> _State:
        chosen = order[state.step % count]
        batch = jax.tree.map(lambda leaf: leaf[chosen][None], data) if count > 1 else data
        loss, slope = value_and_gradient(state.student, batch, energy / count)
        updates, moments = _ADAM.update(slope, state.moments)
        progress = state.step / schedule.steps
        rate = schedule.learning_rate * 0.5 * (1 + jnp.cos(jnp.pi * progress))
        student = jax.tree.map(lambda old, update: old - rate * update, state.student, updates)
        return _State(student, moments, state.step + 1, loss)

    return jax.lax.while_loop(going, advance, state)
