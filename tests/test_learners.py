"""Learners are objects: they are found by name or given, say what they can do, and take options."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import FrozenInstanceError, dataclass, fields, replace

import numpy as np
import pytest
from blocks import ROOT, find_blocks, find_file
from sklearn.base import clone

import mhalearn as mha
from mhalearn import cli, learners
from mhalearn.hardness import plot
from mhalearn.hardness.curve import Cell, Cost, list_curve_methods, measure_cost, record_of
from mhalearn.learners import (
    AdamOptions,
    ChenLiOptions,
    Constants,
    LbfgsOptions,
    Learner,
    LinearOptions,
    NewtonOptions,
    Round,
    find_learner,
    list_learners,
    register,
    unregister,
)
from mhalearn.learners.options import describe_options, find_options
from mhalearn.learners.registry import MODULES
from mhalearn.report.reproduce import describe_again
from mhalearn.run.outcome import Candidate, Outcome
from mhalearn.run.run import Run
from mhalearn.studio import worker
from mhalearn.studio.request import Limits, Wish, read_wish
from mhalearn.studio.request import list_methods as list_offers

TRUTH = mha.random_layer(2, 4, seed=3)
X = mha.sample_inputs("gaussian", 80, 4, 4, seed=1)
Y = TRUTH(X)
OPTIONS = (NewtonOptions, ChenLiOptions, Constants, AdamOptions, LbfgsOptions, LinearOptions)


@dataclass(frozen=True)
class OracleOptions:
    """distance: from the truth."""

    distance: float = 0.0


class Oracle(Learner):
    """Knows the truth, and returns a layer at some distance from it."""

    name = "oracle"
    options = OracleOptions

    def learn(self, examples, architecture, run, options):
        layer = TRUTH.replace(theta=TRUTH.theta + options.distance)
        run.keep(layer, 0.0)
        return Candidate(layer)


@pytest.fixture
def oracle():
    yield register(Oracle())
    unregister("oracle")


@pytest.fixture(scope="module")
def trust_region(tmp_path_factory):
    """The learner of docs/extend.md, from a file as a reader would write it; and its folder."""
    codes = [code for _, code in find_blocks(ROOT / "docs" / "extend.md")]
    (code,) = (code for code in codes if find_file(code) is not None)
    path = tmp_path_factory.mktemp("own") / find_file(code)
    path.write_text(code)
    spec = importlib.util.spec_from_file_location("trust_region", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["trust_region"] = module
    spec.loader.exec_module(module)
    yield path
    unregister("trust-region")
    del sys.modules["trust_region"]


# The registry


def test_the_learners_of_the_package_are_complete_and_in_their_order():
    names = [learner.name for learner in learners.registry.BUILTIN]
    assert names == ["newton", "sculpt", "adam", "lbfgs", "linear"]
    for learner in learners.registry.BUILTIN:
        assert learner.title
        assert learner.__doc__
        assert learner.options in OPTIONS
        assert find_learner(learner.name) is learner
        assert find_learner(learner) is learner
    assert find_learner("auto").name == "newton"
    assert len({learner.color for learner in learners.registry.BUILTIN}) == len(names)


def test_a_registered_learner_is_known_everywhere(oracle):
    assert list_learners()[-1] is find_learner("oracle") is oracle
    assert list_curve_methods()[-1] == "oracle"
    assert list_offers()["oracle"] == "oracle"
    assert read_wish({"method": "oracle"}, Limits()).method == "oracle"
    with pytest.raises(ValueError, match="must be told the number of heads"):
        read_wish({"method": "oracle", "count_heads": True}, Limits())
    assert plot.list_colors({"oracle", "gone"}) == {"oracle": oracle.color, "gone": "#8a8a8a"}
    again = Oracle()
    assert register(again) is find_learner("oracle")
    unregister("oracle")
    with pytest.raises(ValueError, match=r"method='oracle': choose one of auto, newton, .*linear"):
        find_learner("oracle")


def named(name):
    return type("Named", (Oracle,), {"name": name})()


def test_what_cannot_be_asked_for_is_not_registered():
    for name in ("", "two words", "a,b", "auto", "newton"):
        with pytest.raises(ValueError, match="name="):
            register(named(name))

    @dataclass
    class Loose:
        steps: int = 1

    @dataclass(frozen=True)
    class Bare:
        steps: int

    for kind in (Loose, Bare, dict):
        with pytest.raises(ValueError, match="frozen dataclass with defaults"):
            register(type("Odd", (Oracle,), {"options": kind})())
    with pytest.raises(ValueError, match="comes with the package"):
        unregister("newton")
    assert [learner.name for learner in list_learners()] == [
        learner.name for learner in learners.registry.BUILTIN
    ]


def test_a_module_that_is_not_there_is_named(monkeypatch, capsys):
    monkeypatch.setenv(MODULES, "no_such_module")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"MHALEARN_LEARNERS=no_such_module: .* PYTHONPATH"):
            list_learners()
    assert cli.run(["learn", "x.npz", "--method", "adam"]) == 2
    assert "no_such_module" in capsys.readouterr().err


def test_the_list_of_learners_costs_no_numerics():
    code = "import sys, mhalearn.learners, mhalearn.cli; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# The estimator


@pytest.mark.parametrize("method", [Oracle(), "oracle"])
def test_the_estimator_takes_an_object_or_a_name(oracle, method):
    estimator = mha.AttentionRegressor(2, method, options=OracleOptions(1e-3))
    assert estimator.get_params()["method"] is method
    again = clone(estimator)
    assert repr(again) == repr(estimator)
    again.fit(X, Y)
    assert again.outcome_ is Outcome.RECOVERED
    assert mha.compare(again.layer_, TRUTH).max_error < 1e-10
    assert again.layer_.metadata["method"] == "oracle"
    assert again.solution_.settings["method"] == "oracle"
    assert again.solution_.settings["options"] == OracleOptions(1e-3)


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        ("newton", AdamOptions(), "method 'newton' takes NewtonOptions"),
        ("auto", AdamOptions(), "method 'newton' takes NewtonOptions"),
        ("adam", {"steps": 3}, "of type dict: method 'adam' takes AdamOptions"),
        ("adam", AdamOptions, "method 'adam' takes AdamOptions"),
        (type("Plain", (Oracle,), {"options": None})(), AdamOptions(), "has none"),
    ],
)
def test_options_of_another_learner_are_refused(method, options, said):
    with pytest.raises(ValueError, match=said) as error:
        mha.AttentionRegressor(2, method, options=options).fit(X, Y)
    assert "\n" not in str(error.value)


class Odd(Oracle):
    """Returns what it was given to return."""

    def __init__(self, found):
        self.found = found

    def learn(self, examples, architecture, run, options):
        return self.found


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (TRUTH, "a learner returns a Candidate"),
        (Candidate(TRUTH, Outcome.RECOVERED), "the judge's word"),
        (Candidate(mha.random_layer(2, 3)), r"\(d, out_dim\) = \(3, 3\), the examples have"),
    ],
)
def test_what_a_learner_may_not_return_is_refused(found, said):
    with pytest.raises(ValueError, match=said):
        mha.AttentionRegressor(2, Odd(found)).fit(X, Y)


def test_capabilities_are_asked_before_any_work_is_done():
    class Picky(Oracle):
        def supports(self, architecture):
            return "causal=True: too hard; use newton" if architecture.causal else None

        def learn(self, *_):
            raise AssertionError("the work began")

    with pytest.raises(ValueError, match="causal=True: too hard"):
        mha.AttentionRegressor(2, Picky(), causal=True).fit(X, Y)
    with pytest.raises(ValueError, match="'oracle' needs n_heads as a number"):
        mha.AttentionRegressor("auto", Picky()).fit(X, Y)


def test_a_checkpoint_of_other_options_or_another_learner_is_refused(tmp_path):
    path = tmp_path / "run.safetensors"

    def fit(method, options, resume):
        kept = {"checkpoint": path, "resume": resume, "polish": False}
        return mha.AttentionRegressor(2, method, options=options, **kept).fit(X, Y)

    first = fit(Oracle(), OracleOptions(1e-3), False)
    with pytest.raises(ValueError, match=r"options\.distance=.*0\.001.*, now it is '0\.01'"):
        fit(Oracle(), OracleOptions(1e-2), True)
    with pytest.raises(ValueError, match=r"method='oracle', now it is 'other'"):
        fit(named("other"), OracleOptions(1e-3), True)
    again = fit(Oracle(), OracleOptions(1e-3), True)
    np.testing.assert_array_equal(again.layer_.theta, first.layer_.theta)


def test_the_report_says_options_and_offers_no_command_that_is_none(oracle):
    settings = {"n_heads": 2, "method": "newton", "options": NewtonOptions(), "random_state": 0}
    usual = describe_again(settings, TRUTH)
    assert usual.command == "mhalearn learn EXAMPLES --heads 2 --method newton --seed 0"
    assert "options" not in usual.call
    assert ("options", "defaults") in usual.settings
    changed = describe_again(settings | {"options": NewtonOptions(idle_hops=3)}, TRUTH)
    assert changed.command == ""
    assert "method='newton', options=NewtonOptions(idle_hops=3)" in changed.call
    assert ("options", "NewtonOptions(idle_hops=3)") in changed.settings
    own = settings | {"method": "oracle", "options": OracleOptions()}
    assert "--method oracle" in describe_again(own, TRUTH).command
    assert describe_again(own | {"method": "unknown"}, TRUTH).command == ""


# Options


@pytest.mark.parametrize("kind", OPTIONS)
def test_options_are_frozen_and_every_default_is_documented(kind):
    usual = kind()
    assert describe_options(usual) == ""
    with pytest.raises(FrozenInstanceError):
        setattr(usual, fields(kind)[0].name, 1)
    for field in fields(kind):
        assert f"{field.name}: " in kind.__doc__, field.name


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (AdamOptions, {"steps": 0}),
        (AdamOptions, {"learning_rate": float("nan")}),
        (LbfgsOptions, {"memory": True}),
        (LinearOptions, {"ridge": 0.0}),
        (Constants, {"later_rows": (5, 0)}),
        (Constants, {"delta": 1.0}),
        (ChenLiOptions, {"plan": "best"}),
        (NewtonOptions, {"plenty": ()}),
        (Round, {"n_starts": 1, "anneal_steps": 0, "final_ridge": 1.0}),
    ],
)
def test_options_that_mean_nothing_are_refused_when_made(kind, values):
    with pytest.raises(ValueError, match="pass ") as error:
        kind(**values)
    assert any(f"{name}=" in str(error.value) for name in values)


def test_options_of_the_wrong_type_are_refused_where_nobody_checks_types():
    code = """if True:
        from mhalearn.learners import *
        for kind, name, value in (
            (AdamOptions, "starts", 1.5),
            (LinearOptions, "ridge", "little"),
            (Constants, "net_ratios", (1.0,)),
            (Constants, "later_rows", 5),
            (ChenLiOptions, "constants", 3),
            (NewtonOptions, "scarce", [Round(1, 4, 1e-2)]),
        ):
            try:
                kind(**{name: value})
            except ValueError as error:
                print(str(error).partition("=")[0])
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [
        "starts",
        "ridge",
        "net_ratios",
        "later_rows",
        "constants",
        "scarce",
    ]


