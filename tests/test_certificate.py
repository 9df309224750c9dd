"""What `certify` says is true, and what is not true it does not say."""

import itertools
import json
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhalearn.data import Examples
from mhalearn.data.inputs import sample_inputs
from mhalearn.data.label_precision import label_precision
from mhalearn.estimator import AttentionRegressor
from mhalearn.judge import jacobian_spectrum as spectrum
from mhalearn.judge.certificate import THRESHOLD
from mhalearn.judge.certify import certify
from mhalearn.judge.identifiability import RESOLVED
from mhalearn.judge.jacobian_spectrum import measure_spectrum
from mhalearn.judge.residuals import measure_residuals
from mhalearn.layer.layer import AttentionLayer, load_layer
from mhalearn.layer.random_layers import random_layer
from mhalearn.run.outcome import Outcome
from mhalearn.run.run import Run
from mhalearn.solvers.polish import polish_on

TRUTH = random_layer(2, 6, seed=3)
X = sample_inputs("gaussian", 60, 5, 6, seed=1)
Y = TRUTH(X)


def rms(y):
    return float(np.sqrt(np.mean(np.square(y, dtype=np.float64))))


# An independent Jacobian: a layer written once more, differentiated by JAX


def flat_parameters(layer):
    parts = [layer.theta, layer.w, layer.key_vector, layer.out_bias]
    return np.concatenate([part.ravel() for part in parts if part is not None])


def explicit_jacobian(layer, x):
    """d F / d (theta, w, v, c), all of it, by automatic differentiation in double precision."""
    m, d, e = layer.w.shape
    sizes = [m * d * d, m * d * e, m * d * (layer.key_vector is not None)]

    def outputs(flat):
        theta, w, v, c = jnp.split(flat, np.cumsum(sizes))
        logits = jnp.einsum("nra,mab,njb->nmrj", x, theta.reshape(m, d, d), x)
        if v.size:
            logits = logits + jnp.einsum("ma,nja->nmj", v.reshape(m, d), x)[:, :, None]
        if layer.causal:
            logits = jnp.where(np.tri(x.shape[1], dtype=bool), logits, -jnp.inf)
        p = jax.nn.softmax(logits, axis=-1)
        f = jnp.einsum("nmrj,nja,mae->nre", p, x, w.reshape(m, d, e))
        return (f + c if c.size else f).ravel()

    with jax.enable_x64(True):
        x = jnp.asarray(np.asarray(x, dtype=np.float64))
        flat = jnp.asarray(flat_parameters(layer))
        np.testing.assert_allclose(outputs(flat), layer(np.asarray(x)).ravel(), atol=1e-12)
        return np.asarray(jax.jacobian(outputs)(flat))


def explicit_nullity(layer, x):
    """Unknowns less the rank of the explicit Jacobian; the gap must be plain to see."""
    jacobian = explicit_jacobian(layer, x)
    norms = np.linalg.norm(jacobian, axis=0)
    values = np.linalg.svd(jacobian / np.where(norms > 1e-13, norms, 1.0), compute_uv=False)
    rank = int(np.sum(values > 1e-7 * values[0])) if values[0] > 1e-12 else 0
    if 0 < rank < len(values):
        assert values[rank] < 1e-4 * values[rank - 1]
    return jacobian.shape[1] - rank


# The distribution-free statement


def binomial_tail(s, n, p):
    """P(at most s of n), term by term."""
    return math.fsum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(s + 1))


def tail_by_bisection(s, n, delta):
    """The largest eps under which at most s exceedances still have probability delta."""
    low, high = 0.0, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if binomial_tail(s, n, middle) > delta else (low, middle)
    return low


def with_exceedances(chosen):
    y = Y.copy()
    y[chosen] *= 1 + 3 * THRESHOLD
    return y


@pytest.mark.parametrize("delta", [0.5, 0.05, 1e-6])
@pytest.mark.parametrize("s", [0, 1, 7, 59, 60])
def test_the_tail_bound_is_the_binomial_inverted(s, delta):
    certificate = certify(TRUTH, X, with_exceedances(slice(0, s)), delta)
    assert certificate.n_exceeding == s
    assert certificate.n_examples == 60
    expected = 1.0 if s == 60 else tail_by_bisection(s, 60, delta)
    assert certificate.tail_bound == pytest.approx(expected, rel=1e-9)


