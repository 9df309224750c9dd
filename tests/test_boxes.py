"""Boxes that are asked: every question once, answers that are kept, calls that fail."""

import numpy as np
import pytest

import mhalearn as mha
from mhalearn import Examples
from mhalearn.data import answers as kept_answers
from mhalearn.data import box as boxes
from mhalearn.data.box import BoxFailed

D, K, N = 6, 4, 90
TRUTH = mha.random_layer(2, D, seed=0)


class Asked:
    """A box that counts the sequences it is asked about, and fails after so many of them."""

    def __init__(self, f=TRUTH, fails_after=np.inf, error=ConnectionError):
        self.f, self.fails_after, self.error = f, fails_after, error
        self.questions, self.calls = [], 0

    def __call__(self, x):
        self.calls += 1
        if len(self.questions) >= self.fails_after:
            raise self.error("gone")
        self.questions += [one.tobytes() for one in x]
        return self.f(x)

    @property
    def repeated(self):
        return len(self.questions) - len(set(self.questions))


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(boxes, "WAITS", (0.0, 0.0))


def draw(box, **given):
    return Examples.from_callable(box, "gaussian", **{"n": N, "k": K, "d": D, "seed": 1} | given)


def test_fit_and_certify_ask_every_question_once_but_the_first():
    box = Asked()
    learned = mha.AttentionRegressor(2).fit(draw(box))
    assert learned.outcome_ is mha.Outcome.RECOVERED
    assert (len(box.questions), box.repeated) == (N + 1, 1)
    fresh = Asked()
    assert mha.certify(learned.layer_, draw(fresh, seed=2)).recovered
    assert (len(fresh.questions), fresh.repeated) == (N + 1, 1)


def test_a_box_that_answers_one_question_in_two_ways_is_known_to_be_random():
    g = np.random.default_rng(0)
    random = draw(lambda x: TRUTH(x) + 0.1 * g.standard_normal(x.shape))
    assert 0.01 < random.box.repeated < 1
    assert draw(lambda x: TRUTH(x)).box.repeated == 0.0


def test_a_call_that_fails_is_made_again():
    calls = []

    def box(x):
        calls.append(len(x))
        if len(calls) % 2:
            raise TimeoutError("late")
        return TRUTH(x)

    x, y, _ = draw(box).arrays()
    np.testing.assert_array_equal(y, TRUTH(x))


def test_a_mistake_is_not_made_again():
    box = Asked(fails_after=0, error=KeyError)
    with pytest.raises(KeyError, match="gone"):
        draw(box)
    assert box.calls == 1


def test_answers_that_are_kept_are_not_asked_for_again(tmp_path):
    path, n = tmp_path / "answers", 5000  # of two blocks
    first = Asked(fails_after=4000)
    with pytest.raises(BoxFailed, match=r"no answer in 3 calls \(ConnectionError: gone\); its ans"):
        draw(first, n=n, keep=path).arrays()
    again = Asked()
    x, y, _ = draw(again, n=n, keep=path).arrays()
    np.testing.assert_array_equal(y, TRUTH(x))
    assert len(again.questions) == n - 4096 + 1  # the first question is asked twice each time
    assert not set(again.questions[1:]) & set(first.questions)
    # Another number of examples has the same questions at its beginning.
    fewer = Asked()
    draw(fewer, n=4500, keep=path).arrays()
    assert len(fewer.questions) == 1


def test_a_box_of_one_sequence_a_call_loses_none_of_them(tmp_path):
    one_by_one = {"n": 12, "keep": tmp_path / "answers", "one_by_one": True}
    first, again = Asked(fails_after=8), Asked()
    with pytest.raises(BoxFailed):
        draw(lambda x: first(x[None])[0], **one_by_one).arrays()
    x, y, _ = draw(lambda x: again(x[None])[0], **one_by_one).arrays()
    np.testing.assert_allclose(y, TRUTH(x), rtol=1e-12)
    assert again.calls == 12 - 7 + 1


def test_without_a_file_a_failure_says_how_to_keep_answers():
    with pytest.raises(BoxFailed, match="pass keep=FILE"):
        draw(Asked(fails_after=3)).arrays()


def test_what_is_more_than_is_held_is_read_from_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_answers, "HELD", 0)
    box = Asked()
    examples = draw(box, keep=tmp_path / "answers")
    for _ in range(2):
        x, y, _ = examples.arrays()
    np.testing.assert_array_equal(y, TRUTH(x))
    assert len(box.questions) == N + 1


def test_labels_come_back_in_the_boxs_own_precision(tmp_path):
    for _ in range(2):
        examples = draw(lambda x: TRUTH(x).astype(np.float32), keep=tmp_path / "answers")
        assert examples.arrays().y.dtype == examples.y_dtype == np.float32


def test_files_of_other_questions_or_of_none_are_refused_in_a_line(tmp_path):
    path = tmp_path / "answers"
    draw(TRUTH, keep=path)
    with pytest.raises(ValueError, match=r"other questions \(seed 1, not 2\): name another file"):
        draw(TRUTH, keep=path, seed=2)
    other = tmp_path / "text"
    other.write_text("no answers" * 100)
    with pytest.raises(ValueError, match="keeps no answers of a box: name another file"):
        draw(TRUTH, keep=other)
    with pytest.raises(OSError, match="unable to open"):
        draw(TRUTH, keep=tmp_path / "no" / "such")
    shifts = iter(range(100))

    def sampler(n, k, d, rng):
        return rng.standard_normal((n, k, d)) + next(shifts)

    drifting = {"n": 5, "k": K, "d": D, "keep": tmp_path / "drift"}
    Examples.from_callable(TRUTH, sampler, **drifting)
    with pytest.raises(ValueError, match="another question"):
        Examples.from_callable(TRUTH, sampler, **drifting)


def test_boxes_of_one_row_are_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"expected \(2, 4, e\); one row a sequence is not enough"):
        draw(lambda x: x[:, -1])
    with pytest.raises(ValueError, match=r"expected \(4, e\); one row a sequence"):
        draw(lambda x: x[-1], one_by_one=True)
