"""Each check by itself, on evidence that was put together by hand: what it finds, and what not."""

import dataclasses
import json

import numpy as np
import pytest

from mhalearn.data import Examples
from mhalearn.data.input_information import Information
from mhalearn.data.inputs import sample_inputs
from mhalearn.data.label_precision import Precision
from mhalearn.judge import checks
from mhalearn.judge.box_answers import Answers
from mhalearn.judge.certificate import Certificate, give_reason
from mhalearn.judge.departures import ALTERNATIVES, Departure
from mhalearn.judge.evidence import Evidence
from mhalearn.judge.finding import Check, Finding, check
from mhalearn.judge.fit_quality import Fit, classify_fit
from mhalearn.judge.fitted_attention import FittedAttention
from mhalearn.judge.identifiability import Identifiability
from mhalearn.judge.mask_test import FirstRow
from mhalearn.judge.residual_law import ResidualLaw
from mhalearn.judge.residuals import Residuals
from mhalearn.judge.rounding_test import RoundingTest
from mhalearn.judge.subsets import Subsets
from mhalearn.judge.verdict import judge
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.random_layers import random_layer
from mhalearn.layer.rope import Rope
from mhalearn.run.outcome import Candidate, Outcome
from mhalearn.run.run import Run

LAYER = random_layer(2, 4, seed=3)
X = sample_inputs("gaussian", 12, 4, 4, seed=1)
EXAMPLES = Examples(X, LAYER(X))
ROTARY = random_layer(2, 4, head_dim=2, rope=Rope(100.0), window=3)
PAIRS = Examples(X[:, :2], LAYER(X[:, :2]))

FITTED, STUCK, RECOVERED = Outcome.FITTED, Outcome.STUCK, Outcome.RECOVERED
NOT_IDENTIFIED = Outcome.NOT_IDENTIFIED


def residuals(root=1e-15, *, exact=None, precision="float64", rounding=0.0, n=12, worst=None):
    unit = float(np.finfo(precision).eps)
    labels = Precision(precision, unit, 16 * unit + 1e-12, int(1 - np.log2(unit)))
    relative = np.full(n, root)
    if worst is not None:
        relative[0] = worst
    return Residuals(
        squared=relative**2,
        relative=relative,
        root_relative=root,
        label_norm=1.0,
        noise_level=root,
        labels=labels,
        rounding=rounding,
        exact=root <= labels.floor if exact is None else exact,
    )


def certificate(*, recovered=False, null=0, bound=1e-9, fit=None):
    """One of an exact fit; what is not recovered, though it is determined, has mirrored heads."""
    known = Identifiability(null, bound, None, None, 3e-4 if null is None else None)
    mirrored = None if recovered else (0,)
    reason = give_reason(fit or residuals(), known, mirrored, EXAMPLES.architecture(2))
    return Certificate(
        recovered=recovered,
        reason=reason,
        relative_mse=0.0,
        floor=1e-12,
        label_precision="float64",
        noise_level=0.0,
        n_examples=12,
        n_seen=0,
        delta=0.05,
        threshold=1e-6,
        n_exceeding=0,
        tail_bound=0.2,
        spectrum=None,
        null_dimension=null,
        parameter_bound=bound,
        intervals=None,
        statement="",
    )


def information(rows=48, *, symmetric=False, others=3):
    return Information(
        group_of=np.arange(12),
        rows=rows,
        row_length=4.0,
        others=np.full(rows, others),
        centrally_symmetric=symmetric,
    )


NOISE_LIKE = ResidualLaw(None, None, by_size=False)
DISTANCE, POSITION, OWN, *_ = ALTERNATIVES


def rounding_test(residual=1e-6, allowed=2e-6, departure=None):
    return RoundingTest(residual, allowed / 1.6, allowed, departure, undetected=3e-8)


class Untouchable:
    """Evidence that must not be asked for."""


