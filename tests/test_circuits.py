"""QK circuits by distance, against the patterns that a layer computes."""

import numpy as np
import pytest
from test_projected import layer_of

import mhalearn as mha
from mhalearn.layer import circuits

NAMES = ["rotary", "interleaved", "partial rotary", "YaRN", "ALiBi", "T5", "own scale"]


def log_odds(layer, x, y, distance):
    """Of the first token y over the last one x, which asks: the difference of two logits."""
    tokens = np.zeros((1, distance + 1, layer.d))
    tokens[0, 0], tokens[0, -1] = y, x
    row = layer.patterns(tokens)[0, :, -1]
    return np.log(row[:, 0] / row[:, -1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("apart", [1, 4])
def test_logits_are_those_of_the_patterns(name, apart):
    layer = layer_of(name)
    x, y = np.random.default_rng(0).standard_normal((2, layer.d))
    odds = log_odds(layer, x, y, apart)
    far = circuits.logit_by_distance(layer, [apart], x, y)[:, 0]
    here = circuits.logit_by_distance(layer, [0], x, x)[:, 0]
    np.testing.assert_allclose(odds, far - here, atol=1e-10)
    theta, bias = circuits.theta_at(layer, apart), circuits.bias_at(layer, [apart])[:, 0]
    np.testing.assert_allclose(np.einsum("d,mde,e->m", x, theta, y) + bias, far, atol=1e-12)


def test_matrices_of_frequencies_are_of_rank_one_and_sum_to_theta():
    layer = layer_of("rotary")
    circuit = circuits.rotary_circuit(layer)
    matrices = circuit.matrices(1)
    assert matrices.shape == (2, 5, 5)
    assert np.linalg.matrix_rank(matrices[0]) == 1
    np.testing.assert_allclose(np.linalg.norm(matrices, axis=(1, 2)), circuit.sizes()[1])
    turned = np.exp(1j * circuit.frequencies * 3.0)
    found = np.einsum("f,fde->de", turned, matrices).real
    np.testing.assert_allclose(found, circuits.theta_at(layer, 3.0)[1], atol=1e-12)
    traces, sizes = circuits.match_by_distance(layer, [3.0])
    assert traces[1, 0] == pytest.approx(np.trace(found))
    assert sizes[1, 0] == pytest.approx(np.linalg.norm(found))


def test_a_form_of_the_same_function_has_the_same_circuits():
    layer = layer_of("DeepSeek-V3")
    form = layer.canonical()
    order = mha.compare(form, layer).order
    for distance in (0.0, 5.0):
        found, wanted = (circuits.theta_at(one, distance) for one in (form, layer))
        np.testing.assert_allclose(found[order], wanted, atol=1e-10)
    found, wanted = (circuits.output_matrices(one) for one in (form, layer))
    np.testing.assert_allclose(found[order], wanted, atol=1e-10)


def test_a_layer_without_rotary_positions_has_no_frequencies():
    with pytest.raises(ValueError, match="no rotary positions"):
        circuits.rotary_circuit(layer_of("window"))


def test_how_far_back_heads_look():
    weights = np.zeros((1, 1, 4, 4))
    weights[0, 0, np.arange(1, 4), np.arange(3)] = 1.0  # each the one before
    weights[0, 0, 0, 0] = 1.0
    np.testing.assert_allclose(circuits.mean_look_back(weights), [[0.25, 1.0, 0.0, 0.0]])
