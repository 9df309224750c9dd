"""The report on layers that are held by projections."""

import re

import numpy as np
import pytest
from test_projected import inputs_of, layer_of
from test_projected_comparison import gauged
from test_report import Page

import mhalearn as mha
from mhalearn.judge.shown_example import choose_example
from mhalearn.judge.solution import Solution
from mhalearn.report.heads import describe_heads, match_heads
from mhalearn.report.page import render
from mhalearn.run.outcome import Outcome

NAMES = ["Qwen2", "Gemma 3", "gpt-oss", "T5", "cross-attention", "DeepSeek-V3", "grouped"]


def solution_of(name):
    """The same function by other projections, heads in another order."""
    truth = layer_of(name)
    learned = gauged(truth)
    x, beside = inputs_of(truth)
    beside.pop("memory_lengths", None)
    if beside:
        beside["memory"] = beside["memory"][:, : x.shape[1]]
    examples = mha.Examples(x, truth(x, **beside), **beside)
    shown = choose_example(examples, held_out=True, causal=truth.causal)
    settings = {"n": examples.n, "k": examples.k, "n_heads": truth.n_heads}
    return Solution(learned, Outcome.FITTED, [], "a test", settings=settings, example=shown), truth


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in ("Qwen2", "T5") else pytest.mark.slow) for n in NAMES],
)
def test_heads_are_drawn_beside_those_of_the_truth(name):
    solution, truth = solution_of(name)
    text = render(solution, truth)
    page = Page(text).text
    assert "A kind of attention of its own" not in page
    assert text.count('aria-label="Head ') == truth.n_heads
    assert "Head 4, learned: attention of" in page
    assert "the true layer differ by at most" in page
    if truth.architecture.kv_heads is not None:
        assert "Head 4, keys 2" in page
        assert "heads in a row share keys and values" in page
    else:
        assert "keys 2" not in page
    if truth.architecture.rope is not None:
        assert "depends on the distance" in page
        assert len(re.findall(r"mean logit of a token with itself at distances 0 to 5", page)) == 4
    else:
        assert "Θ(0)" not in page


def test_the_truth_is_where_the_learned_layer_is():
    solution, truth = solution_of("Qwen2")
    match = match_heads(solution.layer, truth)
    assert match.found.max_error < 1e-11
    heads = describe_heads(solution.layer, match, tokens=6)
    for head in heads:
        assert [symbol for symbol, _ in head.errors] == ["Θ", "W"]
        assert max(error for _, error in head.errors) < 1e-11
        captions = [panel.caption for panel in head.panels]
        assert captions[-2:] == ["tr Θ by distance", "‖Θ‖ by distance"]
    alone = describe_heads(solution.layer, None, tokens=6)
    assert sorted(head.norms[1][1] for head in alone) == pytest.approx(
        sorted(head.norms[1][1] for head in heads)
    )


def test_a_layer_of_another_kind_is_not_matched():
    solution, _ = solution_of("Qwen2")
    assert "cannot be matched head by head" in Page(render(solution, layer_of("T5"))).text
    assert "cannot be matched head by head" in Page(render(solution, mha.random_layer(4, 5))).text


def test_a_sink_takes_what_rows_lack():
    solution, truth = solution_of("gpt-oss")
    page = Page(render(solution, truth)).text
    assert "sums to one, less what the sink takes" in page
    assert "A sink in every head takes a share of the attention" in page
    assert np.all(truth.patterns(solution.example.x[None]).sum(axis=-1) < 1)
