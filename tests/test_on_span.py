"""Tokens that do not span the features: what is recovered there, and what is left open."""

import json

import numpy as np
import pytest

import mhalearn as mha
from mhalearn import cli
from mhalearn.layer.architecture import Architecture
from mhalearn.run.outcome import Outcome

D, E, K, N = 5, 3, 4, 120


def rng(seed=0):
    return np.random.default_rng(seed)


def gaussian(seed=0, n=N):
    return rng(seed).standard_normal((n, K, D))


def layer_norm(seed=0, n=N):
    x = gaussian(seed, n)
    x = x - x.mean(axis=-1, keepdims=True)
    x = x / x.std(axis=-1, keepdims=True)
    return x * rng(7).uniform(0.5, 2.0, D) + rng(8).standard_normal(D)


def one_hot(seed=0, n=N):
    return np.eye(D)[rng(seed).integers(0, D, (n, K))]


def constant_feature(seed=0, n=N):
    x = gaussian(seed, n)
    x[..., 2] = 3.0
    return x


def in_hyperplane(seed=0, n=N):
    return gaussian(seed, n)[..., :4] @ rng(9).standard_normal((4, D))


LAWS = [layer_norm, one_hot, constant_feature, in_hyperplane]
TRUTH = {
    bias: mha.random_layer(2, D, out_dim=E, key_vector=bias, out_bias=bias, seed=3)
    for bias in (False, True)
}


def learn(x, y, bias=False, **settings):
    return mha.AttentionRegressor(n_heads=2, bias=bias, **settings).fit(x, y)


def changed_off_span(layer, x):
    """Another layer, equal on the span of the tokens."""
    centred = x.reshape(-1, D) - x.mean(axis=(0, 1))
    normal = np.linalg.svd(centred)[2][-1]
    level = float(x[0, 0] @ normal)
    theta, w, vector = layer.theta.copy(), layer.w.copy(), layer.key_vector
    changes = rng(4).standard_normal((2, D))
    theta += changes[:, :, None] * normal  # constant in the key
    if vector is not None:
        theta += normal[:, None] * changes[:, None]
        vector = vector - level * changes
    if abs(level) < 1e-9:
        w += normal[:, None] * rng(5).standard_normal((2, 1, E))
    else:  # what one head gains the other loses
        gain = rng(5).standard_normal(E)
        w += normal[:, None] * np.stack([gain, -gain])[:, None]
    return layer.replace(theta=theta, w=w, key_vector=vector)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_a_layer_is_recovered_on_the_span_of_the_tokens(law, bias):
    x, truth = law(), TRUTH[bias]
    found = learn(x, truth(x), bias)
    assert found.outcome_ is Outcome.RECOVERED_ON_SPAN, found.solution_.reason
    assert "on the affine span of the tokens: 4 of 5 dimensions" in found.solution_.reason
    certificate, layer = found.certificate_, found.layer_
    assert certificate.recovered_on_span
    assert not certificate.recovered
    assert certificate.span.dimension == 4
    assert np.abs((x - x[0, 0]) @ certificate.span.normals.T).max() < 1e-12
    assert Architecture(D, 2, None, E, bias).contains(layer)
    fresh = law(1)
    np.testing.assert_allclose(layer(fresh), truth(fresh), atol=1e-11)
    assert mha.compare(layer, truth, inputs=x).max_error < 1e-10
    assert mha.compare(layer, truth).max_error > 1e-2  # what is open is not the truth's
    assert mha.compare(layer, truth.on_span(x)).max_error < 1e-9  # but of least norm
    learned_from = mha.Examples(x, truth(x))  # of a small vocabulary little is fresh
    certified = mha.certify(layer, fresh, truth(fresh), learned_from=learned_from)
    assert certified.recovered_on_span, certified.reason
    assert not certified.recovered


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_centred_canonical_form_is_unique(law, bias):
    x, layer = law(), TRUTH[bias]
    other = changed_off_span(layer, x)
    np.testing.assert_allclose(other(x), layer(x), atol=1e-12)
    assert mha.compare(other, layer).max_error > 0.1
    assert mha.compare(other, layer, inputs=x).max_error < 1e-13
    forms = [one.on_span(x) for one in (layer, other)]
    np.testing.assert_allclose(forms[1](x), layer(x), atol=1e-12)
    assert mha.compare(*forms).max_error < 1e-13
    assert np.linalg.norm(forms[0].w) <= np.linalg.norm(layer.w)
    twice = forms[0].on_span(x)
    assert mha.compare(twice, forms[0]).max_error < 1e-13


def test_a_layer_is_its_own_form_where_tokens_span_the_features():
    assert TRUTH[True].on_span(gaussian()) is TRUTH[True]
    with pytest.raises(ValueError, match="d = 5"):
        TRUTH[True].on_span(gaussian()[..., :4])
    with pytest.raises(ValueError, match="features"):
        mha.compare(TRUTH[True], TRUTH[True], inputs=gaussian()[..., :4])


