"""Chosen queries: what algebra finds, what is asked, and what is said of it."""

import threading
import time

import numpy as np
import pytest
from scipy.optimize import check_grad

import mhalearn as mha
from mhalearn.data import box as boxes
from mhalearn.data.box import BoxFailed
from mhalearn.learners.queries.at_turns import count_at_turns, draw_at_turns
from mhalearn.learners.queries.attention_step import fit_together, plain_rows
from mhalearn.learners.queries.design import design_calls, jacobian
from mhalearn.learners.queries.domain import mantissa_unit
from mhalearn.learners.queries.extension import (
    count_extension_calls,
    design_extension,
    extend,
    find_row_spaces,
    solve_moves,
)
from mhalearn.learners.queries.forms import AnyBox
from mhalearn.learners.queries.narrow_heads import _Task, fit_narrow_head, split_answers
from mhalearn.learners.queries.plane import design_plane, find_heads_in_plane
from mhalearn.learners.queries.pursuit import Pursuit, coordinates
from mhalearn.learners.queries.session import Budget, BudgetSpent, Session, TimeSpent
from mhalearn.learners.queries.sweep import Sectors

LAYER = mha.random_layer(n_heads=3, d=5, scale=2.0, seed=1)


def session(f, budget=None, keep=None, **options):
    return Session(AnyBox(f, **options), budget or Budget(), keep, {"version": 1})


def plane_of(layer, seed=0, k=8):
    u, v = np.random.default_rng(seed).standard_normal((2, layer.d))
    return design_plane(u, v, k, 4)


@pytest.mark.parametrize("scale", [0.3, 2.0, 20.0])
def test_a_plane_shows_the_heads_and_how_many_there_are(scale):
    layer = mha.random_layer(n_heads=4, d=6, scale=scale, seed=2)
    calls = plane_of(layer)
    found = find_heads_in_plane(calls, layer(calls.tokens), 1e-16)
    assert found.n_heads == 4
    assert found.residual < 1e-11
    true = np.einsum("d,mde,e->m", calls.u, layer.theta, calls.v)
    order, place = np.argsort(found.p), np.argsort(true)
    np.testing.assert_allclose(found.p[order], true[place], rtol=1e-6)
    np.testing.assert_allclose(
        found.images[order], (calls.v @ layer.w)[place], rtol=1e-5, atol=1e-8
    )


def test_a_plane_shows_the_heads_of_a_causal_layer_too():
    layer = mha.AttentionLayer(LAYER.theta, LAYER.w, causal=True)
    u, v = np.random.default_rng(0).standard_normal((2, 5))
    calls = design_plane(u, v, 8, 4, causal=True)
    found = find_heads_in_plane(calls, layer(calls.tokens), 1e-16)
    assert found.residual < 1e-11
    true = np.einsum("d,mde,e->m", u, layer.theta, v)
    np.testing.assert_allclose(np.sort(found.p), np.sort(true), rtol=1e-7)


def test_tokens_off_the_plane_in_few_dimensions_show_the_spaces_that_heads_write_to():
    layer = mha.random_layer(n_heads=3, d=10, head_dim=2, scale=2.0, seed=4)
    calls = plane_of(layer)
    heads = find_heads_in_plane(calls, layer(calls.tokens), 1e-16)
    basis = np.random.default_rng(5).standard_normal((2, 10))
    count = count_extension_calls(3, 2, 8)
    asked = design_extension(calls, 1.0, count, 1e-7, np.random.default_rng(3), basis)
    assert asked.tokens.shape == (count, 8, 10)
    rows = find_row_spaces(heads, solve_moves(heads, asked, layer(asked.tokens)), 2)
    order = np.argsort(np.argsort(heads.p))
    true = np.argsort(np.einsum("d,mde,e->m", calls.u, layer.theta, calls.v))
    for space, w in zip(rows, layer.w[true][order], strict=True):
        outside = w - w @ space.T @ space
        assert np.linalg.norm(outside) < 1e-4 * np.linalg.norm(w)


