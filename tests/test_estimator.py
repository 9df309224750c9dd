"""The estimator keeps scikit-learn's conventions, its own promises, and its hands off the rest."""

import copy
import os
import pickle
import subprocess
import sys
import time
import warnings
from contextlib import contextmanager

import jax
import numpy as np
import pytest
from sklearn.base import clone, is_regressor
from sklearn.exceptions import NotFittedError
from sklearn.metrics import r2_score
from sklearn.model_selection import cross_val_score
from sklearn.utils import get_tags
from threadpoolctl import threadpool_info

from mhalearn._runtime import storage
from mhalearn.data import Examples, load_examples
from mhalearn.data.inputs import sample_inputs
from mhalearn.estimator import AttentionRegressor
from mhalearn.judge.certify import certify
from mhalearn.layer.comparison import compare
from mhalearn.layer.latent import Latent
from mhalearn.layer.layer import load_layer
from mhalearn.layer.random_layers import random_layer
from mhalearn.layer.rope import Rope
from mhalearn.learners import NewtonOptions
from mhalearn.learners.registry import AUTO, list_learners
from mhalearn.run.events import Event
from mhalearn.run.outcome import Outcome

N, K, D = 120, 4, 4
TRUTH = random_layer(2, D, seed=3)
X = sample_inputs("gaussian", N, K, D, seed=1)
Y = TRUTH(X)
NOISY = Y + 0.05 * np.random.default_rng(0).standard_normal(Y.shape)


def same_layer(one, other):
    return (
        np.array_equal(one.theta, other.theta)
        and np.array_equal(one.w, other.w)
        and np.array_equal(one.seen, other.seen)
    )


@pytest.fixture(scope="module")
def fitted():
    return AttentionRegressor(2).fit(X, Y)


# scikit-learn's conventions


SETTINGS = {
    "n_heads": 3,
    "method": "newton",
    "plan": None,
    "options": NewtonOptions(idle_hops=3),
    "head_dim": 2,
    "bias": True,
    "residual": True,
    "causal": True,
    "kv_heads": 3,
    "rope": Rope(),
    "window": 5,
    "sinks": True,
    "softcap": 2.0,
    "qk_norm": "rms",
    "position_bias": "t5",
    "latent": Latent(2),
    "attention": None,
    "polish": False,
    "random_state": 7,
    "max_seconds": 1.5,
    "checkpoint": "layer.safetensors",
    "resume": True,
    "progress": False,
    "on_event": print,
}


def test_parameters_are_kept_as_given():
    estimator = AttentionRegressor(**SETTINGS)
    assert estimator.get_params() == SETTINGS
    assert AttentionRegressor().set_params(**SETTINGS).get_params() == SETTINGS
    assert clone(estimator).get_params() == SETTINGS
    with pytest.raises(ValueError, match="Invalid parameter"):
        estimator.set_params(heads=2)


def test_the_constructor_checks_nothing_and_does_nothing():
    estimator = AttentionRegressor(0, "nonsense", max_seconds=-1.0)
    assert [name for name in vars(estimator) if name.endswith("_")] == []
    assert clone(estimator).n_heads == 0


def test_a_clone_is_not_fitted_and_fits_the_same(fitted):
    again = clone(fitted)
    assert not hasattr(again, "layer_")
    assert same_layer(again.fit(X, Y).layer_, fitted.layer_)


def test_repr_shows_what_was_set():
    assert repr(AttentionRegressor(2)) == "AttentionRegressor(n_heads=2)"
    assert "bias=True" in repr(AttentionRegressor(bias=True))


def test_tags_say_three_axes_and_many_outputs():
    tags = get_tags(AttentionRegressor())
    assert is_regressor(AttentionRegressor())
    assert tags.input_tags.three_d_array
    assert not tags.input_tags.two_d_array
    assert tags.target_tags.multi_output


@pytest.mark.parametrize("call", [lambda e: e.predict(X), lambda e: e.score(X, Y)])
def test_before_fit_there_is_nothing_to_predict_with(call):
    with pytest.raises(NotFittedError, match="not fitted"):
        call(AttentionRegressor(2))


