import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

from mhalearn._runtime.programs import in_float64
from mhalearn.data import Examples
from mhalearn.data.inputs import sample_inputs
from mhalearn.layer.attention import fit_projections, residual
from mhalearn.layer.comparison import compare
from mhalearn.layer.dense import Dense
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.random_layers import random_layer
from mhalearn.learners.newton import learn_newton
from mhalearn.run.outcome import Outcome
from mhalearn.run.run import Run
from mhalearn.solvers import scaled_problem as problem_module
from mhalearn.solvers.gauss_newton import Ridge, init_dense, take_step
from mhalearn.solvers.scaled_problem import make_problem as make_problem_with

# The shape that most tests of the solver share, so that they share its compiled program.
N, K, D, HEADS = 112, 4, 6, 2
NAMES = ("theta", "w", "key_vector", "out_bias")


@pytest.fixture(autouse=True, scope="module")
def one_lapack_thread():
    """As in the estimator: LAPACK's threads would fight XLA's for the same cores."""
    with threadpool_limits(1, user_api="blas"):
        yield


def in_other_units(layer, x_scale, y_scale):
    """The layer that maps x_scale X to y_scale F(X)."""
    return AttentionLayer(
        layer.theta / x_scale**2,
        layer.w * (y_scale / x_scale),
        None if layer.key_vector is None else layer.key_vector / x_scale,
        None if layer.out_bias is None else layer.out_bias * y_scale,
        layer.causal,
    )


def make_examples(layer, n=N, *, k=K, x_scale=1.0, y_scale=1.0, lengths=None):
    x = sample_inputs("gaussian", n, k, layer.d, seed=2)
    return Examples(x_scale * x, y_scale * layer(x, lengths), lengths)


def make_problem(examples, n_heads, **options):
    return make_problem_with(examples, Dense(examples.architecture(n_heads, **options)))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(x_scale=st.floats(1e-8, 1e8), y_scale=st.floats(1e-8, 1e8), bias=st.booleans(), e=st.just(2))
def test_units_are_powers_of_two_near_the_data_and_change_back_exactly(x_scale, y_scale, bias, e):
    layer = random_layer(2, 3, out_dim=e, key_vector=bias, out_bias=bias, seed=1)
    examples = make_examples(layer, 5, x_scale=x_scale, y_scale=y_scale)
    problem = make_problem(examples, 2, bias=bias)
    x, y, _ = examples.arrays()
    for scale, array in ((problem.units.x_scale, x), (problem.units.y_scale, y)):
        assert math.frexp(scale)[0] == 0.5
        assert 0.7 < np.sqrt(np.mean(array**2)) / scale < 1.42
    back = problem.layer(problem.theta(layer), problem.w(layer))
    for name in NAMES:
        expected, found = getattr(layer, name), getattr(back, name)
        assert (expected is None) == (found is None)
        if expected is not None:
            np.testing.assert_array_equal(found, expected)


@in_float64
def test_a_layer_in_solver_units_has_the_residual_it_has_outside():
    layer = random_layer(2, 3, out_dim=2, key_vector=True, out_bias=True, causal=True, seed=1)
    other = random_layer(2, 3, out_dim=2, key_vector=True, out_bias=True, causal=True, seed=2)
    examples = make_examples(layer, 5, x_scale=37.0, y_scale=0.003)
    mine = in_other_units(other, 37.0, 0.003)
    problem = make_problem(examples, 2, bias=True, causal=True)
    x, y, _ = examples.arrays()
    expected = np.sum((mine(x) - y) ** 2) / np.sum(y**2)
    assert problem.rows == 5 * K
    chunk = jax.tree.map(lambda leaf: leaf[0], problem.data)
    wrong = residual(jnp.asarray(problem.theta(mine)), jnp.asarray(problem.w(mine)), chunk)
    assert float(jnp.sum(wrong**2)) / problem.energy == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(
        problem.energy * problem.units.y_scale**2, np.sum(y.astype(np.float64) ** 2), rtol=1e-13
    )


def test_an_absent_bias_is_zero_in_solver_units():
    layer = random_layer(2, 3, seed=1)
    problem = make_problem(make_examples(layer, 5), 2, bias=True)
    back = problem.layer(problem.theta(layer), problem.w(layer))
    np.testing.assert_array_equal(back.theta, layer.theta)
    np.testing.assert_array_equal(back.key_vector, np.zeros((2, 3)))
    np.testing.assert_array_equal(back.out_bias, np.zeros(3))


