import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from mhalearn._runtime.programs import float64
from mhalearn.data import Examples
from mhalearn.data.inputs import sample_inputs
from mhalearn.layer.comparison import compare
from mhalearn.layer.dense import Dense
from mhalearn.layer.factored import Factored
from mhalearn.layer.random_layers import random_layer
from mhalearn.run.run import Run
from mhalearn.solvers.damping import ROUNDING
from mhalearn.solvers.gauss_newton import (
    NO_RIDGE,
    Ridge,
    has_converged,
    init_dense,
    reset_damping,
    take_step,
)
from mhalearn.solvers.polish import polish
from mhalearn.solvers.scaled_problem import make_problem

# The shape that most tests of the solver share, so that they share its compiled program.
N, K, D, HEADS = 112, 4, 6, 2
STARTS = 3


@pytest.fixture(autouse=True, scope="module")
def one_lapack_thread():
    """As in the estimator: LAPACK's threads would fight XLA's for the same cores."""
    with threadpool_limits(1, user_api="blas"):
        yield


def make_problem_of(layer, n=N, *, noise=0.0, lengths=None, head_dim=None):
    x = sample_inputs("boolean", n, K, layer.d, seed=2)
    y = layer(x, lengths)
    y = y + noise * np.random.default_rng(4).normal(size=y.shape)
    bias = layer.out_bias is not None
    examples = Examples(x, y, lengths)
    architecture = examples.architecture(
        layer.n_heads, head_dim=head_dim, bias=bias, causal=layer.causal
    )
    return make_problem(examples, architecture.parametrisation())


def perturbed(layer, size=0.1):
    rng = np.random.default_rng(5)
    changed = {"theta": layer.theta + size * rng.normal(size=layer.theta.shape)}
    changed["w"] = np.zeros_like(layer.w)  # W is eliminated: descent must not look at it
    if layer.key_vector is not None:
        changed["key_vector"] = layer.key_vector + size * rng.normal(size=layer.key_vector.shape)
    return layer.replace(**changed)


@pytest.fixture(scope="module")
def truth():
    return random_layer(HEADS, D, seed=1)


@pytest.fixture(scope="module")
def problem(truth):
    return make_problem_of(truth)


@pytest.fixture(scope="module")
def starts():
    theta = np.random.default_rng(6).normal(size=(STARTS, HEADS, D, D))
    return theta / np.linalg.norm(theta, axis=(2, 3), keepdims=True)


def run(theta, problem, steps, ridge=NO_RIDGE):
    states = [init_dense(theta, problem)]
    for _ in range(steps):
        states.append(take_step(states[-1], problem, ridge=ridge))
    return states


def objective(state, ridge):
    """Relative to the label energy, from the state's parts."""
    theta, w = (np.asarray(part) for part in state.params)
    penalty = ridge.theta * np.sum(theta**2, axis=(1, 2, 3)) + ridge.w * np.sum(w**2, axis=(1, 2))
    return np.asarray(state.loss) + penalty


@pytest.mark.parametrize("ridge", [NO_RIDGE, Ridge(1e-2, 1e-3)], ids=["free", "ridge"])
def test_the_objective_never_rises(problem, starts, ridge):
    # A head that repeats another and a saturated head are the hardest places to step from.
    theta = starts.copy()
    theta[1, 1] = theta[1, 0]
    theta[2, 0] *= 50
    objectives = np.array([objective(s, ridge) for s in run(theta, problem, 25, ridge)[1:]])
    assert np.all(np.diff(objectives, axis=0) <= 1e-12 * objectives[:-1])
    assert np.all(objectives[-1] < 0.9 * objectives[0])


def test_the_loss_of_a_state_is_that_of_its_layer(problem, starts):
    last = run(starts, problem, 4, Ridge(1e-2, 1e-3))[-1]
    x = sample_inputs("boolean", N, K, D, seed=2)
    y = random_layer(HEADS, D, seed=1)(x)
    for i in range(STARTS):
        layer = problem.to_layer(jax.tree.map(lambda leaf, i=i: leaf[i], last.params))
        expected = np.sum((layer(x) - y) ** 2) / np.sum(y**2)
        assert expected > 1e-4
        assert float(last.loss[i]) == pytest.approx(expected, rel=1e-10)


def test_a_perturbed_truth_is_polished_to_rounding(truth, problem):
    trace = Run()
    layer, loss, converged = polish(perturbed(truth), problem, trace)
    assert converged
    assert loss < 1e-24
    assert compare(layer, truth).max_error < 1e-10
    losses = [event.loss for event in trace.events]
    assert {event.stage for event in trace.events} == {"polish"}
    assert losses == sorted(losses, reverse=True)
    assert len(losses) <= 8  # convergence is nearly quadratic, by steps in single precision


def test_biases_are_polished_too():
    truth = random_layer(HEADS, D, key_vector=True, out_bias=True, seed=1)
    lengths = np.random.default_rng(3).integers(2, K + 1, N)
    layer, loss, _ = polish(perturbed(truth), make_problem_of(truth, lengths=lengths), Run())
    assert loss < 1e-24
    assert compare(layer, truth).max_error < 1e-10


def assert_rank_two(matrices):
    values = np.linalg.svd(matrices, compute_uv=False)
    assert np.all(values[:, 1] > 1e-2)
    assert np.all(values[:, 2:] < 1e-13 * values[:, :1])


def polish_by_matrices(layer, problem, **options):
    """Whole matrices whose Theta is retracted to its rank after every step."""
    dense = Dense(problem.architecture)
    return polish(layer, dataclasses.replace(problem, parametrisation=dense), Run(), **options)


