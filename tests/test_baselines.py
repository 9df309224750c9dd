"""The baselines fit what they should, say honestly how a run ended, and keep to their clocks."""

import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhalearn._runtime.programs import float64
from mhalearn.data import Examples
from mhalearn.data.inputs import sample_inputs
from mhalearn.layer.dense import Dense
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.random_layers import random_layer
from mhalearn.learners import find_learner
from mhalearn.learners.baselines import linear as linear_module
from mhalearn.learners.baselines.descent import DescentTask
from mhalearn.learners.baselines.starts import hold_out
from mhalearn.learners.baselines.student import (
    batches,
    random_student,
    relative_loss,
    student_rng,
    value_and_gradient,
)
from mhalearn.run.outcome import Outcome
from mhalearn.run.run import Run
from mhalearn.solvers.polish import relative_error
from mhalearn.solvers.scaled_problem import make_problem

LEARNERS = ("adam", "lbfgs", "linear")


def teach(*, heads=2, d=6, k=5, n=120, lengths=None, noise=0.0, **teacher):
    layer = random_layer(n_heads=heads, d=d, seed=11, **teacher)
    x = sample_inputs("boolean", n, k, d, seed=12)
    y = layer(x, lengths)
    if noise:
        y = y + noise * np.random.default_rng(13).standard_normal(y.shape)
    return Examples(x, y, lengths)


def fresh(examples, teacher, **options):
    x = sample_inputs("boolean", 200, examples.k, examples.d, seed=99)
    return Examples(x, random_layer(d=examples.d, seed=11, **teacher)(x), **options)


CLASS = ("n_heads", "bias", "causal", "head_dim")


def run(method, examples, *, max_seconds=None, **settings):
    """Learn layers of the class that is set; what else is set are options."""
    learner, trace = find_learner(method), Run(max_seconds)
    asked = {"n_heads": 2} | {name: settings.pop(name) for name in CLASS if name in settings}
    options = learner.options(**settings)
    candidate = learner.learn(examples, examples.architecture(**asked), trace, options)
    assert candidate.outcome is not Outcome.RECOVERED
    assert trace.best is not None
    return Ended(candidate.layer, candidate.outcome, candidate.reason, trace.events)


class Ended(NamedTuple):
    """What a learner returned, and what it told."""

    layer: AttentionLayer
    outcome: Outcome
    reason: str
    trace: list


# The errors a practitioner may expect on fresh examples, squared and relative.
EXPECTED = {"adam": 1e-17, "lbfgs": 1e-20, "linear": 0.1}


@pytest.mark.parametrize("method", LEARNERS)
def test_fits_a_small_layer_and_generalises(method):
    solution = run(method, teach())
    assert solution.outcome is Outcome.FITTED
    assert relative_error(solution.layer, fresh(teach(), {"n_heads": 2})) < EXPECTED[method]
    assert min(event.loss for event in solution.trace if event.loss > 0) < 0.2


# L-BFGS shares its student with Adam, so it need not be compiled for these as well.
@pytest.mark.parametrize("method", ["adam", "linear"])
def test_fits_biases_causal_masks_and_lengths_together(method):
    lengths = np.random.default_rng(0).integers(2, 6, 120)
    examples = teach(
        lengths=lengths, scale=1.0, key_vector=True, out_bias=True, causal=True, heads=2
    )
    solution = run(method, examples, bias=True, causal=True)
    assert solution.outcome is Outcome.FITTED
    assert solution.layer.causal
    assert solution.layer.key_vector is not None
    assert solution.layer.out_bias is not None
    assert relative_error(solution.layer, examples) < max(EXPECTED[method], 1e-17)


@pytest.mark.parametrize("method", ["adam", "linear"])
def test_head_dim_bounds_the_rank(method):
    solution = run(method, teach(scale=1.0, rank=2), head_dim=2)
    values = np.linalg.svd(solution.layer.theta, compute_uv=False)
    assert np.all(values[:, 2:] < 1e-12 * values[:, :1])
    assert solution.outcome is Outcome.FITTED


@pytest.mark.parametrize("method", LEARNERS)
def test_same_seed_same_layer(method):
    first, second = (run(method, teach(), starts=1).layer for _ in range(2))
    np.testing.assert_array_equal(first.theta, second.theta)
    np.testing.assert_array_equal(first.w, second.w)