def known(
    *,
    asked=2,
    outcome=FITTED,
    reason="",
    certify=EXAMPLES,
    train=EXAMPLES,
    run=None,
    more=False,
    polished=True,
    inputs=None,
    causal=False,
    precision=None,
    converged=True,
    instead=None,
    **facts,
):
    """Evidence whose measurements are given; an exact fit unless they say otherwise."""
    every = Examples(np.concatenate([X, X]), np.concatenate([LAYER(X)] * 2)) if more else train
    evidence = Evidence(
        Candidate(LAYER, outcome, reason, instead=instead),
        train.architecture(asked, causal=causal),
        Subsets(every, train, train, certify),
        run or Run(),
        precision=precision,
        information=inputs,
        polished=polished,
        converged=converged,
    )
    facts = {
        "train_residuals": residuals(),
        "certify_residuals": None if certify is None else residuals(),
        "all_residuals": residuals(n=24) if more else None,
        "certificate": None
        if certify is None
        else certificate(recovered=True, fit=facts.get("certify_residuals")),
        "train_null_dimension": 0,
        "gain_of_one_more_head": 0.0,
        "residual_dependence": 0.0,
        "residual_correlation": 1.0,
        "first_row": None,
        "first_row_sees_later": False,
        "answers": None,
        "fitted_attention": None,
        "attention_with_one_more_head": None,
        "departures": (),
        "positions_look_alike": True,
        "residual_law": NOISE_LIKE,
        "rounding_test": rounding_test(),
        "held_out_rows": np.full(12, 0.5),
        "rival": None,
    } | facts
    vars(evidence).update(facts)  # where a cached property keeps what it measured
    return evidence


NOISY = {
    "train_residuals": residuals(0.01),
    "certify_residuals": residuals(0.011),
    "certificate": certificate(),
}
COARSE = {
    "train_residuals": residuals(1e-6, precision="float32", rounding=4e-8),
    "certify_residuals": residuals(1e-6, precision="float32", rounding=4e-8),
}
UNCERTIFIED = {"certificate": certificate()}
# One head that sees nothing but the row's own token, and gives it back.
PASSING = FittedAttention(
    AttentionLayer(1e3 * np.eye(4)[None], np.eye(4)[None]),
    EXAMPLES.architecture(1),
    np.eye(4)[None],
    np.ones((1, 4), bool),
    np.zeros((1, 4, 4)),
)


# As learners say them.
LATE = "the time limit came in phase 2: certification, before there was a layer"
BROKEN = "the best candidate of phase 6 has relative squared error 0.3 on held-out examples"

UNPOLISHED = Run()
UNPOLISHED.keep(LAYER, 0.002)