def test_errors_below_the_threshold_do_not_exceed_it():
    certificate = certify(TRUTH, X, Y * (1 + 0.9 * THRESHOLD))
    assert certificate.n_exceeding == 0
    assert not certificate.recovered


def test_the_tail_bound_covers_as_often_as_it_says():
    rng = np.random.default_rng(11)
    share, delta, runs = 0.12, 0.2, 100
    bounds = np.array(
        [
            certify(TRUTH, X, with_exceedances(rng.random(60) < share), delta).tail_bound
            for _ in range(runs)
        ]
    )
    covered = np.mean(bounds >= share)
    allowance = 3 * math.sqrt(delta * (1 - delta) / runs)
    assert covered >= 1 - delta - allowance
    # A bound that covers always says nothing.
    assert covered <= 0.99
    assert bounds.mean() < 2 * share


def test_the_statement_holds_the_numbers_and_rounds_to_the_safe_side():
    certificate = certify(TRUTH, X, Y, delta=1e-6)
    assert certificate.statement.startswith("With confidence 0.999999, at least ")
    said = float(certificate.statement.split("at least ")[1].split("%")[0]) / 100
    assert 1 - certificate.tail_bound - 1e-3 <= said <= 1 - certificate.tail_bound


# Examples the layer has seen


@pytest.fixture(scope="module")
def learned():
    return TRUTH.replace(seen=Examples(X, Y).hashes())


def refuses(layer, x, y):
    with pytest.raises(ValueError, match="learned from") as caught:
        certify(layer, x, y)
    assert "\n" not in str(caught.value)


def test_seen_examples_are_refused_in_every_guise(learned, tmp_path):
    refuses(learned, X, Y)
    order = np.random.default_rng(0).permutation(60)
    refuses(learned, X[order], Y[order])
    refuses(learned, np.asfortranarray(X), Y.tolist())
    learned.save(tmp_path / "layer.safetensors")
    refuses(load_layer(tmp_path / "layer.safetensors"), X, Y)
    x = sample_inputs("gaussian", 29, 5, 6, seed=9)
    # Thirty-one seen ones of sixty are a majority.
    refuses(learned, np.concatenate([x, X[:31]]), np.concatenate([TRUTH(x), Y[:31]]))


def test_seen_examples_are_refused_in_another_dtype():
    x = sample_inputs("boolean", 20, 5, 6, seed=2)
    layer = TRUTH.replace(seen=Examples(x, TRUTH(x)).hashes())
    refuses(layer, x.astype(np.float64), TRUTH(x))
    refuses(layer, x.astype(np.int64), TRUTH(x))


def test_a_minority_of_seen_examples_is_left_out_and_counted(learned):
    x = sample_inputs("gaussian", 40, 5, 6, seed=9)
    y = TRUTH(x)
    mixed = certify(learned, np.concatenate([X[:30], x]), np.concatenate([Y[:30] + 1.0, y]))
    # The labels of seen examples were changed: these are not the examples it was learned from.
    assert mixed.n_seen == 0
    assert mixed.n_exceeding == 30
    mixed = certify(learned, np.concatenate([X[:30], x]), np.concatenate([Y[:30], y]))
    fresh = certify(learned, x, y)
    assert (mixed.n_seen, mixed.n_examples) == (30, 40)
    assert (fresh.n_seen, fresh.n_examples) == (0, 40)
    assert mixed.tail_bound == fresh.tail_bound
    assert mixed.recovered
    assert fresh.recovered


# The same examples in other guises


RNG = np.random.default_rng(5)
GUISES = {
    "another order": lambda x, y: (x[:, ::-1], y[:, ::-1]),
    "signs turned": lambda x, y: (-x, -y),
    "last digits": lambda x, y: (x * (1 + 1e-14 * RNG.standard_normal(x.shape)), y),
    "every order": lambda x, y: tuple(
        np.concatenate([part[:, order] for order in itertools.permutations(range(4))])
        for part in (x, y)
    ),
    "single precision": lambda x, y: (x.astype(np.float32), y.astype(np.float32)),
}


