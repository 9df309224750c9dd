"""Would one more head explain what projected heads leave?"""

import numpy as np
import pytest

import mhalearn as mha
from mhalearn.judge.missing_projected_head import one_more_projected_head
from mhalearn.judge.residuals import measure_residuals
from mhalearn.layer.projected_layer import ProjectedLayer
from mhalearn.run.run import Run

K, D = 4, 6


def first_head(layer):
    """The layer without its second head."""
    one = layer.architecture.with_heads(1)
    return ProjectedLayer(one, {name: leaf[:1] for name, leaf in layer.params.items()})


def look(layer, x, y):
    fitted, held = mha.Examples(x[16:], y[16:]), mha.Examples(x[:16], y[:16])
    residuals = measure_residuals(layer, held)
    return one_more_projected_head(
        layer, fitted, held, layer.architecture, Run(seed=1), residuals=residuals
    )


@pytest.fixture(scope="module")
def case():
    truth = mha.random_layer(
        2, D, head_dim=2, causal=True, rope=mha.Rope(100.0), sinks=True, seed=4
    )
    x = np.random.default_rng(0).standard_normal((76, K, D))
    return truth, x, truth(x)


def test_a_head_that_is_missing_would_help(case):
    truth, x, y = case
    assert look(first_head(truth), x, y).gain > 0.9


def test_beside_noise_no_head_would_help(case):
    truth, x, y = case
    noise = 0.1 * np.random.default_rng(1).standard_normal(y.shape)
    assert look(truth, x, y + noise).gain == 0.0


def test_few_examples_tell_nothing_of_a_missing_head(case):
    truth, x, y = case
    assert look(first_head(truth), x[:20], y[:20]) is None


def test_heads_that_only_share_keys_are_tested_too():
    truth = mha.random_layer(2, D, head_dim=2, causal=True, kv_heads=1, seed=4)
    x = np.random.default_rng(0).standard_normal((76, K, D))
    noise = 0.1 * np.random.default_rng(1).standard_normal((76, K, D))
    assert look(truth, x, truth(x) + noise).gain == 0.0
