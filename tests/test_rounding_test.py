"""Coarse labels: what rounding, and computing in their precision, leave; and what is more."""

import ml_dtypes
import numpy as np
import pytest

from mhalearn.data import Examples
from mhalearn.data.inputs import sample_inputs
from mhalearn.data.label_precision import label_precision
from mhalearn.estimator import AttentionRegressor
from mhalearn.judge.certify import certify
from mhalearn.judge.computing_error import compute_by_factors, compute_coarsely
from mhalearn.judge.fitted_attention import look_at
from mhalearn.judge.residuals import measure_residuals
from mhalearn.judge.rounding_test import run_rounding_test
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.random_layers import random_layer
from mhalearn.run.outcome import Outcome

N, K, D = 120, 4, 4
LAYER = random_layer(2, D, seed=3)
X = sample_inputs("gaussian", N, K, D, seed=1)
Y = LAYER(X)
AWAY = np.abs(np.arange(K)[:, None] - np.arange(K))
BFLOAT16 = ml_dtypes.bfloat16


def softmax(logits):
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def attend(weigh, x=X):
    logits = np.einsum("nra,mab,njb->nmrj", x, LAYER.theta, x)
    return np.einsum("nmrj,njd,mde->nre", weigh(logits), x, LAYER.w)


def computed(dtype, x=X, layer=LAYER):
    """A box whose every result has the given precision."""

    def to(array):
        return array.astype(dtype).astype(np.float64)

    keys = to(to(np.einsum("nra,mab->nmrb", to(x), to(layer.theta))) @ x[:, None].swapaxes(2, 3))
    weights = to(np.exp(keys - keys.max(axis=-1, keepdims=True)))
    p = to(weights / to(weights.sum(axis=-1, keepdims=True)))
    return to(np.sum(to(to(p @ to(x)[:, None]) @ to(layer.w)), axis=1))


# The precision of labels is read off their values


@pytest.mark.parametrize(
    ("labels", "name", "grid"),
    [
        (Y, "float64", 0.0),
        (Y.astype(np.float32), "float32", 0.0),
        (Y.astype(np.float32).astype(np.float64), "float32", 0.0),
        (Y.astype(np.float16), "float16", 0.0),
        (Y.astype(BFLOAT16).astype(np.float32), "bfloat16", 0.0),
        (Y.astype(BFLOAT16).astype(np.float64), "bfloat16", 0.0),
        (np.round(Y, 2), "float64", 0.01),
        (np.round(Y, 2).astype(np.float32), "float64", 0.01),
        (np.round(Y, 1).astype(np.float16), "float64", 0.1),
        (np.round(64 * Y) / 64, "float64", 1 / 64),
        (np.round(100 * Y).astype(np.int32), "float64", 1.0),
        (0 * Y, "float64", 0.0),
    ],
)
def test_how_labels_were_rounded_is_known_by_their_values(labels, name, grid):
    found = label_precision(Examples(X, labels))
    assert (found.name, found.grid) == (name, grid)
    assert found.is_coarse == (name != "float64" or grid > 0)


def test_labels_of_a_few_significant_bits_are_known_as_such():
    mantissa, exponent = np.frexp(Y)
    found = label_precision(Examples(X, np.ldexp(np.round(mantissa * 2**13) / 2**13, exponent)))
    assert (found.name, found.bits, found.grid) == ("float64", 13, 0.0)
    assert found.describe() == "of 13 significant bits"


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16])
def test_the_steps_of_labels_are_those_of_their_format(dtype):
    labels = Y.astype(dtype)
    found = label_precision(Examples(X, labels.astype(np.float64)))
    spacing = np.abs(np.nextafter(labels, labels.dtype.type(np.inf)).astype(float) - labels)
    assert np.mean(found.steps(labels.astype(np.float64)) == spacing) > 0.9
    assert np.median(found.steps(labels.astype(np.float64)) / spacing) == 1.0


# What computing leaves