@pytest.fixture(scope="module")
def square():
    """As many equations as unknowns, so that labels which no layer made are met exactly."""
    truth = random_layer(2, 4, seed=3)
    x = sample_inputs("gaussian", 4, 4, 4, seed=1)
    y = truth(x) * (1 + 0.01 * np.random.default_rng(0).standard_normal((4, 4, 4)))
    examples = Examples(x, y)
    fitted = polish_on(examples, truth, examples.architecture(2), Run()).layer
    assert measure_residuals(fitted, examples).exact
    fresh = sample_inputs("gaussian", 50, 4, 4, seed=9)
    assert rms(fitted(fresh) - truth(fresh)) > 0.1 * rms(truth(fresh))
    return fitted.replace(seen=examples.survey().remembered), x, y


@pytest.mark.parametrize("guise", GUISES.values(), ids=GUISES)
def test_what_was_learned_from_is_known_again_in_other_guises(square, guise):
    layer, x, y = square
    certificate = certify(layer, *guise(x, y))
    assert not certificate.recovered
    assert "learned from" in certificate.reason
    assert certificate.tail_bound == 1
    assert (certificate.n_examples, certificate.n_groups) == (0, 0)
    assert certificate.n_seen >= 4
    # A minority of them is left out, and the rest decides.
    fresh = sample_inputs("gaussian", 200, 4, 4, seed=9)
    copies = guise(x, y)
    mixed = certify(
        layer,
        np.concatenate([fresh, copies[0]]),
        np.concatenate([layer(fresh), copies[1].astype(np.float64)]),
    )
    assert mixed.n_examples == 200
    assert mixed.recovered


@pytest.mark.parametrize("guise", GUISES.values(), ids=GUISES)
def test_examples_that_repeat_each_other_count_once_and_a_square_system_proves_nothing(
    square, guise
):
    layer, x, y = square
    certificate = certify(layer.replace(seen=None), *guise(x, y))
    assert not certificate.recovered
    assert "1.00 independent equations an unknown" in certificate.reason
    assert certificate.n_groups == 4
    assert certificate.tail_bound == certify(layer.replace(seen=None), x, y).tail_bound


def test_equations_of_the_examples_learned_from_count_too():
    few = certify(TRUTH, X[:3], Y[:3])
    assert not few.recovered
    known = certify(TRUTH, X[:3], Y[:3], learned_from=Examples(X[10:], Y[10:]))
    assert known.recovered
    unknown = certify(TRUTH, X[:3], Y[:3], learned_from=Examples(X[10:14], Y[10:14]))
    assert not unknown.recovered


def test_copies_add_nothing_to_the_statement_and_a_wrong_one_that_is_common_stays_so():
    copied = certify(TRUTH, np.repeat(X, 5, axis=0), np.repeat(Y, 5, axis=0))
    assert (copied.n_examples, copied.n_groups) == (300, 60)
    assert copied.tail_bound == certify(TRUTH, X, Y).tail_bound
    assert "of which 60 ask something new" in copied.statement
    # Half of what is drawn is one input, which the layer is wrong about.
    x, y = np.concatenate([X, X[:1].repeat(60, 0)]), np.concatenate([Y, Y[:1].repeat(60, 0) + 1])
    assert certify(TRUTH, x, y).tail_bound > 0.5


def test_tokens_symmetric_about_their_mean_are_not_enough():
    x = np.concatenate([X[:, :2], -X[:, :2]], axis=1)
    certificate = certify(TRUTH, x, TRUTH(x))
    assert not certificate.recovered


def test_a_layer_that_was_learned_remembers_its_examples_in_other_guises():
    model = AttentionRegressor(2).fit(X, Y)
    assert model.outcome_ is Outcome.RECOVERED
    assert certify(model.layer_, -X[:, ::-1], -Y[:, ::-1]).n_examples == 0


@pytest.mark.parametrize("name", ["n_examples", "head_dim"])
def test_metadata_of_thousands_of_digits_are_ignored(name):
    layer = TRUTH.replace(metadata={name: "9" * 5000})
    assert certify(layer, X, Y).recovered


# The precision of labels


@pytest.mark.parametrize(
    ("dtype", "level"), [(np.float16, 3e-4), (np.float32, 4e-8), (np.float64, 1e-15)]
)
def test_labels_are_met_to_their_own_precision_and_the_certificate_says_so(dtype, level):
    y = Y.astype(dtype)
    for labels in (y, y.astype(np.float64)):
        certificate = certify(TRUTH, X, labels)
        assert certificate.recovered
        assert certificate.label_precision == np.dtype(dtype).name
        assert np.dtype(dtype).name in certificate.reason
        assert math.sqrt(certificate.relative_mse) < level
        assert certificate.floor < 17 * np.finfo(dtype).eps + 2e-12


