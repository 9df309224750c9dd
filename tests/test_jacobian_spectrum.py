"""Directions that inputs leave open, where elimination by normal equations would lose them."""

import numpy as np
import pytest

from mhalearn.data import Examples
from mhalearn.data.inputs import sample_inputs
from mhalearn.judge.jacobian_spectrum import measure_spectrum
from mhalearn.layer.random_layers import random_layer


def null_dimension(layer, x):
    return measure_spectrum(layer, Examples(x, layer(x))).null_dimension


@pytest.mark.parametrize("seed", range(6))
def test_what_a_nearly_singular_design_absorbs_is_open(seed):
    """Four examples are 72 equations; twelve rows let W alone meet them all."""
    layer, x = random_layer(2, 6, seed=seed), sample_inputs("gaussian", 4, 3, 6, seed=seed)
    assert null_dimension(layer, x) == 72


def test_tokens_on_a_line_leave_most_of_a_layer_open():
    """One entry of each Theta and one row of each W meet u; signs alone do not tell them apart."""
    u = np.random.default_rng(104).standard_normal(4)
    x = np.random.default_rng(4).choice([-1.0, 1.0], (96, 4, 1)) * u
    found = measure_spectrum(random_layer(2, 4, seed=4), Examples(x, x))
    assert found.null_dimension == 54
    assert np.isinf(found.deviations.w).all()


@pytest.mark.parametrize("size", [1e-1, 1e-3, 1e-5])
def test_a_weak_feature_is_weak_and_not_open(size):
    layer, x = random_layer(2, 4, seed=3), sample_inputs("gaussian", 60, 4, 4, seed=1)
    x[..., -1] *= size
    assert null_dimension(layer, x) == 0
    x[..., -1] = 0.0
    assert null_dimension(layer, x) == 2 * (7 + 4)


def test_nearly_equal_heads_are_nearly_open_in_proportion():
    layer, x = random_layer(2, 4, seed=3), sample_inputs("gaussian", 60, 4, 4, seed=1)
    g = np.random.default_rng(1).standard_normal((4, 4))
    smallest = []
    for apart in (1e-2, 1e-4):
        near = layer.replace(theta=np.stack([layer.theta[0], layer.theta[0] + apart * g]))
        found = measure_spectrum(near, Examples(x, near(x)))
        assert found.null_dimension == 0
        smallest.append(found.theta[0])
    assert smallest[0] / smallest[1] == pytest.approx(1e4, rel=0.1)


@pytest.mark.parametrize(("features", "expected"), [(4, 0), (3, 2 * (2 + 1))])
def test_only_directions_that_keep_the_rank_are_open(features, expected):
    """Without one direction of the tokens, Theta = a b^T loses one entry of a and one of b, and
    W = c d^T one of c."""
    layer, x = random_layer(2, 4, rank=1, seed=3), sample_inputs("gaussian", 60, 4, 4, seed=1)
    x = x[..., :features] @ np.random.default_rng(1).standard_normal((features, 4))
    examples = Examples(x, layer(x))
    found = measure_spectrum(layer, examples, examples.architecture(2, head_dim=1))
    assert found.null_dimension == expected
    assert len(found.theta) == 2 * (7 + 7)
