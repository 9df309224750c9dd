"""The page of a learned block: what it says, and that it keeps to itself."""

import re

import pytest

import mhalearn as mha
from mhalearn.report.block_page import HEADLINES
from mhalearn.run.events import Event


def solution(outcome: mha.Outcome = mha.Outcome.RECOVERED, **sizes: object) -> mha.Solution:
    block = mha.random_block(2, 5, 6, **sizes)
    trace = [Event("student 1", 500, 1e-3, 1.0), Event("student 1", 1000, 1e-7, 2.0)]
    trace += [Event("Gauss-Newton 1", step, 10.0 ** (-9 * step), 3.0 + step) for step in (1, 2, 3)]
    settings = {"n": 400, "k": 3, "d": 5, "activation": "gelu"}
    return mha.Solution(block, outcome, trace, "because & <so>", settings=settings)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_the_report_of_a_block_has_its_parts(tmp_path, activation: str) -> None:
    found = solution(activation=activation, norm="pre")
    mha.write_report(found, tmp_path / "page.html", truth=found.layer)
    page = (tmp_path / "page.html").read_text()
    for said in ("The block was recovered", "Neurons", "LayerNorm", "Head 2: W", "neurons, in"):
        assert said in page
    assert "Because &amp; &lt;so&gt;." in page
    assert "<svg" in page
    assert page.count("data:image/png") == 4 + 2 + (activation == "swiglu")
    assert not re.search(r'(src|href)="(?!data:|#)', page)


def test_the_report_says_what_became_of_a_block(tmp_path) -> None:
    other = mha.random_block(2, 5, 4, norm=None)
    for outcome in (mha.Outcome.STUCK, mha.Outcome.NOT_IDENTIFIED, mha.Outcome.TIME_LIMIT):
        mha.write_report(solution(outcome, norm=None), tmp_path / "page.html", truth=other)
        page = (tmp_path / "page.html").read_text()
        assert outcome.name in page
        assert "cannot be matched" in page
        assert "The block was recovered" not in page


def test_every_outcome_has_a_headline() -> None:
    told = {outcome.name for outcome in mha.Outcome if outcome.name != "RECOVERED_ON_SPAN"}
    assert set(HEADLINES) == told  # no block is recovered on a span alone