def test_fitted_attributes(fitted):
    assert fitted.n_features_in_ == D
    assert fitted.n_heads_ == 2
    assert fitted.outcome_ is Outcome.RECOVERED
    assert fitted.certificate_.recovered
    assert fitted.solution_.layer is fitted.layer_
    assert fitted.solution_.outcome is fitted.outcome_
    assert fitted.trace_
    assert all(isinstance(event, Event) for event in fitted.trace_)
    assert compare(fitted.layer_, TRUTH.canonical()).max_error < 1e-10


def test_fit_changes_no_parameter_and_no_data():
    x, y = X.copy(), Y.copy()
    estimator = AttentionRegressor(2)
    before = estimator.get_params()
    assert estimator.fit(x, y) is estimator
    assert estimator.get_params() == before
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(y, Y)


def test_the_same_seed_gives_the_same_layer_from_arrays_examples_and_files(fitted, tmp_path):
    examples = Examples(X, Y)
    examples.save(tmp_path / "shards", shard_size=50)
    for given in (
        (X, Y),
        (X.tolist(), Y.tolist()),
        (examples,),
        (load_examples(tmp_path / "shards"),),
    ):
        assert same_layer(AttentionRegressor(2).fit(*given).layer_, fitted.layer_)
    assert same_layer(copy.deepcopy(fitted).fit(X, Y).layer_, fitted.layer_)


def test_another_seed_gives_the_same_canonical_layer(fitted):
    other = AttentionRegressor(2, random_state=5).fit(X, Y)
    assert not np.array_equal(other.layer_.theta, fitted.layer_.theta)
    assert compare(other.layer_, fitted.layer_).max_error < 1e-10


def test_a_refit_forgets_the_last_one():
    estimator = AttentionRegressor(2).fit(X, Y)
    estimator.fit(X, NOISY)
    assert estimator.outcome_ is Outcome.FITTED
    assert not estimator.certificate_.recovered
    refuses_training_data(estimator.layer_, NOISY)
    x = sample_inputs("gaussian", 30, K, D, seed=8)
    certify(estimator.layer_, np.concatenate([X[:20], x]), np.concatenate([Y[:20], TRUTH(x)]))


def refuses_training_data(layer, labels=Y):
    with pytest.raises(ValueError, match="learned from"):
        certify(layer, X, labels)


@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_pickling(fitted, protocol):
    unfitted = AttentionRegressor(3, on_event=lambda event: None)
    assert pickle.loads(pickle.dumps(unfitted, protocol)).n_heads == 3
    told = AttentionRegressor(2, on_event=lambda event: None).fit(X, Y)
    for estimator in (fitted, told):
        back = pickle.loads(pickle.dumps(estimator, protocol))
        assert same_layer(back.layer_, fitted.layer_)
        assert back.outcome_ is Outcome.RECOVERED
        np.testing.assert_array_equal(back.predict(X), fitted.predict(X))
        assert back.score(X, Y) == fitted.score(X, Y)
        refuses_training_data(back.layer_)
        assert same_layer(back.fit(X, Y).layer_, fitted.layer_)
    assert told.on_event is not None


def test_cross_validation_works_on_three_axes():
    scores = cross_val_score(AttentionRegressor(2), X, Y, cv=2)
    assert scores.shape == (2,)
    assert (scores > 1 - 1e-12).all()


# Predictions and their score


def test_predictions_are_the_layer_s(fitted):
    x = sample_inputs("gaussian", 7, K, D, seed=4)
    np.testing.assert_array_equal(fitted.predict(x), fitted.layer_(x))
    np.testing.assert_allclose(fitted.predict(x), TRUTH(x), atol=1e-10)
    lengths = np.array([1, 2, 3, 4, 4, 2, 1])
    np.testing.assert_allclose(fitted.predict(x, lengths), TRUTH(x, lengths), atol=1e-10)
    longer = sample_inputs("gaussian", 3, 9, D, seed=4)
    np.testing.assert_allclose(fitted.predict(longer), TRUTH(longer), atol=1e-10)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_score_is_r2_pooled_over_rows_and_weighted_by_variance(fitted, weighted):
    """Rows of all examples are one sample; columns count by their variance."""
    rng = np.random.default_rng(3)
    labels = NOISY * np.array([1, 10, 0.1, 3]) + np.array([0, 5, -2, 0])
    weights = rng.uniform(0, 2, N) if weighted else None
    expected = r2_score(
        labels.reshape(-1, D),
        fitted.predict(X).reshape(-1, D),
        sample_weight=None if weights is None else np.repeat(weights, K),
        multioutput="variance_weighted",
    )
    assert fitted.score(X, labels, weights) == pytest.approx(expected, rel=1e-12)
    assert fitted.score(X, Y) == pytest.approx(1.0, abs=1e-20)