def test_what_differs_from_the_defaults_is_described():
    changed = replace(NewtonOptions(), idle_hops=3, brief=(Round(1, 4, 0.5),))
    said = describe_options(changed)
    assert said.startswith("NewtonOptions(brief=(Round(n_starts=1, ")
    assert eval(said) == changed
    assert describe_options(None) == ""
    assert find_options(find_learner("adam"), None) == AdamOptions()


def test_newton_makes_the_rounds_that_its_options_say():
    rng = np.random.default_rng(0)
    noisy = mha.Examples(X, Y + 0.1 * rng.standard_normal(Y.shape))
    rounds = (Round(1, 4, 1e-2), Round(2, 3, 1e-2))
    options = NewtonOptions(plenty=rounds, scarce=rounds, trusting_ratio=1e9)
    run = Run()
    find_learner("newton").learn(noisy, noisy.architecture(2), run, options)
    stages = {event.stage.partition(",")[0] for event in run.events}
    assert {"round 1", "round 2"} <= stages
    assert "round 3" not in stages


# A stranger's learner, as docs/extend.md shows it


def test_the_learner_of_the_page_recovers_a_layer_in_the_worker(trust_region, tmp_path):
    told = []
    wish = read_wish(
        {"method": "trust-region", "heads": 1, "dim": 3, "tokens": 3, "examples": 60}, Limits()
    )
    worker.Learning(wish, tmp_path / "report.html", told.append).learn()
    assert told[-1]["outcome"] == "RECOVERED"
    assert any(m["kind"] == "event" and m["stage"] == "trust region" for m in told)
    assert "--method trust-region" in (tmp_path / "report.html").read_text()