@pytest.mark.parametrize("causal", [False, True])
def test_a_narrow_head_is_learned_from_what_it_wrote(causal):
    rng = np.random.default_rng(0)
    layer = mha.random_layer(n_heads=1, d=10, head_dim=2, scale=2.0, seed=6)
    layer = mha.AttentionLayer(layer.theta, layer.w, causal=causal)
    x = rng.standard_normal((40, 6, 10))
    space = np.linalg.svd(layer.w[0])[2][:2]
    written = split_answers(layer(x), space[None])[:, :, 0]
    found = fit_narrow_head(x, written, causal=causal)
    assert found.loss < 1e-5
    assert np.linalg.norm(found.theta - layer.theta[0]) < 0.02 * np.linalg.norm(layer.theta[0])
    assert np.linalg.matrix_rank(found.theta, 1e-8) == 2


def test_the_gradient_of_a_narrow_head_is_that_of_its_objective():
    rng = np.random.default_rng(1)
    x, y, flat = rng.standard_normal((3, 4, 5)), rng.standard_normal((3, 4, 2)), rng.random(40)
    task = _Task(x, y, np.tri(4, dtype=bool))
    value, slope = (lambda f, i=i: task.objective(f, 0.1)[i] for i in (0, 1))
    assert check_grad(value, slope, flat) < 1e-5


def test_a_descent_that_has_no_direction_left_ends():
    x = np.random.default_rng(0).standard_normal((2, 4, 5))
    theta, _, loss = fit_together(LAYER.theta, plain_rows(x, np.zeros(x.shape)))
    assert np.array_equal(theta, LAYER.theta)
    assert loss == 0.0


def test_heads_off_the_plane_follow_linearly():
    """The error is first order in how far tokens go off it."""
    calls = plane_of(LAYER)
    heads = find_heads_in_plane(calls, LAYER(calls.tokens), 1e-16)
    count = count_extension_calls(3, 5, 8)
    errors = []
    for off in (1e-5, 1e-7):
        asked = design_extension(calls, 1.0, count, off, np.random.default_rng(3))
        sketch = extend(asked, solve_moves(heads, asked, LAYER(asked.tokens)))
        order = np.argsort(heads.p)
        true = np.argsort(np.einsum("d,mde,e->m", calls.u, LAYER.theta, calls.v))
        apart = np.linalg.norm(sketch.w[order] - LAYER.w[true]) / np.linalg.norm(LAYER.w)
        errors.append(apart)
        rows = np.einsum("d,mde->me", calls.u, sketch.theta[order] - LAYER.theta[true])
        assert np.linalg.norm(rows) < 1e4 * off
    assert errors[0] < 1e3 * 1e-5
    assert errors[1] < errors[0] / 20


def test_a_layer_is_extracted_without_random_starts():
    found = mha.extract(LAYER, 5, max_calls=40)
    assert found.outcome is mha.Outcome.RECOVERED
    assert mha.compare(found.layer, LAYER).max_error < 1e-13
    assert not found.random_starts
    assert found.calls == sum(step.calls for step in found.plan) <= 40
    one_shorter = 8 * found.calls - 4
    assert (found.tokens, found.scalars) == (one_shorter, 5 * one_shorter)


@pytest.mark.parametrize(("m", "d", "scale"), [(3, 12, 0.3), (2, 6, 20.0), (4, 5, 2.0)])
def test_no_start_is_random_where_heads_are_generic(m, d, scale):
    """However small or sharp attention is: the sketch tells how large tokens may be."""
    for seed in range(2):
        layer = mha.random_layer(n_heads=m, d=d, scale=scale, seed=seed)
        found = mha.extract(layer, d, seed=seed, max_seconds=10.0)
        assert found.outcome is mha.Outcome.RECOVERED, found.reason
        assert not found.random_starts
        assert mha.compare(found.layer, layer).max_error < 1e-12


