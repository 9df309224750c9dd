"""The report's sections: what a layer does, its heads, what is certain, what is folded."""

import base64
import dataclasses
import io
import re

import numpy as np
import pytest
from PIL import Image
from test_parametrisation import TRUTH as GATED
from test_parametrisation import X as GATED_INPUTS
from test_report import Page, learned

import mhalearn as mha
from mhalearn.data.label_precision import label_precision
from mhalearn.data.span import find_coordinates
from mhalearn.judge.open_parameters import describe_open
from mhalearn.judge.shown_example import ShownExample, choose_example
from mhalearn.judge.tail_bound import bound_tail, count_needed, keep_errors, say_share
from mhalearn.layer.token_span import measure_span, read_tokens
from mhalearn.report import figures
from mhalearn.report.at_work import show_at_work
from mhalearn.report.certainty import list_certainties
from mhalearn.report.heads import match_heads
from mhalearn.report.numbers import number, typeset
from mhalearn.report.page import render
from mhalearn.run.events import Event
from mhalearn.run.outcome import Outcome

TRUTH = mha.random_layer(n_heads=2, d=6, seed=3)
X = mha.sample_inputs("gaussian", 40, 5, 6, seed=1)


def opacity(svg):
    """Of each cell of the raster in a figure, 0 .. 1."""
    png = re.search(r"data:image/png;base64,([^\"]+)", svg)[1]
    image = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGBA")
    return np.asarray(image)[..., 3] / 255


def shown(layer=TRUTH, held_out=True, k=5):
    return ShownExample(X[0, :k], layer(X[:1, :k])[0], held_out)


@pytest.fixture(scope="module")
def certificate():
    x = mha.sample_inputs("boolean", 100, 4, 6, seed=5)
    return mha.certify(TRUTH, x, TRUTH(x))


# What the layer does


def test_a_pattern_is_drawn_as_the_layer_attends():
    weights = TRUTH.patterns(X[:1])[0, 1]
    drawn = opacity(figures.pattern(weights, weights.max(), "a", "a"))
    np.testing.assert_allclose(drawn, weights / weights.max(), atol=1 / 60)


def test_every_head_is_shown_beside_the_head_it_was_matched_with():
    solution, truth = learned()  # in which the heads have another order
    work = show_at_work(solution.layer, match_heads(solution.layer, truth), shown())
    assert work.names == ("learned", "true")
    assert [panel.caption for panel in work.patterns] == ["Head 1", "Head 2"]
    patterns = truth.patterns(X[:1])[0]
    for panel, weights in zip(work.patterns, patterns, strict=True):
        for drawing in (panel.learned, panel.other):
            np.testing.assert_allclose(opacity(drawing), weights / work.largest, atol=1 / 60)
    assert work.largest == pytest.approx(patterns.max())


def test_without_a_truth_the_output_is_shown_beside_what_was_given_and_no_pattern_is():
    given = dataclasses.replace(shown(), y=np.ones((5, 6)))
    work = show_at_work(TRUTH, None, given)
    assert work.names == ("learned", "given")
    assert all(panel.other is None for panel in work.patterns)
    np.testing.assert_allclose(opacity(work.outputs.other), 1 / work.limit, atol=1 / 30)
    outputs = np.abs(TRUTH(X[:1])[0]) / work.limit
    np.testing.assert_allclose(opacity(work.outputs.learned), outputs, atol=1 / 30)
    assert "examples show outputs, and no patterns" in work.words
    assert "that no step of learning has seen" in work.words
    assert "less the tokens" not in work.words
    assert "less the tokens" in show_at_work(TRUTH, None, given, residual=True).words
    assert "that was learned from" in show_at_work(TRUTH, None, shown(held_out=False)).words


def test_the_page_opens_with_it_and_has_a_switch_for_each_drawing_in_two_states():
    solution, truth = learned(example=shown())
    text = render(solution, truth)
    order = ["verdict", "work", "heads", "certain", "descent", "again"]
    places = [text.index(f'<h{1 if name == "verdict" else 2} id="{name}"') for name in order]
    assert places == sorted(places)
    page = Page(text)
    chosen = [value for tag, name, value in page.attributes if (tag, name) == ("input", "id")]
    labelled = [value for tag, name, value in page.attributes if (tag, name) == ("label", "for")]
    assert chosen == labelled == [f"show-{s}-{w}" for s in ("work", "heads") for w in "ab"]
    assert text.count('<div class="a">') == text.count('<div class="b">') == 2 + 1 + 4
    alone = render(solution)
    assert 'id="show-heads-a"' not in alone
    assert alone.count('<div class="b">') == 1  # of the output