FOUND = [
    (
        "too few examples",
        {"inputs": information(rows=8)},
        Outcome.TOO_FEW_EXAMPLES,
        "count as 2 independent ones, below the counting limit of 4.0",
        {"examples": 2.0, "counting_limit": 4.0},
    ),
    (
        "time limit",
        {**UNCERTIFIED, "time_is_up": True},
        Outcome.TIME_LIMIT,
        Outcome.TIME_LIMIT.explanation,
        {},
    ),
    (
        "time limit",
        {**NOISY, "outcome": Outcome.TIME_LIMIT, "reason": LATE},
        Outcome.TIME_LIMIT,
        LATE,
        {},
    ),
    (
        "not finite",
        {**NOISY, "outcome": Outcome.NONFINITE},
        Outcome.NONFINITE,
        Outcome.NONFINITE.explanation,
        {},
    ),
    (
        "search stuck",
        {**NOISY, "outcome": STUCK, "reason": BROKEN},
        STUCK,
        BROKEN,
        {},
    ),
    (
        "not polished",
        {**NOISY, "polished": False, "run": UNPOLISHED},
        FITTED,
        "relative squared error 2.0e-03 before polish",
        {"relative_squared_error": 0.002},
    ),
    (
        "family of layers, by the inputs to fit",
        {"certify": None, "train_null_dimension": 5},
        NOT_IDENTIFIED,
        "a family of layers of dimension 5 fits",
        {"dimension": 5},
    ),
    (
        "nothing to certify with",
        {"certify": None, "train_residuals": residuals(0.1)},
        FITTED,
        "error 0.01 on the training examples, and no example could be spared",
        {"relative_training_error": pytest.approx(0.01)},
    ),
    (
        "surplus heads",
        {"asked": 3},
        NOT_IDENTIFIED,
        "2 heads explain the examples exactly, so a family of layers with 3 heads does too "
        "(dimension at least 16): ask for n_heads=2",
        {"heads_found": 2, "heads_asked": 3, "dimension": 16},
    ),
    (
        "surplus heads",
        {"asked": 1},
        STUCK,
        "2 heads explain the examples exactly, and 1 was asked for: ask for n_heads=2",
        {"heads_found": 2, "heads_asked": 1},
    ),
    (
        "too few equations",
        {"inputs": information(), "equations": 1.04},
        FITTED,
        "the inputs give 1.04 independent equations an unknown, less than 1.1",
        {"equations_over_unknowns": 1.04},
    ),
    (
        "central symmetry",
        {"inputs": information(symmetric=True)},
        NOT_IDENTIFIED,
        "symmetrically about their mean",
        {},
    ),
    (
        "rank not certain",
        {"certificate": certificate(null=None, bound=None)},
        FITTED,
        "a randomised test does not show the Jacobian to have full rank (solved for from",
        {},
    ),
    (
        "parameter not resolved",
        {"certificate": certificate(bound=0.3)},
        NOT_IDENTIFIED,
        "still leaves a parameter uncertain by 0.3 times the norm of a head",
        {"parameter_bound": 0.3},
    ),
    (
        "parameter not resolved",
        {**COARSE, "certificate": certificate(bound=0.3, fit=COARSE["train_residuals"])},
        FITTED,
        "still leaves a parameter uncertain by 0.3 times the norm of a head",
        {"parameter_bound": 0.3},
    ),
    (
        "causal mask",
        {**NOISY, "first_row": FirstRow(1e-5, 0.4)},
        STUCK,
        "linear function of the first token (regression leaves 1e-05 of it, and at least 0.4 of",
        {"first_row": 1e-5, "other_rows": 0.4},
    ),
    (
        "no causal mask",
        {**NOISY, "causal": True, "first_row": FirstRow(0.3, 0.4), "first_row_sees_later": True},
        STUCK,
        "learn with causal=False",
        {"first_row": 0.3},
    ),
    (
        "order of tokens",
        {**NOISY, "answers": Answers(0.0, 0.2, 32)},
        STUCK,
        "changes what the box answers (by 0.2 of its answers): it has positions or a mask",
        {"reordered": 0.2, "asked": 32},
    ),
    (
        "positions",
        {**NOISY, "departures": (Departure(DISTANCE, 0.6),)},
        STUCK,
        "60% of which goes with the distance of tokens: attention depends on the distance",
        {"share": 0.6},
    ),
    (
        "positions",
        {**NOISY, "residual_law": ResidualLaw(None, 1.7, by_size=False)},
        STUCK,
        "1.7 times as large at some positions",
        {"by_position": 1.7},
    ),
    (
        "not converged",
        {**NOISY, "converged": False, "departures": (Departure(OWN, 0.8),)},
        STUCK,
        "where the descent stopped, short of a minimum",
        {},
    ),
    (
        "departure",
        {**NOISY, "departures": (Departure(OWN, 0.8),)},
        STUCK,
        "80% of which goes with the row's own token: a row's own token counts",
        {"share": 0.8},
    ),
    (
        "residual path",
        {**NOISY, "fitted_attention": PASSING},
        STUCK,
        "head 1 attends to its own token (100% of its weight) with W = I",
        {},
    ),
    ("rival layer", {"rival": LAYER}, NOT_IDENTIFIED, "another start ended at a layer", {}),
    (
        "departure of coarse labels",
        {**COARSE, "rounding_test": rounding_test(departure=Departure(POSITION, 0.81))},
        FITTED,
        "7.5 ulp (units in the last place) of it depend on the inputs: labels depend on",
        None,
    ),
    (
        "held-out examples off",
        {**COARSE, "held_out_rows": np.array([0.5, 0.6, 20.0])},
        FITTED,
        "of held-out examples is not rounding of the labels",
        None,
    ),
    (
        "more than computing leaves",
        {**COARSE, "rounding_test": rounding_test(1e-6, 8e-7)},
        FITTED,
        "more than evaluating the layer in float32 leaves (5e-07): its cause is not known",
        None,
    ),
    (
        "rounding",
        {
            **NOISY,
            "train_residuals": residuals(0.01, rounding=0.01),
            "precision": Precision("float64", 1e-16, 1e-12, 53, 0.01),
            "train_noise": 0.01,
        },
        FITTED,
        "as much as rounding leaves of labels that are multiples of 0.01",
        None,
    ),
    (
        "not explained",
        {**NOISY, "residual_law": ResidualLaw(2.0, None, by_size=True)},
        FITTED,
        "the residual varies in size with the tokens and is large in a few rows (kurtosis 2 times",
        None,
    ),
    (
        "not explained",
        {**NOISY, "answers": Answers(0.0, 0.0, 32)},
        FITTED,
        "asked twice the box answers the same, so the residual is not noise",
        None,
    ),
    (
        "sign symmetry",
        UNCERTIFIED,
        NOT_IDENTIFIED,
        "stays there with Theta and W of opposite sign in 1 of 2 heads",
        {},
    ),
    (
        "family of layers",
        {"certificate": certificate(null=7), "asked": 3},
        NOT_IDENTIFIED,
        "a family of layers of dimension at least 23 fits",
        {"dimension": 23},
    ),
    (
        "contradiction",
        {"train_residuals": residuals(0.1, worst=0.9)},
        FITTED,
        "the training examples are not (0.01, 12 of them off by more than 1e-06)",
        {"contradicting": 12, "bar": 1e-6},
    ),
    (
        "near the precision",
        {
            "train_residuals": residuals(1e-10),
            "certify_residuals": residuals(1e-10),
            "certificate": certificate(),
        },
        FITTED,
        "error 1e-20 on held-out examples: not at the precision of the labels, but so near it",
        {"train_residual": 1e-10},
    ),
    (
        "others not explained",
        {"certify_residuals": residuals(0.1), "certificate": certificate(null=3)},
        NOT_IDENTIFIED,
        "(relative squared error 0.01), and the Jacobian has a null space of "
        "dimension 3: give more examples",
        {"wrong": 12, "of": 12},
    ),
    (
        "others not explained",
        {
            "certify_residuals": dataclasses.replace(
                residuals(1e-15, worst=0.3), root_relative=0.1, exact=False
            ),
            "certificate": certificate(),
        },
        FITTED,
        "1 of 12 held-out ones are not (relative squared error 0.01)",
        {"wrong": 1, "of": 12},
    ),
    (
        "another kind",
        {**NOISY, "instead": ROTARY, "residuals_instead": residuals()},
        STUCK,
        "but heads with rotary positions, a window of 3 tokens explain them to their precision: "
        "learn with rope=Rope(base=100), window=3",
        {
            "relative_squared_error": pytest.approx(1.21e-4),
            "of_the_other_kind": pytest.approx(1e-30),
        },
    ),
    (
        "another kind",
        {**NOISY, "instead": ROTARY, "residuals_instead": residuals(1e-3)},
        STUCK,
        "but heads with rotary positions, a window of 3 tokens leave 1e-06 of them",
        None,
    ),
    (
        "hopeless",
        {
            "train_residuals": residuals(0.9),
            "certify_residuals": residuals(0.9),
            "certificate": certificate(),
        },
        STUCK,
        "leaves 81% of the squared labels",
        {"relative_squared_error": pytest.approx(0.81)},
    ),
    (
        "no test for a missing head",
        {**NOISY, "gain_of_one_more_head": None},
        FITTED,
        "the examples are too few to tell noise from a missing head",
        {},
    ),
    (
        "no test for a missing head",
        {**COARSE, "gain_of_one_more_head": None},
        FITTED,
        "residual 1e-06 is more than rounding of the labels, and the examples are too few",
        {},
    ),
    (
        "missing head",
        {**NOISY, "gain_of_one_more_head": 0.4},
        STUCK,
        "of which one more head explains 40%",
        {"gain": 0.4},
    ),
    (
        "missing head",
        {**NOISY, "certify_residuals": residuals(1e-3), "gain_of_one_more_head": 0.4},
        FITTED,
        "relative squared error 1e-06 on held-out examples, of which one more head explains 40%",
        {"gain": 0.4},
    ),
    (
        "missing head",
        {**COARSE, "gain_of_one_more_head": 0.4},
        FITTED,
        "more than rounding of the labels, and one more head explains 40% of its square",
        {"gain": 0.4},
    ),
    (
        "no time for tests",
        {**COARSE, "unfinished": ["missing head"]},
        FITTED,
        "the time limit came before these tests were made: missing head; raise max_seconds",
        None,
    ),
    (
        "no time for tests",
        {**NOISY, "unfinished": ["departure", "missing head"]},
        Outcome.TIME_LIMIT,
        "the time limit came before these tests were made: departure, missing head",
        None,
    ),
    (
        "residual dependence",
        {**NOISY, "residual_dependence": 30.0},
        STUCK,
        "depends on the inputs (30 standard deviations above noise), not as one more head would",
        {"deviations": 30.0, "share": 0.0},
    ),
    (
        "residual dependence",
        {**COARSE, "residual_dependence": 30.0},
        FITTED,
        "and depends on the inputs (30 standard deviations above noise)",
        {"deviations": 30.0},
    ),
    (
        "overfitted",
        {**NOISY, "certify_residuals": residuals(0.1), "residual_correlation": 5.0},
        STUCK,
        "in root mean square 8.2 times the noise that the training examples show, whose residual "
        "is correlated between outputs 5.0 times as much as noise",
        {"times_noise": pytest.approx(10 * np.sqrt(2 / 3)), "correlation": 5.0},
    ),
    (
        "noise",
        NOISY,
        FITTED,
        "0.00012 on held-out examples; the residual looks like independent noise to every test",
        {"relative_squared_error": pytest.approx(1.21e-4)},
    ),
    (
        "noise",
        {**NOISY, "answers": Answers(0.015, 0.0, 32)},
        FITTED,
        "to every test, and asked twice the box answers otherwise, by 0.015 of its answers",
        {"relative_squared_error": pytest.approx(1.21e-4)},
    ),
    (
        "recovered",
        {},
        RECOVERED,
        "the Jacobian has full rank: no other layer nearby fits, so the examples determine "
        "both heads; of distant layers",
        {"train_residual": 1e-15},
    ),
    ("recovered", COARSE, RECOVERED, "no more than evaluating the layer in float32 leaves", None),
    (
        "recovered",
        {"inputs": information(symmetric=True), "train": PAIRS, "certify": PAIRS},
        RECOVERED,
        "with two tokens other heads can make the same one",
        None,
    ),
    (
        "recovered",
        {"train_residuals": residuals(9e-13)},
        RECOVERED,
        "a head as small as that residual would go undetected",
        None,
    ),
    (
        "all examples",
        {"more": True, "all_residuals": residuals(0.1, n=24)},
        FITTED,
        "12 random examples are explained exactly, all 24 are not (relative squared error 0.01, "
        "24 of them off by more than 1e-06)",
        {"wrong": 24, "bar": 1e-6},
    ),
    (
        "all examples",
        {**NOISY, "more": True, "all_residuals": residuals(0.01, n=24, worst=2.0)},
        FITTED,
        "relative squared error 0.0001 over all examples, 1 of which is off by more than 10 times "
        "the median, as wrong labels would be; the layer was fitted to 12 of 24 examples",
        {"outliers": 1},
    ),
]
NAMED = {check.name: check for check in (*checks.CHECKS, *checks.OBJECTIONS)}


