"""Features of very different sizes, and heads of less rank than their class allows."""

import numpy as np
import pytest
from oracles import narrow_layer

from mhalearn import sample_inputs
from mhalearn.data import Examples
from mhalearn.judge import jacobian_spectrum
from mhalearn.judge.certify import certify
from mhalearn.judge.feature_units import layer_in_feature_units
from mhalearn.judge.randomised_rank_test import NULL_TOLERANCE, run_rank_test
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.layer import AttentionLayer

X = sample_inputs("gaussian", 400, 8, 16, seed=1)
LAYER = narrow_layer(3, 16, 4, bias=True)
LOWER = narrow_layer(3, 16, 2, bias=True)


@pytest.fixture
def large(monkeypatch):
    """Every layer is too large for its spectrum."""
    monkeypatch.setattr(jacobian_spectrum, "DENSE_LIMIT", 0)


def certificate(layer, x, head_dim, labels=None, dtype=np.float64):
    labels = layer(x) if labels is None else labels
    architecture = Architecture(layer.d, layer.n_heads, head_dim, bias=True)
    return certify(layer, x, labels.astype(dtype), architecture=architecture)


@pytest.mark.parametrize("head_dim", [4, None])
@pytest.mark.parametrize("size", [1e-2, 1e-4])
def test_a_weak_feature_is_certified(large, head_dim, size):
    x = X.copy()
    x[..., 0] *= size
    assert certificate(LAYER, x, head_dim).recovered


@pytest.mark.parametrize("head_dim", [4, None])
@pytest.mark.parametrize("size", [1e-2, 1e3])
def test_the_unit_of_a_feature_changes_no_certificate(large, head_dim, size):
    sizes = np.append(size, np.ones(15))
    assert certificate(layer_in_feature_units(LAYER, 1 / sizes), X * sizes, head_dim).recovered


@pytest.mark.parametrize("size", [1e-2, 1e-4])
def test_a_weak_feature_of_many_narrow_heads_is_certified(size):
    layer, x = narrow_layer(8, bias=True), sample_inputs("gaussian", 400, 8, 64, seed=1)
    x[..., 0] *= size
    assert certificate(layer, x, 8).recovered


def test_units_of_features_change_no_output():
    sizes = 2.0 ** np.arange(-8, 8)
    same = layer_in_feature_units(LAYER, sizes)(X / sizes)
    np.testing.assert_allclose(same, LAYER(X), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("head_dim", [4, None])
def test_a_feature_that_is_always_zero_is_open(large, head_dim):
    x = X.copy()
    x[..., 3] = 0.0
    assert not certificate(LAYER, x, head_dim).recovered


@pytest.mark.parametrize("head_dim", [4, None])
def test_a_feature_below_the_rounding_of_labels_is_not_certified(large, head_dim):
    """Other parameters of that feature make the same labels."""
    x = X.copy()
    x[..., 3] *= 1e-9
    w = LAYER.w.copy()
    w[:, 3] *= 2.0
    other = LAYER.replace(w=w)
    np.testing.assert_allclose(other(x), LAYER(x), rtol=0, atol=1e-7)
    assert not certificate(other, x, head_dim, LAYER(x), np.float32).recovered


def test_a_rank_below_the_class_is_certified(large):
    """It takes some twice as many examples as matrices of any rank need, and here 60 are five
    times as many."""
    assert certificate(LOWER, X[:60], 4).recovered


def subspace(layer):
    basis = np.random.default_rng(0).standard_normal((15, 16))
    return layer, X[:60, :, :15] @ basis


def constant_feature(layer):
    """Keys never differ in it."""
    x = X[:60].copy()
    x[..., 5] = x[:, :1, 5]
    return layer, x


def twins(layer):
    twice = [0, 1, 2, 2]
    w = layer.w[twice] * np.array([1, 1, 0.3, 0.7])[:, None, None]
    return AttentionLayer(layer.theta[twice], w, layer.key_vector[twice], layer.out_bias), X[:60]


def no_projection(layer):
    return layer.replace(w=layer.w * np.array([1.0, 1.0, 0.0])[:, None, None]), X[:60]


def too_few(layer):
    return layer, X[:7]


def never_together(layer):
    """Two features that no example has both: an entry of Theta meets nothing, and a change of it
    has rank one."""
    x = X[:60].copy()
    x[::2, :, 0] = 0.0
    x[1::2, :, 1] = 0.0
    theta = layer.theta.copy()
    theta[1, 0, 1] += 0.5
    np.testing.assert_array_equal(layer.replace(theta=theta)(x), layer(x))
    return layer, x


def never_together_often(layer):
    x = X.copy()
    x[::2, :, 0] = 0.0
    x[1::2, :, 1] = 0.0
    return layer, x


@pytest.mark.parametrize(
    "case",
    [
        *(subspace, constant_feature, twins, no_projection, too_few),
        *(never_together, never_together_often),
    ],
)
def test_what_is_open_near_a_lower_rank_is_found(large, case):
    layer, x = case(LOWER)
    architecture = Architecture(16, layer.n_heads, 4, bias=True)
    found = run_rank_test(layer, Examples(x, layer(x)), architecture)
    assert not found.null_component < NULL_TOLERANCE
    assert found.error_amplification == np.inf
    assert not certificate(layer, x, 4).recovered
