"""Under noise the examples held out are fitted in the end, and the certificate says so."""

import numpy as np
import pytest

from mhalearn import AttentionRegressor, Examples, Outcome, compare, random_layer, sample_inputs
from mhalearn.judge.jacobian_spectrum import measure_spectrum
from mhalearn.run.run import Run
from mhalearn.solvers import streaming_bfgs as refit_module
from mhalearn.solvers.polish import polish_on
from mhalearn.solvers.streaming_bfgs import fit_streamed

TRUTH = random_layer(2, 4, seed=1)


def draw(n, sigma, seed=0, layer=TRUTH, k=5):
    rng = np.random.default_rng(seed)
    x = sample_inputs("gaussian", n, k, layer.d, seed=seed)
    y = layer(x)
    return x, y + sigma * rng.standard_normal(y.shape)


@pytest.mark.slow
def test_all_examples_are_fitted_and_the_noise_is_estimated():
    sigma, levels = 1e-2, []
    for seed in range(6):
        x, y = draw(160, sigma, seed)
        learner = AttentionRegressor(2, random_state=seed).fit(x, y)
        assert learner.outcome_ is Outcome.FITTED
        assert learner.layer_.metadata["n_examples"] == "160"
        levels.append(learner.certificate_.noise_level / sigma)
    # Residuals of 3200 scalars less 64 unknowns: a deviation of 1.3 % each.
    assert np.mean(levels) == pytest.approx(1.0, abs=0.02)


def test_no_promise_about_fresh_inputs_is_left():
    x, y = draw(160, 1e-6)
    learner = AttentionRegressor(2).fit(x, y)
    certificate = learner.certificate_
    assert learner.outcome_ is Outcome.FITTED
    assert certificate.tail_bound == 1.0
    assert "nothing is promised about fresh inputs" in certificate.statement
    assert f"level {certificate.noise_level:.3g}" in certificate.statement
    # A least-squares fit to all examples: its gradient vanishes, which that to a part has not.
    examples = Examples(x, y)
    own = np.linalg.norm(learner.layer_(x) - y)
    assert own < np.linalg.norm(TRUTH(x) - y)
    assert learner.certificate_.n_examples < examples.n


def test_a_wrong_label_among_those_held_out_is_not_fitted():
    x, y = draw(160, 1e-8)
    held = np.random.default_rng([0, 0x5B117]).permutation(160)[0]
    y[held] += np.random.default_rng(9).standard_normal(y[held].shape)
    learner = AttentionRegressor(2).fit(x, y)
    assert learner.outcome_ is Outcome.FITTED
    assert learner.certificate_.n_exceeding == 1
    assert compare(learner.layer_, TRUTH).max_error < 1e-6


def test_exact_labels_are_certified_and_nothing_is_refitted():
    x, y = draw(160, 0.0)
    learner = AttentionRegressor(2).fit(x, y)
    assert learner.outcome_ is Outcome.RECOVERED
    assert learner.certificate_.tail_bound < 0.2
    assert learner.layer_.metadata["n_examples"] == "140"


@pytest.mark.slow
def test_a_key_vector_of_a_narrow_head_counts_as_its_rank():
    layer = random_layer(2, 6, rank=1, key_vector=True, out_bias=True, seed=3)
    layer = layer.replace(key_vector=layer.theta[:, 0] * 0.5)  # in the row space, as a rank asks
    levels = []
    for seed in range(4):
        x, y = draw(80, 1e-2, seed, layer)
        learner = AttentionRegressor(2, head_dim=1, bias=True, random_state=seed).fit(x, y)
        levels.append(learner.certificate_.noise_level / 1e-2)
    assert np.mean(levels) == pytest.approx(1.0, abs=0.03)


# In passes: the gradient of all examples, the normal matrix of a part


@pytest.mark.parametrize(
    ("bias", "causal", "head_dim", "ragged"),
    [
        pytest.param(False, False, None, False, marks=pytest.mark.slow),
        (True, True, None, True),
        pytest.param(True, False, 2, False, marks=pytest.mark.slow),
    ],
)
def test_passes_lead_to_the_least_squares_layer_of_all_examples(bias, causal, head_dim, ragged):
    truth = random_layer(2, 4, rank=head_dim, key_vector=bias, out_bias=bias, seed=1)
    truth = truth.replace(causal=causal)
    n, sigma, rng = 3000, 1e-2, np.random.default_rng(5)
    x = sample_inputs("gaussian", n, 5, 4, seed=2)
    lengths = rng.integers(3, 6, n) if ragged else None
    y = truth(x, lengths)
    examples = Examples(x, y + sigma * rng.standard_normal(y.shape), lengths)
    part = examples.sample(500, seed=0)
    architecture = examples.architecture(2, head_dim=head_dim, bias=bias, causal=causal)
    start = polish_on(part, truth, architecture, Run()).layer
    found = fit_streamed(start, examples, part, architecture, Run())
    best = polish_on(examples, truth, architecture, Run()).layer
    deviations = measure_spectrum(truth, examples, architecture).deviations
    names = ["theta", "w"] + (["key_vector", "out_bias"] if bias else [])
    for name in names:
        one, wrong = sigma * getattr(deviations, name), getattr(found, name) - getattr(best, name)
        assert np.abs(wrong / one).max() < 0.02
        assert np.abs((getattr(start, name) - getattr(best, name)) / one).max() > 0.5
    if head_dim is not None:
        for matrices in (found.theta, found.w):
            assert np.linalg.matrix_rank(matrices, tol=1e-9).tolist() == [head_dim] * 2


def test_passes_that_do_not_get_there_are_none(monkeypatch):
    x, y = draw(2000, 1e-2)
    examples = Examples(x, y)
    part, architecture = examples.sample(100, seed=0), examples.architecture(2)
    monkeypatch.setattr(refit_module, "_PASSES", 1)
    assert fit_streamed(TRUTH, examples, part, architecture, Run()) is None
    monkeypatch.undo()
    monkeypatch.setattr(refit_module, "DENSE_LIMIT", 31)
    assert fit_streamed(TRUTH, examples, part, architecture, Run()) is None
    monkeypatch.undo()
    assert fit_streamed(TRUTH, examples, part, architecture, Run()) is not None
