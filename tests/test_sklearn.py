"""scikit-learn's own checks of an estimator, and in three dimensions what they try in two."""

import pickle
from pathlib import Path
from typing import Any

import jaxtyping
import numpy as np
import pytest
from sklearn.base import clone
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

from mhalearn import AttentionRegressor, Examples, random_layer, sample_inputs


class Tried(AttentionRegressor):
    """Says that it takes matrices, which it refuses: else scikit-learn would check nothing."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = True
        return tags


# X is (examples, tokens, features) and Y (examples, tokens, outputs), so that no check passes that
# fits a matrix. What they are about is tried below in three dimensions, under the same name.
FITS = "fits a matrix X (n, d), which is no sequence of tokens; "
WORDS = "wants scikit-learn's words for a matrix X, which is refused for its number of axes; "
NOT_MET = {
    "check_dict_unchanged": FITS + "predict leaves the attributes alone: below",
    "check_dont_overwrite_parameters": FITS + "fit sets only names that end in _: below",
    "check_dtype_object": FITS + "besides, arrays of Python objects are refused, not converted",
    "check_estimators_dtypes": FITS + "integers and single precision: below",
    "check_estimators_empty_data_messages": WORDS + "no examples, no features: below",
    "check_estimators_fit_returns_self": FITS + "below",
    "check_estimators_nan_inf": WORDS + "NaN and infinity in X: below",
    "check_estimators_overwrite_params": FITS + "fit changes no parameter: below",
    "check_estimators_pickle": FITS + "a pickled copy predicts the same: below",
    "check_f_contiguous_array_estimator": FITS + "order of memory: below",
    "check_fit2d_1feature": WORDS + "one feature is a feature like any other",
    "check_fit2d_1sample": WORDS + "one example is too few: an outcome, not an exception",
    "check_fit2d_predict1d": FITS + "predict refuses fewer axes: below",
    "check_fit_check_is_fitted": FITS + "test_estimator.py asks before and after a fit",
    "check_fit_idempotent": FITS + "a second fit predicts the same: below",
    "check_fit_score_takes_y": FITS + "score takes labels: below",
    "check_methods_sample_order_invariance": FITS + "order of examples: below",
    "check_methods_subset_invariance": FITS + "examples one by one: below",
    "check_n_features_in": FITS + "n_features_in_ is d, and there only after fit: below",
    "check_n_features_in_after_fitting": FITS + "predict refuses another d: below",
    "check_pipeline_consistency": FITS + "as the last step of a pipeline: below",
    "check_positive_only_tag_during_fit": FITS + "every test here has negative inputs",
    "check_readonly_memmap_input": FITS + "inputs on disk, read-only: below",
    "check_regressor_data_not_an_array": FITS + "nested lists: below",
    "check_regressor_multioutput": FITS + "all labels here have more than one output",
    "check_regressors_int": FITS + "integers: below",
    "check_regressors_no_decision_function": FITS + "there is no such method",
    "check_regressors_train": FITS + "a fit scores 1 on labels of a layer: below",
    "check_supervised_y_2d": FITS + "labels are 3-D",
}


@parametrize_with_checks(
    [Tried(n_heads=1)], expected_failed_checks=lambda estimator: NOT_MET, xfail_strict=True
)
def test_checks_of_scikit_learn(
    estimator: Tried, check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the types of the tests: what users get who pass a sparse matrix is of interest."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    check(estimator)


TRUTH = random_layer(n_heads=1, d=3, out_dim=2, scale=2.0, seed=0)
X = sample_inputs("boolean", 60, 3, 3, seed=1)
Y = TRUTH(X)
CHEAP = {"n_heads": 1, "method": "lbfgs", "polish": False}


@pytest.fixture(scope="module")
def fitted() -> AttentionRegressor:
    return AttentionRegressor(**CHEAP).fit(X, Y)


def test_fit_returns_itself_changes_no_parameter_and_sets_names_that_end_in_a_bar() -> None:
    model = AttentionRegressor(**CHEAP)
    before = dict(vars(model))
    assert not hasattr(model, "n_features_in_")
    assert model.fit(X, Y) is model
    assert {name: vars(model)[name] for name in before} == before
    new = vars(model).keys() - before.keys()
    assert all(name.endswith("_") or name.startswith("_") for name in new)
    assert model.n_features_in_ == 3


def test_predict_leaves_the_attributes_alone(fitted: AttentionRegressor) -> None:
    before = dict(vars(fitted))
    fitted.predict(X)
    assert vars(fitted) == before


def test_a_second_fit_a_copy_and_a_pickle_predict_the_same(fitted: AttentionRegressor) -> None:
    expected = fitted.predict(X)
    assert np.array_equal(clone(fitted).fit(X, Y).predict(X), expected)
    assert np.array_equal(pickle.loads(pickle.dumps(fitted)).predict(X), expected)


@pytest.mark.parametrize(
    "given",
    [
        lambda x, folder: x.astype(np.float32),
        lambda x, folder: x.astype(np.int64),
        lambda x, folder: np.asfortranarray(x),
        lambda x, folder: x.tolist(),
        lambda x, folder: on_disk(x, folder),
    ],
    ids=["single", "integers", "fortran", "lists", "memmap"],
)
def test_inputs_of_every_kind_predict_the_same(
    given: Any, fitted: AttentionRegressor, tmp_path: Path
) -> None:
    assert np.array_equal(fitted.predict(given(X, tmp_path)), fitted.predict(X))
    assert np.array_equal(Examples(given(X, tmp_path), Y).arrays().x, X)


def on_disk(array: Any, folder: Path) -> Any:
    np.save(folder / "x.npy", array)
    return np.load(folder / "x.npy", mmap_mode="r")


def test_examples_may_come_in_any_order_and_one_by_one(fitted: AttentionRegressor) -> None:
    expected = fitted.predict(X)
    order = np.random.default_rng(0).permutation(len(X))
    assert np.abs(fitted.predict(X[order]) - expected[order]).max() < 1e-12
    one_by_one = np.concatenate([fitted.predict(X[i : i + 1]) for i in range(8)])
    assert np.abs(one_by_one - expected[:8]).max() < 1e-12


def test_a_fit_scores_one_and_is_the_last_step_of_a_pipeline(fitted: AttentionRegressor) -> None:
    assert fitted.score(X, Y) > 1 - 1e-12
    pipeline = make_pipeline("passthrough", AttentionRegressor(**CHEAP)).fit(X, Y)
    assert pipeline.score(X, Y) == fitted.score(X, Y)


def test_what_cannot_be_predicted_from_is_refused(fitted: AttentionRegressor) -> None:
    with pytest.raises(ValueError, match="expected 3 axes"):
        fitted.predict(X[0])
    with pytest.raises(ValueError, match="d = 3"):
        fitted.predict(X[..., :2])
    with pytest.raises(ValueError, match="empty"):
        fitted.predict(X[:0])
    with pytest.raises(ValueError, match="empty"):
        fitted.predict(X[..., :0])
    for bad in (np.nan, np.inf):
        with pytest.raises(ValueError, match="NaN or infinite"):
            AttentionRegressor(**CHEAP).fit(X * bad, Y)
