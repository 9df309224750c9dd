"""What examples leave open about projected heads too large for their spectrum."""

import numpy as np
import pytest

import mhalearn as mha
from mhalearn.judge.identifiability import parameter_bound
from mhalearn.judge.jacobian_spectrum import measure_spectrum
from mhalearn.judge.projected_rank_test import may_ask, run_projected_rank_test
from mhalearn.judge.randomised_rank_test import NULL_TOLERANCE

ROPE = mha.Rope(base=100.0)
GIVEN = {"rope": ROPE, "kv_heads": 2, "key_vector": True, "out_bias": True}
LAYER = mha.random_layer(4, 8, head_dim=4, causal=True, seed=1, **GIVEN)
X = np.random.default_rng(0).standard_normal((100, 6, 8))


def changed(name, head, factor):
    params = {side: leaf.copy() for side, leaf in LAYER.params.items()}
    params[name][head] *= factor
    return LAYER.replace(params=params)


@pytest.mark.parametrize("layer", [LAYER, mha.random_layer(2, 8, head_dim=4, sinks=True, seed=2)])
def test_a_layer_that_is_determined_is_closed_and_its_room_bounds_the_spectrums(layer):
    examples = mha.Examples(X, layer(X))
    found = run_projected_rank_test(layer, examples)
    assert found.null_component < NULL_TOLERANCE
    spectrum = measure_spectrum(layer, examples)
    assert spectrum.null_dimension == 0
    assert found.error_amplification > 0.5 * parameter_bound(layer, spectrum, 1.0)


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (changed("out", 1, 0.0), X),
        (LAYER, X[:2]),
        (LAYER, np.repeat(X[:, :1], 6, axis=1)),
        (LAYER, X * np.array([1.0] * 7 + [0.0])),
    ],
    ids=["no projection", "too few", "constant tokens", "feature of zeros"],
)
def test_what_is_open_is_found(layer, x):
    found = run_projected_rank_test(layer, mha.Examples(x, layer(x)))
    assert not found.null_component < 1e-3
    assert found.error_amplification == np.inf


def test_heads_whose_norms_or_latents_are_not_in_their_products_are_not_asked_about():
    architecture = mha.Architecture(8, 2, 4, rope=ROPE, qk_norm=True)
    assert not may_ask(architecture)
    assert may_ask(LAYER.architecture)