def test_the_score_of_constant_labels(fitted):
    assert fitted.score(X, np.ones_like(Y)) == 0.0


# Every method


SHORTER = np.random.default_rng(0).integers(2, K + 1, N)
# Of a setting: the layer it is about, the parameters that ask for it, and the examples' lengths.
KINDS = {
    "plain": (TRUTH, {}, None),
    "lengths": (TRUTH, {}, SHORTER),
    "open count": (TRUTH, {"n_heads": "auto"}, None),
    "causal": (TRUTH.replace(causal=True), {"causal": True}, None),
    "bias": (random_layer(2, D, key_vector=True, out_bias=True, seed=3), {"bias": True}, None),
    "rank": (random_layer(2, D, rank=2, seed=3), {"head_dim": 2}, None),
}
# These compile programs of their own.
SLOW_KINDS = ("open count", "causal", "bias", "rank")
REFUSALS = {
    "sculpt": {"lengths": "lengths", "causal": "causal", "bias": "bias", "rank": "head_dim"},
    "adam": {"open count": "n_heads"},
    "lbfgs": {"open count": "n_heads"},
    "linear": {"open count": "n_heads"},
}
# The labels of two heads and four tokens need six dimensions in the phases.
BREAKDOWNS = {"sculpt": ("plain", "open count")}
METHODS = [AUTO, *(learner.name for learner in list_learners())]
REFUSED = [(m, kind, words) for m in METHODS for kind, words in REFUSALS.get(m, {}).items()]
WORKING = [
    pytest.param(m, kind, marks=[pytest.mark.slow] if kind in SLOW_KINDS else [])
    for m in METHODS
    for kind in KINDS
    if kind not in REFUSALS.get(m, {})
]


def attempt(method, kind):
    truth, arguments, lengths = KINDS[kind]
    estimator = AttentionRegressor(2, method).set_params(**arguments)
    return estimator.fit(X, truth(X, lengths), lengths), truth


@pytest.mark.parametrize(("method", "kind", "words"), REFUSED)
def test_a_method_refuses_what_it_does_not_know(method, kind, words):
    with pytest.raises(ValueError, match=words) as error:
        attempt(method, kind)
    assert method in one_line(error) or "use newton" in one_line(error)


@pytest.mark.parametrize(("method", "kind"), WORKING)
def test_every_method_works_where_it_does_not_refuse(method, kind):
    estimator, truth = attempt(method, kind)
    if kind in BREAKDOWNS.get(method, ()):
        assert estimator.outcome_ is Outcome.STUCK
        assert estimator.solution_.reason.startswith("phase ")
        assert compare(estimator.layer_, truth.canonical()).max_error > 1e-3
    else:  # Polish brings whatever is near enough to machine precision.
        assert estimator.outcome_ is Outcome.RECOVERED, estimator.solution_.reason
        assert compare(estimator.layer_, truth.canonical()).max_error < 1e-9
    if kind == "plain":
        refuses_training_data(estimator.layer_)


def test_auto_is_newton(fitted):
    assert same_layer(AttentionRegressor(2, "newton").fit(X, Y).layer_, fitted.layer_)


def test_without_polish_nothing_is_polished():
    estimator = AttentionRegressor(2, "linear", polish=False).fit(X, Y)
    stages = {event.stage for event in estimator.trace_}
    assert "linear" in stages
    assert not stages & {"polish", "reduction"}
    assert estimator.outcome_ is not Outcome.RECOVERED
    polished = AttentionRegressor(2, "linear").fit(X, Y)
    assert "polish" in {event.stage for event in polished.trace_}
    assert polished.certificate_.relative_mse < estimator.certificate_.relative_mse


