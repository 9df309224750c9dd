"""Predicted parameter errors, beside those of fits."""

import numpy as np
import pytest

import mhalearn as mha
from mhalearn.judge.double_error import computing_deviation, outputs_in
from mhalearn.judge.sample_plan import head_error, predict_error
from mhalearn.run.run import Run
from mhalearn.solvers.polish import polish_on

LAYER = mha.random_layer(n_heads=3, d=6, scale=2.0, seed=3)


@pytest.mark.parametrize("labels", ["float32", 0.01, 11])
def test_a_prediction_is_met_within_a_fifth(labels):
    """On average over what is rounded or drawn: of one fit the error itself is random."""
    rng = np.random.default_rng(0)
    ratios = []
    for seed in range(3):
        x = mha.sample_inputs("gaussian", 30, 8, 6, seed=seed)
        y = LAYER(x)
        if labels == "float32":
            coarse = y.astype(np.float32)
        elif isinstance(labels, int):
            part, power = np.frexp(y)
            coarse = np.ldexp(np.round(part * 2**labels) / 2**labels, power)
        else:
            coarse = y + labels * np.sqrt(np.mean(y**2)) * rng.standard_normal(y.shape)
        found = polish_on(mha.Examples(x, coarse), LAYER, LAYER.architecture, Run()).layer
        achieved = head_error(found, LAYER, mha.compare(found, LAYER).order)
        ratios.append(achieved / predict_error(LAYER, x, labels, LAYER.architecture))
    assert 0.8 < np.sqrt(np.mean(np.square(ratios))) < 1.2


def test_what_computing_in_doubles_loses_is_what_more_digits_show():
    """As much as one rounding of an output at least, and beside it the oracle is the layer."""
    layer = mha.random_layer(n_heads=2, d=5, key_vector=True, out_bias=True, causal=True, seed=1)
    x = mha.sample_inputs("gaussian", 20, 6, 5, seed=0)
    exact = outputs_in(layer, x, np.longdouble)
    np.testing.assert_allclose(exact.astype(np.float64), layer(x), rtol=1e-12, atol=1e-14)
    lost = computing_deviation(layer, x)
    size = float(np.sqrt(np.mean(layer(x) ** 2)))
    assert 2**-54 * size < lost < 2**-48 * size


def test_more_precise_labels_and_more_examples_promise_more():
    architecture = mha.Architecture(5, n_heads=2)
    rough = mha.plan(architecture, 3e-4, labels="bfloat16")
    fine = mha.plan(architecture, 3e-4, labels="float32")
    finer = mha.plan(architecture, 3e-5, labels="bfloat16")
    assert fine.examples < rough.examples < finer.examples
    assert fine.examples >= fine.counting_limit
    # Far above the counting limit errors fall as the root of the examples.
    assert finer.examples / rough.examples == pytest.approx(100, rel=0.02)


def test_inputs_that_leave_something_open_promise_nothing():
    x = np.zeros((40, 4, 6))
    assert predict_error(LAYER, x + np.eye(6)[0], "float32", LAYER.architecture) == np.inf


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"precision": 0.0}, "relative error you want"),
        ({"labels": "float8"}, "choose one of"),
        ({"labels": 60}, "1 to 53 bits"),
        ({"labels": 2.5}, "between 0 and 1"),
        ({"architecture": mha.Architecture(5)}, "n_heads"),
        ({"architecture": mha.Architecture(64, n_heads=8)}, "smaller layer"),
    ],
)
def test_mistakes_are_told_in_one_line(change, said):
    asked = {"architecture": mha.Architecture(5, n_heads=2), "precision": 1e-3} | change
    with pytest.raises(ValueError, match=said):
        mha.plan(**asked)