def test_zero_labels_have_a_unit_too():
    x = sample_inputs("boolean", 5, 3, 4, seed=1)
    problem = make_problem(Examples(x, np.zeros((5, 3, 4))), 1)
    assert (problem.units.x_scale, problem.units.y_scale, problem.energy) == (1.0, 1.0, 0.0)


@in_float64
def test_padded_examples_change_neither_loss_nor_gradient(monkeypatch):
    n = 9
    lengths = np.random.default_rng(3).integers(1, K + 1, n)
    layer = random_layer(HEADS, D, key_vector=True, out_bias=True, seed=1)
    start = random_layer(HEADS, D, key_vector=True, out_bias=True, seed=2)
    examples = make_examples(layer, n, lengths=lengths)
    found = []
    for padded in (n, 24):
        monkeypatch.setattr(
            problem_module, "_few_bits_above", lambda n, bits, padded=padded: padded
        )
        problem = make_problem(examples, HEADS, bias=True)
        assert problem.data.tokens.shape[:2] == (1, padded)
        theta, ridge = jnp.asarray(problem.theta(start)), jnp.asarray(1e-3)
        loss_and_gradient = jax.jit(
            jax.value_and_grad(lambda theta, data, ridge: fit_projections(theta, data, ridge).loss)
        )
        found.append((problem.energy, problem.rows, *loss_and_gradient(theta, problem.data, ridge)))
    assert found[0][1] == found[1][1] == lengths.sum()
    assert found[0][2] > 1e-3
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 100, 112, 113, 1000, 12345])
def test_padding_costs_at_most_a_quarter(n):
    padded = problem_module._few_bits_above(n, 3)
    assert n <= padded <= 1.25 * n
    assert problem_module._few_bits_above(padded, 3) == padded
    doubled = problem_module._few_bits_above(n, 1)
    assert n <= doubled < 2 * n or n == doubled == 1
    assert doubled.bit_count() == 1


def test_every_example_is_in_exactly_one_chunk(monkeypatch):
    layer = random_layer(HEADS, D, seed=1)
    examples = make_examples(layer, 101)
    x = examples.arrays().x
    for workspace in (2**9, 2**13, 2**24):
        monkeypatch.setattr(problem_module, "WORKSPACE", workspace)
        problem = make_problem(examples, HEADS)
        counted = np.asarray(problem.data.weight).reshape(-1, K).all(axis=1)
        tokens = np.asarray(problem.data.tokens).reshape(-1, K, D)
        np.testing.assert_array_equal(tokens[counted] * problem.units.x_scale, x)
        chunks, size = problem.data.tokens.shape[:2]
        assert chunks == 1 or size * K * (HEADS * D) ** 2 <= max(workspace, K * (HEADS * D) ** 2)


def test_descent_is_the_same_in_one_chunk_and_in_many(monkeypatch):
    layer = random_layer(HEADS, D, seed=1)
    examples = make_examples(layer)
    theta = random_layer(HEADS, D, scale=1.0, seed=7).theta[None]
    runs = []
    for workspace in (2**24, 2**15):
        monkeypatch.setattr(problem_module, "WORKSPACE", workspace)
        problem = make_problem(examples, HEADS)
        runs.append((problem, init_dense(theta, problem)))
    one, many = (problem.data.tokens.shape[0] for problem, _ in runs)
    assert one == 1 < many
    losses = []
    for _ in range(6):
        runs = [
            (problem, take_step(state, problem, ridge=Ridge(1e-4, 1e-4))) for problem, state in runs
        ]
        (_, one), (_, many) = runs
        losses.append(float(one.loss[0]))
        np.testing.assert_allclose(many.params.theta, one.params.theta, rtol=0, atol=1e-10)
        np.testing.assert_allclose(many.params.w, one.params.w, rtol=0, atol=1e-10)
        np.testing.assert_allclose(many.loss, one.loss, rtol=1e-10)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(("x_scale", "y_scale"), [(1e-6, 1.0), (1e6, 1e-6), (1e-6, 1e6)])
def test_layers_are_recovered_in_any_units(x_scale, y_scale):
    layer = random_layer(HEADS, D, seed=1)
    examples = make_examples(layer, x_scale=x_scale, y_scale=y_scale)
    solution = learn_newton(examples, examples.architecture(HEADS), Run())
    assert solution.outcome is Outcome.FITTED
    assert compare(solution.layer, in_other_units(layer, x_scale, y_scale)).max_error < 1e-10
