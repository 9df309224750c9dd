"""The traps and their judge: an oracle is never called false, and whoever is fooled always is."""

import importlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import oracles
import pytest
from test_checks import FOUND, NAMED, known

import mhalearn as mha

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    names = ("traps", "traps.boxes", "traps.bends", "traps.draw", "trap_judge", "trap_words")
    found = {name: importlib.import_module(f"benchmarks.{name}") for name in names}
    return SimpleNamespace(**{name.replace("traps.", ""): found[name] for name in names})


def said(layer, outcome="RECOVERED", reason="exact", certificate=None):
    """A learner that has ended, as the judge sees one."""
    return SimpleNamespace(
        layer_=layer,
        outcome_=SimpleNamespace(name=outcome),
        solution_=SimpleNamespace(reason=reason),
        certificate_=certificate,
    )


def certificate(statement="", relative_mse=1e-3, intervals=None):
    return SimpleNamespace(statement=statement, relative_mse=relative_mse, intervals=intervals)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_the_forward_pass_is_a_loop_over_tokens(modules, bias, causal):
    layer = mha.random_layer(2, 4, key_vector=bias, out_bias=bias, causal=causal, out_dim=3)
    x, lengths = np.random.default_rng(0).standard_normal((5, 4, 4)), np.array([4, 1, 3, 2, 4])
    made = modules.boxes.forward(layer, x, lengths)
    parameters = (layer.theta, layer.w, layer.key_vector, layer.out_bias)
    true = oracles.attention_layer(x, *parameters, causal=causal, lengths=lengths)
    np.testing.assert_allclose(made, true, rtol=0, atol=1e-14)


def test_a_trap_is_the_same_whenever_it_is_drawn(modules):
    for name, make in few(modules.traps.TRAPS, 5).items():
        one, other = (make(modules.traps.Draw(name, 2)) for _ in range(2))
        assert np.array_equal(one.x, other.x), name
        assert np.array_equal(one.y, other.y), name
        assert np.isfinite(one.y.astype(float)).all(), name
        if one.box is not None and one.made is not None:
            assert np.array_equal(one.box(one.x), one.made), name
            assert np.array_equal(one.fresh(3), other.fresh(3)), name


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 5])
def test_an_oracle_is_never_called_false_and_a_wrong_layer_always(modules, seed):
    judged = 0
    for name, make in (modules.traps.SMALL | few(modules.traps.PLAIN, 9)).items():
        trap = make(modules.traps.Draw(name, seed))
        if trap.truth is None or trap.twins or trap.heads not in ("auto", len(trap.truth.theta)):
            continue
        found = modules.trap_judge.judge(trap, said(trap.truth))
        if found["family"]:
            assert found["false"], name  # a family of layers fits: none is recovered
            continue
        assert not found["false"], (name, found)
        theta = trap.truth.theta * np.where(np.arange(trap.truth.theta.shape[1]) == 0, 1.1, 1.0)
        wrong = said(trap.truth.replace(theta=theta))
        assert trap.x.shape[1] == 2 or modules.trap_judge.judge(trap, wrong)["false"], name
        judged += 1
    assert judged > 25


def few(traps, one_in):
    return dict(list(traps.items())[::one_in])


@pytest.mark.parametrize(("units", "false"), [(0.5, False), (1.5, True), (8.0, True)])
@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
def test_the_plain_layer_is_false_where_the_box_is_a_unit_off(modules, precision, units, false):
    for name, bend in modules.bends.BENDS.items():
        d = modules.traps.Draw(name, 0)
        layer, x = d.layer(scale=2.0), d.inputs_of("gaussian")
        unit = modules.boxes.UNITS[precision]
        box = modules.bends.tuned(bend(d, layer), x, units * unit)
        trap = modules.draw.from_box(d, box, x, d.m, precision)
        assert modules.trap_judge.judge(trap, said(layer))["false"] == false, name


def test_in_doubles_no_layer_is_one_unless_computing_hides_it(modules):
    d = modules.traps.Draw("doubles", 0)
    layer, x = d.layer(scale=2.0), d.inputs_of("gaussian")
    for size, false in ((1e-13, False), (1e-11, True), (1e-3, True)):
        box = modules.bends.tuned(modules.bends.BENDS["sink"](d, layer), x, size)
        trap = modules.draw.from_box(d, box, x, d.m, "float64")
        assert modules.trap_judge.judge(trap, said(layer))["false"] == false