def test_narrow_heads_keep_their_rank():
    truth = random_layer(HEADS, 8, rank=2, seed=1)
    rng = np.random.default_rng(5)
    moved = truth.theta + 0.02 * truth.theta @ rng.normal(size=(HEADS, 8, 8))
    start, problem = truth.replace(theta=moved), make_problem_of(truth, head_dim=2)
    assert isinstance(problem.parametrisation, Factored)
    layer, loss, converged = polish(start, problem, Run())
    assert converged
    assert loss < 1e-24
    assert compare(layer, truth).max_error < 1e-10
    early = polish(start, problem, Run(), max_steps=2).layer
    for matrices in (layer.theta, early.theta, layer.w, early.w):
        assert_rank_two(matrices)


def test_narrow_heads_as_whole_matrices_keep_the_rank_of_theta():
    truth = random_layer(HEADS, 8, rank=2, seed=1)
    rng = np.random.default_rng(5)
    moved = truth.theta + 0.02 * truth.theta @ rng.normal(size=(HEADS, 8, 8))
    start, problem = truth.replace(theta=moved), make_problem_of(truth, head_dim=2)
    layer, loss, _ = polish_by_matrices(start, problem)
    assert loss < 1e-24
    assert compare(layer, truth).max_error < 1e-10
    early = polish_by_matrices(start, problem, max_steps=2).layer
    for matrices in (layer.theta, early.theta):
        assert_rank_two(matrices)


def test_a_narrow_descent_from_full_heads_ends_narrow():
    truth = random_layer(HEADS, 8, rank=2, seed=1)
    rng = np.random.default_rng(5)
    full = perturbed(truth, 0.02).replace(w=truth.w + 0.02 * rng.normal(size=truth.w.shape))
    problem = make_problem_of(truth, head_dim=2)
    layer = polish(full, problem, Run()).layer
    for matrices in (layer.theta, layer.w):
        assert np.linalg.svd(matrices, compute_uv=False)[:, 2:].max() < 1e-12
    assert compare(layer, truth).max_error < 1e-10
    by_matrices = polish_by_matrices(perturbed(truth, 0.02), problem).layer
    assert np.linalg.svd(by_matrices.theta, compute_uv=False)[:, 2:].max() < 1e-12
    assert compare(by_matrices, truth).max_error < 1e-10


def test_starts_do_not_influence_each_other(problem, starts):
    ridge = Ridge(1e-3, 1e-3)
    together = run(starts, problem, 6, ridge)[-1]
    for i in range(STARTS):
        alone = run(starts[i : i + 1], problem, 6, ridge)[-1]
        assert 1e-4 < float(alone.loss[0]) < 0.9
        for one, all_ in zip(*map(jax.tree.leaves, (alone, together)), strict=True):
            np.testing.assert_allclose(all_[i], one[0], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e200])
def test_a_start_that_is_not_finite_does_not_poison_others(problem, starts, bad):
    theta = starts.copy()
    theta[1, 0, 2, 3] = bad
    with float64():
        dirty, clean = (run(t, problem, 6, Ridge(1e-3, 1e-3))[-1] for t in (theta, starts))
    for one, other in zip(*map(jax.tree.leaves, (clean, dirty)), strict=True):
        np.testing.assert_allclose(np.asarray(other)[[0, 2]], np.asarray(one)[[0, 2]], rtol=1e-8)
    if not np.isfinite(bad):
        assert has_converged(dirty)[1]
        assert not np.isfinite(dirty.loss[1])
    assert not has_converged(dirty)[[0, 2]].any()


def test_starts_settle_at_rounding_when_idle_and_when_not_finite(problem, starts):
    state = init_dense(starts, problem)
    assert has_converged(state).tolist() == [False, False, False]
    with float64():
        low = state._replace(loss=jnp.array([ROUNDING / 2, 1.0, np.nan]))
        idle = state._replace(idle=jnp.array([3.0, 4.0, 5.0]))
    assert has_converged(low).tolist() == [True, False, True]
    assert has_converged(idle).tolist() == [False, True, True]


def test_every_state_of_a_descent_runs_the_same_program(problem, starts):
    # A weak type or another dtype on the way would compile the step again, some seconds each time.
    first = init_dense(starts, problem)
    later = take_step(first, problem)
    kinds = [jax.tree.map(jax.typeof, state) for state in (first, later, reset_damping(later))]
    assert kinds[0] == kinds[1] == kinds[2]
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(later)]
    assert dtypes == 5 * [np.float64] + [bool]  # numbers, and whether equations were solved
    assert not jax.config.jax_enable_x64


def test_noise_stops_at_its_level(truth):
    noise = 1e-3
    problem = make_problem_of(truth, noise=noise)
    layer, loss, converged = polish(perturbed(truth), problem, Run())
    assert converged
    y = truth(sample_inputs("boolean", N, K, D, seed=2))
    level = noise**2 / np.mean(y**2)
    share = 1 - 2 * HEADS * D * D / y.size  # of the noise, what no parameter takes up
    assert loss == pytest.approx(share * level, rel=0.15)
    assert 1e-5 < compare(layer, truth).max_error < 1e-2


def test_polish_stops_when_time_is_up(truth, problem):
    trace = Run(max_seconds=1e-9)
    layer, loss, converged = polish(perturbed(truth), problem, trace)
    assert not converged
    assert len(trace.events) == 1
    assert np.isfinite(loss)
    assert layer.n_heads == HEADS
