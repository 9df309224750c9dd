"""Long work tells how far it is and ends by the clock; the judge says what it had no time for."""

import numpy as np
import pytest

import mhalearn as mha
from mhalearn.data import Examples
from mhalearn.judge import jacobian_spectrum, randomised_rank_test
from mhalearn.judge.certificate import make_certificate
from mhalearn.judge.checks import CHECKS
from mhalearn.judge.evidence import Evidence
from mhalearn.judge.jacobian_spectrum import measure_spectrum
from mhalearn.judge.randomised_rank_test import run_rank_test
from mhalearn.judge.residuals import measure_residuals
from mhalearn.judge.subsets import Subsets
from mhalearn.judge.verdict import judge
from mhalearn.layer.architecture import Architecture
from mhalearn.learners import Learner
from mhalearn.run.clock import Clock
from mhalearn.run.outcome import Candidate, Outcome
from mhalearn.run.run import Run
from mhalearn.run.watch import OutOfTime, Watch
from mhalearn.solvers import scaled_problem

LAYER = mha.random_layer(2, 4, seed=3)
X = mha.sample_inputs("gaussian", 60, 4, 4, seed=1)
EXAMPLES = Examples(X, LAYER(X))
ARCHITECTURE = EXAMPLES.architecture(2)


class FakeClock(Clock):
    """Every look at it takes two seconds."""

    def __init__(self, max_seconds):
        super().__init__(max_seconds)
        self.looks = 0.0

    @property
    def seconds(self):
        self.looks += 2.0
        return self.looks


def fake_run(max_seconds=None):
    run = Run(max_seconds)
    run.clock = FakeClock(max_seconds)
    return run


def over():
    """A run whose time is up, also that of its judge."""
    return fake_run(0.5)


def evidence(examples, run):
    half = examples.n // 2
    train, certify = (examples.subset(part) for part in (slice(0, half), slice(half, None)))
    subsets = Subsets(examples, examples, train, certify)
    return Evidence(Candidate(LAYER), ARCHITECTURE, subsets, run)


class Knowing(Learner):
    """Returns the layer at once, so that the judge has all the work."""

    name, needs_polish = "knowing", False

    def learn(self, examples, architecture, run, options):
        return Candidate(LAYER)


# The watch and the clock


def test_a_watch_tells_a_part_at_once_and_steps_once_a_second():
    run = Run()
    watch = Watch(run, "stage")
    watch.begin("first part")
    for step in range(1000):
        watch(step, 1000)
    assert [(event.stage, event.detail) for event in run.events] == [("stage", "first part")]
    slow = fake_run()
    watch = Watch(slow, "stage")
    for step in range(3):
        watch(step, 3)
    assert [event.data["of"] for event in slow.events] == [3, 3, 3]
    assert [event.step for event in slow.events] == [0, 1, 2]


def test_a_watch_ends_what_is_not_done_in_time():
    watch = Watch(over(), "stage")
    with pytest.raises(OutOfTime):
        watch.begin("part")
    with pytest.raises(OutOfTime):
        watch(1, 2)


def test_the_judge_has_a_tenth_of_the_limit_more_from_where_the_search_ended(monkeypatch):
    run = Run(100.0)
    now = [0.0]
    monkeypatch.setattr(Clock, "seconds", property(lambda self: now[0]))
    now[0] = 103.0
    assert run.begin_judging()
    assert not run.is_over()
    now[0] = 112.9
    assert not run.is_over()
    now[0] = 113.1
    assert run.is_over()
    early = Run(100.0)
    now[0] = 20.0
    assert not early.begin_judging()
    now[0] = 109.9
    assert not early.is_over()
    now[0] = 110.1
    assert early.is_over()
    assert not Run().begin_judging()


# What is measured chunk by chunk


def test_the_spectrum_of_whole_matrices_is_the_same_in_chunks_and_tells_of_them(monkeypatch):
    monkeypatch.setattr(scaled_problem, "_LITTLE_HOST_WORK", 0)
    whole = measure_spectrum(LAYER, EXAMPLES)
    monkeypatch.setattr(scaled_problem, "WORKSPACE", 4096)
    run = fake_run()
    found = measure_spectrum(LAYER, EXAMPLES, watch=Watch(run, "identifiability"))
    np.testing.assert_allclose(found.theta, whole.theta, rtol=1e-9)
    np.testing.assert_allclose(found.w, whole.w, rtol=1e-9)
    steps = [event.step for event in run.events if "of" in event.data]
    assert len(steps) > 1
    assert steps == list(range(1, run.events[1].data["of"] + 1))
    assert any("eigenvalues" in event.detail for event in run.events)


def test_the_spectrum_of_factors_is_the_same_in_pieces(monkeypatch):
    layer = mha.random_layer(2, 4, rank=1, seed=0)
    examples = Examples(X, layer(X))
    architecture = Architecture(4, 2, 1)
    whole = measure_spectrum(layer, examples, architecture)
    monkeypatch.setattr(jacobian_spectrum, "_WORKSPACE", 20_000)
    monkeypatch.setattr(jacobian_spectrum, "_PIECES", 2)
    run = fake_run()
    found = measure_spectrum(layer, examples, architecture, watch=Watch(run, "identifiability"))
    np.testing.assert_allclose(found.theta, whole.theta, rtol=1e-6, atol=1e-9)
    done = [event for event in run.events if "of" in event.data]
    assert len(done) > 1
    assert done[-1].step == done[-1].data["of"]