@pytest.mark.parametrize(("dtype", "noise"), [(np.float16, 0.05), (np.float32, 5e-6)])
def test_noise_above_the_precision_of_labels_is_not_met_exactly(dtype, noise):
    rng = np.random.default_rng(4)
    y = (Y + noise * rms(Y) * rng.standard_normal(Y.shape)).astype(dtype)
    assert not certify(TRUTH, X, y).recovered


@pytest.mark.parametrize("step", [1 / 8, 1 / 64, 1 / 256, 0.01])
def test_quantised_labels_are_not_half_precision(step):
    y = np.round(Y / step) * step
    assert label_precision(Examples(X, y)).name == "float64"
    assert not certify(TRUTH, X, y).recovered


def test_integer_labels_are_not_half_precision():
    certificate = certify(TRUTH.replace(w=100 * TRUTH.w), X, np.round(100 * Y).astype(np.int32))
    assert certificate.label_precision == "float64"
    assert not certificate.recovered


# Layers that are slightly wrong


@pytest.mark.parametrize("name", ["theta", "w", "key_vector", "out_bias"])
def test_one_parameter_off_by_a_billionth_is_not_recovered(name):
    layer = random_layer(2, 6, key_vector=True, out_bias=True, seed=3)
    y = layer(X)
    assert certify(layer, X, y).recovered
    values = getattr(layer, name).copy()
    place = np.unravel_index(np.argmax(np.abs(values)), values.shape)
    values[place] *= 1 + 1e-9
    assert not certify(layer.replace(**{name: values}), X, y).recovered


def test_a_direction_that_coarse_labels_hardly_see_is_not_recovered():
    x = X.copy()
    x[..., -1] *= 2e-3
    y = TRUTH(x).astype(np.float32)
    theta = TRUTH.theta.copy()
    theta[0, 5, 5] += 0.3
    certificate = certify(TRUTH.replace(theta=theta), x, y)
    assert certificate.null_dimension == 0
    assert certificate.relative_mse <= certificate.floor**2
    assert certificate.parameter_bound > RESOLVED
    assert not certificate.recovered
    assert "uncertain by" in certificate.reason


def test_the_parameter_bound_bounds_the_error_of_a_parameter():
    theta_size = np.sqrt(np.mean(np.sum(TRUTH.theta**2, axis=(1, 2))))
    w_size = np.sqrt(np.mean(np.sum(TRUTH.w**2, axis=(1, 2))))
    rng = np.random.default_rng(6)
    tightest = np.inf
    for place in [(0, 0, 0), (1, 3, 2), (1, 5, 5)]:
        for name, size in (("theta", theta_size), ("w", w_size)):
            values = getattr(TRUTH, name).copy()
            values[place] += 1e-6 * size * rng.choice([-1, 1])
            bound = certify(TRUTH.replace(**{name: values}), X, Y).parameter_bound
            assert bound >= 1e-6
            tightest = min(tightest, bound)
    assert tightest < 1e-5


def test_a_huge_column_does_not_hide_noise_in_the_others():
    scales = np.array([1e7, 1, 1, 1, 1, 1])
    layer = TRUTH.replace(w=TRUTH.w * scales)
    noisy = layer(X)
    assert certify(layer, X, noisy).recovered
    noisy[..., 1:] += 1e-6 * np.random.default_rng(1).standard_normal(noisy[..., 1:].shape)
    certificate = certify(layer, X, noisy)
    assert certificate.relative_mse <= certificate.floor**2
    assert not certificate.recovered


def test_a_huge_example_does_not_hide_noise_in_the_others():
    x = X.copy()
    x[0] *= 1e8
    noisy = TRUTH(x)
    noisy[1:] += 1e-6 * np.random.default_rng(1).standard_normal(noisy[1:].shape)
    certificate = certify(TRUTH, x, noisy)
    assert certificate.relative_mse <= certificate.floor**2
    assert not certificate.recovered


def test_a_column_in_which_heads_cancel_is_no_obstacle():
    # Two heads of equal attention, opposite in column 2, and a third without it: what the black
    # box returns there is the rounding of a sum that vanishes.
    w = TRUTH.w * (np.arange(6) != 2)
    opposite = np.where(np.arange(6) == 2, TRUTH.w[0], 0.0)
    box = AttentionLayer(TRUTH.theta[[0, 0, 1]], np.stack([w[0] + opposite, -opposite, w[1]]))
    labels = box(X)
    assert 0 < np.abs(labels[..., 2]).max() < 1e-14
    merged = box.canonical()
    assert merged.n_heads == 2
    assert certify(merged, X, labels).recovered