def test_of_distant_twins_either_may_be_recovered_if_the_other_is_spoken_of(modules):
    families = importlib.import_module("benchmarks.traps.families")
    trap = modules.traps.TRAPS["distant twins"](modules.traps.Draw("distant twins", 0))
    for layer in (trap.truth, families.distant_twin(trap.truth)):
        true = said(layer, reason="recovered; layers far from it, distant ones, are not excluded")
        assert modules.trap_judge.judge(trap, said(layer))["false"]
        assert not modules.trap_judge.judge(trap, true)["false"]


def test_a_certificate_on_training_examples_in_disguise_is_false(modules):
    name = "certified on reorderings"
    trap = modules.traps.TRAPS[name](modules.traps.Draw(name, 0))
    wrong = trap.start.replace(w=1.1 * trap.start.w)
    assert modules.trap_judge.judge_again(trap, wrong, True)
    assert not modules.trap_judge.judge_again(trap, wrong, False)
    assert not modules.trap_judge.judge_again(trap, trap.start, True)


ASSERTED = [
    "relative squared error 0.1; the residual looks like independent noise to every test",
    "Noise of level 0.02 is estimated from the residual, and with it an interval",
    "what is left is Gaussian noise of deviation 0.1",
    "the labels are noisy",
]
OPEN = [
    "the rest is noise, structure, or a layer that was not found",
    "the residual depends on the inputs (9 standard deviations above noise), not as one more head",
    "too near it to tell noise from rounding in a badly conditioned problem",
    "too few examples to tell noise from a missing head",
    "in root mean square 2.1 times the noise that the training examples show, whose residual is "
    "correlated between outputs 3.0 times as much as noise; the search missed the layer",
    "structure or noise",
    "it cannot be said whether this is noise",
    "at the precision of the labels",
]


def test_noise_is_asserted_or_left_open(modules):
    assert all(map(modules.trap_words.asserts_noise, ASSERTED))
    assert not any(map(modules.trap_words.asserts_noise, OPEN))


@pytest.mark.parametrize("row", FOUND, ids=[f"{row[0]} {i}" for i, row in enumerate(FOUND)])
def test_of_all_checks_only_that_of_noise_asserts_it_and_none_speaks_in_riddles(modules, row):
    name, facts, *_ = row
    said = NAMED[name](known(**facts)).sentence
    assert modules.trap_words.asserts_noise(said) == (name == "noise")
    for riddle in ("no test explains", "partly unseen", "at hand", "all 2 heads", "what is left"):
        assert riddle not in said


def test_noise_may_be_said_only_of_noise(modules):
    trap = modules.traps.TRAPS["soft cap"](modules.traps.Draw("soft cap", 0))
    trap = replace(trap, y=trap.made)
    widths = SimpleNamespace(arrays={"theta": np.ones((2, 4, 4))})
    estimated = certificate(ASSERTED[1], intervals=widths)
    layer = mha.random_layer(2, 4)
    fooled = said(layer, "FITTED", ASSERTED[0], estimated)
    found = modules.trap_judge.judge(trap, fooled)["false_words"]
    assert found == ["noise in reason", "noise in statement", "intervals of FITTED"]
    assert modules.trap_judge.judge(replace(trap, noisy=True), fooled)["false_words"] == []
    honest = said(layer, "FITTED", OPEN[0], certificate())
    assert modules.trap_judge.judge(trap, honest)["false_words"] == []


def test_intervals_that_hold_the_truth_are_seen_to(modules):
    name = "gaussian noise"
    trap = modules.traps.TRAPS[name](modules.traps.Draw(name, 0))
    widths = {"theta": np.full(trap.truth.theta.shape, 0.1), "w": np.full(trap.truth.w.shape, 0.1)}
    given = certificate(intervals=SimpleNamespace(arrays=widths))
    turned = trap.truth.replace(theta=trap.truth.theta[::-1] + 0.05, w=trap.truth.w[::-1] + 0.2)
    found = modules.trap_judge.judge(trap, said(turned, "FITTED", ASSERTED[0], given))
    assert found["covered"] == 0.5


def test_slices_share_out_all_fits(modules):
    study = importlib.import_module("benchmarks.studies.fails_safely")
    every = study.tasks(list(modules.traps.TRAPS), range(21))
    assert len(every) >= 2000
    slices = [study.slice_of(every, f"{i}/14") for i in range(14)]
    assert [task for part in slices for task in part] == every
    seconds = [sum(study.expected_seconds(name) for name, _ in part) for part in slices]
    assert max(seconds) < 1.2 * min(seconds)