def test_the_sketch_tells_the_size_of_theta():
    layer = mha.random_layer(n_heads=2, d=12, scale=0.3, seed=0)
    calls = plane_of(layer)
    heads = find_heads_in_plane(calls, layer(calls.tokens), 1e-16)
    asked = design_extension(
        calls, 1.0, count_extension_calls(2, 12, 8), 1e-6, np.random.default_rng(3)
    )
    assert 0.6 * 0.3 < solve_moves(heads, asked, layer(asked.tokens)).size(12) < 1.5 * 0.3


def test_designed_calls_tell_more_of_heads_that_are_nearly_alike():
    """The smallest singular value with two calls more, against ten random pairs."""
    rng, theta = np.random.default_rng(0), LAYER.theta[:2, :4, :4].copy()
    w = LAYER.w[:2, :4, :4]
    theta[1] = theta[0] + 0.02 * rng.standard_normal((4, 4))

    def draw(n):
        x = rng.standard_normal((n, 6, 4))
        return 2.0 * x / np.linalg.norm(x, axis=-1, keepdims=True)

    def smallest(more):
        rows = jacobian(theta, w, np.concatenate([first, more]))
        return np.linalg.svd(rows, compute_uv=False)[-1]

    first = draw(8)
    chosen = design_calls(theta, w, first, 2, 2.0, rng)
    np.testing.assert_allclose(np.linalg.norm(chosen, axis=-1), 2.0)
    by_chance = [smallest(draw(2)) for _ in range(10)]
    assert smallest(chosen) > max(1.5 * np.median(by_chance), max(by_chance))


@pytest.mark.slow
def test_narrow_heads_take_calls_as_their_rank_is():
    """Each is learned on its own; heads are counted, and no start is random."""
    layer = mha.random_layer(n_heads=3, d=12, head_dim=2, scale=2.0, seed=2)
    found = mha.extract(layer, 12, head_dim=2)
    assert found.outcome is mha.Outcome.RECOVERED, found.reason
    assert found.layer.n_heads == 3
    assert not found.random_starts
    assert mha.compare(found.layer, layer).max_error < 1e-12
    off = {step.purpose: step.calls for step in found.plan}["spaces that heads write to"]
    assert off == count_extension_calls(3, 2, 8) < count_extension_calls(3, 12, 8) / 4


@pytest.mark.slow
def test_heads_as_decoders_have_them_are_extracted():
    kind = {"head_dim": 4, "causal": True, "rope": mha.Rope(base=100.0), "kv_heads": 1}
    layer = mha.random_layer(2, 6, seed=3, **kind)
    found = mha.extract(layer, 6, 2, max_length=6, **kind)
    assert found.outcome is mha.Outcome.RECOVERED, found.reason
    assert mha.compare(found.layer, layer).max_error < 1e-9


@pytest.mark.parametrize("kind", ["parity", "more heads than outputs"])
def test_heads_that_write_alike_are_told_apart_by_their_turns(kind):
    """The rank of answers is smaller than the number of heads: one, or that of outputs."""
    if kind == "parity":
        layer = mha.hard_layer("parity", n_heads=2, d=4, seed=0)[0]
    else:
        layer = mha.random_layer(n_heads=4, d=4, out_dim=2, scale=4.0, seed=1)
    found = mha.extract(layer, 4, max_calls=150, max_seconds=20.0)
    assert found.outcome is mha.Outcome.RECOVERED, found.reason
    assert found.algebra.by_turns
    assert not found.random_starts
    assert mha.compare(found.layer, layer).max_error < 1e-11


