"""Figures of the phases: which there are, what their dots say, and how they are saved."""

from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
import pytest

import mhalearn as mha
from mhalearn.learners import chen_li
from mhalearn.learners.chen_li.body_shape import fit_shape
from mhalearn.learners.chen_li.decode import Decoded
from mhalearn.learners.chen_li.epsilon_net import bound_error
from mhalearn.learners.chen_li.input_distribution import from_whitened, to_whitened
from mhalearn.learners.chen_li.phase1_crude_sum import CrudeSum, SumEstimate
from mhalearn.learners.chen_li.phase2_certification import screen_pairs
from mhalearn.learners.chen_li.phase3_refined_sum import RefinedSum

HEADS, D, K = 2, 6, 3


@pytest.fixture(scope="module")
def truth():
    return mha.random_layer(n_heads=HEADS, d=D, scale=4.0, seed=0)


@pytest.fixture(scope="module")
def phases(truth):
    """All phases, from certification with the exact sum and made-up errors elsewhere."""
    exact = chen_li.exact(truth)
    total = exact.crude.estimate
    examples = mha.Examples.from_callable(truth, "boolean", n=4_000, k=K, d=D, seed=1)
    rows = screen_pairs(examples, total, 4 * D**2)
    found = [
        SumEstimate("rough", 1.5 * total, 0.0),
        SumEstimate("better", 1.25 * total, -1.0),
    ]
    rng = np.random.default_rng(0)
    refined = RefinedSum(1.01 * total, rng.uniform(size=40), 0.5, rng.uniform(size=40))
    net = replace(exact.net, candidates=np.geomspace(1e-3, 1e-1, 12), error=1e-3)
    decoded = Decoded(truth, 1e-9, np.geomspace(1e-3, 1e-9, 5), 0.9, 100)
    return replace(
        exact,
        crude=CrudeSum(found[1].estimate, tuple(found), 1.0, D),
        rows=(rows, rows),
        bodies=(fit_shape(rows, HEADS, 2 * D**2), chen_li.sculpt_within(rows)),
        sums=(refined,),
        span=replace(exact.span, angles=(("linear optimisation", 0.1),)),
        net=net,
        decoded=decoded,
    )


def dots(figure, title, series=0):
    """The numbers of a panel that its axis names so."""
    axes = next(one for one in figure.axes if title in (one.get_xlabel(), one.get_ylabel()))
    line = axes.get_lines()[series]
    return line.get_xdata() if axes.get_xlabel() == title else line.get_ydata()


def titles(figure):
    shown = [axes for axes in figure.axes if axes.get_visible()]
    return [axes.get_ylabel() or axes.get_xlabel() for axes in shown]


ALL = [*(f"phase {number}" for number in range(1, 7)), "decode"]


def test_there_is_a_figure_for_each_phase_in_order(phases, truth):
    assert list(chen_li.plot(phases)) == list(chen_li.plot(phases, truth)) == ALL


@pytest.mark.parametrize(("phase", "left"), [(2, 1), (3, 2), (4, 3), (5, 4), (6, 5), (7, 6)])
def test_phases_that_did_not_run_are_left_out(phases, truth, phase, left):
    assert list(chen_li.plot(phases.before(phase), truth)) == ALL[:left]


def test_nothing_is_drawn_of_nothing():
    assert chen_li.plot(chen_li.Phases()) == {}


def test_the_truth_adds_errors(phases, truth):
    without, with_ = chen_li.plot(phases), chen_li.plot(phases, truth)
    added = {name: set(titles(with_[name])) - set(titles(without[name])) for name in ALL}
    assert added == {
        "phase 1": {"relative error"},
        "phase 2": {"precision", "distance from the body"},
        "phase 3": {
            "relative error of the sum",
            "<proxy, head> / |proxy|\N{SUPERSCRIPT TWO}",
        },
        "phase 4": {"precision", "distance from the body"},
        "phase 5": set(),  # more dots in the panel of sines
        "phase 6": {"relative error"},
        "decode": {"relative error"},
    }


def test_dots_are_the_numbers_they_stand_for(phases, truth):
    drawn = chen_li.plot(phases, truth)
    assert dots(drawn["phase 1"], "relative error") == pytest.approx([0.5, 0.25])
    assert dots(drawn["phase 1"], "mean log score") == pytest.approx([0.0, -1.0])
    assert dots(drawn["phase 3"], "relative error of the sum") == pytest.approx([0.25, 0.01])
    sines = dots(drawn["phase 5"], "sine to the span")
    assert sines[0] == 0.1
    assert np.all(sines[1:] < 1e-6)
    assert np.allclose(dots(drawn["decode"], "relative squared error"), phases.decoded.errors)
    assert dots(drawn["phase 6"], "relative squared error")[-1] == pytest.approx(0.1)


def test_precision_is_the_share_of_true_rows_among_the_best(phases, truth):
    rows = phases.rows[0]
    logits = np.einsum("cd,mde,ce->mc", rows.query, truth.theta, rows.difference)
    true = np.all(np.abs(logits - np.log(rows.weight / (1 - rows.weight))) < 1, axis=0)
    assert 0.2 < true.mean() < 1
    precision = dots(chen_li.plot(phases, truth)["phase 2"], "precision")
    assert precision[0] == true[0]
    assert precision[-1] == pytest.approx(true.mean())


