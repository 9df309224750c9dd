"""Crossover: starts under a strong ridge inherit heads from one another (a memetic algorithm).

Near the counting limit sharp heads are decided while the ridge is still strong. There the minima of
random starts hold some true heads each, and a true head lowers the penalised objective whatever the
others are: a child of two starts that holds more of them is known by its objective alone. Children
are relaxed by Adam in single precision, which is cheap; slides from a stronger ridge, under which
there is one minimum only, lead all starts to the same wrong one.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.programs import in_float64
from mhalearn._runtime.types import Float64
from mhalearn.layer.dense import DenseHeads
from mhalearn.learners.newton.continuation import ridge_at
from mhalearn.learners.newton.starts import Scales
from mhalearn.run.checkpoint import generator_from, generator_words
from mhalearn.run.run import Run
from mhalearn.solvers.first_order import FirstOrderOptions, Schedule, anneal
from mhalearn.solvers.gauss_newton import Ridge
from mhalearn.solvers.scaled_problem import Problem

# Strength g of the ridge, and the norm of random heads over the prior's.
_STRENGTH, _SIZE = 2.0, 0.5
# Steps of random starts and of children, at a rate that falls in the second half.
_FIRST_STEPS, _STEPS, _RATE, _LAST_RATE = 3000, 1500, 0.05, 1e-3
# Heads a child inherits, at most; how often it gets random ones instead; and how often the better
# of its parents is the one it is like.
_MOST_HEADS, _ANEW, _BETTER = 3, 0.15, 0.7
# Objectives closer than this are those of one minimum, of which one start is enough.
_SAME = 2e-5
# Generations in which no start got better after which none will; and starts that go on.
_IDLE, KEPT = 40, 2


class Population(NamedTuple):
    """Starts, each relaxed under the ridge."""

    theta: Float64  # (s, m, q, d)
    w: Float64  # (s, p, e)
    objective: Float64  # (s,)
    generation: int
    idle: int  # generations since a start last got better
    rng: NDArray[np.uint64]


def cross_starts(
    theta: Float64,
    problem: Problem,
    run: Run,
    scales: Scales,
    generations: int,
    rng: np.random.Generator,
    *,
    stage: str,
) -> Float64:
    """The attention matrices (KEPT, m, q, d) of the lowest objective, of starts (s, m, q, d).

    Cost: 1500 forward and backward passes a child, half as many children a generation as starts.
    Trust: a heuristic.
    """
    ridge, checkpoint = ridge_at(_STRENGTH, scales, problem), run.checkpoint
    w = np.zeros((len(theta), theta.shape[1] * problem.d + problem.bias, problem.out_dim))
    nothing = Population(theta, w, np.zeros(len(theta)), 0, 0, generator_words(rng))
    now: Population | None = checkpoint.recall("crossover", like=nothing)
    if now is None:
        with checkpoint.within("relaxation"):
            sized = theta * (_SIZE * scales.theta)
            relaxed = _relax(sized, w, problem, run, ridge, _FIRST_STEPS, stage)
        now = Population(*relaxed, 0, 0, generator_words(rng))
        checkpoint.record("crossover", now)
    while now.generation < generations and now.idle < _IDLE and not run.is_over():
        name = f"{stage} {now.generation + 1}"
        with checkpoint.within(name):
            now = _breed(now, problem, run, ridge, scales, name)
        checkpoint.record("crossover", now)
    return now.theta[np.argsort(now.objective)[:KEPT]]


def _breed(
    now: Population, problem: Problem, run: Run, ridge: Ridge, scales: Scales, stage: str
) -> Population:
    """A child of every pair, which takes its first parent's place if it is better."""
    rng = generator_from(now.rng)
    order = rng.permutation(len(now.objective)).tolist()
    half = len(order) // 2
    pairs = [
        _rank(pair, now.objective, rng)
        for pair in zip(order[:half], order[half : 2 * half], strict=True)
    ]
    children = [_cross(now, *pair, scales, rng) for pair in pairs]
    theta, w = (np.stack(part) for part in zip(*children, strict=True))
    theta, w, objective = _relax(theta, w, problem, run, ridge, _STEPS, stage)
    grown = now._replace(
        theta=now.theta.copy(), w=now.w.copy(), objective=now.objective.copy(), idle=now.idle + 1
    )
    for child, (first, _) in enumerate(pairs):
        others = np.delete(grown.objective, first)
        new = np.min(np.abs(others - objective[child])) > _SAME
        if new and objective[child] < grown.objective[first]:
            grown.theta[first], grown.w[first] = theta[child], w[child]
            grown.objective[first] = objective[child]
            grown = grown._replace(idle=0)
    return grown._replace(generation=now.generation + 1, rng=generator_words(rng))


def _rank(pair: tuple[int, int], objective: Float64, rng: np.random.Generator) -> tuple[int, int]:
    """The pair, mostly with the better one first."""
    first, second = pair
    swap = objective[second] < objective[first] and rng.random() < _BETTER
    return (second, first) if swap else (first, second)


def _cross(
    now: Population, first: int, second: int, scales: Scales, rng: np.random.Generator
) -> tuple[Float64, Float64]:
    """The first start with some heads of the second, mostly such as it has none like."""
    theta, w = now.theta[first].copy(), now.w[first].copy()
    m, _, d = theta.shape
    count = int(rng.integers(1, min(_MOST_HEADS, m) + 1))
    places = rng.choice(m, count, replace=False)
    if rng.random() < _ANEW:
        heads = rng.normal(size=(count, *theta.shape[1:]))
        norms = np.linalg.norm(heads, axis=(1, 2), keepdims=True)
        theta[places] = heads / norms * (_SIZE * scales.theta)
        taken = None
    else:
        unlike = np.clip(1 - _likeness(now.theta[second], theta), 0.02, None)
        taken = rng.choice(m, count, replace=False, p=unlike / unlike.sum())
        theta[places] = now.theta[second][taken]
    for number, place in enumerate(places):
        rows = slice(place * d, (place + 1) * d)
        w[rows] = 0.0
        if taken is not None:
            w[rows] = now.w[second][taken[number] * d : (taken[number] + 1) * d]
    return theta, w


def _likeness(heads: Float64, others: Float64) -> Float64:
    """The largest cosine of each head with one of the others."""
    flat = [part.reshape(len(part), -1) for part in (heads, others)]
    ours, theirs = (part / (np.linalg.norm(part, axis=1, keepdims=True) + 1e-30) for part in flat)
    return np.asarray((ours @ theirs.T).max(axis=1))


@in_float64
def _relax(
    theta: Float64, w: Float64, problem: Problem, run: Run, ridge: Ridge, steps: int, stage: str
) -> tuple[Float64, Float64, Float64]:
    """Theta, W and the penalised objective of starts after so many steps."""
    rates = np.full(steps, _RATE)
    rates[steps // 2 :] = np.geomspace(_RATE, _LAST_RATE, steps - steps // 2)
    walk = anneal(
        DenseHeads(jnp.asarray(theta), jnp.asarray(w)),
        problem,
        run,
        Schedule(rates, np.ones(steps)),
        FirstOrderOptions(single=True),
        stage=stage,
        weights=DenseHeads(*ridge),  # type: ignore[arg-type]
    )
    theta, w = (np.asarray(part, np.float64) for part in walk.params)
    penalty = ridge.theta * np.sum(theta**2, axis=(1, 2, 3)) + ridge.w * np.sum(w**2, axis=(1, 2))
    objective = np.asarray(walk.loss, np.float64) + np.asarray(penalty)
    return theta, w, np.nan_to_num(objective, nan=np.inf)