def test_biases_and_lengths_are_learned():
    truth = random_layer(1, 3, key_vector=True, out_bias=True, seed=2)
    x = sample_inputs("gaussian", 100, 4, 3, seed=3)
    lengths = np.random.default_rng(0).integers(2, 5, 100)
    estimator = AttentionRegressor(1, bias=True).fit(x, truth(x, lengths), lengths)
    assert estimator.outcome_ is Outcome.RECOVERED
    assert compare(estimator.layer_, truth).max_error < 1e-9
    # Padding read as tokens is another function.
    wrong = AttentionRegressor(1, bias=True).fit(x, truth(x, lengths))
    assert wrong.outcome_ is not Outcome.RECOVERED


# Events, time, interruption


def test_events_arrive_in_order_and_are_the_trace():
    seen = []
    estimator = AttentionRegressor(2, on_event=seen.append).fit(X, Y)
    assert list(map(id, estimator.trace_)) == list(map(id, seen))
    seconds = [event.seconds for event in seen]
    assert seconds == sorted(seconds)
    stages = [event.stage for event in seen]
    assert stages[0] == "round 1"
    assert stages[-2:] == ["certificate", "outcome"]
    assert stages.index("model selection") < stages.index("polish") < stages.index("certificate")
    steps = [event.step for event in seen if event.stage == "round 1"]
    assert steps == list(range(len(steps)))
    assert seen[-1].detail.startswith("RECOVERED: ")


@pytest.mark.parametrize(("n_heads", "limit"), [(2, 0.3), ("auto", 0.05)])
def test_the_time_limit_is_honoured(n_heads, limit):
    labels = np.random.default_rng(2).standard_normal(Y.shape)
    AttentionRegressor(n_heads, max_seconds=limit).fit(X, labels)  # compiles what it reaches
    AttentionRegressor(n_heads, max_seconds=2 * limit).fit(X, labels)
    began, used = time.perf_counter(), time.process_time()
    estimator = AttentionRegressor(n_heads, max_seconds=limit).fit(X, labels)
    assert estimator.outcome_ is Outcome.TIME_LIMIT
    assert time.perf_counter() - began >= limit
    assert time.process_time() - used < limit + 3  # a busy machine makes it wait, not work
    assert np.isfinite(estimator.layer_.w).all()


def test_what_is_found_in_time_is_recovered_whatever_the_limit():
    assert AttentionRegressor(2, max_seconds=60.0).fit(X, Y).outcome_ is Outcome.RECOVERED


class InterruptAt:
    def __init__(self, stage):
        self.stage = stage

    def __call__(self, event):
        if event.stage == self.stage:
            raise KeyboardInterrupt


def test_an_interrupted_fit_leaves_the_best_layer_so_far():
    estimator = AttentionRegressor(2, on_event=InterruptAt("model selection"))
    assert estimator.best_layer_so_far() is None
    before = threadpool_info()
    with pytest.raises(KeyboardInterrupt):
        estimator.fit(X, Y)
    best = estimator.best_layer_so_far()
    assert compare(best.canonical(), TRUTH.canonical()).max_error < 1e-6
    refuses_training_data(best)
    with pytest.raises(NotFittedError):
        estimator.predict(X)
    assert threadpool_info() == before
    assert not jax.config.jax_enable_x64
    pickle.dumps(estimator)
    assert estimator.set_params(on_event=None).fit(X, Y).outcome_ is Outcome.RECOVERED


def test_an_interruption_before_any_layer_leaves_none():
    estimator = AttentionRegressor(2, on_event=InterruptAt("round 1"))
    with pytest.raises(KeyboardInterrupt):
        estimator.fit(X, Y)
    best = estimator.best_layer_so_far()
    assert best is None or not best.w.any()


# Checkpoints