# Directions that inputs leave open


def tokens_in_a_plane(n, rng):
    return rng.standard_normal((n, 4, 2)) @ rng.standard_normal((2, 3))


def equal_tokens(n, rng):
    return np.repeat(rng.standard_normal((n, 1, 3)), 4, axis=1)


def one_hot_tokens(n, rng):
    return np.eye(3)[rng.integers(0, 3, (n, 4))]


def generic_tokens(n, rng):
    return rng.standard_normal((n, 4, 3))


def plain(m=2, e=2, **options):
    return random_layer(m, 3, out_dim=e, seed=5, **options)


def equal_heads(w_equal=False):
    layer = plain()
    w = np.stack([layer.w[0], 2 * layer.w[0]]) if w_equal else layer.w
    return layer.replace(theta=np.stack([layer.theta[0]] * 2), w=w)


def one_zero_head():
    layer = plain()
    return layer.replace(w=np.stack([layer.w[0], 0 * layer.w[1]]))


OPEN = [
    pytest.param(equal_heads(), generic_tokens, 60, 6, id="equal heads: W moves between them"),
    pytest.param(equal_heads(True), generic_tokens, 60, 15, id="equal heads, proportional W"),
    pytest.param(one_zero_head(), generic_tokens, 60, 9, id="W = 0 leaves its Theta open"),
    pytest.param(plain(), tokens_in_a_plane, 60, 14, id="tokens in a plane"),
    pytest.param(plain(), equal_tokens, 60, 24, id="equal tokens"),
    pytest.param(plain(1), equal_tokens, 60, 9, id="equal tokens, one head"),
    pytest.param(plain(), one_hot_tokens, 60, 8, id="one-hot tokens: Theta + u 1^T"),
    pytest.param(plain(1, 1), generic_tokens, 1, 8, id="one example"),
    pytest.param(plain(3, 1), generic_tokens, 5, None, id="five examples"),
    pytest.param(
        plain(key_vector=True, out_bias=True), one_hot_tokens, 60, None, id="one-hot, biases"
    ),
    pytest.param(
        plain(key_vector=True, out_bias=True), equal_tokens, 60, None, id="equal tokens, biases"
    ),
    pytest.param(plain(causal=True), tokens_in_a_plane, 60, 14, id="tokens in a plane, causal"),
]


@pytest.mark.parametrize(("layer", "tokens", "n", "expected"), OPEN)
def test_open_directions_are_counted_and_never_recovered(layer, tokens, n, expected):
    x = tokens(n, np.random.default_rng(8))
    certificate = certify(layer, x, layer(x))
    assert certificate.relative_mse < 1e-25
    beyond = 0 if certificate.span is None else certificate.span.n_open
    assert certificate.null_dimension + beyond == explicit_nullity(layer, x)
    assert certificate.null_dimension + beyond > 0
    if expected is not None:
        assert certificate.null_dimension + beyond == expected
    assert not certificate.recovered
    assert certificate.recovered_on_span == (certificate.null_dimension == 0)
    assert str(certificate.null_dimension or beyond) in certificate.reason


def test_what_w_absorbs_is_open_though_it_is_computed_by_cancellation():
    # Two heads on two +-1 tokens with one feature: two equations for four unknowns.
    layer = random_layer(2, 1, seed=0)
    x = sample_inputs("boolean", 60, 2, 1, seed=1)
    assert certify(layer, x, layer(x)).null_dimension == 2


@pytest.mark.parametrize("spread", [1e-8, 1e-12])
def test_nearly_equal_tokens_are_equal_to_rounding(spread):
    layer = plain(1)
    rng = np.random.default_rng(8)
    x = equal_tokens(60, rng) + spread * generic_tokens(60, rng)
    certificate = certify(layer, x, layer(x))
    assert certificate.null_dimension == 9
    assert not certificate.recovered


@pytest.mark.parametrize("options", [{}, {"key_vector": True, "out_bias": True}, {"causal": True}])
def test_generic_inputs_leave_nothing_open(options):
    layer = plain(**options)
    x = generic_tokens(60, np.random.default_rng(8))
    certificate = certify(layer, x, layer(x))
    assert certificate.null_dimension == explicit_nullity(layer, x) == 0
    assert certificate.recovered


