"""The noise level that a fit reports is that of the noise, however few the examples are."""

import numpy as np
import pytest

import mhalearn as mha
from mhalearn.data import Examples
from mhalearn.data.input_information import measure_information
from mhalearn.data.inputs import sample_inputs
from mhalearn.judge.certify import certify
from mhalearn.judge.noise import estimate_noise, refitted
from mhalearn.judge.residual_correlation import measure_residual_correlation
from mhalearn.judge.residuals import measure_residuals
from mhalearn.judge.subsets import split_to_certify
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.random_layers import random_layer
from mhalearn.learners import Learner
from mhalearn.learners.newton import factored as search
from mhalearn.run.outcome import Candidate, Outcome
from mhalearn.run.run import Run
from mhalearn.solvers.polish import polish_on

SMALL = Architecture(16, 4, 4)  # narrow heads, four of rank four
LARGE = Architecture(64, 8, 8)


class Knowing(Learner):
    """A learner that is told the answer: what comes after it is looked at."""

    name = "knowing"

    def __init__(self, layer):
        self.layer = layer

    def learn(self, examples, architecture, run, options):
        return Candidate(self.layer)


def draw(architecture, times, k, level=0.01, seed=0):
    """A sharp layer, noisy examples of it, and the standard deviation of the noise."""
    layer = random_layer(
        architecture.heads, architecture.d, scale=6.0, rank=architecture.head_dim, seed=seed
    )
    n = round(times * architecture.counting_limit(np.array([k])))
    x = sample_inputs("boolean", n, k, architecture.d, seed=100 + seed)
    y = layer(x)
    sigma = level * float(np.sqrt(np.mean(y**2)))
    return layer, x, y + sigma * np.random.default_rng(seed).standard_normal(y.shape), sigma


def polished_certificate(architecture, times, k, level):
    """The certificate of the truth, polished on noisy examples."""
    truth, x, y, sigma = draw(architecture, times, k, level)
    examples = Examples(x, y)
    layer = polish_on(examples, truth, architecture, Run()).layer
    fresh = sample_inputs("boolean", 20, k, architecture.d, seed=7)
    before = certify(layer, fresh, truth(fresh), architecture=architecture, learned_from=examples)
    return refitted(before, layer, examples, architecture), sigma