def test_a_kind_of_attention_without_patterns_shows_its_outputs():
    x = GATED_INPUTS[0]
    work = show_at_work(GATED, None, ShownExample(x, GATED(x[None])[0], True))
    assert work.patterns == []
    assert "Row r" not in work.words


@pytest.mark.parametrize(
    ("lengths", "causal", "number", "tokens"),
    [
        ([4, 16, 30, 16, 3], False, 1, 16),  # the longest of those that are easy to read
        ([40, 30, 35], False, 1, 30),  # the shortest, where all are long
        ([40, 36, 38], True, 1, 32),  # tokens that follow change nothing
    ],
)
def test_the_example_is_of_a_length_to_look_at(lengths, causal, number, tokens):
    x = mha.sample_inputs("gaussian", len(lengths), 40, 6, seed=1)
    examples = mha.Examples(x, TRUTH(x, lengths), lengths)
    example = choose_example(examples, held_out=True, causal=causal)
    np.testing.assert_array_equal(example.x, x[number, :tokens])
    np.testing.assert_array_equal(example.y, TRUTH(x, lengths)[number, :tokens])


def test_no_example_is_kept_that_is_too_long_to_be_drawn():
    x = np.zeros((2, 513, 1))
    assert choose_example(mha.Examples(x, x), held_out=True, causal=False) is None


def test_long_examples_are_thinned():
    x = mha.sample_inputs("gaussian", 1, 100, 6, seed=1)
    work = show_at_work(TRUTH, None, ShownExample(x[0], TRUTH(x)[0], True))
    assert opacity(work.patterns[0].learned).shape == (64, 64)


# The heads


def test_a_difference_is_on_the_scale_of_the_truth():
    truth = np.eye(6)
    blank = figures.difference_map(1e-15 * truth, 1.0, "a", "a")
    assert "<image" not in blank
    assert number(1e-15) in blank
    assert "equal" in figures.difference_map(0 * truth, 1.0, "a", "a")
    seen = opacity(figures.difference_map(0.5 * truth, 1.0, "a", "a"))
    np.testing.assert_allclose(seen, 0.5 * truth, atol=1 / 30)


def test_what_no_input_can_show_is_no_difference():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((50, 5, 6))
    x -= x.mean(axis=2, keepdims=True)
    examples = mha.Examples(x, TRUTH(x))
    architecture = examples.architecture(2)
    coordinates = find_coordinates(examples, architecture, label_precision(examples))
    span = describe_open(coordinates, 2)
    layer = TRUTH.on_span(x)
    assert match_heads(layer, TRUTH).found.max_error > 0.1
    assert match_heads(layer, TRUTH, span).found.max_error < 1e-12


# What is certain


@pytest.mark.parametrize(
    ("tail", "said"),
    [
        (0.22092, "77.9 %"),
        (0.00299, "99.7 %"),
        (0.000123, "99.987 %"),
        (0.5, "50 %"),
        (0.01, "99 %"),
        (1.0, "0 %"),
        (0.0, "100 %"),
    ],
)
def test_shares_have_as_many_digits_as_they_deserve(tail, said):
    assert say_share(tail) == said


def test_shares_are_rounded_to_the_safe_side():
    for tail in np.random.default_rng(0).uniform(-5, 0, 200):
        promised = 1 - float(say_share(10**tail).split()[0]) / 100
        assert 10**tail - 1e-12 <= promised <= 1.1 * 10**tail + 0.001 * (tail > -2)


@pytest.mark.parametrize(("share", "delta"), [(0.99, 0.05), (0.9, 0.01), (0.999, 0.5)])
def test_as_many_examples_are_needed_as_pass_with_probability_delta(share, delta):
    n = next(n for n in range(1, 10_000) if share**n <= delta)
    assert count_needed(share, delta) == n
    assert bound_tail(0, n, delta) <= 1 - share < bound_tail(0, n - 1, delta)


def test_of_many_errors_even_quantiles_are_kept():
    errors = np.random.default_rng(0).permutation(1001) / 1000
    kept = keep_errors(errors)
    assert len(kept) == 65
    np.testing.assert_allclose(kept, np.linspace(0, 1, 65), atol=1e-3)
    np.testing.assert_array_equal(keep_errors(errors[:5]), np.sort(errors[:5]))


def test_errors_threshold_and_bound_are_drawn_and_what_would_give_99_percent(certificate):
    unseen, parameters = list_certainties(certificate, None, None, 6)
    assert "at least 97 % of inputs" in certificate.statement
    assert unseen.sentences[:2] == [
        certificate.statement,
        "299 fresh examples, all of them below, would give 99 %.",
    ]
    for told in (f"relative error t = {typeset('1e-6')}", "at least 97 % of inputs below t"):
        assert told in unseen.figure
    assert parameters.figure is not None
    enough = dataclasses.replace(certificate, tail_bound=0.005)
    assert "would give" not in " ".join(list_certainties(enough, None, None, 6)[0].sentences)
    some = dataclasses.replace(certificate, n_exceeding=1)
    assert "would give" not in " ".join(list_certainties(some, None, None, 6)[0].sentences)


