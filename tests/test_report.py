"""The report: one file that stands alone, says what is certain, and escapes what it is given."""

import dataclasses
import json
import math
import re
from html.parser import HTMLParser

import matplotlib
import numpy as np
import pytest

import mhalearn as mha
from mhalearn.judge.finding import Finding
from mhalearn.judge.solution import Solution
from mhalearn.learners.chen_li import events
from mhalearn.learners.chen_li.body_shape import BodyShape
from mhalearn.learners.chen_li.phase1_crude_sum import CrudeSum, SumEstimate
from mhalearn.learners.chen_li.phase2_certification import fit_pairs
from mhalearn.learners.chen_li.phase3_refined_sum import RefinedSum
from mhalearn.learners.chen_li.phase6_net import NetResult
from mhalearn.learners.chen_li.span import Span
from mhalearn.report import figures
from mhalearn.report.descent import draw_descent, list_stages, measured_seconds
from mhalearn.report.numbers import number, short, typeset
from mhalearn.report.page import render
from mhalearn.report.phases import describe_phases
from mhalearn.report.reproduce import ARGUMENTS, describe_again
from mhalearn.run.events import Event
from mhalearn.run.outcome import Outcome
from mhalearn.run.run import Run

VOID = {"meta", "link", "br", "hr", "img", "input", "area", "base", "col", "embed", "source", "wbr"}