def test_sequences_at_turns_determine_heads_that_write_alike_as_counted():
    """What an error of the labels of those makes of another one's outputs, at most: with as many as
    are counted it is of the size of that error, with a third of them not."""
    layer = mha.hard_layer("parity", n_heads=4, d=8, seed=0)[0]
    rng, k = np.random.default_rng(0), 8
    count = count_at_turns(4, 8, k, 1)

    def amplified(n):
        given = jacobian(layer.theta, layer.w, draw_at_turns(layer.theta, n, k, rng))
        asked = jacobian(layer.theta, layer.w, draw_at_turns(layer.theta, 20, k, rng))
        return np.linalg.norm(asked @ np.linalg.pinv(given, rcond=1e-14), axis=1).reshape(20, -1)

    assert np.median(amplified(count).max(axis=1)) < 10
    assert np.median(amplified(count // 3).max(axis=1)) > 100


def test_parity_layers_are_certified():
    layer = mha.hard_layer("parity", n_heads=4, d=8, seed=0)[0]
    found = mha.extract(layer, 8, max_calls=300)
    assert found.outcome is mha.Outcome.RECOVERED, found.reason
    assert found.algebra.by_turns
    assert found.certificate.relative_mse < 1e-25
    assert mha.compare(found.layer, layer).max_error < 1e-12


def test_a_sweep_shows_heads_of_one_image_and_not_more():
    layer = mha.hard_layer("parity", n_heads=4, d=6, seed=3)[0]
    u, v = np.random.default_rng(1).standard_normal((2, 6))
    sectors = Sectors(np.pi * (np.arange(16) + 0.3) / 16, np.pi / 16, 2.5)
    calls = sectors.calls(u, v, 8)
    answers = layer(calls.tokens)
    assert np.linalg.matrix_rank(answers.reshape(-1, 6), 1e-9) == 1
    points, left = Pursuit(calls, answers, local=True).search([sectors], 6, 1e-12)
    assert left < 1e-12
    p, s = coordinates(points)
    true = np.einsum("ad,mde,e->ma", np.stack([u, v]), layer.theta, v)
    apart = np.linalg.norm(np.stack([p, s], axis=1) - true[:, None], axis=-1)
    assert apart.min(axis=1).max() < 1e-8


def test_one_number_a_call_is_enough():
    """The last row alone, one output, one sequence a call."""
    layer = mha.random_layer(n_heads=2, d=4, out_dim=1, scale=2.0, seed=3)
    asked = []

    def box(x):
        asked.append(x)
        return float(layer(x[None])[0, -1, 0])

    found = mha.extract(box, 4, 2, one_by_one=True, max_length=4)
    assert found.outcome is mha.Outcome.RECOVERED
    assert mha.compare(found.layer, layer).max_error < 1e-12
    assert found.calls == found.scalars == len(asked)
    assert max(map(len, asked)) == 4


def test_causal_boxes_are_asked_for_prefixes():
    layer = mha.random_layer(n_heads=2, d=4, scale=2.0, seed=4)
    layer = mha.AttentionLayer(layer.theta, layer.w, causal=True)

    def box(x):
        if x.shape[1] == 1:  # all attention is on the one token
            return x[:, 0] @ layer.w.sum(axis=0)
        return layer(x)[:, -1]

    found = mha.extract(box, 4, 2, causal=True, max_length=5)
    assert found.outcome is mha.Outcome.RECOVERED
    assert mha.compare(found.layer, layer).max_error < 1e-12


@pytest.mark.parametrize("inputs", ["cube", 3.0, "vocabulary"])
def test_only_allowed_tokens_are_asked_about(inputs):
    tokens = np.random.default_rng(0).standard_normal((40, 4))
    layer, seen = mha.random_layer(n_heads=2, d=4, scale=2.0, seed=5), []

    def box(x):
        seen.append(x.reshape(-1, 4))
        return layer(x)

    found = mha.extract(box, 4, 2, inputs=tokens if inputs == "vocabulary" else inputs)
    assert found.outcome is mha.Outcome.RECOVERED
    asked = np.concatenate(seen)
    if inputs == "cube":
        assert (np.abs(asked) == 1).all()
    elif inputs == 3.0:
        assert np.linalg.norm(asked, axis=1).max() <= 3.0 + 1e-12
    else:
        assert all((tokens == token).all(axis=1).any() for token in asked)


def test_a_budget_is_kept_and_its_end_is_told():
    for budget in ({"max_calls": 9}, {"max_scalars": 200}):
        asked = []

        def box(x, asked=asked):
            asked.append(len(x))
            return LAYER(x)

        found = mha.extract(box, 5, 3, **budget)
        spent = {"max_calls": found.calls, "max_tokens": found.tokens, "max_scalars": found.scalars}
        (name, limit), *_ = budget.items()
        assert spent[name] <= limit
        assert sum(asked) == found.calls
        if found.outcome is not mha.Outcome.RECOVERED:
            assert "the next call would have been for" in found.reason


def test_a_paid_answer_is_not_asked_for_again(tmp_path):
    keep, asked = tmp_path / "answers.sqlite", []

    def breaks(x):
        if len(asked) == 6:
            raise ConnectionError("gone")
        asked.append(x)
        return LAYER(x[None])[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boxes, "WAITS", (0.0, 0.0))
        with pytest.raises(BoxFailed, match="run again with it to go on from there"):
            mha.extract(breaks, 5, keep=keep, one_by_one=True)
    again = []

    def works(x):
        again.append(x)
        return LAYER(x[None])[0]

    found = mha.extract(works, 5, keep=keep, one_by_one=True)
    assert found.outcome is mha.Outcome.RECOVERED
    assert len(again) == found.calls - 6
    assert not any(np.array_equal(x, y) for x in asked for y in again)
    with pytest.raises(ValueError, match="keeps answers to other questions"):
        mha.extract(works, 5, keep=keep, one_by_one=True, seed=1)


def test_a_run_with_a_larger_budget_goes_on_from_what_was_paid(tmp_path):
    keep, asked = tmp_path / "answers.sqlite", []

    def box(x):
        asked.append(x)
        return LAYER(x[None])[0]

    short = mha.extract(box, 5, keep=keep, one_by_one=True, max_calls=9, max_seconds=3.0)
    assert len(asked) == short.calls <= 9
    found = mha.extract(box, 5, keep=keep, one_by_one=True, max_calls=40)
    assert found.outcome is mha.Outcome.RECOVERED
    assert len(asked) < short.calls + found.calls
    twice = sum(np.array_equal(x, y) for i, x in enumerate(asked) for y in asked[:i])
    assert twice == 1  # that answers are not random is learned by asking again


def test_a_box_that_hangs_is_given_up_and_asked_again():
    hangs, asked = threading.Event(), []

    def box(x):
        asked.append(len(x))
        if len(asked) == 2:
            hangs.wait()
        return LAYER(x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boxes, "WAITS", (0.0,))
        answers = AnyBox(box, timeout=0.2)
        x = np.ones((1, 4, 5))
        assert np.array_equal(answers(x), answers(x))
        assert len(asked) == 3
        with pytest.raises(BoxFailed, match=r"no answer in 0\.2 seconds"):
            AnyBox(lambda _: hangs.wait(), timeout=0.2)(x)
    hangs.set()


def test_what_an_answered_question_raises_is_taken_for_a_failure():
    asked = []

    def box(x):
        asked.append(len(x))
        if len(asked) in (2, 3):
            raise ValueError("no JSON")
        return LAYER(x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boxes, "WAITS", (0.0, 0.0))
        answers = AnyBox(box)
        answers(np.ones((1, 4, 5)))
        assert answers(np.ones((1, 4, 5))).shape == (1, 4, 5)
        asked[:] = [0]
        with pytest.raises(ValueError, match="many sequences a call"):  # of this form a first one
            answers(np.ones((2, 4, 5)))


def test_nothing_is_asked_after_the_limit_in_seconds():
    late = session(lambda x: x)
    late.ask(np.ones((1, 4, 3)), "first")
    late.until = time.monotonic() - 1.0
    with pytest.raises(TimeSpent):
        late.ask(np.ones((1, 4, 3)), "second")
    assert late.calls == 1


def test_one_answer_beyond_the_budget_is_the_only_one():
    asked = []
    with pytest.raises(ValueError, match="1 call, 8 tokens, 40 scalars"):
        mha.extract(lambda x: asked.append(len(x)) or LAYER(x), 5, max_scalars=39)
    assert asked == [1]


def test_noise_is_told_from_a_missing_head_where_calls_are_allowed():
    noise = np.random.default_rng(0)

    def box(x):
        return LAYER(x) + 1e-3 * noise.standard_normal(x.shape)

    found = mha.extract(box, 5, 3)
    assert found.outcome is mha.Outcome.FITTED
    assert "too few" not in found.reason, found.reason
    assert "asked twice, the box answers otherwise" in found.reason
    assert mha.compare(found.layer, LAYER).max_error < 2e-3


def test_coarse_answers_are_not_called_exact():
    found = mha.extract(lambda x: LAYER(x).astype(np.float32), 5, 3, seed=2)
    assert found.random_starts
    assert mha.compare(found.layer, LAYER).max_error < 1e-4
    noise = np.random.default_rng(0)
    found = mha.extract(lambda x: LAYER(x) + 1e-3 * noise.standard_normal(x.shape), 5, 3)
    assert found.outcome is mha.Outcome.FITTED
    assert mha.compare(found.layer, LAYER).max_error < 0.05


def test_bits_of_coarse_answers_are_counted():
    y = np.random.default_rng(0).standard_normal((3, 4))
    part, power = np.frexp(y)
    assert mantissa_unit(np.ldexp(np.round(part * 2**12) / 2**12, power)) == 2.0**-12
    assert mantissa_unit(y) == mantissa_unit(np.zeros((2, 2))) == 0.0


def test_a_box_that_is_no_layer_is_not_recovered():
    found = mha.extract(lambda x: np.tanh(LAYER(x)), 5, 3, max_calls=20, max_seconds=3.0)
    assert found.outcome not in (mha.Outcome.RECOVERED, mha.Outcome.RECOVERED_ON_SPAN)


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ({"plan": "magic"}, "choose one of"),
        ({"inputs": "sphere"}, "radius of a ball"),
        ({"inputs": -1.0}, "positive"),
        ({"max_calls": 0}, "max_calls"),
        ({"plan": "algebra", "inputs": "cube"}, "plan='auto'"),
        ({"rope": mha.Rope()}, "pass both"),
        ({"n_heads": "many"}, "an integer or 'auto'"),
        ({"n_heads": 2, "head_dim": 9}, "rank at most"),
    ],
)
def test_mistakes_are_told_in_one_line(mistake, said):
    with pytest.raises(ValueError, match=said) as error:
        mha.extract(LAYER, 5, **mistake)
    assert "\n" not in str(error.value)


