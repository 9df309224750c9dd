"""Evidence is measured when asked for, and once: what a whole fit reads, and how often."""

from collections import Counter

import numpy as np
import pytest

from mhalearn.data import Examples, examples
from mhalearn.data.inputs import sample_inputs
from mhalearn.estimator import AttentionRegressor, fitting
from mhalearn.judge import certify, evidence, missing_head, refit, residuals, sign_symmetry
from mhalearn.judge.evidence import Evidence
from mhalearn.judge.subsets import Subsets
from mhalearn.judge.verdict import judge
from mhalearn.layer.random_layers import random_layer
from mhalearn.run.outcome import Candidate, Outcome
from mhalearn.run.run import Run

LAYER = random_layer(2, 4, seed=3)
X = sample_inputs("gaussian", 600, 4, 4, seed=1)
Y = LAYER(X)


def with_noise(y):
    return y + 1e-3 * np.random.default_rng(0).standard_normal(y.shape)


@pytest.fixture
def passes(monkeypatch):
    """How often each subset was walked over with the candidate, and labels read for precision."""
    counts, judged = Counter(), []

    def make(*args, **options):
        judged.append(Evidence(*args, **options))
        return judged[-1]

    def walk(layer, given, precision=None, **options):
        if judged and layer is judged[0].layer:
            subsets = judged[0].subsets
            names = [name for name in ("train", "certify", "every") if _is(subsets, name, given)]
            counts[names[0] if names else "other"] += 1
        return measure(layer, given, precision, **options)

    def look(given):
        counts["precision"] += 1
        return precision_of(given)

    measure, precision_of = residuals.measure_residuals, residuals.label_precision
    monkeypatch.setattr(fitting, "Evidence", make)
    for module in (refit, certify, evidence, missing_head, sign_symmetry):
        monkeypatch.setattr(module, "measure_residuals", walk)
    for module in (fitting, evidence, residuals):
        monkeypatch.setattr(module, "label_precision", look)
    return counts


def _is(subsets, name, given):
    return getattr(subsets, name) is given


@pytest.mark.parametrize(
    ("labels", "outcome"), [(Y, Outcome.RECOVERED), (with_noise(Y), Outcome.FITTED)]
)
def test_a_fit_walks_the_candidate_over_each_subset_once(passes, labels, outcome):
    model = AttentionRegressor(2).fit(X[:120], labels[:120])
    assert model.outcome_ is outcome
    assert passes == {"train": 1, "certify": 1, "precision": 1}


@pytest.mark.parametrize(
    ("labels", "outcome"), [(Y, Outcome.RECOVERED), (with_noise(Y), Outcome.FITTED)]
)
def test_a_fit_to_a_working_set_walks_it_over_all_examples_once(
    passes, monkeypatch, labels, outcome
):
    monkeypatch.setattr(examples, "_PLENTY", 30)
    monkeypatch.setattr(examples, "_WORKING", 0)
    model = AttentionRegressor(2).fit(X, labels)
    assert model.outcome_ is outcome
    assert passes == {"train": 1, "certify": 1, "every": 1, "precision": 1}


def of(train, certify):
    subsets = Subsets(train, train, train, certify)
    return Evidence(Candidate(LAYER), train.architecture(2), subsets, Run())


def test_nothing_is_measured_before_it_is_asked_for(passes):
    found = of(Examples(X[:100], Y[:100]), Examples(X[100:120], Y[100:120]))
    assert not passes
    vars_before = set(vars(found))
    assert judge(found).outcome is Outcome.RECOVERED
    measured = set(vars(found)) - vars_before
    assert {"train_residuals", "certify_residuals", "certificate"} <= measured
    # Exact labels of double precision ask for no test of structure.
    assert not {"gain_of_one_more_head", "residual_dependence", "train_null_dimension"} & measured


def test_without_examples_to_certify_with_there_is_no_certificate():
    found = of(Examples(X[:6], Y[:6]), None)
    assert found.certificate is None
    assert not found.is_certified
    assert found.gain_of_one_more_head is None
    assert judge(found).findings[0].name == "nothing to certify with"


def test_the_findings_of_a_fit_are_told():
    model = AttentionRegressor(3).fit(X[:120], Y[:120])
    solution = model.solution_
    assert solution.findings[0].name == "surplus heads"
    assert solution.findings[0].sentence == solution.reason
    assert solution.findings[0].outcome is solution.outcome