def test_a_checkpoint_is_whole_at_every_moment_and_resumes(fitted, tmp_path):
    path = tmp_path / "best.safetensors"
    losses = []

    def look(event):
        assert set(tmp_path.iterdir()) - {path} == {storage.beside(path, ".lock")}
        if path.exists() and "theta" in storage.peek_shapes(path)[0]:  # there is a layer yet
            losses.append(float(load_layer(path).metadata["held_out_loss"]))

    AttentionRegressor(2, checkpoint=path, on_event=look).fit(X, Y)
    assert list(tmp_path.iterdir()) == [path]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 1e-16
    kept = load_layer(path)
    assert compare(kept.canonical(), TRUTH.canonical()).max_error < 1e-6
    refuses_training_data(kept)

    resumed = AttentionRegressor(2, checkpoint=str(path), resume=True).fit(X, Y)
    assert resumed.outcome_ is Outcome.RECOVERED
    assert [event.stage for event in resumed.trace_[:2]] == ["resumed", "polish"]
    assert len(resumed.trace_) < len(fitted.trace_)
    assert same_layer(resumed.layer_, fitted.layer_)


def test_an_interrupted_fit_leaves_a_checkpoint_to_resume_from(tmp_path):
    path = tmp_path / "best.safetensors"
    estimator = AttentionRegressor(2, checkpoint=path, on_event=InterruptAt("model selection"))
    with pytest.raises(KeyboardInterrupt):
        estimator.fit(X, Y)
    assert list(tmp_path.iterdir()) == [path]
    resumed = AttentionRegressor(2, checkpoint=path, resume=True).fit(X, Y)
    assert resumed.outcome_ is Outcome.RECOVERED


# Callers' mistakes


@contextmanager
def quick():
    """Before any work: nothing is compiled and little computed, however busy the machine is."""
    began, compiled = time.process_time(), []

    def note(event, seconds, **_):
        compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert compiled == []
    assert time.process_time() - began < 1


def one_line(error):
    assert str(error.value).strip()
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