def test_the_learner_of_the_page_has_a_cost_and_a_colour(trust_region, tmp_path):
    cell = Cell("generic", 1, 3, "trust-region")
    cost = measure_cost(cell, seed=0, budget=30.0, ratios=(8.0,))
    assert cost.learned
    assert cost.relative_mse < 1e-20
    other = Cost(0, True, None, 100, 1.0, 0.1, "")
    records = [record_of(cell, 30.0, cost), record_of(replace(cell, n_heads=2), 30.0, other)]
    plot.draw_curve(records, tmp_path / "curve.svg")
    assert "#c0392b" in (tmp_path / "curve.svg").read_text()


def test_a_worker_of_its_own_imports_the_modules_it_is_told(trust_region, tmp_path):
    """As the studio starts it: another process, which knows the learner from its environment."""
    paths = [str(trust_region.parent), str(ROOT / "src")]
    wish = Wish(heads=1, dim=3, tokens=3, examples=60, method="trust-region")
    process = subprocess.Popen(
        [sys.executable, "-m", "mhalearn.studio.worker", str(tmp_path / "report.html")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {MODULES: "trust_region", "PYTHONPATH": os.pathsep.join(paths)},
        text=True,
    )
    with process:
        process.stdin.write(json.dumps(vars(wish)) + "\n")
        process.stdin.flush()
        told = (json.loads(line) for line in process.stdout)
        first = next(message for message in told if message["kind"] in ("event", "failed"))
    assert first.get("stage") == "trust region", first