def test_a_last_row_with_positions_before_and_after_it_is_refused():
    kind = {"head_dim": 4, "rope": mha.Rope(base=100.0)}
    layer = mha.random_layer(2, 6, seed=3, **kind)
    with pytest.raises(ValueError, match="must be causal"):
        mha.extract(lambda x: layer(x)[:, -1], 6, 2, **kind)


def test_a_box_must_answer_in_a_known_shape():
    with pytest.raises(ValueError, match="of the last row alone"):
        session(lambda x: x[:, :2]).ask(np.zeros((2, 4, 3)), "test")


def test_what_a_box_does_wrong_is_told_in_one_line():
    def fails(x):
        return x @ np.ones((4, 4))

    for box, said in [
        (fails, "d = 3"),
        (lambda x: np.full_like(x, np.nan), "NaN or infinite"),
        (lambda x: "hello", "expected"),
    ]:
        with pytest.raises(ValueError, match=said) as error:
            mha.extract(box, 3)
        assert "\n" not in str(error.value)


def test_a_box_that_answers_nothing_but_zeros_is_no_error():
    found = mha.extract(lambda x: np.zeros(x.shape), 3, max_calls=30)
    assert found.outcome is not mha.Outcome.RECOVERED


def test_a_session_asks_nothing_beyond_its_budget():
    asked = []
    one = session(lambda x: asked.append(x) or x, Budget(calls=3))
    one.ask(np.ones((2, 4, 3)), "first")
    with pytest.raises(BudgetSpent) as spent:
        one.ask(np.ones((2, 4, 3)), "second")
    assert spent.value.purpose == "second"
    assert sum(map(len, asked)) == one.calls == 2