@pytest.mark.parametrize("method", LEARNERS)
def test_stops_at_the_time_limit_with_a_layer(method):
    examples = teach(noise=0.3)  # nothing to reach: every start would run to its end
    brief = {"sweeps" if method == "linear" else "steps": 8}
    run(method, examples, starts=1, **brief)  # compiles
    began = time.process_time()
    solution = run(method, examples, max_seconds=0.2, starts=10**6)
    assert time.process_time() - began < 2.0
    assert solution.outcome is Outcome.TIME_LIMIT
    assert np.isfinite(solution.layer.theta).all()


@pytest.mark.parametrize("method", ["adam", "lbfgs"])
def test_labels_without_a_layer_are_stuck(method):
    x = sample_inputs("boolean", 120, 5, 6, seed=1)
    y = np.random.default_rng(2).standard_normal((120, 5, 6))
    assert run(method, Examples(x, y), starts=1, steps=50).outcome is Outcome.STUCK


def test_divergence_is_an_outcome_and_the_layer_stays_finite():
    solution = run("adam", teach(), learning_rate=1e200, steps=50, starts=2)
    assert solution.outcome is Outcome.NONFINITE
    assert np.isfinite(solution.layer.theta).all()


@pytest.mark.parametrize("method", LEARNERS)
def test_zero_labels_are_fitted(method):
    silent = Examples(sample_inputs("boolean", 120, 5, 6, seed=1), np.zeros((120, 5, 6)))
    solution = run(method, silent, starts=1)
    assert solution.outcome is Outcome.FITTED
    assert np.abs(solution.layer(silent.arrays().x)).max() < 1e-6


@pytest.mark.parametrize("head_dim", [None, 2])
def test_gradient_agrees_with_finite_differences(head_dim):
    lengths = np.random.default_rng(0).integers(2, 6, 40)
    examples = teach(n=40, lengths=lengths, key_vector=True, out_bias=True, causal=True)
    with float64():
        asked = examples.architecture(2, head_dim=head_dim, bias=True, causal=True)
        kind = asked.parametrisation()
        problem = make_problem(examples, kind)
        data, energy = batches(problem), jnp.asarray(problem.energy)
        rng = student_rng(3)
        student = random_student(problem, rng)
        gradient = jax.jit(value_and_gradient, static_argnums=0)
        loss, slope = gradient(kind, student, data, energy)
        np.testing.assert_allclose(loss, relative_loss(kind, student, data, energy), rtol=1e-13)
        step = 1e-5
        for name, leaf in student._asdict().items():
            direction = rng.standard_normal(leaf.shape)
            ahead, behind = (
                relative_loss(
                    kind, student._replace(**{name: leaf + sign * step * direction}), data, energy
                )
                for sign in (1, -1)
            )
            found = float(jnp.sum(getattr(slope, name) * direction))
            assert found == pytest.approx(float(ahead - behind) / (2 * step), rel=1e-6)


def test_cutting_into_batches_changes_no_loss(monkeypatch):
    examples = teach(n=50, lengths=np.random.default_rng(0).integers(1, 6, 50))
    with float64():
        problem = make_problem(examples, Dense(examples.architecture(2)))
        energy = jnp.asarray(problem.energy)
        student = random_student(problem, student_rng(0))
        whole = batches(problem)
        assert whole.weight.shape[0] == 1
        monkeypatch.setattr("mhalearn.solvers.scaled_problem.WORKSPACE", 20_000)
        monkeypatch.setattr("mhalearn.learners.baselines.student._WORKSPACE", 1)
        monkeypatch.setattr("mhalearn.learners.baselines.student._LEAST_EXAMPLES", 9)
        cut = batches(make_problem(examples, Dense(examples.architecture(2))))
        assert cut.weight.shape[1] <= 9
        kind = problem.parametrisation
        losses = [float(relative_loss(kind, student, data, energy)) for data in (whole, cut)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-13)


