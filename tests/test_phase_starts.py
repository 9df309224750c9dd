"""Where a run of the phases begins, and which rows the literal plan keeps."""

from dataclasses import replace

import numpy as np
import pytest

import mhalearn as mha
from mhalearn.learners import chen_li
from mhalearn.learners.chen_li import phase2_every_row
from mhalearn.report.phases import describe_phases
from mhalearn.run.run import Run

HEADS, D, K = 2, 8, 3


class Reached(Exception):
    """Phase 5 began."""


@pytest.fixture(scope="module")
def truth():
    return mha.random_layer(n_heads=HEADS, d=D, scale=4.0, seed=0)


@pytest.fixture(scope="module")
def examples(truth):
    return mha.Examples.from_callable(truth, "boolean", n=8_000, k=K, d=D, seed=1)


@pytest.mark.parametrize("plan", [chen_li.LITERAL, chen_li.PRACTICAL], ids=repr)
def test_a_start_before_phase_5_begins_there_whatever_the_rounds(plan, truth, examples):
    def refuse(*_):
        raise AssertionError("phase 4 began")

    def reach(*_):
        raise Reached

    begun = replace(plan, certify=refuse, span=reach)
    for rounds in (1, 3):
        with pytest.raises(Reached):
            chen_li.run(
                examples,
                HEADS,
                plan=begun,
                start=chen_li.exact(truth).before(5),
                constants=chen_li.Constants(rounds=rounds),
            )


def test_rows_on_one_token_take_no_places_among_the_certified(truth, examples, monkeypatch):
    monkeypatch.setattr(phase2_every_row, "_TOGETHER", 64)  # so that it may stop before the end
    total = truth.w.sum(axis=0)
    few, many = (
        chen_li.certify_every_row(examples, total, 0.15, 0.15, most) for most in (D**2, 1000 * D**2)
    )
    kept, all_ = (set(zip(rows.example, rows.row, strict=True)) for rows in (few, many))
    assert len(kept) == D**2 < len(all_)
    assert kept < all_
    best = list(dict.fromkeys(zip(many.example, many.row, strict=True)))[: D**2]
    assert kept == set(best)
    assert np.all(np.take_along_axis(few.attention, few.pair, axis=1) >= 0.1)


def test_a_literal_run_without_a_certified_row_is_told_and_reported(truth, examples):
    trace = Run()
    strict = chen_li.Constants(epsilon=(1e-9, 1e-9))
    with pytest.raises(chen_li.Breakdown, match="0 rows certify"):
        chen_li.run_phases(examples, HEADS, trace, "literal", strict)
    section = describe_phases(trace.events)
    assert dict(section.phases[-1].rows)["Rows certified"] == ["0"]


def test_a_small_vocabulary_does_not_crowd_the_body_with_one_constraint(truth):
    words = np.random.default_rng(3).normal(size=(24, D))

    x = words[np.random.default_rng(4).integers(0, len(words), (8_000, K))]
    rows = chen_li.screen_pairs(mha.Examples(x, truth(x)), truth.w.sum(axis=0), 4 * D * D)
    constraints = rows.query[:, :, None] * rows.difference[:, None, :]
    flat = constraints.reshape(len(rows), -1).round(9)
    flat *= np.sign(flat[:, :1])
    assert len(np.unique(flat, axis=0)) == len(rows) > 2 * D * D


def test_a_body_without_facets_has_no_span():
    class Everything:
        def contains(self, thetas):
            return np.ones(len(thetas), bool)

    with pytest.raises(chen_li.Breakdown, match="rays met 0 facets"):
        chen_li.span_by_membership(Everything(), np.eye(3), HEADS)
