"""Noise is even; what attention leaves of labels that it cannot make is not."""

import numpy as np
import pytest

from mhalearn.data import Examples
from mhalearn.data.inputs import sample_inputs
from mhalearn.judge.mask_test import measure_first_row
from mhalearn.judge.residual_law import (
    describe_residual_law,
    inputs_look_alike_at_all_positions,
    rows_of,
)
from mhalearn.judge.tangent_space import TangentSpace
from mhalearn.layer.random_layers import random_layer

N, K, D = 150, 5, 4
LAYER = random_layer(2, D, seed=3)
X = sample_inputs("gaussian", N, K, D, seed=1)
NOTHING_TAKEN = TangentSpace(None, None, 0, None)


def law(left):
    return describe_residual_law(rows_of(LAYER, Examples(X, LAYER(X) + left)), NOTHING_TAKEN)


def rng(seed=0):
    return np.random.default_rng(seed)


def test_gaussian_noise_is_noise():
    columns = np.array([1e3, 1.0, 1e-3, 5.0])
    assert all(law(columns * rng(seed).standard_normal((N, K, D))).is_noise for seed in range(40))


def test_noise_that_is_shared_between_columns_is_noise():
    mixed = rng().standard_normal((N, K, D)) @ rng(1).standard_normal((D, D))
    assert law(mixed).is_noise


@pytest.mark.parametrize(
    ("size", "told"),
    [
        (1 + np.arange(K)[:, None] / K, "positions"),
        (np.sum(X**2, axis=-1, keepdims=True), "varies in size with the tokens"),
        (rng(2).random((N, 1, 1)) < 0.1, "large in a few rows"),
        (rng(3).standard_exponential((N, K, 1)), "large in a few rows"),
    ],
)
def test_noise_of_several_sizes_is_told_from_noise_of_one(size, told):
    found = law(size * rng().standard_normal((N, K, D)))
    assert not found.is_noise
    assert told in found.describe()


def test_another_layer_is_not_noise():
    other = random_layer(1, D, scale=3.0, seed=8)
    assert not law(other(X)).is_noise


# The first row under a causal mask


def first_row(y):
    return measure_first_row(Examples(X, y))


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_first_row_of_a_causal_layer_sees_itself_alone(noise):
    left = noise * rng().standard_normal((N, K, D))
    assert first_row(LAYER.replace(causal=True)(X) + left).sees_itself_alone
    assert not first_row(LAYER(X) + left).sees_itself_alone
    assert not first_row(left + X).sees_itself_alone  # every row does


def test_too_few_examples_say_nothing_of_the_first_row():
    assert measure_first_row(Examples(X[:8], LAYER(X[:8]))) is None


@pytest.mark.parametrize(
    ("change", "alike"),
    [
        (lambda x: x, True),
        (lambda x: np.sign(x), True),
        (lambda x: np.concatenate([np.ones_like(x[:, :1]), x[:, 1:]], axis=1), False),
        (lambda x: x * (1 + np.arange(K)[:, None]), False),
        (lambda x: x + np.arange(K)[:, None] / 4, False),
    ],
)
def test_inputs_that_differ_by_position_are_noticed(change, alike):
    x = change(X)
    rows = rows_of(LAYER, Examples(x, LAYER(x)))
    assert inputs_look_alike_at_all_positions(rows) == alike
