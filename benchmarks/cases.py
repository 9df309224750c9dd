"""A case, and what a method makes of it: a random teacher, its examples, a clock, starts anew."""

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from threadpoolctl import threadpool_limits

import mhalearn as mha
from benchmarks.ledger import Record, finite
from mhalearn._runtime.programs import float64
from mhalearn.layer.attention import residual
from mhalearn.layer.batches import Chunk
from mhalearn.layer.dense import Dense
from mhalearn.learners import Learner
from mhalearn.learners.baselines.student import random_student, student_rng
from mhalearn.learners.options import find_options
from mhalearn.run.run import Run
from mhalearn.solvers.polish import relative_error
from mhalearn.solvers.scaled_problem import Problem, make_problem

GOAL = 1e-20  # relative squared training error


class Case(NamedTuple):
    """A random teacher and examples of it."""

    m: int
    d: int
    k: int
    n: int
    scale: float

    def __str__(self) -> str:
        return f"({self.m},{self.d},{self.k}) N={self.n} scale {self.scale:g}"

    @property
    def counting_limit(self) -> float:
        """Examples below which no method could determine the layer."""
        return mha.Architecture(self.d, self.m).counting_limit(self.k)

    def draw(self, seed: int) -> tuple[mha.AttentionLayer, np.ndarray, np.ndarray]:
        layer = mha.random_layer(n_heads=self.m, d=self.d, scale=self.scale, seed=seed)
        x = mha.sample_inputs("boolean", self.n, self.k, self.d, seed=seed)
        return layer, x, layer(x)


def case_at(ratio: float, shape: tuple[int, int, int], scale: float = 2.0) -> Case:
    """The case with `ratio` times the counting limit of examples, rounded up."""
    case = Case(*shape, 0, scale)
    return case._replace(n=math.ceil(ratio * case.counting_limit - 1e-9))


class Arrival(NamedTuple):
    """When a method got to the goal, if it did, and what it found."""

    best: float  # the lowest relative squared training error seen
    reached: float | None  # seconds to the goal
    total: float  # seconds until the method returned
    starts: int
    layer: mha.AttentionLayer | None = None  # the one with that error
    worked: float | None = None  # seconds of the process to the goal, which no other work lengthens

    def record(self) -> Record:
        found = self._asdict()
        del found["layer"]
        return found | {"best": finite(self.best)}


Method = Callable[[Case, int, float], Arrival]  # case, seed, seconds


def by_learner(
    learner: Learner, case: Case, seed: int, limit: float, options: Any = None
) -> Arrival:
    """Time a learner by its trace; start again from another seed if need be.

    An arrival counts only if the layer that came back explains all examples, up to a factor for
    those that were held out.
    """
    _, x, y = case.draw(seed)
    architecture, options = mha.Examples(x, y).architecture(case.m), find_options(learner, options)
    starts = 0
    reached: list[tuple[float, float]] = []
    worked: list[float] = []  # seconds of the process, at the events that reach the goal

    def hear(event: mha.Event) -> None:
        if event.loss <= GOAL:
            worked.append(time.process_time() - began)

    with threadpool_limits(1, user_api="blas"):
        began, trace = time.process_time(), Run(limit, hear)
        examples = mha.Examples(x, y)
        while not reached and not trace.is_over():
            trace.seed = seed + 10_000 * starts
            layer = learner.learn(examples, architecture, trace, options).layer
            starts += 1
            if relative_error(layer, examples) <= 100 * GOAL:
                there = (event for event in trace.events if event.loss <= GOAL)
                # A sketch is a fit of some of the examples; the choice after it is by others.
                reached = [
                    (event.seconds, cpu)
                    for event, cpu in zip(there, worked, strict=True)
                    if not event.stage.startswith("subsample")
                ]
    total = trace.seconds
    losses = (event.loss for event in trace.events if math.isfinite(event.loss))
    best = min(losses, default=math.inf)
    arrived, cpu = min(reached, default=(None, None))
    return Arrival(best, arrived, total, starts, trace.best, cpu)


class Start(NamedTuple):
    """A random start for a peer, in the units all learners use."""

    problem: Problem
    data: Chunk  # one chunk
    energy: jax.Array
    flat: np.ndarray  # theta, then w


class End(NamedTuple):
    """Where a start led."""

    loss: float
    flat: np.ndarray


def ended(loss: float, flat: Any) -> End:
    return End(loss if math.isfinite(loss) else math.inf, np.asarray(flat))


Descend = Callable[[Start, float], End]  # from a start, until the clock says so


class Starts:
    """Random starts on the same examples, one after the other, and the way back to a layer."""

    def __init__(self, examples: mha.Examples, m: int, seed: int, causal: bool = False) -> None:
        self.m, self.seed = m, seed
        self.problem = make_problem(examples, Dense(examples.architecture(m, causal=causal)))
        self.data = jax.tree.map(lambda leaf: jnp.concatenate(list(leaf)), self.problem.data)

    def draw(self, number: int) -> Start:
        student = random_student(self.problem, student_rng(self.seed, 1, number))
        flat = np.concatenate([np.ravel(student.theta), np.ravel(student.w)])
        return Start(self.problem, self.data, jnp.asarray(self.problem.energy), flat)

    def layer(self, end: End) -> mha.AttentionLayer:
        theta, w = unflatten(jnp.asarray(end.flat), self.data)
        return self.problem.layer(np.asarray(theta), np.asarray(w))


def descend_again(
    descend: Descend,
    examples: mha.Examples,
    m: int,
    seed: int,
    limit: float,
    threads: int | None = 1,
    causal: bool = False,
) -> Arrival:
    """Descend from one random start after the other until the goal or the time limit."""
    best, count = End(math.inf, np.zeros(0)), 0
    with float64(), threadpool_limits(threads, user_api="blas"):
        began, worked = time.perf_counter(), time.process_time()
        starts = Starts(examples, m, seed, causal)
        while best.loss > GOAL and time.perf_counter() - began < limit:
            end = descend(starts.draw(count), began + limit)
            best = end if end.loss < best.loss else best
            count += 1
        total, worked = time.perf_counter() - began, time.process_time() - worked
        layer = starts.layer(best) if best.flat.size else None
    there = best.loss <= GOAL
    reached = (total, worked) if there else (None, None)
    return Arrival(best.loss, reached[0], total, count, layer, reached[1])


def restarts(
    descend: Descend, case: Case, seed: int, limit: float, threads: int | None = 1
) -> Arrival:
    _, x, y = case.draw(seed)
    return descend_again(descend, mha.Examples(x, y), case.m, seed, limit, threads)


def with_restarts(descend: Descend, threads: int | None = 1) -> Method:
    return partial(restarts, descend, threads=threads)


def unflatten(flat: jax.Array, data: Chunk) -> tuple[jax.Array, jax.Array]:
    """Heads are as many as the unknowns allow: m d (d + e)."""
    d, e = data.tokens.shape[-1], data.labels.shape[-1]
    m = flat.shape[0] // (d * (d + e))
    return flat[: m * d * d].reshape(m, d, d), flat[m * d * d :].reshape(m * d, e)


@jax.jit
def residuals(flat: jax.Array, data: Chunk, energy: jax.Array) -> jax.Array:
    """Their squares sum to the relative training error."""
    return -residual(*unflatten(flat, data), data).ravel() / jnp.sqrt(energy)