def test_adam_learns_from_mini_batches(monkeypatch):
    monkeypatch.setattr("mhalearn.solvers.scaled_problem.WORKSPACE", 20_000)
    monkeypatch.setattr("mhalearn.learners.baselines.student._WORKSPACE", 1)
    monkeypatch.setattr("mhalearn.learners.baselines.student._LEAST_EXAMPLES", 40)
    assert run("adam", teach(heads=1), n_heads=1, steps=2000, starts=1).reason.startswith(
        "held-out"
    )
    assert run("adam", teach(heads=1), n_heads=1, steps=2000, starts=1).outcome is Outcome.FITTED


def test_alternating_least_squares_never_rises_and_agrees_with_a_loop():
    lengths = np.random.default_rng(0).integers(2, 6, 40)
    examples = teach(n=40, lengths=lengths, key_vector=True, out_bias=True)
    trace = Run()
    with float64():
        problem = make_problem(examples, Dense(examples.architecture(2, bias=True)))
        data = batches(problem)
        theta = student_rng(5).standard_normal((2, 7, 6)) / 6
        energy, ridge = jnp.asarray(problem.energy), jnp.asarray(1e-6)
        swept = linear_module._sweeps(jnp.asarray(theta), data, energy, ridge)
        linear_module.fit_student(theta, data, problem.energy, 60, 1e-6, trace)
    objectives = [event.data["objective"] for event in trace.events]
    assert len(objectives) > 5
    assert np.all(np.diff(objectives) <= 1e-12)
    assert objectives[-1] < 0.7 * objectives[0]
    student = [np.asarray(leaf[-1]) for leaf in swept]
    expected = _linear_student_loss(examples, problem, *student[:2])
    assert float(student[2]) == pytest.approx(expected, rel=1e-10)


def _linear_student_loss(examples, problem, theta, w):
    """The student's relative squared error with explicit loops."""
    x, y, lengths = examples.arrays()
    d, wrong, right = examples.d, 0.0, 0.0
    for tokens, labels, length in zip(
        x / problem.units.x_scale, y / problem.units.y_scale, lengths, strict=True
    ):
        seen = tokens[:length]
        mean = seen.mean(axis=0)
        covariance = (seen - mean).T @ (seen - mean) / length
        for r in range(length):
            output = mean @ w[:d] + w[-1]
            for i, matrix in enumerate(theta):
                query = np.append(seen[r], 1.0)
                output = output + query @ matrix @ covariance @ w[d + i * d : 2 * d + i * d]
            wrong += np.sum((labels[r] - output) ** 2)
            right += np.sum(labels[r] ** 2)
    return wrong / right


def test_linear_reads_one_head_of_small_logits_almost_exactly():
    solution = run("linear", teach(heads=1, scale=0.5), n_heads=1)
    truth = random_layer(n_heads=1, d=6, scale=0.5, seed=11)
    cosine = np.sum(solution.layer.theta * truth.theta) / 0.5 / np.linalg.norm(solution.layer.theta)
    assert cosine > 0.99


def test_students_never_start_at_the_teacher():
    teacher = random_layer(n_heads=2, d=6, seed=0)
    with float64():
        problem = make_problem(teach(), Dense(teach().architecture(2)))
        theta = np.asarray(random_student(problem, student_rng(0, 1, 0)).theta)
    cosine = np.sum(theta * teacher.theta) / np.linalg.norm(theta) / np.linalg.norm(teacher.theta)
    assert abs(cosine) < 0.4


def test_nothing_is_held_out_when_nothing_can_be_spared():
    examples = teach(n=40)
    kept, chosen = hold_out(examples, 0, limit=5.0)
    assert (kept.n, chosen.n) == (35, 5)
    assert not np.intersect1d(kept.hashes(), chosen.hashes()).size
    kept, chosen = hold_out(examples, 0, limit=30.0)
    assert kept.n == chosen.n == 40
    alone, _ = hold_out(examples.subset([0]), 0, limit=0.1)
    assert alone.n == 1


def test_a_better_layer_reaches_the_trace_only_when_it_is_worth_it():
    trace = Run()
    with float64():
        problem = make_problem(teach(), Dense(teach().architecture(2)))
        shared = DescentTask(problem, batches(problem), jnp.asarray(problem.energy), trace)
        student = random_student(problem, student_rng(0))
        for loss in (1.0, 0.9, 0.3):
            shared.keep(student, loss)
    assert trace.best_loss == 0.3
