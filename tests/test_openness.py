"""What examples leave open about layers too large for their spectrum."""

import numpy as np
import pytest
from oracles import narrow_layer

from mhalearn import AttentionRegressor, Outcome, compare, narrow, sample_inputs
from mhalearn.certificate import _parameter_bound, certify
from mhalearn.examples import Examples
from mhalearn.layer import AttentionLayer
from mhalearn.openness import CLOSED, measure_openness
from mhalearn.spectrum import measure_spectrum

LAYER = narrow_layer(3, 16, 4, bias=True)
X = sample_inputs("boolean", 400, 8, 16, seed=1)


@pytest.fixture(params=[4, None], ids=["by factors", "by matrices"])
def head_dim(request, monkeypatch):
    monkeypatch.setattr(narrow, "_LARGE", 100)
    return request.param


@pytest.mark.parametrize("ratio", [6, 20])
def test_a_layer_that_is_determined_is_closed_and_its_room_bounds_the_spectrums(head_dim, ratio):
    limit = Examples(X, LAYER(X)).counting_limit(3, True, head_dim)
    examples = Examples(X, LAYER(X)).subset(slice(0, int(ratio * limit)))
    found = measure_openness(LAYER, examples, head_dim)
    assert found.unseen < CLOSED
    spectrum = measure_spectrum(LAYER, examples.subset(slice(0, found.n_examples)), head_dim)
    assert spectrum.null_dimension == 0
    exact = _parameter_bound(LAYER, spectrum, 1.0)
    assert 0.5 * exact < found.room < 20 * exact


def feature_twice(layer):
    x = X.copy()
    x[:, :, 1] = x[:, :, 0]
    return layer, x


def equal_heads(layer):
    twice = [0, 1, 2, 2]
    w = layer.w[twice] * np.array([1, 1, 0.3, 0.7])[:, None, None]
    return AttentionLayer(layer.theta[twice], w, layer.key_vector[twice], layer.out_bias), X


def no_projection(layer):
    return layer.replace(w=layer.w * np.array([1.0, 1.0, 0.0])[:, None, None]), X


def constant_tokens(layer):
    return layer, np.repeat(X[:, :1], 8, axis=1)


def too_few(layer):
    return layer, X[:5]


@pytest.mark.parametrize(
    "case", [feature_twice, equal_heads, no_projection, constant_tokens, too_few]
)
def test_what_is_open_is_found(head_dim, case):
    layer, x = case(LAYER)
    found = measure_openness(layer, Examples(x, layer(x)), head_dim)
    assert not found.unseen < 1e-3
    assert found.room == np.inf


def test_a_rank_larger_than_the_heads_have_is_certified_or_not_never_wrong(monkeypatch):
    monkeypatch.setattr(narrow, "_LARGE", 100)
    certificate = certify(LAYER, X, LAYER(X), head_dim=6)
    assert certificate.relative_mse < 1e-24
    assert certificate.null_dimension in (0, None)


@pytest.mark.slow
def test_coarse_labels_of_many_narrow_heads_are_recovered():
    layer = narrow_layer(8, bias=True)
    x = sample_inputs("boolean", 800, 8, 64, seed=3)
    learner = AttentionRegressor(8, head_dim=8, bias=True).fit(x, layer(x).astype(np.float32))
    assert learner.outcome_ is Outcome.RECOVERED
    assert compare(learner.layer_, layer).max_error < 1e-5


def test_a_missing_narrow_head_is_noticed():
    layer = narrow_layer(8)
    x = sample_inputs("boolean", 800, 8, 64, seed=3)
    learner = AttentionRegressor(7, head_dim=8, max_seconds=15.0).fit(x, layer(x))
    assert learner.outcome_ in (Outcome.STUCK, Outcome.FITTED, Outcome.TIME_LIMIT)
    assert learner.certificate_.relative_mse > 1e-4