@pytest.mark.parametrize(
    ("name", "facts", "outcome", "words", "numbers"),
    [pytest.param(*row, id=f"{row[0]} {i}") for i, row in enumerate(FOUND)],
)
def test_a_check_finds_what_it_is_named_after_and_it_decides(name, facts, outcome, words, numbers):
    finding = NAMED[name](known(**facts))
    assert finding.name == name
    assert finding.outcome is outcome
    assert words in finding.sentence
    if numbers is not None:
        assert finding.numbers == numbers
    verdict = judge(known(**facts))
    assert verdict.findings[0] == finding
    assert (verdict.outcome, verdict.reason) == (outcome, finding.sentence)
    json.dumps([finding.to_dict() for finding in verdict.findings], allow_nan=False)


def test_every_check_is_in_the_table():
    assert {row[0] for row in FOUND} == set(NAMED)
    assert len(NAMED) == len(checks.CHECKS) + len(checks.OBJECTIONS)


@pytest.mark.parametrize("check", NAMED.values(), ids=NAMED)
def test_an_exact_fit_that_is_certified_is_found_nothing_against(check):
    found = check(known(more=True, inputs=information()))
    assert (found is None) == (check.name != "recovered")


@pytest.mark.parametrize(
    "facts",
    [
        {"outcome": STUCK},
        {"outcome": Outcome.NONFINITE},
        {"outcome": Outcome.TIME_LIMIT},
        {"time_is_up": True},
        {"polished": False},
    ],
)
def test_how_the_search_ended_is_no_matter_where_the_layer_is_certified(facts):
    assert judge(known(**facts)).outcome is RECOVERED


