import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from mhalearn.data import Examples
from mhalearn.data.inputs import sample_inputs
from mhalearn.layer.comparison import compare
from mhalearn.layer.dense import Dense
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.random_layers import random_layer
from mhalearn.run.run import Run
from mhalearn.solvers.merge_heads import reduce_heads
from mhalearn.solvers.polish import polish, polish_on
from mhalearn.solvers.scaled_problem import make_problem

# The shape that most tests of the solver share, so that they share its compiled program.
N, K, D = 112, 4, 6


@pytest.fixture(autouse=True, scope="module")
def one_lapack_thread():
    """As in the estimator: LAPACK's threads would fight XLA's for the same cores."""
    with threadpool_limits(1, user_api="blas"):
        yield


def make_examples(layer, noise=0.0):
    x = sample_inputs("boolean", N, K, layer.d, seed=2)
    y = layer(x)
    y = y + noise * np.sqrt(np.mean(y**2)) * np.random.default_rng(4).normal(size=y.shape)
    return Examples(x, y)


def polished(start, examples):
    problem = make_problem(examples, Dense(examples.architecture(start.n_heads)))
    layer, loss, converged = polish(start, problem, Run())
    assert converged
    return layer, loss


def reduced(start, examples):
    """What the estimator does after a learner: polish, then reduce."""
    trace = Run()
    layer, loss = polished(start, examples)
    smaller, smaller_loss = reduce_heads(layer, loss, examples, examples.architecture(), trace)
    told = [event.detail for event in trace.events if event.stage == "reduction"]
    assert len(told) == (smaller.n_heads < layer.n_heads)
    return smaller, smaller_loss, loss


@pytest.fixture(scope="module")
def truth():
    return random_layer(2, D, seed=1)


def with_third_head(truth, theta, w):
    return AttentionLayer(np.append(truth.theta, [theta], 0), np.append(truth.w, [w], 0))


def test_an_exact_copy_is_merged(truth):
    copy = with_third_head(truth, truth.theta[1], 0.7 * truth.w[1])
    copy = copy.replace(w=copy.w * np.array([1.0, 0.3, 1.0])[:, None, None])
    examples = make_examples(truth)
    smaller, loss, _ = reduced(copy, examples)
    assert loss < 1e-24
    assert compare(smaller, truth).max_error < 1e-10


def test_a_copy_that_has_not_quite_converged_is_merged(truth):
    rng = np.random.default_rng(5)
    near = truth.theta[1] + 0.02 * rng.normal(size=(D, D))
    start = with_third_head(truth, near, truth.w[1] / 2)
    examples = make_examples(truth)
    # As a learner leaves it: one step, not polished.
    problem = make_problem(examples, Dense(examples.architecture(3)))
    layer, loss, _ = polish(start, problem, Run(), max_steps=2)
    assert layer.n_heads == 3
    smaller, smaller_loss = reduce_heads(layer, loss, examples, examples.architecture(), Run())
    assert smaller_loss < 1e-24
    assert compare(smaller, truth).max_error < 1e-10


@pytest.mark.parametrize("size", [0.0, 1e-12])
def test_a_head_without_projection_is_dropped(truth, size):
    rng = np.random.default_rng(6)
    start = with_third_head(truth, 2 * rng.normal(size=(D, D)) / D, size * truth.w[0])
    smaller, loss, _ = reduced(start, make_examples(truth))
    assert loss < 1e-24
    assert compare(smaller, truth).max_error < 1e-10


def test_the_biases_of_a_smaller_layer_are_kept():
    truth = random_layer(2, D, key_vector=True, out_bias=True, seed=1)
    same = truth.replace(
        theta=truth.theta[[0, 1, 1]],
        w=truth.w[[0, 1, 1]] * np.array([1.0, 0.5, 0.5])[:, None, None],
        key_vector=truth.key_vector[[0, 1, 1]],
    )
    examples = make_examples(truth)
    smaller, loss = reduce_heads(same, 1e-28, examples, examples.architecture(bias=True), Run())
    assert loss < 1e-24
    assert compare(smaller, truth).max_error < 1e-10