def test_where_the_spectrum_is_too_large_a_random_direction_is_asked(monkeypatch):
    monkeypatch.setattr(spectrum, "DENSE_LIMIT", 10)
    certificate = certify(TRUTH, X, Y)
    assert certificate.spectrum is None
    assert certificate.intervals is None
    assert certificate.recovered
    assert certificate.null_dimension == 0
    json.loads(certificate.to_json())
    twins = AttentionLayer(TRUTH.theta[[0, 0, 1]], TRUTH.w[[0, 0, 1]] * [[[0.5]], [[0.5]], [[1.0]]])
    certificate = certify(twins, X, Y)
    assert not certificate.recovered
    assert certificate.null_dimension is None
    assert "does not show the Jacobian to have full rank" in certificate.reason


# Symmetries


def facts(certificate):
    return (
        certificate.recovered,
        certificate.null_dimension,
        certificate.n_exceeding,
        certificate.tail_bound,
        certificate.label_precision,
    )


@pytest.mark.parametrize("labels", [Y, Y + 1e-4, Y.astype(np.float32)])
def test_the_order_of_heads_and_examples_changes_nothing(labels):
    certificate = certify(TRUTH, X, labels)
    turned = TRUTH.replace(theta=TRUTH.theta[::-1], w=TRUTH.w[::-1])
    order = np.random.default_rng(2).permutation(60)
    for other in (certify(turned, X, labels), certify(TRUTH, X[order], labels[order])):
        assert facts(other) == facts(certificate)
        assert other.relative_mse == pytest.approx(certificate.relative_mse, rel=1e-6, abs=1e-30)
        np.testing.assert_allclose(other.spectrum, certificate.spectrum, rtol=1e-7)
        np.testing.assert_allclose(
            np.sort(other.intervals.theta, axis=None),
            np.sort(certificate.intervals.theta, axis=None),
            rtol=1e-6,
            atol=1e-15,
        )


def test_relabelled_features_and_tokens_change_nothing():
    labels = Y + 1e-3 * np.random.default_rng(0).standard_normal(Y.shape)
    certificate = certify(TRUTH, X, labels)
    r = np.eye(6)[[3, 1, 5, 0, 2, 4]] * np.array([1, -1, 1, 1, -1, -1])
    turned = AttentionLayer(r.T @ TRUTH.theta @ r, r.T @ TRUTH.w)
    tokens = [2, 0, 4, 3, 1]
    for other in (certify(turned, X @ r, labels), certify(TRUTH, X[:, tokens], labels[:, tokens])):
        assert facts(other) == facts(certificate)
        assert other.relative_mse == pytest.approx(certificate.relative_mse, rel=1e-9)
        np.testing.assert_allclose(other.spectrum, certificate.spectrum, rtol=1e-7)


@pytest.mark.parametrize("power", [-8, 8])
def test_other_units_change_nothing(power):
    labels = Y + 1e-3 * np.random.default_rng(0).standard_normal(Y.shape)
    certificate = certify(TRUTH, X, labels)
    x, y = 2.0**power, 2.0 ** (2 * power + 1)
    other = certify(AttentionLayer(TRUTH.theta / x**2, TRUTH.w * y / x), X * x, labels * y)
    assert facts(other) == facts(certificate)
    assert other.parameter_bound == pytest.approx(certificate.parameter_bound, rel=1e-6)
    assert other.noise_level == pytest.approx(y * certificate.noise_level, rel=1e-9)
    np.testing.assert_allclose(other.intervals.theta, certificate.intervals.theta / x**2, rtol=1e-6)


# Intervals


@pytest.mark.parametrize("options", [{}, {"key_vector": True, "out_bias": True}, {"causal": True}])
def test_intervals_are_those_of_the_explicit_jacobian(options):
    layer = plain(**options)
    rng = np.random.default_rng(3)
    x = generic_tokens(30, rng)
    y = layer(x) + 0.01 * rng.standard_normal((30, 4, 2))
    certificate = certify(layer, x, y, delta=0.1)
    jacobian = explicit_jacobian(layer, x)
    sigma = np.sqrt(np.mean((layer(x) - y) ** 2))
    quantile = 1.6448536269514722  # of the standard normal, at 0.95
    expected = quantile * sigma * np.sqrt(np.diag(np.linalg.inv(jacobian.T @ jacobian)))
    found = flat_parameters(certificate.intervals)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert certificate.noise_level == pytest.approx(sigma, rel=1e-12)