@pytest.mark.parametrize(
    ("name", "dtype"), [("float32", np.float32), ("float16", np.float16), ("bfloat16", BFLOAT16)]
)
def test_computing_coarsely_errs_as_a_box_does_that_computes_so(name, dtype):
    fitted = look_at(LAYER, Examples(X, Y), Architecture(D, 2), 0)[0]
    box = np.sqrt(np.mean((computed(dtype) - Y) ** 2))
    ours = [
        np.sqrt(np.mean((way(fitted, name) - Y) ** 2))
        for way in (compute_coarsely, compute_by_factors)
    ]
    assert 0.7 * box < max(ours) < 2 * box


# Boxes


def capped(cap):
    return lambda x: attend(lambda logits: softmax(cap * np.tanh(logits / cap)), x)


def sloped(slope):
    return lambda x: attend(lambda logits: softmax(logits - slope * AWAY), x)


DEPARTING = [
    (capped(1500), np.float32),
    (capped(800), np.float32),
    (sloped(2e-6), np.float32),
    (sloped(1e-6), np.float32),
    (capped(30), np.float16),
    (sloped(1e-2), np.float16),
    (capped(12), BFLOAT16),
]


@pytest.mark.parametrize(("box", "dtype"), DEPARTING)
def test_a_deviation_of_a_few_units_is_not_rounding(box, dtype):
    learned = AttentionRegressor(2).fit(X, box(X).astype(dtype).astype(np.float64))
    assert learned.outcome_ is Outcome.FITTED
    assert learned.certificate_.noise_level is None
    assert learned.certificate_.intervals is None
    fresh = sample_inputs("gaussian", 200, K, D, seed=9)
    labels = box(fresh).astype(dtype).astype(np.float64)
    assert not certify(learned.layer_, fresh, labels).recovered


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("rounded_once", [True, False])
def test_rounding_and_computing_in_the_labels_precision_are_let_pass(dtype, rounded_once):
    box = (lambda x: LAYER(x).astype(dtype)) if rounded_once else (lambda x: computed(dtype, x))
    learned = AttentionRegressor(2).fit(X, box(X))
    assert learned.outcome_ is Outcome.RECOVERED
    unit = float(np.finfo(dtype).eps)
    assert 0.4 * unit < learned.certificate_.undetected < unit
    fresh = sample_inputs("gaussian", 200, K, D, seed=9)
    assert certify(learned.layer_, fresh, box(fresh)).recovered


def test_bfloat16_labels_give_error_bars_or_the_layer_and_are_never_not_identified():
    learned = AttentionRegressor(2).fit(X, Y.astype(BFLOAT16).astype(np.float32))
    certificate = learned.certificate_
    assert certificate.label_precision == "bfloat16"
    assert learned.outcome_ in (Outcome.FITTED, Outcome.RECOVERED)
    assert certificate.intervals is not None
    error = np.abs(learned.layer_.canonical().w - LAYER.canonical().w)
    assert np.mean(error <= certificate.intervals.arrays["w"]) > 0.8


def test_quantised_labels_are_said_to_be_rounded_and_have_error_bars():
    learned = AttentionRegressor(2).fit(X, np.round(Y, 2))
    assert learned.outcome_ is Outcome.FITTED
    assert "labels that are multiples of 0.01" in learned.solution_.reason
    assert learned.certificate_.noise_level == pytest.approx(0.01 / np.sqrt(12), rel=0.1)
    assert learned.certificate_.statement.startswith("Rounding of level")


def test_the_test_says_what_it_would_not_have_seen():
    examples = Examples(X, Y.astype(np.float32))
    architecture = Architecture(D, 2)
    residuals = measure_residuals(LAYER, examples)
    test = run_rounding_test(LAYER, examples, architecture, residuals)
    assert test.passed
    assert residuals.unit / 2 <= test.undetected < residuals.unit


def test_a_row_that_is_off_is_seen_beside_rows_of_any_size():
    """One token of every example is huge: its row outweighs all others in sums."""
    x = X.copy()
    x[:, 0] *= 1e3
    y = LAYER(x)
    assert measure_residuals(LAYER, Examples(x, y)).exact
    y[5, 2] *= 1.001
    assert not measure_residuals(LAYER, Examples(x, y)).exact
    rounded = LAYER(x).astype(np.float32)
    assert measure_residuals(LAYER, Examples(x, rounded)).exact
    rounded[5, 2] *= np.float32(1.36)
    assert not measure_residuals(LAYER, Examples(x, rounded)).exact