def test_heads_are_as_far_from_a_body_as_they_were_moved(phases, truth):
    """A body of true rows holds the heads; along a hull they may move, across it not."""
    rows = phases.rows[0]
    logits = np.einsum("cd,mde,ce->cm", rows.query, truth.theta, rows.difference)
    weight = 1 / (1 + np.exp(-logits[:, 0]))
    one_head = mha.AttentionLayer(truth.theta[:1], truth.w[:1])
    true = replace(rows, weight=weight)
    body = chen_li.sculpt_within(true)
    hull = chen_li.exact(one_head).bodies[0]
    across = np.random.default_rng(0).normal(size=(1, D, D))
    moved = one_head.replace(theta=one_head.theta + 0.1 * across)
    known = replace(phases, rows=(true, true), bodies=(hull, body), span=None)
    drawn, off = chen_li.plot(known, one_head), chen_li.plot(known, moved)
    far = 0.1 * np.linalg.norm(across) / np.linalg.norm(moved.theta)
    title = "distance from the body"
    assert dots(drawn["phase 2"], title)[0] < 1e-12
    assert dots(off["phase 2"], title)[0] == pytest.approx(far)
    assert dots(drawn["phase 4"], title)[0] < 1e-6
    assert dots(drawn["phase 4"], "log-odds error over score", series=1).max() < 1e-9


def test_whitened_phases_are_compared_in_their_own_coordinates(phases, truth):
    """All but the layers is in whitened coordinates, and the truth is given in the inputs'."""
    matrix = np.diag(np.linspace(0.5, 2.0, D))
    outside = from_whitened(truth, matrix)
    assert np.allclose(to_whitened(outside, matrix).theta, truth.theta)
    whitened = replace(
        phases,
        whitening=matrix,
        net=replace(phases.net, layer=outside),
        decoded=replace(phases.decoded, layer=outside),
    )
    drawn, plain = chen_li.plot(whitened, outside), chen_li.plot(phases, truth)
    for name in ("phase 1", "phase 2", "phase 3", "phase 4", "phase 6", "decode"):
        for one, other in zip(drawn[name].axes, plain[name].axes, strict=True):
            for line, beside in zip(one.get_lines(), other.get_lines(), strict=True):
                assert np.allclose(line.get_xydata(), beside.get_xydata(), atol=1e-9), name


def test_a_literal_net_shows_its_bound_and_few_of_its_points(phases):
    errors = np.sort(np.random.default_rng(0).uniform(size=100_000))
    stated = bound_error(errors[:1000], len(errors), 0.05)
    net = replace(phases.net, candidates=errors, generalisation=stated)
    figure = chen_li.plot(replace(phases, net=net))["phase 6"]
    candidates, bound, _ = figure.axes[0].get_lines()
    assert len(candidates.get_xdata()) < 500
    assert candidates.get_ydata()[[0, -1]] == pytest.approx(errors[[0, -1]])
    assert bound.get_ydata()[0] == stated.bound
    assert bound.get_label() == "bound (95%)"


def test_rows_of_a_run_that_began_at_phase_3_are_those_of_phase_4(phases, truth):
    """An exact start has a body and no rows."""
    begun = replace(phases, rows=phases.rows[:1])
    drawn = chen_li.plot(begun, truth)
    assert titles(drawn["phase 2"]) == ["distance from the body"]
    assert titles(drawn["phase 4"])[0] == "score"


def test_a_body_of_ones_own_needs_a_proxy_alone(phases, truth):
    class Point:
        proxy = np.eye(D)

    drawn = chen_li.plot(replace(phases, bodies=(Point(), Point())), truth)
    assert titles(drawn["phase 4"]) == ["score", "log-odds error over score", "precision"]


def test_another_layer_is_refused(phases):
    with pytest.raises(ValueError, match="truth has 5 features and 6 outputs, the phases 6 and 6"):
        chen_li.plot(phases, mha.random_layer(n_heads=2, d=5, out_dim=6))


def test_figures_are_saved_with_their_text_and_change_no_settings(phases, truth, tmp_path: Path):
    before = dict(matplotlib.rcParams)
    for name, figure in chen_li.plot(phases, truth).items():
        assert figure.get_figwidth() == 3.4
        assert figure.get_figheight() < 4
        figure.savefig(tmp_path / f"{name}.pdf")
        pdf = (tmp_path / f"{name}.pdf").read_bytes()
        assert b"/FontFile2" in pdf  # TrueType, embedded
        assert b"/Type3" not in pdf
    figure.savefig(tmp_path / "decode.svg")
    assert "<text" in (tmp_path / "decode.svg").read_text()
    assert dict(matplotlib.rcParams) == before


def test_matplotlib_is_imported_when_a_figure_is_asked_for(tmp_path: Path):
    from blocks import run_block

    code = (
        "import sys\nfrom mhalearn.learners import chen_li\nassert 'matplotlib' not in sys.modules"
    )
    run_block("python", code, tmp_path)


def test_a_run_is_drawn(tmp_path: Path):
    """Decoding after exact phases: what a run hands back can be saved, loaded and drawn."""
    truth = mha.random_layer(n_heads=2, d=4, scale=3.0, seed=0)
    examples = mha.Examples.from_callable(truth, "boolean", n=1_000, k=3, d=4, seed=1)
    found = chen_li.run(examples, 2, plan="decode", start=chen_li.exact(truth).before(7))
    found.save(tmp_path / "phases.safetensors")
    drawn = chen_li.plot(chen_li.load_phases(tmp_path / "phases.safetensors"), truth)
    assert list(drawn) == ALL
    assert dots(drawn["decode"], "relative error").max() < 1e-6