@pytest.mark.parametrize(
    ("train", "certify", "expected"),
    [
        (residuals(), residuals(), Fit.EXACT),
        (residuals(1e-10), residuals(1e-10), Fit.NEAR),
        (residuals(0.1), residuals(), Fit.NEAR),
        (residuals(), residuals(0.1), Fit.TRAIN_ONLY),
        (residuals(), residuals(0.9), Fit.TRAIN_ONLY),
        (residuals(0.1), residuals(0.9), Fit.HOPELESS),
        (residuals(0.9), residuals(0.1), Fit.PARTIAL),
        (residuals(0.1), None, None),
    ],
)
def test_fits_are_of_five_kinds(train, certify, expected):
    evidence = known(train_residuals=train, certify_residuals=certify)
    assert classify_fit(evidence) is expected


# The order, and what is asked


def test_all_cheap_findings_are_kept_and_the_first_decides():
    verdict = judge(known(asked=3, inputs=information(rows=8), equations=0.5))
    names = [finding.name for finding in verdict.findings]
    assert names == ["too few examples", "surplus heads", "too few equations"]
    assert verdict.outcome is Outcome.TOO_FEW_EXAMPLES


@pytest.mark.parametrize(
    "facts",
    [
        {**NOISY, "outcome": STUCK},
        {**NOISY, "time_is_up": True},
        {"asked": 3},
        {"certificate": certificate(null=7)},
        {"train_residuals": residuals(0.9), "certify_residuals": residuals(0.9)},
    ],
)
def test_what_is_expensive_is_not_asked_where_something_cheap_decides(facts):
    evidence = known(**facts, more=True)
    for name in ("gain_of_one_more_head", "residual_dependence", "train_null_dimension"):
        vars(evidence)[name] = Untouchable()  # comparing it raises
    if judge(evidence).outcome in (STUCK, NOT_IDENTIFIED, Outcome.TIME_LIMIT):
        vars(evidence)["all_residuals"] = Untouchable()
        judge(evidence)


