"""`mha.plot`: what is drawn are the numbers it stands for, on given axes too, fit for a paper."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from blocks import run_block
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import mhalearn as mha
from mhalearn.judge.open_parameters import OpenParameters
from mhalearn.layer.base import ParametrisedLayer
from mhalearn.learners import chen_li
from mhalearn.run.events import Event

HEADS, D = 3, 6


@pytest.fixture(scope="module")
def truth():
    return mha.random_layer(n_heads=HEADS, d=D, out_dim=4, rank=2, scale=2.0, seed=0)


@pytest.fixture(scope="module")
def learned(truth):
    """The heads in another order, and one entry of one of them off."""
    theta = truth.theta[[2, 0, 1]].copy()
    theta[1, 3, 4] += 0.125
    return mha.AttentionLayer(theta, truth.w[[2, 0, 1]])


@pytest.fixture(scope="module")
def certificate(truth):
    X = mha.sample_inputs("gaussian", n=60, k=4, d=D, seed=1)
    return mha.certify(truth, X, truth(X))


@pytest.fixture(scope="module")
def trace():
    falling = [Event("round 1", i, 10.0**-i, 20.0 + i) for i in range(5)]
    polish = [Event("polish", i, 10.0 ** (-20 - i), 30.0 + i) for i in range(3)]
    return [*falling, Event("choice", 0, float("nan"), 26.0), *polish]


def draw_all(truth, certificate, trace):
    x = mha.sample_inputs("boolean", n=1, k=4, d=D, seed=1)[0]
    return {
        "heads": mha.plot.heads(truth, truth),
        "patterns": mha.plot.patterns(truth, x, list("abcd"), truth),
        "singular_values": mha.plot.singular_values(truth),
        "descent": mha.plot.descent(trace),
        "phases": mha.plot.phases(chen_li.exact(truth), truth),
        "identifiability": mha.plot.identifiability(certificate),
    }


@pytest.fixture(scope="module")
def drawn(truth, certificate, trace):
    return draw_all(truth, certificate, trace)


def image(axes):
    return np.asarray(axes.get_images()[0].get_array())


def words(svg):
    """Its texts and tags; the layout engine moves panels a little each time they are drawn."""
    return re.sub(r'="[^"]*"', "", svg)


# What is drawn.


def test_heads_are_their_matrices(truth):
    panels = mha.plot.heads(truth)
    assert panels.shape == (2, HEADS)
    for head in range(HEADS):
        assert np.array_equal(image(panels[0, head]), truth.theta[head])
        assert np.array_equal(image(panels[1, head]), truth.w[head])
        assert panels[0, head].get_title() == f"head {head + 1}"
    assert {one.get_images()[0].norm.vmax for one in panels[0]} == {np.abs(truth.theta).max()}


def test_with_the_truth_heads_are_matched_and_differences_on_its_scale(learned, truth):
    panels = mha.plot.heads(learned, truth)
    assert panels.shape == (6, HEADS)
    assert np.array_equal(image(panels[0, 0]), learned.theta[1])
    assert np.array_equal(image(panels[1, 0]), truth.theta[0])
    difference = image(panels[2, 0])
    assert np.argwhere(difference).tolist() == [[3, 4]]
    assert panels[2, 0].get_xlabel() == "\N{LESS-THAN OR EQUAL TO} 0.125"
    assert panels[2, 1].get_xlabel() == "equal"
    limits = {panels[row, 0].get_images()[0].norm.vmax for row in range(3)}
    assert limits == {np.abs(truth.theta).max()}


def test_some_heads_are_drawn_where_there_are_many():
    many = mha.random_layer(n_heads=20, d=2, seed=0)
    assert mha.plot.heads(many).shape == (2, 12)
    some = mha.plot.heads(many, which=[19, 3])
    assert [one.get_title() for one in some[0]] == ["head 20", "head 4"]
    assert np.array_equal(image(some[1, 0]), many.w[19])


def test_large_matrices_are_drawn_by_their_blocks_largest_entries():
    large = mha.AttentionLayer(np.zeros((1, 200, 200)), np.eye(200)[None] * -3)
    panels = mha.plot.heads(large)
    assert image(panels[1, 0]).shape == (64, 64)
    assert image(panels[1, 0]).min() == -3


def test_patterns_are_attention_weights_of_matched_heads(learned, truth):
    x = mha.sample_inputs("boolean", n=1, k=5, d=D, seed=3)
    panels = mha.plot.patterns(learned, x, truth=truth)
    order = mha.compare(learned, truth).order
    for head in range(HEADS):
        assert np.allclose(image(panels[0, head]), learned.patterns(x)[0, order[head]])
        assert np.allclose(image(panels[1, head]), truth.patterns(x)[0, head])
    top, *_, bottom = panels[0, 0].get_images()[0].get_extent()[::-1]
    assert top < bottom or panels[0, 0].yaxis_inverted()


def test_tokens_are_named_as_they_are_written(truth):
    """A dollar is no formula, and an unclosed one no error."""
    names = ["$x_1$", "$\\frac", "<b>", "d"]
    x = mha.sample_inputs("boolean", n=1, k=4, d=D, seed=1)[0]
    panels = mha.plot.patterns(truth, x, names)
    assert [label.get_text() for label in panels[0, 0].get_yticklabels()] == names
    text = mha.plot.to_svg(panels)
    assert "$x_1$" in text
    assert "&lt;b&gt;" in text
    assert "<b>" not in text


def test_singular_values_are_those_of_the_heads_and_end_after_the_rank(learned, truth):
    panels = mha.plot.singular_values(learned, truth)
    for axes, learned_ones, true in zip(
        panels.flat, (learned.theta, learned.w), (truth.theta, truth.w), strict=True
    ):
        lines = axes.get_lines()
        assert len(lines) == 2 * HEADS
        for head, place in enumerate(mha.compare(learned, truth).order):
            for line, matrix in zip(
                lines[2 * head :], (learned_ones[place], true[head]), strict=False
            ):
                exact = np.linalg.svd(matrix, compute_uv=False)
                assert np.allclose(line.get_ydata(), exact[: len(line.get_ydata())])
    narrow = mha.random_layer(n_heads=1, d=30, rank=2, seed=0)
    assert len(mha.plot.singular_values(narrow)[0, 0].get_lines()[0].get_ydata()) == 2 + 4


@pytest.mark.parametrize("by", ["event", "seconds"])
def test_the_descent_is_the_errors_of_the_trace(trace, truth, by):
    axes = mha.plot.descent(mha.Solution(truth, mha.Outcome.FITTED, trace), by=by)
    first, last = (line.get_xydata() for line in axes.get_lines()[:2])
    kept = [event for event in trace if event.stage != "choice"]
    places = [event.seconds if by == "seconds" else i + 1 for i, event in enumerate(kept)]
    assert np.allclose(np.concatenate([first, last])[:, 0], places)
    assert np.allclose(np.concatenate([first, last])[:, 1], [event.loss for event in kept])
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["round 1", "polish"]
    assert axes.get_yscale() == "log"


def test_a_long_descent_is_thinned_and_keeps_its_ends():
    long = [Event("adam", i, 1.0 / (i + 1), float(i)) for i in range(50_000)]
    axes = mha.plot.descent(long)
    shown = axes.get_lines()[0].get_ydata()
    assert len(shown) < 1000
    assert (shown[0], shown[-1]) == (1.0, 1 / 50_000)


def test_open_directions_are_told_apart(certificate):
    values = np.concatenate([[0.0, 1e-17], np.geomspace(1e-3, 10, 30)])
    opened = replace(certificate, spectrum=values, null_dimension=2)
    (axes,) = mha.plot.identifiability(opened).flat
    seen, lost = axes.get_lines()
    assert seen.get_label() == "seen (30)"
    assert lost.get_label() == "open (2)"
    assert np.allclose(seen.get_ydata(), values[2:])
    assert np.allclose(lost.get_ydata(), 1e-17, rtol=1e-9, atol=0)  # zero is drawn at the smallest
    known = mha.plot.identifiability(certificate)[0, 0]
    assert len(known.get_lines()) == 1


def test_what_tokens_do_not_span_is_shown_by_feature(certificate):
    normals = np.array([[0.6, 0.8, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1.0]])
    opened = OpenParameters(4, 6, normals, 1, 2, ())
    _, axes = mha.plot.identifiability(replace(certificate, span=opened)).flat
    assert np.allclose(axes.get_lines()[0].get_ydata(), [0.36, 0.64, 0, 0, 0, 1])
    (alone,) = mha.plot.identifiability(replace(certificate, span=opened, spectrum=None)).flat
    assert alone.get_xlabel() == "feature"


def test_phases_are_the_panels_of_each_phase_in_order(truth):
    found = chen_li.exact(truth)
    panels = mha.plot.phases(found, truth)
    figures = chen_li.plot(found, truth)
    alone = [axes for figure in figures.values() for axes in figure.axes if axes.get_visible()]
    assert len(panels) == len(alone)
    for one, other in zip(panels, alone, strict=True):
        assert one.get_xlabel() == other.get_xlabel()
        for line, beside in zip(one.get_lines(), other.get_lines(), strict=True):
            assert np.array_equal(line.get_xydata(), beside.get_xydata())
    names = [part.get_suptitle() for part in panels.figure.subfigs]
    assert [name for name in names if name] == list(figures)
    solution = mha.Solution(truth, mha.Outcome.FITTED, [], phases=found)
    assert len(mha.plot.phases(solution)) < len(panels)


# How it is drawn.


def test_a_notebook_shows_what_was_made(drawn):
    for name, axes in drawn.items():
        assert axes._repr_svg_().startswith("<svg"), name
        if name != "descent":
            assert isinstance(axes.flat[0], Axes), name
    assert isinstance(drawn["descent"], Axes)
    assert words(drawn["heads"][0, 0]._repr_svg_()) == words(drawn["heads"]._repr_svg_())


def test_svg_stands_alone_and_says_nothing_of_where_it_was_made(drawn):
    for name, axes in drawn.items():
        text = mha.plot.to_svg(axes)
        assert text.startswith("<svg"), name
        assert text.rstrip().endswith("</svg>"), name
        assert len(text) < 150_000, name
        assert "<text" in text, name  # no outlines
        assert "<script" not in text, name
        assert "metadata" not in text, name
        assert words(mha.plot.to_svg(axes.figure)) == words(text), name


def test_what_is_saved_embeds_its_fonts_whatever_the_callers_settings(drawn, tmp_path: Path):
    for name, axes in drawn.items():
        path = tmp_path / f"{name}.pdf"
        with matplotlib.rc_context({"pdf.fonttype": 3, "figure.facecolor": "black"}):
            axes.figure.savefig(path)
        assert b"/FontFile2" in path.read_bytes(), name
        assert b"/Type3" not in path.read_bytes(), name


def test_figures_have_their_own_style_whatever_the_callers_settings(truth):
    plain = mha.plot.to_svg(mha.plot.singular_values(truth))
    changed = {
        "axes.facecolor": "black",
        "text.color": "red",
        "font.size": 30,
        "axes.edgecolor": "w",
    }
    with matplotlib.rc_context(changed):
        assert mha.plot.to_svg(mha.plot.singular_values(truth)) == plain


def test_nothing_global_changes(truth, certificate, trace):
    before = dict(matplotlib.rcParams)
    pyplot = sys.modules.get("matplotlib.pyplot")
    for axes in draw_all(truth, certificate, trace).values():
        mha.plot.to_svg(axes)
    assert dict(matplotlib.rcParams) == before
    assert sys.modules.get("matplotlib.pyplot") is pyplot


def test_axes_of_ones_own_are_drawn_on_and_keep_their_style(truth, certificate, trace):
    x = mha.sample_inputs("boolean", n=1, k=4, d=D, seed=1)[0]
    with matplotlib.rc_context({"axes.labelsize": 23.0}):
        figure = Figure()
        two, three, one = (
            part.subplots(rows, columns, squeeze=False)
            for part, rows, columns in zip(
                figure.subfigures(3), (2, 1, 1), (HEADS, HEADS, 2), strict=True
            )
        )
    assert np.array_equal(mha.plot.heads(truth, axes=two), two)
    assert np.array_equal(mha.plot.patterns(truth, x, axes=three[0]), three)
    assert np.array_equal(mha.plot.singular_values(truth, axes=list(one[0])), one)
    assert one[0, 0].xaxis.label.get_size() == 23.0
    single = Figure().subplots()
    assert mha.plot.descent(trace, ax=single) is single
    assert mha.plot.identifiability(certificate, axes=single)[0, 0] is single
    assert single.figure.axes == [single]
    assert len(figure.axes) == two.size + three.size + one.size


def test_a_module_without_matplotlib_until_it_is_asked_for(tmp_path: Path):
    code = (
        "import sys, mhalearn as mha\n"
        "assert 'matplotlib' not in sys.modules\n"
        "panels = mha.plot.heads(mha.random_layer(n_heads=1, d=2))\n"
        "assert panels._repr_svg_()\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    run_block("python", code, tmp_path)


# What is refused, and how.


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (lambda layer: mha.plot.heads(layer, axes=Figure().subplots()), "this figure has 6"),
        (lambda layer: mha.plot.heads(layer, which=[3]), "heads 0 to 2"),
        (lambda layer: mha.plot.heads(layer, which=[]), "heads 0 to 2"),
        (lambda layer: mha.plot.heads(layer, mha.random_layer(n_heads=2, d=D)), "3 heads beside 2"),
        (lambda layer: mha.plot.patterns(layer, np.ones((2, 4, D))), r"as X\[0\]"),
        (lambda layer: mha.plot.patterns(layer, np.eye(D), ["a"]), "1 names for 6 tokens"),
        (lambda layer: mha.plot.descent(layer), "pass a Solution"),
        (lambda layer: mha.plot.descent([]), "nothing to draw"),
        (lambda layer: mha.plot.descent([], by="steps"), "by='steps'"),
        (lambda layer: mha.plot.phases(mha.Solution(layer, mha.Outcome.FITTED, [])), "sculpt"),
        (lambda layer: mha.plot.phases(chen_li.Phases()), "nothing to draw"),
        (
            lambda layer: mha.plot.identifiability(mha.Solution(layer, mha.Outcome.FITTED, [])),
            "no certificate",
        ),
        (lambda layer: mha.plot.to_svg("heads"), "pass axes or a figure"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_one_line(truth, draw, said):
    with pytest.raises(ValueError, match=said):
        draw(truth)


def test_another_kind_of_attention_has_no_such_heads(truth):
    other = ParametrisedLayer(truth.parametrisation, {"values": np.eye(2)})
    for given in ((other,), (truth, other)):
        with pytest.raises(ValueError, match="pass an AttentionLayer"):
            mha.plot.heads(*given)


def test_a_certificate_without_a_spectrum_has_nothing_to_draw(certificate):
    with pytest.raises(ValueError, match="too large for its spectrum"):
        mha.plot.identifiability(replace(certificate, spectrum=None))