def test_a_box_with_biases_that_were_not_told_is_said_to_have_them():
    box = mha.random_layer(n_heads=2, d=4, out_bias=True, seed=0)
    found = mha.extract(box, 4, 2, max_seconds=2.0)
    assert found.outcome is not mha.Outcome.RECOVERED
    assert "which no layer without biases does: ask with bias=True" in found.reason
    told = mha.extract(box, 4, 2, bias=True)
    assert told.outcome is mha.Outcome.RECOVERED, told.reason


def test_a_box_that_knows_positions_is_not_said_to_have_biases():
    places = 0.3 * np.random.default_rng(0).standard_normal((8, 5))
    found = mha.extract(lambda x: LAYER(x + places[: x.shape[1]]), 5, 3, max_seconds=3.0)
    assert found.outcome is not mha.Outcome.RECOVERED
    assert "the box knows the positions of tokens" in found.reason
    assert "bias=True" not in found.reason


@pytest.mark.parametrize("last", [False, True])
def test_a_scale_that_goes_with_the_length_is_not_recovered(last):
    def box(x):
        y = mha.AttentionLayer(LAYER.theta / np.log(x.shape[1] + 1), LAYER.w)(x)
        return y[:, -1] if last else y

    found = mha.extract(box, 5, 3)
    assert found.outcome is mha.Outcome.FITTED
    assert found.findings[0].name == "length"
    assert "depends on their number" in found.reason
    assert not found.certificate.recovered
    spent = mha.extract(box, 5, 3, max_calls=found.calls - 1)
    assert spent.reason.endswith("; only sequences of 8 tokens were answered")