def test_intervals_speak_of_the_examples_the_layer_was_learned_from():
    layer = plain()
    rng = np.random.default_rng(3)
    x, fresh = generic_tokens(50, rng), generic_tokens(30, rng)
    y = layer(fresh) + 0.01 * rng.standard_normal((30, 4, 2))
    known = certify(layer, fresh, y, learned_from=Examples(x, layer(x)))
    jacobian = explicit_jacobian(layer, x)
    expected = np.sqrt(np.diag(np.linalg.inv(jacobian.T @ jacobian)))
    found = flat_parameters(known.intervals)
    np.testing.assert_allclose(found / found[0], expected / expected[0], rtol=1e-6)
    # Without those examples, their number is known and fresh inputs stand in.
    told = certify(layer.replace(metadata={"n_examples": "3000"}), fresh, y)
    stood_in = certify(layer, fresh, y)
    np.testing.assert_allclose(told.intervals.w, stood_in.intervals.w / 10, rtol=1e-9)


@pytest.mark.parametrize("said", ["many", "0", "-3", "1e3", ""])
def test_nonsense_in_metadata_is_not_believed(said):
    told = certify(TRUTH.replace(metadata={"n_examples": said}), X, Y + 1e-3)
    np.testing.assert_array_equal(told.intervals.w, certify(TRUTH, X, Y + 1e-3).intervals.w)


def test_parameters_that_touch_an_open_direction_have_no_interval():
    layer = one_zero_head()
    x = generic_tokens(60, np.random.default_rng(8))
    intervals = certify(layer, x, layer(x) + 1e-3).intervals
    assert np.isinf(intervals.theta[1]).all()
    assert np.isfinite(intervals.theta[0]).all()


@pytest.mark.parametrize("options", [{}, {"key_vector": True, "out_bias": True}])
def test_intervals_cover_as_often_as_they_say(options):
    """Refits of noisy labels from the truth; all parameters of all refits pooled."""
    layer = random_layer(2, 4, seed=1, **options)
    bias = bool(options)
    x = sample_inputs("gaussian", 96, 4, 4, seed=2)
    fresh = sample_inputs("gaussian", 96, 4, 4, seed=3)
    rng = np.random.default_rng(5)
    inside, truth = [], flat_parameters(layer)
    for _ in range(40):
        examples = Examples(x, layer(x) + 0.01 * rng.standard_normal((96, 4, 4)))
        fitted = polish_on(examples, layer, examples.architecture(2, bias=bias), Run()).layer
        noisy = layer(fresh) + 0.01 * rng.standard_normal((96, 4, 4))
        certificate = certify(fitted, fresh, noisy, learned_from=examples)
        assert not certificate.recovered
        error = np.abs(flat_parameters(fitted) - truth)
        inside.append(error <= flat_parameters(certificate.intervals))
    assert 0.93 < np.mean(inside) < 0.97


# Plain data


def strictly(text):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize(
    ("layer", "labels"),
    [
        (TRUTH, Y),
        (TRUTH, Y + 0.1),
        (TRUTH, 0 * Y),
        (TRUTH.replace(w=0 * TRUTH.w), 0 * Y),
        (TRUTH.replace(w=TRUTH.w * np.array([1, 0])[:, None, None]), Y),
        (TRUTH, Y.astype(np.float16)),
    ],
)
def test_to_json_is_strict_json(layer, labels):
    certificate = certify(layer, X, labels)
    plain_data = strictly(certificate.to_json())
    assert plain_data == strictly(json.dumps(certificate.to_dict(), allow_nan=False))
    assert plain_data["recovered"] is certificate.recovered
    assert plain_data["tail_bound"] == certificate.tail_bound
    assert plain_data["n_examples"] == 60
    assert plain_data["statement"] == certificate.statement
    assert "errors" not in plain_data
    assert plain_data["median_error"] <= plain_data["largest_error"] == certificate.errors[-1]


# What the certificate rests on


