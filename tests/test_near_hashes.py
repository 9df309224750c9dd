"""Near copies share a hash, others do not."""

import numpy as np
import pytest

from mhalearn.data import Examples
from mhalearn.data.inputs import sample_inputs
from mhalearn.data.near_hashes import near_hashes
from mhalearn.layer.random_layers import random_layer

N, K, D = 2000, 4, 5
LAYER = random_layer(2, D, out_dim=3, seed=1)
RNG = np.random.default_rng(0)


def draw(kind="gaussian", scale=1.0):
    x = scale * sample_inputs(kind, N, K, D, seed=2).astype(np.float64)
    return x, LAYER(x)


def hashes(x, y, lengths=None):
    return near_hashes(x, y, np.full(len(x), x.shape[1]) if lengths is None else lengths)


def share(one, other):
    """How many of the examples share a hash with their copy."""
    return float(np.mean((one == other).any(axis=1)))


def jitter(array, size):
    return array * (1 + size * RNG.standard_normal(array.shape))


CHANGES = {
    "order": lambda x, y: (x[:, [2, 0, 3, 1]], y[:, [2, 0, 3, 1]]),
    "sign": lambda x, y: (-x, -y),
    "last digits": lambda x, y: (jitter(x, 1e-14), jitter(y, 1e-14)),
    "more digits": lambda x, y: (jitter(x, 1e-10), jitter(y, 1e-10)),
    "every token twice": lambda x, y: (np.repeat(x, 2, axis=1), np.repeat(y, 2, axis=1)),
    "all at once": lambda x, y: (jitter(-x[:, ::-1], 1e-12), jitter(-y[:, ::-1], 1e-12)),
}


@pytest.mark.parametrize("kind", ["boolean", "gaussian"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_copies_in_other_guises_share_a_hash(change, kind):
    x, y = draw(kind)
    assert share(hashes(x, y), hashes(*change(x, y))) == 1


def test_copies_rounded_to_single_precision_nearly_always_share_a_hash():
    x, y = draw()
    assert share(hashes(x, y), hashes(x.astype(np.float32), y.astype(np.float32))) > 0.995
    # A box that computes in float32 gives other last digits for another order of tokens.
    assert share(hashes(x, y), hashes(x, jitter(y.astype(np.float32), 6e-8))) > 0.99


@pytest.mark.parametrize(
    "inputs",
    [
        lambda x: x,
        lambda x: 1e-200 * x,
        lambda x: 1e150 * x,
        lambda x: np.concatenate([x, -x], axis=1),  # odd statistics vanish
        lambda x: x + 1000 * np.eye(D)[0],  # a feature that dwarfs the others
        lambda x: np.concatenate([1e6 * np.ones((N, 1, D)), x], axis=1),  # so does a token
    ],
)
def test_other_examples_share_none(inputs):
    x = inputs(draw()[0])
    y = RNG.standard_normal((*x.shape[:2], 3))
    found = hashes(x, y)
    for grid in found.T:
        assert len(np.unique(grid)) == N
    for other in ((2 * x, y), (x, 2 * y), (x, -y), (jitter(x, 0.01), y)):
        assert not np.intersect1d(found, hashes(*other)).size


def test_padding_does_not_count_and_nothing_is_undefined():
    x, y = draw()
    lengths = RNG.integers(1, K + 1, N)
    padded_x, padded_y = x.copy(), y.copy()
    padding = np.arange(K) >= lengths[:, None]
    padded_x[padding], padded_y[padding] = np.inf, np.nan
    np.testing.assert_array_equal(hashes(padded_x, padded_y, lengths), hashes(x, y, lengths))
    zeros = hashes(np.zeros((2, K, D)), np.zeros((2, K, 3)))
    np.testing.assert_array_equal(zeros[0], zeros[1])


def test_hashes_are_those_that_layer_files_hold():
    """These two numbers are in files: they must not change."""
    x = np.arange(12.0).reshape(1, 3, 4) - 5
    assert hashes(x, x[..., :2] ** 2 + 1).tolist() == [[8490298709311920583, 18008730136498859936]]


def test_a_survey_has_them_whatever_the_chunks_and_remembers_three_hashes_an_example():
    x, y = draw()
    survey = Examples(x, y).survey()
    np.testing.assert_array_equal(survey.near_hashes, hashes(x, y))
    assert len(survey.remembered) == 3 * N
