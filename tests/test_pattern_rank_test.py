"""What examples leave open, asked of patterns and log-odds."""

import numpy as np
import pytest
from oracles import narrow_layer

from mhalearn import sample_inputs
from mhalearn.data import Examples
from mhalearn.judge.identifiability import parameter_bound
from mhalearn.judge.jacobian_spectrum import measure_spectrum
from mhalearn.judge.pattern_rank_test import run_pattern_rank_test
from mhalearn.judge.randomised_rank_test import NULL_TOLERANCE
from mhalearn.layer.architecture import Architecture

M, D, H, K = 2, 24, 6, 4
LAYER = narrow_layer(M, D, H, bias=True)
X = sample_inputs("gaussian", 160, K, D, seed=1)
ARCHITECTURE = Architecture(D, M, H, bias=True)


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_a_layer_that_is_determined_is_closed_and_its_room_is_no_less_than_the_spectrums(scale):
    layer = LAYER.replace(theta=scale * LAYER.theta, key_vector=scale * LAYER.key_vector)
    examples = Examples(X, layer(X))
    found = run_pattern_rank_test(layer, examples, ARCHITECTURE)
    assert found is not None
    assert found.null_component < NULL_TOLERANCE
    spectrum = measure_spectrum(layer, examples, ARCHITECTURE)
    assert spectrum.null_dimension == 0
    assert parameter_bound(layer, spectrum, 1.0) < found.error_amplification < np.inf


def test_units_of_features_do_not_matter():
    sizes = 2.0 ** np.random.default_rng(0).integers(-6, 7, D)
    layer = LAYER.replace(
        theta=LAYER.theta / np.outer(sizes, sizes),
        w=LAYER.w / sizes[:, None],
        key_vector=LAYER.key_vector / sizes,
    )
    x = X * sizes
    found = run_pattern_rank_test(layer, Examples(x, layer(x)), ARCHITECTURE)
    assert found is not None
    assert found.null_component < NULL_TOLERANCE


def feature_twice():
    x = X.copy()
    x[:, :, 1] = x[:, :, 0]
    return LAYER, x


def silent_feature():
    x = X.copy()
    x[:, :, 3] = 0.0
    return LAYER, x


def constant_feature():
    """Its query side adds to the key vector."""
    x = X.copy()
    x[:, :, 3] = 1.0
    return LAYER, x


def flat_head():
    """Of a head that hardly attends queries and keys are still told."""
    return LAYER.replace(theta=LAYER.theta * np.array([1.0, 0.0])[:, None, None]), X


def heads_that_write_alike():
    w = np.stack([LAYER.w[0], 0.5 * LAYER.w[0]])
    return LAYER.replace(w=w), X


def tokens_twice():
    return LAYER, X[:, [0, 0, 1, 2]]


def too_few():
    return LAYER, X[:12]


def too_long():
    return LAYER, np.concatenate([X, X[::-1], X], axis=1)


@pytest.mark.parametrize(
    "case",
    [
        feature_twice,
        silent_feature,
        constant_feature,
        flat_head,
        heads_that_write_alike,
        tokens_twice,
        too_few,
        too_long,
    ],
)
def test_what_is_open_or_not_told_by_patterns_is_never_closed(case):
    layer, x = case()
    found = run_pattern_rank_test(layer, Examples(x, layer(x)), ARCHITECTURE)
    assert found is None or (
        not found.null_component < 1e-3 and found.error_amplification == np.inf
    )


def test_a_rank_that_heads_do_not_have_is_not_asked_about():
    architecture = Architecture(D, M, H + 1, bias=True)
    assert run_pattern_rank_test(LAYER, Examples(X, LAYER(X)), architecture) is None
