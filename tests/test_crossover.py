"""Starts that inherit heads from one another under a strong ridge."""

import numpy as np
import pytest

import mhalearn as mha
from mhalearn.layer.dense import Dense
from mhalearn.learners.newton import crossover
from mhalearn.learners.newton.crossover import KEPT, Population, cross_starts
from mhalearn.learners.newton.learner import learn_newton
from mhalearn.learners.newton.starts import Scales, random_starts
from mhalearn.learners.options import NewtonOptions, Round
from mhalearn.run.checkpoint import generator_words
from mhalearn.run.run import Run
from mhalearn.solvers.scaled_problem import make_problem

SCALES = Scales(theta=4.0, w=0.3)


def make(n_heads=3, d=4, n=20):
    layer = mha.random_layer(n_heads=n_heads, d=d, scale=4.0, seed=0)
    x = mha.sample_inputs("boolean", n, 4, d, seed=1)
    examples = mha.Examples(x, layer(x))
    return make_problem(examples, Dense(examples.architecture(n_heads)))


def test_no_start_gets_worse_and_the_lowest_go_on(monkeypatch):
    for name, steps in (("_FIRST_STEPS", 40), ("_STEPS", 40)):
        monkeypatch.setattr(crossover, name, steps)
    seen, breed = [], crossover._breed

    def watch(now, *rest):
        seen.append(now)
        seen.append(breed(now, *rest))
        return seen[-1]

    monkeypatch.setattr(crossover, "_breed", watch)
    problem, rng = make(), np.random.default_rng(0)
    theta = random_starts(problem, 6, 0, 0)
    best = cross_starts(theta, problem, Run(), SCALES, 5, rng, stage="crossover")
    for before, after in zip(seen[::2], seen[1::2], strict=True):
        assert np.all(after.objective <= before.objective)
    last = seen[-1]
    assert last.objective.min() < seen[0].objective.min()
    assert best.shape == (KEPT, 3, 4, 4)
    np.testing.assert_array_equal(best[0], last.theta[np.argmin(last.objective)])


@pytest.mark.parametrize("seed", range(8))
def test_a_child_has_heads_of_both_parents_with_what_they_write(seed):
    rng = np.random.default_rng(seed)
    theta, w = rng.normal(size=(2, 5, 3, 3)), rng.normal(size=(2, 15, 3))
    now = Population(theta, w, np.array([1.0, 2.0]), 0, 0, generator_words(rng))
    child, written = crossover._cross(now, 0, 1, SCALES, rng)
    sources = []
    for head, rows in zip(child, written.reshape(5, 3, 3), strict=True):
        same = [
            parent
            for parent in (0, 1)
            for other, its in zip(theta[parent], w[parent].reshape(5, 3, 3), strict=True)
            if np.array_equal(head, other) and np.array_equal(rows, its)
        ]
        anew = not rows.any() and np.isclose(np.linalg.norm(head), 0.5 * SCALES.theta)
        assert same or anew
        sources.append(same[0] if same else None)
    assert 2 <= sources.count(0) < 5


def test_a_round_may_begin_with_it(monkeypatch):
    for name, steps in (("_FIRST_STEPS", 40), ("_STEPS", 40)):
        monkeypatch.setattr(crossover, name, steps)
    layer = mha.random_layer(n_heads=2, d=4, seed=0)
    x = mha.sample_inputs("boolean", 12, 4, 4, seed=1)
    rounds = (Round(4, 10, 1e-3, release_steps=4, crossovers=2),)
    run, examples = Run(30.0), mha.Examples(x, layer(x))
    learn_newton(examples, examples.architecture(2), run, NewtonOptions(scarce=rounds))
    stages = {event.stage for event in run.events}
    assert {"round 1, crossover 1", "round 1, crossover 2", "round 1"} <= stages