ARGUMENTS = [
    {"n_heads": 0},
    {"n_heads": -1},
    {"n_heads": 2.0},
    {"n_heads": True},
    {"n_heads": None},
    {"n_heads": "many"},
    {"n_heads": [2]},
    {"n_heads": 10**9},
    {"method": "nonsense"},
    {"method": None},
    {"method": "adam", "n_heads": "auto"},
    {"head_dim": 0},
    {"head_dim": D + 1},
    {"head_dim": 1.5},
    {"head_dim": "2"},
    {"head_dim": True},
    {"bias": "no"},
    {"bias": None},
    {"causal": 1},
    {"polish": "no"},
    {"random_state": -1},
    {"random_state": 1.5},
    {"random_state": None},
    {"random_state": "zero"},
    {"max_seconds": 0},
    {"max_seconds": -1.0},
    {"max_seconds": float("nan")},
    {"max_seconds": "5"},
    {"max_seconds": True},
    {"checkpoint": 5},
    {"checkpoint": "no/such/folder/layer.safetensors"},
    {"checkpoint": "."},
    {"resume": True},
    {"on_event": 5},
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_a_bad_argument_is_a_quick_value_error_of_one_line(arguments, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    estimator = AttentionRegressor(2).set_params(**arguments)
    with quick(), pytest.raises(ValueError) as error:  # noqa: PT011
        estimator.fit(X, Y)
    said = one_line(error)
    assert any(name in said or str(value) in said for name, value in arguments.items())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [{"n_heads": 3}, {"method": "lbfgs"}, {"causal": True}, {"bias": True}],
    ids=str,
)
def test_a_checkpoint_of_another_kind_is_refused(arguments, tmp_path):
    path = tmp_path / "layer.safetensors"
    TRUTH.save(path)
    estimator = AttentionRegressor(2, checkpoint=path, resume=True).set_params(**arguments)
    with pytest.raises(ValueError, match=r"checkpoint|resume") as error:
        estimator.fit(X, Y)
    one_line(error)
    with pytest.raises(ValueError, match="features"):
        AttentionRegressor(2, checkpoint=path, resume=True).fit(X[..., :3], Y)


def spoiled(array, value):
    array = array.copy()
    array[3, 1, 2] = value
    return array


DATA = {
    "X has two axes": (X[0], Y),
    "X has four axes": (X[None], Y),
    "Y has two axes": (X, Y[..., 0]),
    "fewer labels than examples": (X, Y[:-1]),
    "fewer labels than tokens": (X, Y[:, :-1]),
    "no examples": (X[:0], Y[:0]),
    "no features": (X[..., :0], Y),
    "no outputs": (X, Y[..., :0]),
    "one token": (X[:, :1], Y[:, :1]),
    "NaN in X": (spoiled(X, np.nan), Y),
    "infinity in Y": (X, spoiled(Y, -np.inf)),
    "strings": (X.astype(str), Y),
    "objects": (X, Y.astype(object)),
    "booleans": (X > 0, Y),
    "complex numbers": (X, Y + 1j),
    "dates": (X.astype("M8[s]"), Y),
    "ragged lists": ([[[1.0, 2.0]], [[1.0]]], Y),
    "no labels": (X, None),
    "labels that overflow": (X, 1e200 * Y),
    "labels that underflow": (X, 1e-200 * Y),
    "inputs that overflow": (1e200 * X, Y),
    "inputs that underflow": (1e-200 * X, Y),
    "examples and labels": (Examples(X, Y), Y),
}


@pytest.mark.parametrize(("x", "y"), DATA.values(), ids=DATA.keys())
def test_bad_data_are_a_quick_value_error_of_one_line(x, y):
    estimator = AttentionRegressor(2)
    with quick(), pytest.raises(ValueError) as error:  # noqa: PT011
        estimator.fit(x, y)
    one_line(error)
    assert not hasattr(estimator, "layer_")


@pytest.mark.parametrize("lengths", [[4], np.full(N, 4.0), np.full(N, 0), np.full(N, 5)])
def test_bad_lengths_are_a_value_error_of_one_line(lengths):
    with pytest.raises(ValueError, match="lengths") as error:
        AttentionRegressor(2).fit(X, Y, lengths)
    one_line(error)


@pytest.mark.parametrize(
    "call",
    [
        lambda e: e.predict(X[0]),
        lambda e: e.predict(X[..., :3]),
        lambda e: e.predict(X[:, :1]),
        lambda e: e.predict(np.where(X > 2, np.nan, X)),
        lambda e: e.score(X, Y[:3]),
        lambda e: e.score(X, Y[..., :3]),
        lambda e: e.score(X, Y, np.ones(3)),
        lambda e: e.score(X, Y, np.zeros(N)),
        lambda e: e.score(X, Y, -np.ones(N)),
        lambda e: e.score(X, Y, np.full(N, np.nan)),
        lambda e: e.score(X, Y, ["a"] * N),
    ],
)
def test_bad_data_after_fit_are_a_value_error_of_one_line(fitted, call):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        call(fitted)
    one_line(error)


def test_the_caller_s_own_exceptions_pass_through():
    class Mine(Exception):
        pass

    def complain(event):
        raise Mine

    with pytest.raises(Mine):
        AttentionRegressor(2, on_event=complain).fit(X, Y)


# Hands off


def test_nothing_is_printed(capfd):
    AttentionRegressor(2, progress=True).fit(X, Y)
    AttentionRegressor(2, max_seconds=0.3).fit(X, NOISY)
    assert capfd.readouterr() == ("", "")


def test_nothing_global_changes():
    def state():
        kind, keys, *rest = np.random.get_state()  # noqa: NPY002
        return (
            jax.config.jax_enable_x64,
            jax.config.jax_default_matmul_precision,
            np.geterr(),
            threadpool_info(),
            (kind, keys.tolist(), *rest),
            list(warnings.filters),
            dict(os.environ),
            os.getcwd(),
        )

    before = state()
    AttentionRegressor(2).fit(X, Y).predict(X)
    with pytest.raises(ValueError, match="n_heads"):
        AttentionRegressor(0).fit(X, Y)
    assert state() == before


def test_a_fit_needs_neither_the_test_s_hook_nor_a_warning():
    script = """
import warnings
warnings.simplefilter("error")
import random
import mhalearn as mha
truth = mha.random_layer(2, 4, seed=3)  # of the shape above: its programs are in the cache
x = mha.sample_inputs("gaussian", 120, 4, 4, seed=1)
estimator = mha.AttentionRegressor(2).fit(x, truth(x))
assert estimator.outcome_ is mha.Outcome.RECOVERED, estimator.solution_.reason
assert mha.compare(estimator.layer_, truth).max_error < 1e-10
before = random.getstate()  # once everything is imported
estimator.fit(x, truth(x))
assert random.getstate() == before
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