def test_nothing_is_merged_that_should_not_be(truth):
    smaller, loss, before = reduced(truth, make_examples(truth))
    assert smaller.n_heads == 2
    assert loss == before
    assert compare(smaller, truth).max_error < 1e-10


def test_nearly_equal_heads_stay_two(truth):
    step = np.random.default_rng(7).normal(size=(D, D))
    step *= np.linalg.norm(truth.theta[0]) / np.linalg.norm(step)
    near = truth.replace(theta=np.stack([truth.theta[0], truth.theta[0] + 0.05 * step]))
    assert near.canonical(tolerance=0.1).n_heads == 1  # so that a merger is tried
    smaller, loss, _ = reduced(near, make_examples(near))
    assert smaller.n_heads == 2
    assert loss < 1e-22
    assert compare(smaller, near).max_error < 1e-8


@pytest.mark.parametrize("size", [1e-2, 1e-4])
def test_a_small_head_is_not_dropped(truth, size):
    small = truth.replace(w=truth.w * np.array([1.0, size])[:, None, None])
    assert small.canonical(tolerance=0.1).n_heads == 1
    smaller, loss, _ = reduced(small, make_examples(small))
    assert loss < 1e-22
    assert compare(smaller, small).max_error < 1e-8


@pytest.mark.parametrize("noise", [1e-3, 1e-1])
def test_noise_is_no_reason_to_merge(truth, noise):
    smaller, loss, before = reduced(truth, make_examples(truth, noise))
    assert smaller.n_heads == 2
    assert loss == before
    assert 0.5 * noise**2 < loss < 2 * noise**2
    assert compare(smaller, truth).max_error < 3 * noise


def test_a_small_head_that_stands_out_of_the_noise_is_not_dropped(truth):
    small = truth.replace(w=truth.w * np.array([1.0, 0.02])[:, None, None])
    examples = make_examples(small, 0.01)
    alone, without = polished(small.canonical(tolerance=0.1), examples)
    smaller, loss, _ = reduced(small, examples)
    assert alone.n_heads == 1
    assert 1.5 * loss < without < 10 * loss
    assert smaller.n_heads == 2


def test_a_copy_is_merged_under_noise(truth):
    examples = make_examples(truth, 1e-3)
    best, loss = polished(truth, examples)
    copy = with_third_head(best, best.theta[1], best.w[1])
    copy = copy.replace(w=copy.w * np.array([1.0, 0.5, 0.5])[:, None, None])
    smaller, smaller_loss = reduce_heads(copy, loss, examples, examples.architecture(), Run())
    assert smaller.n_heads == 2
    assert smaller_loss <= 1.02 * loss
    assert compare(smaller, truth).max_error < 3e-3


def test_narrow_heads_stay_narrow():
    # Under noise, or full heads would come back narrow by themselves.
    truth = random_layer(2, 8, rank=2, seed=1)
    examples = make_examples(truth, 1e-3)
    architecture = examples.architecture(2, head_dim=2)
    best, loss, _ = polish_on(examples, truth, architecture, Run())
    copy = AttentionLayer(
        best.theta[[0, 1, 1]], best.w[[0, 1, 1]] * np.array([1.0, 0.5, 0.5])[:, None, None]
    )
    smaller, smaller_loss = reduce_heads(copy, loss, examples, architecture, Run())
    assert smaller_loss <= 1.02 * loss
    assert compare(smaller, truth).max_error < 3e-3
    for matrices in (smaller.theta, smaller.w):
        assert np.linalg.svd(matrices, compute_uv=False)[:, 2:].max() < 1e-12


def test_heads_come_in_canonical_order(truth):
    layer = truth.replace(w=truth.w * np.array([1.0, 3.0])[:, None, None])
    smaller, _, _ = reduced(layer, make_examples(layer))
    np.testing.assert_allclose(smaller.w, layer.canonical().w, rtol=0, atol=1e-9)