def test_the_rank_test_looks_at_the_clock_between_steps(monkeypatch):
    whole = run_rank_test(LAYER, EXAMPLES, ARCHITECTURE)
    monkeypatch.setattr(randomised_rank_test, "_BETWEEN_LOOKS", 3)
    run = fake_run()
    parts = run_rank_test(LAYER, EXAMPLES, ARCHITECTURE, watch=Watch(run, "identifiability"))
    assert parts.error_amplification == pytest.approx(whole.error_amplification, rel=1e-6)
    assert sum("of" in event.data for event in run.events) > 3
    short = fake_run(20.0)
    with pytest.raises(OutOfTime):
        run_rank_test(LAYER, EXAMPLES, ARCHITECTURE, watch=Watch(short, "identifiability"))
    assert len(short.events) < len(run.events)


# What is said


@pytest.mark.parametrize("limit", [4096, 10], ids=["spectrum", "rank test"])
def test_a_certificate_that_was_not_finished_claims_nothing(monkeypatch, limit):
    monkeypatch.setattr(jacobian_spectrum, "DENSE_LIMIT", limit)
    monkeypatch.setattr(scaled_problem, "_LITTLE_HOST_WORK", 0)
    residuals = measure_residuals(LAYER, EXAMPLES)
    made = make_certificate(LAYER, residuals, EXAMPLES, ARCHITECTURE, run=over())
    assert not made.recovered
    assert made.is_unfinished
    assert made.null_dimension is None
    assert made.intervals is None
    assert "the time limit came before the rank of the Jacobian was known" in made.reason
    assert make_certificate(LAYER, residuals, EXAMPLES, ARCHITECTURE, run=Run()).recovered


def test_an_exact_fit_without_time_for_its_certificate_says_so(monkeypatch):
    monkeypatch.setattr(scaled_problem, "_LITTLE_HOST_WORK", 0)
    verdict = judge(evidence(EXAMPLES, over()))
    assert verdict.outcome is Outcome.FITTED
    assert "time limit" in verdict.reason
    assert "raise max_seconds" in verdict.reason


def test_noise_is_not_concluded_from_tests_that_were_not_made():
    rng = np.random.default_rng(0)
    y = LAYER(X)
    noisy = Examples(X, y + 1e-3 * rng.normal(size=y.shape))
    known = evidence(noisy, Run())
    assert "looks like independent noise" in judge(known).reason
    late = evidence(noisy, over())
    verdict = judge(late)
    assert verdict.outcome is Outcome.TIME_LIMIT
    assert "noise" not in verdict.reason
    assert not verdict.has_error_bars
    names = {check.name for check in CHECKS if check.expensive}
    assert late.unfinished
    assert set(late.unfinished) <= names


def test_all_examples_that_were_not_walked_over_are_not_vouched_for():
    many = Examples(np.concatenate([X, X + 1.0]), LAYER(np.concatenate([X, X + 1.0])))
    known = evidence(EXAMPLES, Run())
    subsets = Subsets(many, EXAMPLES, known.subsets.train, known.subsets.certify)
    whole = Evidence(Candidate(LAYER), ARCHITECTURE, subsets, Run())
    assert judge(whole).outcome is Outcome.RECOVERED
    late = Evidence(Candidate(LAYER), ARCHITECTURE, subsets, run := Run())
    assert late.certificate.recovered
    run.clock = FakeClock(0.5)
    verdict = judge(late)
    assert verdict.outcome is Outcome.FITTED
    assert "before these tests were made: all examples" in verdict.reason


def test_a_fit_tells_of_its_certificate_and_ends_soon_after_its_limit(monkeypatch):
    """With a clock that the certificate makes run: an exact fit, but no time to certify it."""
    monkeypatch.setattr(scaled_problem, "_LITTLE_HOST_WORK", 0)
    told = []
    known = {"method": Knowing(), "polish": False, "max_seconds": 600.0}
    mha.AttentionRegressor(2, on_event=told.append, **known).fit(X, LAYER(X))
    stages = [event.stage for event in told]
    assert "identifiability" in stages[: stages.index("certificate")]

    skip = [0.0]
    seconds = Clock.seconds.fget
    monkeypatch.setattr(Clock, "seconds", property(lambda self: seconds(self) + skip[0]))

    def jump(event):
        skip[0] += 10_000.0 * (event.stage == "identifiability")

    late = mha.AttentionRegressor(2, on_event=jump, **known).fit(X, LAYER(X))
    assert skip[0] == 10_000.0  # the first part of it was the last
    assert late.outcome_ is Outcome.FITTED
    assert "the time limit came before the rank" in late.solution_.reason
    assert mha.compare(late.layer_, LAYER).max_error < 1e-8
