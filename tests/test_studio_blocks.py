"""A whole block in the studio: what is asked for, what is shown of it, and how it ends."""

import dataclasses
import json
import math

import numpy as np
import pytest

import mhalearn as mha
from mhalearn.run.events import Event
from mhalearn.studio import worker
from mhalearn.studio.block_pictures import draw_block, draw_truth, put_beside
from mhalearn.studio.blocks import BlockWatcher
from mhalearn.studio.counting import count
from mhalearn.studio.request import ACTIVATIONS, NORMS, PRESETS, Limits, Wish, bounds, read_wish

SMALL = Wish(1, 4, 3, examples=400, inputs="gaussian", block=True, neurons=4)


def no_file(number):
    return None


def hidden(activation="gelu", norm=None):
    return mha.random_block(2, 5, 6, activation, norm, seed=1).canonical()


def test_what_may_be_chosen_is_what_blocks_can_have():
    for activation in ACTIVATIONS:
        for norm in NORMS:
            wish = dataclasses.replace(SMALL, activation=activation, norm=norm)
            assert read_wish(vars(wish), Limits()) == wish
            truth = mha.random_block(1, 4, 4, activation, None if norm == "none" else norm)
            known = count(wish, no_file)
            assert known["limit"] == math.ceil(truth.architecture.counting_limit(3))
            assert known["problem"] is None
    for name, (least, most) in bounds(Limits(), block=True).items():
        for value in (least - 1, most + 1):
            with pytest.raises(ValueError, match=f"{name} is .*: choose from"):
                read_wish({"block": True, name: value}, Limits())


def test_too_few_examples_of_a_block_are_refused_with_their_number():
    limit = count(SMALL, no_file)["limit"]
    line = count(dataclasses.replace(SMALL, examples=limit - 1), no_file)["problem"]
    assert "a block of 1 head and 4 neurons" in line
    assert f"at least {limit}" in line
    assert count(dataclasses.replace(SMALL, examples=limit), no_file)["problem"] is None


@pytest.mark.parametrize("norm", [None, "pre", "post"])
@pytest.mark.parametrize("activation", ["gelu", "relu", "glu", "swiglu"])
def test_a_student_that_holds_the_truth_among_more_is_right(activation, norm):
    """In another order, with a head and neurons that the truth has not."""
    truth = hidden(activation, norm)
    more = mha.random_block(3, 5, 9, activation, norm, seed=7)
    heads, ff, extra = truth.attention, truth.feed_forward, more.feed_forward
    theta = np.concatenate([more.attention.theta[:1], heads.theta[::-1]])
    w = np.concatenate([more.attention.w[:1], heads.w[::-1]])
    vectors = np.concatenate([more.attention.key_vector[:1], heads.key_vector[::-1]])
    rows = {"up": 1, "gate": 1, "down": 0, "up_bias": 0, "gate_bias": 0}
    wider = {
        name: np.concatenate(
            [
                getattr(extra, name)[..., :3] if axis or name != "down" else extra.down[:3],
                np.flip(part, axis),
            ],
            axis,
        )
        for name, axis in rows.items()
        if (part := getattr(ff, name)) is not None
    }
    student = truth.replace(
        attention=heads.replace(theta=theta, w=w, key_vector=vectors),
        feed_forward=ff.replace(**wider),
    )
    beside = put_beside(student, truth)
    assert beside.worst < 1e-10
    assert beside.found == {"heads": 2, "neurons": 6}
    np.testing.assert_allclose(beside.heads.theta, heads.theta, atol=1e-10)
    np.testing.assert_allclose(np.abs(beside.neurons.up), np.abs(ff.up), atol=1e-10)


