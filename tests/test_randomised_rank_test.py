"""What examples leave open about layers too large for their spectrum."""

import numpy as np
import pytest
from oracles import narrow_layer

from mhalearn import AttentionRegressor, Outcome, compare, sample_inputs
from mhalearn.data import Examples
from mhalearn.judge.certify import certify
from mhalearn.judge.identifiability import parameter_bound
from mhalearn.judge.jacobian_spectrum import measure_spectrum
from mhalearn.judge.missing_head import one_more_head
from mhalearn.judge.randomised_rank_test import NULL_TOLERANCE, run_rank_test
from mhalearn.layer import architecture as architectures
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.layer import AttentionLayer
from mhalearn.learners.newton import factored as search
from mhalearn.run.run import Run

LAYER = narrow_layer(3, 16, 4, bias=True)
X = sample_inputs("boolean", 400, 8, 16, seed=1)


@pytest.fixture(params=[4, None], ids=["by factors", "by matrices"])
def head_dim(request, monkeypatch):
    monkeypatch.setattr(architectures, "_LARGE", 100)
    return request.param


@pytest.mark.parametrize("ratio", [6, 20])
def test_a_layer_that_is_determined_is_closed_and_its_room_bounds_the_spectrums(head_dim, ratio):
    architecture = Architecture(16, 3, head_dim, bias=True)
    limit = Examples(X, LAYER(X)).counting_limit(architecture)
    examples = Examples(X, LAYER(X)).subset(slice(0, int(ratio * limit)))
    found = run_rank_test(LAYER, examples, architecture)
    assert found.null_component < NULL_TOLERANCE
    seen = examples.subset(slice(0, found.n_examples))
    spectrum = measure_spectrum(LAYER, seen, architecture)
    assert spectrum.null_dimension == 0
    exact = parameter_bound(LAYER, spectrum, 1.0)
    assert 0.5 * exact < found.error_amplification < 20 * exact


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
    architecture = Architecture(16, layer.n_heads, head_dim, bias=True)
    found = run_rank_test(layer, Examples(x, layer(x)), architecture)
    assert not found.null_component < 1e-3
    assert found.error_amplification == np.inf


def test_heads_of_smaller_rank_are_asked_about_by_their_matrices(monkeypatch):
    """Where a factor is zero its changes move nothing, and would hide what is open."""
    monkeypatch.setattr(architectures, "_LARGE", 100)
    examples = Examples(X, LAYER(X))
    by_factors, by_matrices, deficient = (
        run_rank_test(LAYER, examples, Architecture(16, 3, rank, bias=True)).n_examples
        for rank in (4, None, 6)
    )
    assert by_factors < by_matrices == deficient


@pytest.mark.parametrize("large", [100, 10**6])
def test_a_rank_the_layer_does_not_have_is_refused(monkeypatch, large):
    monkeypatch.setattr(architectures, "_LARGE", large)
    with pytest.raises(ValueError, match=r"head_dim=2.* does not contain the layer"):
        certify(LAYER, X, LAYER(X), architecture=Architecture(16, 3, 2, bias=True))
    with pytest.raises(ValueError, match="head_dim=True"):
        certify(LAYER, X, LAYER(X), architecture=Architecture(16, 3, True, bias=True))


@pytest.mark.parametrize("amplitude", [pytest.param(3e-7, marks=pytest.mark.slow), 3e-6])
def test_a_faint_head_is_found_in_what_coarse_labels_leave(monkeypatch, amplitude):
    monkeypatch.setattr(architectures, "_LARGE", 100)
    faint = LAYER.w * np.array([1.0, 1.0, amplitude])[:, None, None]
    labels = LAYER.replace(w=faint)(X).astype(np.float32)
    two = AttentionLayer(LAYER.theta[:2], LAYER.w[:2], LAYER.key_vector[:2], LAYER.out_bias)
    examples = Examples(X, labels)
    fitted, held = examples.subset(slice(0, 350)), examples.subset(slice(350, None))
    architecture = Architecture(16, head_dim=4, bias=True)
    assert one_more_head(two, fitted, held, architecture, Run()).gain > 0.3
    true = LAYER.replace(w=faint)
    assert one_more_head(true, fitted, held, architecture, Run()).gain == 0.0


@pytest.mark.parametrize("out_dim", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_heads_may_have_fewer_outputs_than_their_rank(monkeypatch, out_dim):
    monkeypatch.setattr(architectures, "_LARGE", 100)
    monkeypatch.setattr(search, "_STEPS", 400)
    layer = narrow_layer(2, 16, 4, out_dim=out_dim)
    learner = AttentionRegressor(2, head_dim=4).fit(X, layer(X))
    assert learner.outcome_ is Outcome.RECOVERED
    assert learner.layer_.out_dim == out_dim
    assert learner.certificate_.relative_mse < 1e-25
    assert compare(learner.layer_, layer).max_error < 1e-12


@pytest.mark.slow
def test_coarse_labels_of_many_narrow_heads_are_recovered():
    layer = narrow_layer(8, bias=True)
    x = sample_inputs("boolean", 800, 8, 64, seed=3)
    learner = AttentionRegressor(8, head_dim=8, bias=True).fit(x, layer(x).astype(np.float32))
    assert learner.outcome_ is Outcome.RECOVERED
    assert compare(learner.layer_, layer).max_error < 1e-5


@pytest.mark.slow
def test_a_missing_narrow_head_is_noticed(monkeypatch):
    monkeypatch.setattr(architectures, "_LARGE", 100)
    monkeypatch.setattr(search, "_STEPS", 400)
    monkeypatch.setattr(search, "_ATTEMPTS", 1)
    layer = narrow_layer(3, 16, 4)
    learner = AttentionRegressor(2, head_dim=4).fit(X, layer(X))
    assert learner.outcome_ is Outcome.STUCK
    assert "one more head explains" in learner.solution_.reason
    assert learner.certificate_.relative_mse > 0.1