def test_a_box_that_takes_one_length_alone_is_recovered_and_this_is_said():
    def box(x):
        return LAYER(x + np.zeros((8, 5)))

    found = mha.extract(box, 5)
    assert found.outcome is mha.Outcome.RECOVERED, found.reason
    assert found.reason.endswith("; only sequences of 8 tokens were answered")


def test_zeros_that_have_no_answer_do_not_end_a_search():
    def box(x):
        with np.errstate(invalid="ignore"):
            return LAYER(x / np.linalg.norm(x, axis=-1, keepdims=True))

    found = mha.extract(box, 5, 3, max_calls=30, max_seconds=2.0)
    assert found.outcome is not mha.Outcome.RECOVERED
    spent = found.calls == 30
    assert spent or "zeros have no answer" in found.reason


def test_answers_that_are_off_by_little_are_fitted_as_well_as_they_go():
    found = mha.extract(lambda x: LAYER(x) + 1e-10 * x**2, 5, 3)
    assert found.outcome is mha.Outcome.FITTED
    assert mha.compare(found.layer, LAYER).max_error < 1e-8


def test_another_number_of_heads_than_was_told_is_said_once_it_is_found():
    found = mha.extract(LAYER, 5, 4, max_calls=60)
    assert found.outcome is mha.Outcome.NOT_IDENTIFIED
    assert "3 heads explain" in found.reason
    assert found.reason.endswith("ask for n_heads=3")
    assert found.calls < 30


def test_a_limit_in_seconds_is_that_of_asking_and_of_all_fits_together(monkeypatch):
    limits = []

    class Noted(mha.AttentionRegressor):
        def fit(self, *given):
            limits.append(self.max_seconds)
            return super().fit(*given)

    def slow(x):
        time.sleep(0.05)
        return LAYER(x)

    monkeypatch.setattr("mhalearn.extraction.search.AttentionRegressor", Noted)
    mha.extract(slow, 5, plan="random", max_seconds=100.0)
    assert limits
    assert all(50.0 < limit <= 99.95 for limit in limits)