class Page(HTMLParser):
    """Reads a page and keeps what the tests ask about; unbalanced tags are an error."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.attributes, self.words = [], [], [], []
        self.tags = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self._note(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self._note(tag, attrs)

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    def _note(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            self.attributes.append((tag, name, value))
            if name == "id":
                self.ids.append(value)

    @property
    def text(self):
        return " ".join("".join(self.words).split())


def learned(n_heads=2, d=6, outcome=Outcome.RECOVERED, **extra):
    """A layer near a random truth, as a run would return it."""
    truth = mha.random_layer(n_heads=n_heads, d=d, seed=3)
    rng = np.random.default_rng(0)
    layer = truth.replace(
        theta=truth.theta[::-1] + 1e-14 * rng.standard_normal(truth.theta.shape),
        w=truth.w[::-1],
        seen=np.arange(10, dtype=np.uint64),
    )
    trace = [Event("start", 0, math.nan, 0.01)]
    trace += [Event("round 1", i, 10.0 ** (-i), 0.1 + 0.1 * i) for i in range(20)]
    trace += [Event("polish", i, 0.0, 2.2 + 0.1 * i) for i in range(3)]
    settings = {"n_heads": n_heads, "method": "newton", "random_state": 7, "k": 4}
    fields = {"reason": "Because it fits.", "settings": settings} | extra
    return Solution(layer, outcome, trace, **fields), truth


@pytest.fixture(scope="module")
def certificate():
    solution, truth = learned()
    x = mha.sample_inputs("boolean", 100, 4, 6, seed=5)
    return mha.certify(solution.layer, x, truth(x))


def test_the_page_stands_alone(certificate, tmp_path):
    solution, truth = learned(certificate=certificate)
    path = tmp_path / "report.html"
    mha.write_report(solution, path, truth=truth)
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    for tag, name, value in page.attributes:
        if name in ("src", "href", "xlink:href", "srcset", "action", "poster"):
            assert value.startswith(("#", "data:image/png;base64,")), (tag, name, value)
        assert not name.startswith("on")
    assert not set(page.tags) & {"script", "link", "iframe", "object", "base"}
    assert "@import" not in text
    assert all(u.startswith("#") for u in re.findall(r"url\(([^)]*)\)", text))
    assert len(page.ids) == len(set(page.ids))
    named = {value for _, name, value in page.attributes if name == "aria-labelledby"}
    assert named <= set(page.ids)
    assert ("meta", "name", "viewport") in page.attributes
    assert len(text) < 2_000_000


def test_every_figure_has_a_text_alternative(certificate):
    solution, truth = learned(certificate=certificate)
    text = render(solution, truth)
    opened = re.findall(r"<svg[^>]*>\s*<title id=\"([^\"]+)\">([^<]+)</title>", text)
    assert len(opened) == text.count("<svg ")
    # Two heads of two matrices, four drawings each; fresh errors and the spectrum; the descent, for
    # two widths.
    assert len(opened) == 2 * 2 * 4 + 2 + 2
    assert text.count('role="img"') == len(opened)


def test_it_says_verdict_certificate_conditions_and_how_to_repeat(certificate):
    solution, truth = learned(certificate=certificate)
    text = render(solution, truth)
    said = Page(text).text
    assert "The layer was recovered." in said
    assert "Because it fits." in said
    assert typeset(certificate.statement) in said
    for item in mha.check_nondegeneracy(solution.layer, k=4, seed=0).items:
        assert item.name in said
    assert "n_heads=2, method='newton', random_state=7" in said
    assert "the largest relative error of a parameter is" in said
    assert "mhalearn learn EXAMPLES --heads 2 --method newton --seed 7" in said
    assert len(set(re.findall(r"\b[0-9a-f]{64}\b", text))) == 2  # the examples and the layer
    assert "jaxlib" in said


@pytest.mark.parametrize("outcome", list(Outcome))
def test_every_outcome_has_a_headline(outcome):
    solution, _ = learned(outcome=outcome)
    said = Page(render(solution)).text
    assert outcome.name in said
    assert "nothing is promised" in said
    assert ("The layer was recovered." in said) == (outcome is Outcome.RECOVERED)


def test_the_check_that_decided_is_named_and_the_others_are_folded():
    first = Finding("surplus heads", Outcome.NOT_IDENTIFIED, "2 heads explain it")
    other = Finding("too few equations", Outcome.FITTED, "the inputs <hold> 1.02 times as many")
    solution, _ = learned(outcome=Outcome.NOT_IDENTIFIED, findings=(first, other))
    text = render(solution)
    assert "rests on: the check “surplus heads”, and what another found" in Page(text).text
    folded = text[text.index("<details>") : text.index("</details>")]
    assert "too few equations (FITTED by itself): The inputs &lt;hold&gt; 1.02 times" in folded
    assert "what another found" not in render(learned(findings=(first,))[0])


def test_the_truth_is_drawn_beside_its_match():
    solution, truth = learned()
    text = render(solution, truth)
    largest = re.findall(r"learned minus truth: at most (\S+) in size", text)
    assert len(largest) == 4
    # The heads were given in another order.
    assert all(value == "0" or re.search(r"10⁻¹[³⁴⁵⁶⁷⁸⁹]$", value) for value in largest)


def test_runs_and_certificates_are_short_to_print(certificate):
    solution, _ = learned(certificate=certificate)
    assert "RECOVERED" in repr(solution)
    assert certificate.statement in repr(certificate)
    assert len(repr(solution)) < 400
    assert len(repr(certificate)) < 800


def test_a_truth_with_other_heads_is_said_and_not_subtracted():
    solution, _ = learned()
    said = Page(render(solution, mha.random_layer(n_heads=3, d=6, seed=0))).text
    assert "The truth has 3 heads" in said
    assert "minus" not in said


def test_strings_are_escaped():
    evil = '<script>alert("x")</script>&amp;'
    solution, _ = learned(reason=evil, settings={evil: evil, "k": 4})
    trace = [Event(evil, 0, 1.0, 0.1, evil), Event(evil, 1, 0.1, 0.2)]
    solution = Solution(solution.layer, solution.outcome, trace, evil, None, solution.settings)
    text = render(solution)
    page = Page(text)
    assert "<script" not in text
    assert "script" not in page.tags
    assert evil in page.text


def test_no_trace_no_settings_no_certificate():
    layer = mha.random_layer(n_heads=1, d=2, out_dim=1, key_vector=True, out_bias=True, causal=True)
    said = Page(render(Solution(layer, Outcome.STUCK, []))).text
    assert "recorded no events" in said
    assert "No certificate was made" in said
    assert "conditions on the layer" not in said
    assert Outcome.STUCK.explanation[1:] in said  # as a sentence, with a capital letter


def test_a_zero_layer_and_a_trace_of_nans_are_drawn():
    layer = mha.AttentionLayer(np.zeros((1, 3, 3)), np.zeros((1, 3, 2)))
    trace = [Event("start", i, math.nan, 0.1 * i) for i in range(3)]
    Page(render(Solution(layer, Outcome.NONFINITE, trace)))


def test_large_layers_stay_small_files():
    truth = mha.random_layer(n_heads=300, d=70, seed=0)
    trace = [Event(f"round {i // 100}", i, 1 / (i + 1), i / 100) for i in range(5_000)]
    text = render(Solution(truth, Outcome.FITTED, trace), truth)
    assert len(text.encode()) < 2_000_000
    said = Page(text).text
    assert "The first 12 heads are drawn" in said
    assert "The first 256 of 300" in said
    assert "entry of largest size in its block" in said


def test_the_same_run_gives_the_same_page_and_matplotlib_keeps_its_settings():
    before = dict(matplotlib.rcParams)
    solution, truth = learned()
    assert render(solution, truth) == render(solution, truth)
    assert dict(matplotlib.rcParams) == before


def test_only_a_run_can_be_reported(tmp_path):
    with pytest.raises(ValueError, match="pass a Solution or a fitted"):
        mha.write_report({"layer": None}, tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_path_is_refused(tmp_path):
    solution, _ = learned()
    with pytest.raises(ValueError, match="does not exist"):
        mha.write_report(solution, tmp_path / "nowhere" / "report.html")
    with pytest.raises(ValueError, match="is a folder"):
        mha.write_report(solution, tmp_path)


def test_thinning_keeps_the_largest_entry_of_each_block():
    matrix = np.zeros((200, 70))
    matrix[130, 33], matrix[10, 2] = -5.0, 3.0
    small = figures._thinned(matrix)
    assert small.shape == (64, 64)
    assert small.min() == -5.0
    assert small.max() == 3.0
    assert np.count_nonzero(small) == 2


def tell_all_phases(d=6, k=3, count=200):
    """The events of a run of the phases, told from made-up results; no phase really runs."""
    rng, trace = np.random.default_rng(0), Run()
    truth = mha.random_layer(n_heads=2, d=d, seed=3)
    examples = mha.Examples.from_callable(truth, "gaussian", n=count, k=k, d=d)
    x, y, _ = examples.arrays()
    total, which = truth.w.sum(axis=0), np.arange(count)
    pair = np.tile([1, 0], (count, 1))
    rows = fit_pairs(which, which % k, pair, x.astype(float), y, total)
    shape = BodyShape(truth.theta[0], truth.theta[1:], np.array([1e-4, 0.01, *[0.1] * (d * d - 2)]))
    residuals = np.geomspace(1e-6, 1, count)
    refined = RefinedSum(total, residuals, 0.75, rng.uniform(2, 9, count))
    candidates = (SumEstimate("all tokens", total, -2.0), SumEstimate("none", total, math.inf))
    events.emit_theory(examples, 2, "practical", trace)
    events.emit_crude(CrudeSum(total, candidates, 1.5, 8), trace)
    for round_ in range(3):
        if round_:
            events.emit_sum(refined, round_, trace)
        trace.emit(events.certification_stage(round_), 100, of=200)
        events.emit_rows(rows, rows.select(rows.score < 1), round_, examples, trace)
        events.emit_body(shape, 2, round_, trace)
    angles = (("linear optimisation", 0.01),)
    events.emit_span(Span(shape.proxy, shape.wide, angles, 7), trace)
    trace.emit("phase 6: net", 3, 0.5)
    events.emit_net(NetResult(truth, 1e-4, np.array([2e-4, 2e-4, 0.1, math.inf])), trace)
    return trace.events


def test_the_phases_are_told_in_the_papers_numbering_and_drawn():
    trace = tell_all_phases()
    results = [event for event in trace if event.data and "of" not in event.data]
    json.dumps([event.data for event in results], allow_nan=False)
    assert all(len(v) <= 64 for e in results for v in e.data.values() if isinstance(v, list))
    stages = [event.stage for event in results]
    assert stages.count("phase 2: certification") == stages.count("phase 2: body") == 1
    assert stages.count("phase 4: certification") == stages.count("phase 4: tighter body") == 2
    assert [e.data["round"] for e in results if e.stage == "phase 3: refined sum"] == [1, 2]

    section = describe_phases(trace)
    assert [phase.number for phase in section.phases] == [1, 2, 3, 4, 5, 6]
    assert [len(phase.figures) for phase in section.phases] == [0, 0, 1, 2, 0, 1]
    assert [len(phase.columns) for phase in section.phases] == [0, 0, 2, 2, 0, 0]
    assert all(len(v) == len(p.columns or [1]) for p in section.phases for _, v in p.rows)
    rows = dict(section.phases[3].rows)
    assert rows["Gap in the widths there"] == ["10", "10"]  # eigenvalues a hundredfold apart
    assert dict(section.phases[2].rows)["Inliers"] == ["75 %", "75 %"]
    assert dict(section.phases[5].rows)["Candidates that agree with the best"] == ["2"]

    solution, truth = learned()
    text = render(Solution(solution.layer, Outcome.FITTED, trace), truth)
    page = Page(text)
    assert "The paper's phases" in page.text
    assert "(kd)Θ(m) + poly(m, k, d) log(1/δ)" in page.text  # and no number, which would not follow
    alone = f"The phases alone came to a relative squared error of {number(1e-4)}"
    assert f"{alone}." in page.text
    polished = [*trace, Event("polish", 0, 1e-30, 9.0)]
    assert describe_phases(polished).alone == f"{alone}; the rest was done by polish."
    assert len(page.ids) == len(set(page.ids))
    assert text.count("<svg ") == text.count('role="img"') == 2 * 2 * 4 + 2 + 2 * 4
    assert len(text) < 2_000_000


def test_a_breakdown_names_the_phase_and_the_number():
    trace = tell_all_phases()[:2]
    told = Run()
    events.emit_breakdown("phase 2: certification", "73 rows certify", {"needed": 72}, told)
    section = describe_phases([*trace, *told.events])
    assert [phase.breakdown for phase in section.phases] == ["", "73 rows certify"]
    layer = mha.random_layer(n_heads=1, d=2, seed=0)
    said = Page(render(Solution(layer, Outcome.STUCK, [*trace, *told.events]))).text
    assert "Phase 2 broke down. 73 rows certify. No later phase ran." in said
    assert "Rows needed72" in said


def test_no_section_where_no_phase_ran():
    solution, _ = learned()
    assert describe_phases(solution.trace) is None
    assert "The paper's phases" not in render(solution)
    progress = [Event("phase 1: crude sum", 10, math.nan, 0.1, "", {"of": 20})]
    steps = [Event("phase 6: net", i, 0.1, 0.2) for i in range(3)]
    assert describe_phases([*progress, *steps]) is None


def test_phases_with_numbers_missing_or_beyond_floats_are_still_told():
    orders = {"heads": 6, "tokens": 8, "d": 16, "plan": "literal"}
    trace = [
        Event("theory", 0, math.nan, 0.0, "", orders | {"examples": 1000}),
        Event("phase 2: body", 0, math.nan, 0.1, "", {"eigenvalues": [0.0, 1.0], "heads": 2}),
        Event("phase 6: net", 0, 0.0, 0.2, "", {"candidates": []}),
    ]
    section = describe_phases(trace)
    assert section.theory["error"] == "0"
    assert [len(phase.figures) for phase in section.phases] == [1, 0]
    Page(render(Solution(mha.random_layer(n_heads=1, d=2), Outcome.STUCK, trace)))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "\N{EN DASH}"),
        (math.nan, "\N{EN DASH}"),
        (math.inf, "∞"),
        (0.0, "0"),
        (200, "200"),
        (0.0149, "0.0149"),
        (30561.7, "30562"),
        (-0.5, "\N{MINUS SIGN}0.5"),
        (3.14e-15, "3.1\N{MULTIPLICATION SIGN}10⁻¹⁵"),
    ],
)
def test_numbers(value, said):
    assert number(value) == said


def test_a_run_without_a_layer_draws_none_and_measures_none(certificate):
    layer = mha.AttentionLayer(np.zeros((1, 3, 3)), np.zeros((1, 3, 2)))
    settings = {"n_heads": 2, "k": 4}
    run = Solution(layer, Outcome.STUCK, [], "It broke.", certificate, settings)
    text = render(run, mha.random_layer(n_heads=1, d=3, out_dim=2))
    said = Page(text).text
    assert "<svg" not in text
    assert "The run ended before it had a layer" in said
    assert "nothing was certified" in said
    assert "conditions on the layer" not in said


def test_fewer_heads_than_asked_for_are_said():
    solution, _ = learned(settings={"n_heads": 3, "k": 4})
    assert "Heads, of 3 asked for2" in Page(render(solution)).text


def test_nothing_is_promised_of_a_layer_that_was_fitted_to_all_examples(certificate):
    unseen = dataclasses.replace(certificate, tail_bound=1.0, n_exceeding=100)
    said = Page(render(learned(certificate=unseen)[0])).text
    assert "Nothing is promised about unseen inputs: 100 of 100 fresh examples" in said
    assert "This holds for inputs drawn" not in said
    assert certificate.statement not in said
    refitted = dataclasses.replace(unseen, refitted=True, statement="Noise of level 2e-2.")
    said = Page(render(learned(certificate=refitted)[0])).text
    assert "Noise of level 2\N{MULTIPLICATION SIGN}10⁻²." in said
    assert "held-out examples, before a last fit to all" in said
    assert "unseen examples" not in said


def test_stages_are_numbered_in_figures_and_table():
    trace = [Event("theory", 0, math.nan, 0.0)]
    trace += [Event("round 1", i, 10.0**-i, 5 + 0.001 * i) for i in range(6)]
    trace += [Event("polish", i, 1e-20, 5.01 + 0.001 * i) for i in range(6)]
    assert [(s.number, s.colour) for s in list_stages(trace)] == [(0, 0), (1, 1), (2, 2)]
    drawn = draw_descent(trace, 10.0, "a")
    assert ">1</text>" in drawn
    assert ">2</text>" in drawn
    assert ">1\N{EN DASH}2</text>" in draw_descent(trace, 0.9, "b")  # too close to be told apart
    assert draw_descent(trace[:2], 10.0, "c") is None
    assert measured_seconds(trace) == pytest.approx(0.01)  # and not the five before the first


@pytest.mark.parametrize(
    ("settings", "command"),
    [
        ({}, ""),
        ({"n_heads": "auto", "bias": True, "polish": False, "random_state": 3}, None),
        ({"n_heads": 2, "command": "mhalearn demo"}, "mhalearn demo"),
        (
            {"n_heads": 2, "examples": "my data.npz"},
            "mhalearn learn 'my data.npz' --heads 2",
        ),
    ],
)
def test_the_command_repeats_the_settings(settings, command):
    expected = "mhalearn learn EXAMPLES --heads auto --seed 3 --bias --no-polish"
    again = describe_again(settings, mha.random_layer(n_heads=1, d=2))
    assert again.command == (expected if command is None else command)
    assert bool(again.call) == bool(settings)


def test_the_call_says_what_was_set_and_no_more():
    settings = mha.AttentionRegressor(3, causal=True).get_params()
    again = describe_again(settings, mha.random_layer(n_heads=1, d=2))
    assert (
        again.call == "mha.AttentionRegressor(n_heads=3, causal=True, random_state=0).fit(examples)"
    )
    assert {name: settings[name] for name in ARGUMENTS} == ARGUMENTS | {
        "n_heads": 3,
        "causal": True,
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("at most 1e-06 (0 of 3)", "at most 1\N{MULTIPLICATION SIGN}10⁻⁶ (0 of 3)"),
        ("error 4.8e-16.", "error 4.8\N{MULTIPLICATION SIGN}10⁻¹⁶."),
        ("1.5e+03 of 2", "1.5\N{MULTIPLICATION SIGN}10³ of 2"),
        ("layer1e5, 0x1e5, 1e2.5", "layer1e5, 0x1e5, 1e2.5"),
    ],
)
def test_powers_in_sentences_are_typeset(text, said):
    assert typeset(text) == said


@pytest.mark.parametrize(("value", "said"), [(1278.4, "1278"), (0.964, "0.964"), (2e-5, "2.0e-5")])
def test_ticks_are_short(value, said):
    assert short(value) == said