def test_a_certificate_without_fresh_examples_is_told_and_not_drawn(certificate):
    none = dataclasses.replace(certificate, n_examples=0, tail_bound=1.0, errors=None)
    known = list_certainties(
        dataclasses.replace(none, statement="No example is fresh."), 0.1, None, 6
    )
    assert known[0].figure is None
    assert known[0].sentences == ["No example is fresh."]


def test_recorded_inputs_have_their_spectrum_and_what_it_leaves_open(certificate):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((50, 5, 6)) * np.geomspace(1, 0.1, 6)
    x[..., 2] = 1.0  # a feature that never changes
    examples = mha.Examples(x, TRUTH(x))
    tokens = x.reshape(-1, 6)
    spectrum = measure_span(read_tokens(examples)).spectrum
    np.testing.assert_allclose(spectrum, np.linalg.eigvalsh(np.cov(tokens.T, ddof=0))[:0:-1])
    coordinates = find_coordinates(examples, examples.architecture(2), label_precision(examples))
    span = describe_open(coordinates, 2)
    solution, _ = learned(
        outcome=Outcome.RECOVERED_ON_SPAN,
        certificate=dataclasses.replace(certificate, span=span),
        token_spectrum=spectrum,
    )
    text = render(solution)
    assert "Tokens span 5 of 6 dimensions" in Page(text).text
    assert f"{span.n_open} of {span.n_parameters} numbers of the layer are open" in Page(text).text
    assert "at most 1, of feature 3" in text  # all of it, and of no other
    even = list_certainties(certificate, None, np.array([9.0, 1.0]), 2)[2]
    assert even.sentences == [
        "Tokens span all 2 dimensions, unevenly: the widest direction has 9 times the variance of "
        "the narrowest."
    ]


# The verdict, the conditions, the folds


def test_the_verdict_stands_once_on_the_page(certificate):
    sentence = "the residual is small and the inputs determine all 2 heads"
    certificate = dataclasses.replace(certificate, reason=sentence)
    solution, truth = learned(
        certificate=certificate, reason=f"on held-out examples {sentence}", example=shown()
    )
    trace = [
        *solution.trace,
        Event("certificate", 0, 1e-30, 3.0, sentence),
        Event("outcome", 0, 1e-30, 3.1, f"RECOVERED: {sentence}"),
        Event("other", 0, 1e-30, 3.2, "something else"),
    ]
    text = Page(render(dataclasses.replace(solution, trace=trace), truth)).text
    assert text.count(sentence) == 1
    assert "something else" in text
    stuck = dataclasses.replace(certificate, recovered=False, reason="the residual is too large")
    solution = dataclasses.replace(solution, certificate=stuck, reason="no start got there")
    assert "The residual is too large." in Page(render(solution)).text


def test_conditions_of_the_paper_fail_only_where_its_algorithm_ran():
    solution, _ = learned()
    narrow = solution.layer.replace(theta=np.repeat(solution.layer.theta[:1], 2, axis=0))
    solution = dataclasses.replace(solution, layer=narrow)
    text = render(solution)
    assert "not needed by this method" in text
    assert '<td class="plain">not needed</td>' in text
    assert "does not hold" not in text
    phase = Event("phase 1: crude sum", 0, 0.1, 0.1, "", {"strength": 1.0})
    text = render(dataclasses.replace(solution, trace=[phase]))
    assert "not needed" not in text
    assert "does not hold" in text


def test_settings_versions_and_hashes_are_folded():
    text = render(learned()[0])
    folded = "".join(re.findall(r"<details[^>]*>.*?</details>", text, flags=re.DOTALL))
    assert "<details open" not in text
    assert folded.count("<table") == text.count("<table")
    for told in ("jaxlib", "random_state", "SHA-256", "Error at its end"):
        assert told in folded


def test_a_run_keeps_an_example_it_has_not_learned_from():
    truth = mha.random_layer(n_heads=1, d=4, seed=1)
    x = mha.sample_inputs("gaussian", 60, 3, 4, seed=2)
    solution = mha.AttentionRegressor(1).fit(x, truth(x)).solution_
    assert solution.outcome is Outcome.RECOVERED
    assert solution.example.held_out
    assert any(np.array_equal(solution.example.x, one) for one in x)
    np.testing.assert_allclose(solution.example.y, truth(solution.example.x[None])[0])
    assert solution.token_spectrum is None
