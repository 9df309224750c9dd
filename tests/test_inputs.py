import numpy as np
import pytest

from mhalearn._runtime.seeds import Stream, generator
from mhalearn.data import inputs
from mhalearn.data.inputs import sample_inputs
from mhalearn.layer.random_layers import random_layer


def test_boolean_inputs_are_uniform_signs():
    x = sample_inputs("boolean", 5000, 4, 6, seed=1)
    assert x.dtype == np.int8
    assert x.shape == (5000, 4, 6)
    assert set(np.unique(x)) == {-1, 1}
    # 120 000 fair coins: five standard deviations are 0.0145.
    assert abs(x.mean(dtype=float)) < 0.0145
    flat = x.reshape(5000, -1).astype(float)
    assert np.abs(flat.T @ flat / 5000 - np.eye(24)).max() < 5 / np.sqrt(5000)


def test_gaussian_inputs_are_standard_normal():
    x = sample_inputs("gaussian", 5000, 4, 6, seed=1)
    assert x.dtype == np.float64
    flat = x.reshape(5000, -1)
    assert np.abs(flat.mean(axis=0)).max() < 5 / np.sqrt(5000)
    assert np.abs(flat.T @ flat / 5000 - np.eye(24)).max() < 5 * np.sqrt(2 / 5000)


@pytest.mark.parametrize("kind", ["boolean", "gaussian"])
def test_a_seed_names_its_inputs(kind):
    x = sample_inputs(kind, 10, 3, 4, seed=1)
    np.testing.assert_array_equal(sample_inputs(kind, 10, 3, 4, seed=1), x)
    assert not np.array_equal(sample_inputs(kind, 10, 3, 4, seed=2), x)
    np.testing.assert_array_equal(sample_inputs(kind, 5000, 3, 4, seed=1)[:10], x)


def test_blocks_differ_from_each_other():
    size = inputs.block_size(2, 8)
    x = sample_inputs("gaussian", 2 * size, 2, 8)
    assert not np.array_equal(x[:size], x[size:])


def test_wide_examples_come_in_small_blocks():
    assert inputs.block_size(512, 768) * 512 * 768 <= 2**22
    assert inputs.block_size(10**4, 10**4) == 1


def test_one_seed_gives_inputs_and_teacher_that_are_independent():
    draws = [generator(5, stream).standard_normal(1000) for stream in Stream]
    draws.append(np.random.default_rng(5).standard_normal(1000))
    draws += [generator(5, Stream.INPUTS, place).standard_normal(1000) for place in (0, 1)]
    overlaps = np.corrcoef(draws) - np.eye(len(draws))
    assert np.abs(overlaps).max() < 5 / np.sqrt(1000)
    theta = random_layer(1, 8, seed=5).theta.ravel()
    x = sample_inputs("gaussian", 1, 2, 32, seed=5).ravel()
    assert abs(np.corrcoef(theta, x)[0, 1]) < 5 / np.sqrt(64)


def test_a_sampler_may_be_anything():
    def ternary(n, k, d, rng):
        return rng.integers(-1, 2, (n, k, d))

    x = sample_inputs(ternary, 5000, 3, 4, seed=1)
    assert set(np.unique(x)) == {-1, 0, 1}
    np.testing.assert_array_equal(sample_inputs(ternary, 5000, 3, 4, seed=1), x)


@pytest.mark.parametrize(
    ("drawn", "words"),
    [
        (np.ones((2, 3)), "expected 3 axes"),
        (np.ones((2, 3, 5)), r"\(2, 3, 5\): expected \(2, 3, 4\)"),
        (np.full((2, 3, 4), np.nan), "NaN"),
        (np.full((2, 3, 4), "a"), "dtype"),
    ],
)
def test_a_wrong_sampler_is_refused(drawn, words):
    with pytest.raises(ValueError, match=words):
        sample_inputs(lambda n, k, d, rng: drawn, 2, 3, 4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("uniform", 2, 3, 4), "'uniform' are unknown: choose 'boolean', 'gaussian'"),
        (("boolean", 0, 3, 4), "n=0"),
        (("boolean", -2, 3, 4), "n=-2"),
        (("boolean", 2, 1, 4), "k=1"),
        (("boolean", 2, 3, 0), "d=0"),
        (("boolean", True, 3, 4), "n=True"),
        (("boolean", 2, 3, 4, -1), "seed=-1"),
    ],
)
def test_wrong_arguments_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        sample_inputs(*arguments)