def test_float32_recordings_of_normalised_tokens_are_recovered_on_their_span():
    x = layer_norm().astype(np.float32)
    found = learn(x, TRUTH[True](x).astype(np.float32), True)
    assert found.outcome_ is Outcome.RECOVERED_ON_SPAN, found.solution_.reason
    assert mha.compare(found.layer_, TRUTH[True], inputs=x).max_error < 1e-4


def test_uneven_tokens_that_span_the_features_are_whitened_and_recovered():
    x = gaussian() * np.array([1, 1, 2, 30, 0.05]) + np.array([0, 4, 0, 0, 0])
    truth = TRUTH[True].replace(theta=TRUTH[True].theta / 10)
    found = learn(x, truth(x), True)
    assert [event.step for event in found.trace_ if event.stage == "span"] == [D]
    assert found.outcome_ is Outcome.RECOVERED, found.solution_.reason
    assert found.certificate_.span is None
    assert mha.compare(found.layer_, truth).max_error < 1e-8


def test_even_tokens_are_taken_as_they_are():
    x = gaussian()
    found = learn(x, TRUTH[False](x))
    assert found.outcome_ is Outcome.RECOVERED
    assert not [event for event in found.trace_ if event.stage == "span"]


@pytest.mark.parametrize("spoiled", ["noise", "a token outside"])
def test_labels_that_no_layer_on_the_span_makes_are_not_recovered(spoiled):
    x, truth = one_hot(), TRUTH[False]
    y = truth(x)
    if spoiled == "noise":
        y = y + 1e-3 * rng(3).standard_normal(y.shape)
    else:  # one that is near the others in no direction, seen once
        x = x.copy()
        x[5, 1] += 0.5
        y = truth(x)
    found = learn(x, y)
    assert found.outcome_ not in (Outcome.RECOVERED, Outcome.RECOVERED_ON_SPAN)
    if spoiled == "noise":
        assert "4 of 5 dimensions" in found.solution_.reason
        assert found.certificate_.intervals.theta.shape == (2, D, D)
        assert np.isinf(found.certificate_.intervals.theta).any()


def test_what_others_see_of_a_run_is_in_the_features_of_the_user(tmp_path):
    x, truth, seen = one_hot(), TRUTH[False], []

    def listen(event):
        layer = estimator.layer_at_hand()
        if layer is not None:
            seen.append(layer.d)

    path = tmp_path / "run.safetensors"
    estimator = mha.AttentionRegressor(n_heads=2, checkpoint=str(path), on_event=listen)
    estimator.fit(x, truth(x))
    assert set(seen) == {D}
    best = estimator.best_layer_so_far()
    assert (best.d, best.key_vector) == (D, None)
    np.testing.assert_allclose(best(x), truth(x), atol=1e-3)
    assert mha.load_layer(path).d == D
    again = mha.AttentionRegressor(n_heads=2, checkpoint=str(path), resume=True).fit(x, truth(x))
    np.testing.assert_array_equal(again.layer_.theta, estimator.layer_.theta)
    assert again.outcome_ is estimator.outcome_


def test_streamed_examples_are_asked_for_tokens_the_working_set_lacks():
    """The span is that of all tokens, not of those in memory."""
    from mhalearn._runtime.precision import find_precision
    from mhalearn.data.span import find_coordinates

    few, more = one_hot(), one_hot(1)
    more[7, 0] = 0.25
    doubles = find_precision(lambda: [gaussian()])
    few, more = (mha.Examples(x, TRUTH[False](x)) for x in (few, more))
    alone = find_coordinates(few, Architecture(D, 2, None, E), doubles)
    both = find_coordinates(few, Architecture(D, 2, None, E), doubles, others=more)
    assert alone.span.rank == 4
    assert both is None or both.span.rank == 5


def test_the_command_line_says_so(tmp_path, capsys):
    x, fresh, truth = constant_feature(), constant_feature(1), TRUTH[False]
    names = ("data", "fresh", "truth", "layer")
    data, other, true, out = (tmp_path / f"{name}.safetensors" for name in names)
    report = tmp_path / "report.html"
    mha.Examples(x, truth(x)).save(data)
    mha.Examples(fresh, truth(fresh)).save(other)
    truth.save(true)

    def call(*arguments):
        assert cli.run([str(argument) for argument in arguments]) == 0
        return capsys.readouterr().out

    said = json.loads(call("learn", data, "--heads", 2, "--out", out, "--report", report, "--json"))
    assert (said["outcome"], said["span_dimension"]) == ("RECOVERED_ON_SPAN", 4)
    assert (said["recovered"], said["recovered_on_span"]) == (False, True)
    assert said["certificate"]["span"]["open_parameters"] == 2 * D + E
    assert "recovered on the span of the tokens" in report.read_text()
    assert "RECOVERED_ON_SPAN" in call("certify", out, other)
    compared = json.loads(call("compare", out, true, "--inputs", data, "--json"))
    assert compared["max_error"] < 1e-10