def test_what_a_student_lacks_has_error_one_and_is_not_found():
    truth = hidden()
    heads, ff = truth.attention, truth.feed_forward
    fewer = truth.replace(
        attention=heads.replace(
            theta=heads.theta[:1], w=heads.w[:1], key_vector=heads.key_vector[:1]
        ),
        feed_forward=ff.replace(up=ff.up[:, :4], up_bias=ff.up_bias[:4], down=ff.down[:4]),
    )
    beside = put_beside(fewer, truth)
    assert beside.found == {"heads": 1, "neurons": 4}
    assert sorted(beside.theta_errors > 0.5) == [False, True]
    assert np.sum(beside.input_errors > 0.5) == 2
    assert beside.worst <= 1.0


def test_neurons_turned_over_beside_a_linear_map_count_as_found():
    truth = hidden()
    ff = truth.feed_forward
    turned = ff.replace(up=-ff.up, up_bias=-ff.up_bias, linear=0.1 * np.eye(5))
    beside = put_beside(truth.replace(feed_forward=turned), truth)
    assert beside.found["neurons"] == 6
    assert beside.input_errors.max() < 1e-10


def test_pictures_of_a_block_are_small_and_name_every_matrix():
    truth = hidden("swiglu")
    begun = draw_truth(truth)
    assert [one["name"] for one in begun["neurons"]] == ["up", "gate", "down"]
    assert {(one["rows"], one["columns"]) for one in begun["neurons"]} == {(5, 6)}
    told = draw_block(truth, truth)
    assert [one["bytes"] for one in told["neurons"]] == [one["bytes"] for one in begun["neurons"]]
    assert told["sizes"] == {"heads": 2, "neurons": 6} == told["found"]
    assert len(json.dumps(told, allow_nan=False)) < 5000


class Student:
    """An estimator that has one block at hand, or one that diverged."""

    def __init__(self, block):
        self.block = block

    def layer_at_hand(self):
        if self.block is None:
            raise ValueError("up holds NaN or infinity")
        return self.block


def test_the_best_block_until_then_is_kept_and_one_that_diverged_is_neither_shown_nor_kept():
    truth, told = hidden(), []
    other = mha.random_block(3, 5, 8, norm=None, seed=3)
    student = Student(truth)
    watcher = BlockWatcher(truth, student, told.append)
    watcher.on_event(Event("student 1", 500, 1e-3, 0.0))
    student.block = other
    watcher.on_event(Event("student 1", 1000, 1e-1, 0.1))
    student.block = None
    watcher.on_event(Event("student 1", 1500, 1e-9, 0.2))
    assert watcher.best is truth
    frames = [one for one in told if one["kind"] == "heads"]
    assert [one["sizes"]["neurons"] for one in frames] == [6, 8]
    errors = [one["head_error"] for one in told if one["kind"] == "event"]
    assert errors[0] < 1e-12 < errors[1]
    assert errors[2] is None


@pytest.mark.slow
def test_the_worker_learns_a_block_tells_and_reports(tmp_path):
    told = []
    wish = dataclasses.replace(SMALL, seed=2)
    worker.make_run(wish, tmp_path / "report.html", told.append, {}).learn()
    json.dumps(told, allow_nan=False)
    assert told[0]["kind"] == "begin"
    assert told[0]["ratio"] == pytest.approx(count(wish, no_file)["ratio"])
    frames = [message for message in told if message["kind"] == "heads"]
    assert frames[0]["worst"] > 1e-3 > 1e-10 > frames[-1]["worst"]
    assert frames[0]["sizes"]["neurons"] > 4 == frames[-1]["sizes"]["neurons"]
    assert frames[-1]["found"] == {"heads": 1, "neurons": 4}
    assert told[-1]["outcome"] == "RECOVERED", told[-1]["reason"]
    assert told[-1]["max_error"] < 1e-10
    assert "RECOVERED" in (tmp_path / "report.html").read_text()


def test_the_preset_leaves_all_sizes_open(tmp_path):
    wish = PRESETS["A whole block"]
    assert (wish.block, wish.count_heads) == (True, True)
    run = worker.make_run(dataclasses.replace(wish, examples=60), tmp_path, [].append, {})
    assert (run._estimator.n_heads, run._estimator.hidden) == ("auto", "auto")