@pytest.mark.parametrize(
    "facts",
    [
        {"residual_correlation": 5.0},  # as noise of one cause is, with enough examples
        {"certify_residuals": residuals(0.1)},  # the error of an estimate near the counting limit
    ],
)
def test_one_sign_of_a_wrong_layer_alone_is_taken_for_noise(facts):
    assert judge(known(**NOISY | facts)).findings[0].name == "noise"


def test_where_no_head_can_be_tested_dependence_is():
    evidence = known(**NOISY, gain_of_one_more_head=None, residual_dependence=30.0)
    assert judge(evidence).findings[0].name == "residual dependence"


def test_a_missing_head_spares_the_test_of_dependence():
    evidence = known(**NOISY, gain_of_one_more_head=0.5)
    vars(evidence)["residual_dependence"] = Untouchable()
    assert judge(evidence).findings[0].name == "missing head"


def test_an_objection_overrules_what_speaks_for_the_layer_and_nothing_else():
    objecting = {"more": True, "all_residuals": residuals(0.1, n=24)}
    over = judge(known(**objecting))
    assert [finding.name for finding in over.findings] == ["all examples", "recovered"]
    assert over.outcome is FITTED
    stands = judge(known(asked=3, **objecting))
    assert [finding.name for finding in stands.findings] == ["surplus heads"]


def test_a_check_of_one_s_own_is_a_function_with_a_name():
    @check("tuesday")
    def tuesday(evidence):
        return STUCK, "it is Tuesday", {"day": 2}

    assert isinstance(tuesday, Check)
    verdict = judge(known(), (tuesday, *checks.CHECKS))
    assert verdict.findings == (Finding("tuesday", STUCK, "it is Tuesday", {"day": 2}),)
    assert judge(known(), (*checks.CHECKS, tuesday)).outcome is RECOVERED