def test_residuals_are_recomputed_in_double_precision_and_in_chunks():
    n = 2500  # three chunks
    x = sample_inputs("gaussian", n, 3, 3, seed=5)
    layer = plain()
    y = (layer(x) + 0.1 * np.random.default_rng(0).standard_normal((n, 3, 2))).astype(np.float32)
    residuals = measure_residuals(layer, Examples(x, y))
    wrong = layer(x) - y.astype(np.float64)
    np.testing.assert_allclose(residuals.squared, np.sum(wrong**2, axis=(1, 2)))
    expected = np.sqrt(np.sum(wrong**2) / np.sum(y.astype(np.float64) ** 2))
    assert residuals.root_relative == pytest.approx(expected, rel=1e-12)
    assert residuals.noise_level == pytest.approx(np.sqrt(np.mean(wrong**2)), rel=1e-12)


def test_padding_is_not_looked_at():
    lengths = np.random.default_rng(1).integers(2, 6, 60)
    y = TRUTH(X, lengths)
    assert certify(TRUTH, X, y, lengths=lengths).recovered
    x, labels = X.copy(), y.copy()
    for i, length in enumerate(lengths):
        x[i, length:], labels[i, length:] = 1e3, -7.0
    assert certify(TRUTH, x, labels, lengths=lengths).recovered
    assert not certify(TRUTH, x, labels).recovered


def test_the_spectrum_is_that_of_the_explicit_schur_complement():
    layer, x = plain(), generic_tokens(30, np.random.default_rng(3))
    jacobian = explicit_jacobian(layer, x)
    of_theta, of_w = jacobian[:, :18], jacobian[:, 18:]
    projected = of_theta - of_w @ np.linalg.lstsq(of_w, of_theta, rcond=None)[0]
    size = np.sum(of_theta**2, axis=0)
    scaled = projected.T @ projected / np.sqrt(np.outer(size, size))
    found = measure_spectrum(layer, Examples(x, layer(x)))
    np.testing.assert_allclose(found.theta, np.linalg.eigvalsh(scaled), rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize(
    "mistake",
    [
        lambda: certify(TRUTH, X),
        lambda: certify(TRUTH, X, Y[:5]),
        lambda: certify(TRUTH, X[0], Y[0]),
        lambda: certify(TRUTH, X[..., :4], Y),
        lambda: certify(TRUTH, X, Y[..., :4]),
        lambda: certify(TRUTH, X, Y * np.nan),
        lambda: certify(TRUTH, X, Y.astype(str)),
        lambda: certify(TRUTH, X[:0], Y[:0]),
        lambda: certify(TRUTH, X[:, :1], Y[:, :1]),
        lambda: certify(TRUTH, X, 1e200 * Y),
        lambda: certify(TRUTH, Examples(X, Y), Y),
        lambda: certify(TRUTH, X, Y, learned_from=Examples(X[..., :4], Y)),
        *(
            lambda delta=delta: certify(TRUTH, X, Y, delta)
            for delta in (0.0, 1.0, -0.1, 2.0, float("nan"))
        ),
    ],
)
def test_a_caller_s_mistake_is_a_value_error_of_one_line(mistake):
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        mistake()


def test_a_mistaken_type_is_a_value_error_of_one_line():
    """In a process of its own: the checker of the tests would see these first."""
    script = """
import json
import numpy as np
from mhalearn import Examples, certify, random_layer, sample_inputs
layer, x = random_layer(1, 2), sample_inputs("gaussian", 8, 3, 2)
y = layer(x)
for mistake in [
    lambda: certify("layer", x, y),
    lambda: certify(x, layer, y),
    lambda: certify(layer, x, y, learned_from=x),
    *(lambda delta=delta: certify(layer, x, y, delta) for delta in ("a", None, [0.1], 1j, True)),
    lambda: certify(layer, None, None),
    lambda: certify(layer, x, y, lengths="abc"),
    lambda: certify(layer, x, y, lengths=np.full(8, 3.0)),
]:
    try:
        mistake()
    except ValueError as error:
        assert len(str(error).splitlines()) == 1, error
    else:
        raise AssertionError("accepted")
json.loads(certify(layer, x, y, delta=np.float32(0.05)).to_json())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_head_counts_that_disagree_are_told_apart_by_the_residual():
    three = random_layer(3, 6, seed=3)
    for kept in itertools.combinations(range(3), 2):
        part = three.replace(theta=three.theta[list(kept)], w=three.w[list(kept)])
        assert not certify(part, X, three(X)).recovered