@pytest.mark.parametrize("times", [2, 3.3, pytest.param(10, marks=pytest.mark.slow)])
def test_the_noise_of_narrow_heads_is_estimated_from_twice_the_limit_on(times):
    """With 900 scalars more than unknowns the estimate has a deviation of 2.4 % by itself."""
    certificate, sigma = polished_certificate(SMALL, times, 6, 1e-3)
    assert certificate.refitted
    assert certificate.noise_level == pytest.approx(sigma, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("times", [2, 3.3, 10])
def test_the_noise_of_many_narrow_heads_is_estimated_from_twice_the_limit_on(times):
    certificate, sigma = polished_certificate(LARGE, times, 8, 0.01)
    assert certificate.noise_level == pytest.approx(sigma, rel=0.05)


def test_noise_is_what_is_left_over_scalars_less_unknowns():
    rng = np.random.default_rng(0)
    layer = random_layer(2, 4, seed=1)
    x = sample_inputs("gaussian", 50, 4, 4, seed=1)
    left = rng.standard_normal((50, 4, 4))
    residuals = measure_residuals(layer, Examples(x, layer(x) + left))
    expected = np.sqrt(np.sum(left**2) / (800 - 64))
    assert estimate_noise(residuals, 800, 64) == pytest.approx(expected, rel=1e-9)
    assert estimate_noise(residuals, 800, 800) == residuals.noise_level


def with_a_wrong_head(truth):
    other = random_layer(truth.n_heads, truth.d, scale=6.0, rank=4, seed=50)
    return truth.replace(
        theta=np.concatenate([other.theta[:1], truth.theta[1:]]),
        w=np.concatenate([other.w[:1], truth.w[1:]]),
    )


@pytest.mark.parametrize("times", [pytest.param(4.6, marks=pytest.mark.slow), 5.2])
def test_a_layer_with_a_wrong_head_is_not_called_fitted_up_to_noise(times):
    """It leaves a third of the held-out labels, which no test of smooth dependence notices."""
    truth, x, y, _ = draw(SMALL, times, 6)
    model = mha.AttentionRegressor(4, Knowing(with_a_wrong_head(truth)), head_dim=4).fit(x, y)
    assert mha.compare(model.layer_, truth).max_error > 1
    assert model.outcome_ is Outcome.STUCK


def correlation_left(truth, start, x, y, architecture):
    examples = Examples(x, y)
    layer = polish_on(examples, start, architecture, Run()).layer
    return measure_residual_correlation(layer, examples), mha.compare(layer, truth).max_error


def test_outputs_of_what_a_wrong_head_leaves_go_together_and_those_of_noise_do_not():
    truth, x, y, _ = draw(SMALL, 3.5, 6)
    right, error = correlation_left(truth, truth, x, y, SMALL)
    assert error < 0.1
    assert 0.8 < right < 1.6
    wrong, error = correlation_left(truth, with_a_wrong_head(truth), x, y, SMALL)
    assert error > 1
    assert wrong > 2.5


def test_noise_of_any_size_in_each_column_is_not_correlated():
    rng = np.random.default_rng(0)
    x = sample_inputs("gaussian", 200, 4, 4, seed=1)
    noise = rng.standard_normal((200, 4, 4)) * np.array([1e3, 1.0, 1e-3, 5.0])
    layer = random_layer(2, 4, seed=1)
    assert measure_residual_correlation(layer, Examples(x, layer(x) + noise)) < 1.5
    shared = rng.standard_normal((200, 4, 1)) + 0.1 * rng.standard_normal((200, 4, 4))
    assert measure_residual_correlation(layer, Examples(x, layer(x) + shared)) > 10
    one = random_layer(2, 4, out_dim=1, seed=1)
    assert measure_residual_correlation(one, Examples(x, one(x) + noise[..., :1])) == 0.0


TRUTH = random_layer(2, 4, seed=3)
X = sample_inputs("gaussian", 200, 4, 4, seed=1)


def noisy_labels(sigma):
    return TRUTH(X) + sigma * np.random.default_rng(5).standard_normal((200, 4, 4))


def certifying(y, estimator):
    """Which examples a fit keeps to certify with."""
    whole = Examples(X, y)
    architecture = whole.architecture(2)
    information = measure_information(whole, architecture, precision=1e-16)
    subsets = split_to_certify(whole, whole, architecture, information, estimator.random_state)
    return np.flatnonzero(np.isin(whole.hashes(), subsets.certify.hashes()))


def test_a_wrong_label_that_certifies_is_not_fitted_and_not_taken_for_noise():
    y = noisy_labels(1e-3)
    estimator = mha.AttentionRegressor(2, Knowing(TRUTH))
    y[certifying(y, estimator)[0]] += 1.0
    estimator.fit(X, y)
    assert estimator.outcome_ in (Outcome.FITTED, Outcome.STUCK)
    certificate = estimator.certificate_
    assert not certificate.refitted
    assert certificate.n_exceeding == certificate.n_examples
    assert mha.compare(estimator.layer_, TRUTH).max_error < 1e-2
    if estimator.outcome_ is Outcome.FITTED:
        assert certificate.noise_level == pytest.approx(1e-3, rel=0.05)


def test_without_polish_the_noise_is_that_of_the_examples_to_fit():
    y = noisy_labels(1e-3)
    fitted = mha.AttentionRegressor(2, Knowing(TRUTH)).fit(X, y)
    plain = mha.AttentionRegressor(2, Knowing(fitted.layer_), polish=False).fit(X, y)
    assert (fitted.certificate_.refitted, plain.certificate_.refitted) == (True, False)
    for estimator in (fitted, plain):
        assert estimator.outcome_ is Outcome.FITTED
        assert estimator.certificate_.noise_level == pytest.approx(1e-3, rel=0.05)
    ratio = plain.certificate_.intervals.theta / fitted.certificate_.intervals.theta
    assert np.median(ratio) == pytest.approx(np.sqrt(8 / 7), rel=0.05)  # an eighth certifies


@pytest.mark.slow
@pytest.mark.parametrize("times", [2.5, 4])
def test_the_error_of_the_estimate_is_not_taken_for_noise(times):
    """Fresh examples are off by several times the noise here, and some by much more."""
    truth, x, y, sigma = draw(LARGE, times, 8)
    model = mha.AttentionRegressor(8, Knowing(truth), head_dim=8).fit(x, y)
    assert model.outcome_ is Outcome.FITTED
    assert model.certificate_.noise_level == pytest.approx(sigma, rel=0.05)


@pytest.mark.slow
def test_a_whole_fit_of_many_narrow_heads_reports_the_noise(monkeypatch):
    monkeypatch.setattr(search, "_ATTEMPTS", 1)  # noise ends none of them early
    truth, x, y, sigma = draw(LARGE, 13, 8)
    model = mha.AttentionRegressor(8, head_dim=8).fit(x, y)
    assert model.outcome_ is Outcome.FITTED
    assert mha.compare(model.layer_, truth).max_error < 0.02
    assert model.certificate_.noise_level == pytest.approx(sigma, rel=0.05)
