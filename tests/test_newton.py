import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

from mhalearn._runtime.programs import float64, in_float64
from mhalearn.data import Examples
from mhalearn.data.inputs import sample_inputs
from mhalearn.estimator import AttentionRegressor
from mhalearn.layer.comparison import compare
from mhalearn.layer.dense import Dense, DenseHeads
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.random_layers import random_layer
from mhalearn.learners.newton import continuation, learn_newton
from mhalearn.learners.newton.annealing import anneal_first_order
from mhalearn.learners.newton.head_count import choose_heads
from mhalearn.learners.newton.head_exchange import exchange_heads, keep_better, rescale_prior
from mhalearn.learners.newton.learner import most_heads
from mhalearn.learners.newton.model_selection import ModelSelection, split_for_selection
from mhalearn.learners.newton.starts import Scales, estimate_scales, random_starts
from mhalearn.run.outcome import Candidate, Outcome
from mhalearn.run.run import Run
from mhalearn.solvers.gauss_newton import ITERATIVE, Ridge, State
from mhalearn.solvers.merge_heads import reduce_heads
from mhalearn.solvers.polish import polish
from mhalearn.solvers.scaled_problem import make_problem as make_problem_with

# The shape that most tests of the solver share, so that they share its compiled program.
N, K, D = 112, 4, 6


@pytest.fixture(autouse=True, scope="module")
def one_lapack_thread():
    """As in the estimator: LAPACK's threads would fight XLA's for the same cores."""
    with threadpool_limits(1, user_api="blas"):
        yield


def make_examples(layer, n=N, k=K, *, inputs="boolean", lengths=None, seed=2):
    x = sample_inputs(inputs, n, k, layer.d, seed=seed)
    return Examples(x, layer(x, lengths), lengths)


def make_problem(examples, n_heads, **options):
    return make_problem_with(examples, Dense(examples.architecture(n_heads, **options)))


def run(examples, n_heads, *, seed=0, trace=None, **options):
    """With a number of heads, or None."""
    trace = Run(seed=seed) if trace is None else trace
    return learn_newton(examples, examples.architecture(n_heads, **options), trace)


LENGTHS = np.random.default_rng(3).integers(2, K + 1, N)
# name: teacher, examples, learner
TABLE = {
    "two heads": ({"n_heads": 2, "d": D}, {}, {}),
    "three heads": ({"n_heads": 3, "d": 8}, {"n": 160, "k": 5}, {}),
    "one head": ({"n_heads": 1, "d": D}, {}, {}),
    "bias": ({"n_heads": 2, "d": D, "key_vector": True, "out_bias": True}, {}, {"bias": True}),
    "causal": ({"n_heads": 2, "d": D, "causal": True}, {}, {"causal": True}),
    "lengths": ({"n_heads": 2, "d": D}, {"lengths": LENGTHS}, {}),
    "gaussian inputs": ({"n_heads": 2, "d": D}, {"inputs": "gaussian"}, {}),
    "narrow heads": ({"n_heads": 2, "d": 8, "rank": 2}, {}, {"head_dim": 2}),
    "few outputs": ({"n_heads": 2, "d": D, "out_dim": 3}, {}, {}),
    "sharp attention": ({"n_heads": 2, "d": D, "scale": 6.0}, {}, {}),
    "soft attention": ({"n_heads": 2, "d": D, "scale": 0.5}, {}, {}),
}


def rounds_of(events):
    """Stages without their parts: annealing, free descent, finish."""
    return {event.stage.split(",")[0] for event in events}


@pytest.mark.parametrize("name", TABLE, ids=lambda name: name.replace(" ", "-"))
def test_recovery(name):
    teacher, data, options = TABLE[name]
    layer = random_layer(**teacher, seed=1)
    examples = make_examples(layer, **data)
    trace = Run()
    solution = run(examples, layer.n_heads, trace=trace, **options)
    # Only a certificate may say RECOVERED.
    assert solution.outcome is Outcome.FITTED
    assert not hasattr(solution, "certificate")
    assert compare(solution.layer, layer).max_error < 1e-10
    assert trace.best_loss < 1e-20
    assert trace.best is solution.layer
    assert solution.loss == trace.best_loss
    assert rounds_of(trace.events) == {"round 1", "model selection"}


def test_the_learner_knows_no_units():
    # Powers of two round nothing, so that the two runs are the same run.
    layer = random_layer(2, D, seed=1)
    examples = make_examples(layer)
    x, y, _ = examples.arrays()
    here = run(examples, 2).layer
    there = run(Examples(8.0 * x, y / 4), 2).layer
    np.testing.assert_array_equal(there.theta, here.theta / 64)
    np.testing.assert_array_equal(there.w, here.w / 32)


def test_a_run_is_a_function_of_its_seed():
    examples = make_examples(random_layer(2, D, seed=1))
    one, again, other = (run(examples, 2, seed=seed).layer for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.theta, again.theta)
    assert np.any(one.theta != other.theta)


def test_zero_labels_are_explained_by_the_zero_layer():
    x = sample_inputs("boolean", 40, K, D, seed=1)
    solution = run(Examples(x, np.zeros((40, K, D))), 2)
    assert solution.outcome is Outcome.FITTED
    assert not solution.layer.w.any()
    assert solution.layer.n_heads == 2


def test_time_runs_out_honestly():
    examples = make_examples(random_layer(2, D, seed=1))
    solution = run(examples, 2, trace=Run(max_seconds=1e-9))
    assert solution.outcome is Outcome.TIME_LIMIT
    x, y, _ = examples.arrays()
    assert np.sum((solution.layer(x) - y) ** 2) <= np.sum(y**2)  # no worse than nothing


@pytest.mark.parametrize("scale", [2.0, 6.0])
def test_layers_are_recovered_close_to_the_counting_limit(scale):
    """Ten examples where eight could do: single starts mostly fail, and sharp attention stalls
    conjugate gradients."""
    truth = random_layer(2, 8, scale=scale, seed=7)
    examples = make_examples(truth, n=10, k=4)
    assert examples.n == 1.25 * examples.counting_limit(examples.architecture(2))
    solution = run(examples, 2)
    assert compare(solution.layer, truth).max_error < 1e-6


def states(rng, starts=3, heads=4):
    shapes = (starts, heads, D, D), (starts, heads * D, D), starts, starts, starts
    theta, w, *rest = (jnp.asarray(rng.normal(size=shape)) for shape in shapes)
    return State(DenseHeads(theta, w), *rest, solved=jnp.ones(starts, bool))


@in_float64
@pytest.mark.parametrize("starts", [1, 3])
def test_an_exchange_replaces_one_head_of_each_start(starts):
    state = states(np.random.default_rng(0), starts)
    before = np.asarray(state.params.theta)
    for seed in range(8):
        after = exchange_heads(state, np.random.default_rng(seed))
        changed = np.any(after != before, axis=(2, 3))
        np.testing.assert_array_equal(changed.sum(axis=1), np.ones(starts))
        for start, head in zip(*np.nonzero(changed), strict=True):
            others = np.delete(before, start, axis=0)
            copied = np.any(np.all(others == after[start, head], axis=(2, 3)))
            assert copied or np.linalg.norm(after[start, head]) == pytest.approx(1.0)


@in_float64
def test_the_better_of_two_descents_is_kept_start_by_start():
    def made(losses, size):
        fill = jnp.asarray(losses)
        heads = DenseHeads(jnp.full((3, 2, D, D), size), jnp.zeros((3, 2 * D, D)))
        return State(heads, fill, fill, fill, jnp.ones(3, bool))

    small, large = made([1.0, 2.0, 3.0], 0.1), made([2.0, 1.0, jnp.nan], 1.0)
    kept, any_better, lowest = keep_better(small, large, Ridge(0.0, 0.0))
    np.testing.assert_array_equal(kept.loss, [1.0, 1.0, 3.0])
    assert any_better
    assert not lowest
    assert keep_better(small, made([2.0, 0.5, 9.0], 1.0), Ridge(0.0, 0.0))[1:] == (True, True)
    assert keep_better(small, small, Ridge(0.0, 0.0))[1:] == (False, False)
    # Under a ridge, the smaller of two layers that fit alike.
    np.testing.assert_array_equal(
        keep_better(small, large, Ridge(1.0, 0.0))[0].loss, [1.0, 2.0, 3.0]
    )


@in_float64
def test_the_prior_follows_the_heads():
    state = states(np.random.default_rng(1))
    norms = np.linalg.norm(np.asarray(state.params.theta), axis=(2, 3))
    learned = rescale_prior(Scales(2.0, 0.5), state, 1.5)
    assert learned.theta == pytest.approx(1.5 * np.sqrt(np.mean(norms**2)))
    assert learned.w == 0.5


@in_float64
def test_nothing_is_finished_where_every_start_diverged():
    shapes = (2, 2, D, D), (2, 2 * D, D), 2, 2, 2
    theta, w, *rest = (jnp.full(shape, jnp.nan) for shape in shapes)
    nothing = State(DenseHeads(theta, w), *rest, solved=jnp.ones(2, bool))
    examples = make_examples(random_layer(2, D, seed=1))
    problem = make_problem(examples, 2)
    offered = []
    task = continuation.Task(problem, Run(), offered.append, ITERATIVE)
    continuation.finish_with_direct_steps(nothing, task, stage="finish")
    assert not offered
    assert np.isfinite(exchange_heads(nothing, np.random.default_rng(0))).all()
    assert rescale_prior(Scales(2.0, 0.5), nothing, 1.0).theta == 2.0


def test_a_solver_that_diverges_says_so(monkeypatch):
    def diverge(state, *_, **__):
        return jax.tree.map(lambda leaf: np.full_like(leaf, np.nan, dtype=float), state)

    monkeypatch.setattr(continuation, "take_step", diverge)
    solution = run(make_examples(random_layer(2, D, seed=1)), 2)
    assert solution.outcome is Outcome.NONFINITE
    assert np.isfinite(solution.layer.theta).all()


def test_below_the_counting_limit_one_round_is_enough():
    layer = random_layer(2, D, seed=1)
    trace = Run()
    solution = run(make_examples(layer, 4), 2, trace=trace)
    assert solution.outcome is Outcome.FITTED
    assert compare(solution.layer, layer).max_error > 1e-2
    assert rounds_of(trace.events) == {"round 1", "model selection"}


def test_a_checkpoint_is_where_descent_begins():
    layer = random_layer(2, D, seed=1)
    trace = Run(start=layer.replace(theta=layer.theta + 1e-3))
    solution = run(make_examples(layer), 2, trace=trace)
    assert {event.stage for event in trace.events} == {"polish", "model selection"}
    assert compare(solution.layer, layer).max_error < 1e-10


# The head count


@pytest.mark.parametrize("n_heads", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_head_count_is_found(n_heads):
    layer = random_layer(n_heads, D, seed=1)
    examples = make_examples(layer)
    trace = Run()
    solution = run(examples, None, trace=trace)
    assert solution.outcome is Outcome.FITTED
    found = solution.layer
    tried = [event.step for event in trace.events if event.stage == "head count"]
    assert tried == {1: [1], 2: [1, 2], 3: [1, 2, 4]}[n_heads]
    polished = polish(found, make_problem(examples, found.n_heads), trace)
    architecture = examples.architecture()
    reduced, loss = reduce_heads(polished.layer, polished.loss, examples, architecture, trace)
    assert loss < 1e-20
    assert compare(reduced, layer).max_error < 1e-10


class Curve:
    """A fit that is nothing but its error; it remembers what was asked of it."""

    def __init__(self, error, patient=None):
        self.error, self.calls, self.again = error, [], []
        self.patient = error if patient is None else patient

    def __call__(self, m, patient):
        (self.again if patient else self.calls).append(m)
        layer = AttentionLayer(np.zeros((m, 1, 1)), np.zeros((m, 1, 1)))
        return Candidate(layer), (self.patient if patient else self.error)(m)

    def choose(self, most=64, exact=1e-16, trace=None):
        found = choose_heads(self, most, exact, Run() if trace is None else trace)
        for calls in (self.calls, self.again):
            assert len(set(calls)) == len(calls), "a count was fitted twice"
        assert set(self.again) <= set(self.calls)
        assert max(self.calls) <= most
        assert self.calls[0] == 1
        return found.layer.n_heads


def test_patience_finds_the_count_that_brief_fits_were_stuck_at():
    curve = Curve(lambda m: 0.3 / m, patient=lambda m: 1e-28 if m >= 2 else 0.3)
    assert curve.choose(most=14) == 2
    assert curve.again == [1, 2]


def missing_heads(true, level):
    """Every missing head costs its share; what is left is noise."""
    return lambda m: max(0.0, 1 - m / true) + level


@pytest.mark.parametrize("true", [*range(1, 17), 24, 32, 48])
def test_exact_examples_end_the_doubling(true):
    curve = Curve(lambda m: 1e-28 if m >= true else 1 - m / (true + 1))
    found = curve.choose()
    # The first power of two that suffices; its surplus heads are merged later.
    assert found == 2 ** int(np.ceil(np.log2(true)))
    assert len(curve.calls) <= np.log2(found) + 2


@pytest.mark.parametrize("true", [*range(1, 17), 24, 32, 48])
@pytest.mark.parametrize("level", [1e-2, 1e-6])
def test_with_noise_the_smallest_count_at_the_plateau_is_found(true, level):
    curve = Curve(missing_heads(true, level))
    assert curve.choose() == true
    assert len(curve.calls) <= 2 * np.ceil(np.log2(64)) + 2


@settings(max_examples=60, deadline=None, derandomize=True)
@given(true=st.integers(1, 16), seed=st.integers(0, 2**32), overfit=st.floats(0.0, 0.02))
def test_ripples_of_a_plateau_are_no_heads(true, seed, overfit):
    # Held-out errors on the plateau wander by a few percent and drift as surplus heads fit noise.
    ripples = 1 + 0.03 * np.random.default_rng(seed).uniform(-1, 1, 200)
    smooth = missing_heads(true, 1e-3)
    curve = Curve(lambda m: smooth(m) * ripples[m] * (1 + overfit) ** max(0, m - true))
    assert curve.choose(most=16) == true


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    most=st.integers(1, 40),
    errors=st.lists(st.floats(1e-20, 1e3), min_size=41, max_size=41),
)
def test_any_curve_gives_a_count_that_is_near_the_best_seen(most, errors):
    curve = Curve(lambda m: errors[m])
    found = curve.choose(most=most, exact=1e-16)
    assert errors[found] <= min(errors[m] for m in curve.calls) / 0.8


def test_the_search_never_goes_beyond_what_examples_can_determine():
    for most in (1, 2, 3, 5, 7):
        curve = Curve(lambda m: 0.7**m)
        assert curve.choose(most=most) == most


def test_two_heads_that_only_help_together_are_found():
    curve = Curve(lambda m: {1: 1.0, 2: 0.97, 3: 0.95}.get(m, 1e-28))
    assert curve.choose() == 4


def test_noise_alone_has_one_head():
    curve = Curve(lambda m: 1.0 + 0.01 * m)
    assert curve.choose() == 1
    assert curve.calls == [1, 2, 4]


def test_the_search_stops_when_time_is_up():
    curve = Curve(lambda m: 1 / m)
    assert curve.choose(trace=Run(max_seconds=1e-9)) == 1
    assert curve.calls == [1]


# Parts


@pytest.mark.parametrize("shape", [(2, D, K, N), (3, 8, 5, 160)], ids=str)
@pytest.mark.parametrize("inputs", ["boolean", "gaussian"])
@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0, 4.0, 8.0, 16.0])
def test_scales_are_guessed_within_a_factor_of_four(scale, inputs, shape):
    m, d, k, n = shape
    for seed in range(2):
        layer = random_layer(m, d, scale=scale, seed=seed)
        problem = make_problem(make_examples(layer, n, k, inputs=inputs), m)
        theta = np.linalg.norm(problem.theta(layer), axis=(1, 2)).mean()
        w = np.sqrt(np.mean(problem.w(layer) ** 2))
        guess = estimate_scales(problem)
        assert 1 / 4 < guess.theta / theta < 4
        assert 1 / 4 < guess.w / w < 4


def test_scales_do_not_depend_on_units():
    examples = make_examples(random_layer(2, D, seed=1))
    x, y, _ = examples.arrays()
    problems = [
        make_problem(Examples(a * x, b * y), 2) for a, b in ((1.0, 1.0), (2.0**20, 2.0**-30))
    ]
    assert estimate_scales(problems[0]) == estimate_scales(problems[1])


def test_the_ridge_is_that_of_a_gaussian_prior():
    problem = make_problem(make_examples(random_layer(2, D, seed=1)), 2, bias=True)
    scales, g = Scales(theta=3.0, w=0.5), 0.1
    noise = g * problem.energy / (N * K * D)  # a share of the mean square of a label
    ridge = continuation.ridge_at(g, scales, problem)
    entry = scales.theta**2 / ((D + 1) * D)  # mean square entry of a Theta of that norm
    assert ridge.theta * problem.energy == pytest.approx(noise / entry)
    assert ridge.w * problem.energy == pytest.approx(noise / scales.w**2)


def test_starts_have_unit_norm_and_are_all_different():
    problem = make_problem(make_examples(random_layer(2, D, seed=1)), 2, bias=True)
    draws = [
        random_starts(problem, 3, seed, round_)
        for seed, round_ in itertools.product((0, 1), (0, 1))
    ]
    for theta in draws:
        assert theta.shape == (3, 2, D + 1, D)
        np.testing.assert_allclose(np.linalg.norm(theta, axis=(2, 3)), 1.0, rtol=1e-14)
    flat = np.concatenate(draws).reshape(-1, (D + 1) * D)
    cosines = flat @ flat.T - np.eye(len(flat))
    assert np.abs(cosines).max() < 0.6
    np.testing.assert_array_equal(random_starts(problem, 3, 0, 0), draws[0])


def test_the_choice_keeps_the_best_on_held_out_examples():
    layer = random_layer(2, D, seed=1)
    examples = make_examples(layer)
    problem = make_problem(examples, 2)
    held = make_examples(layer, 20, seed=9)
    trace = Run()
    choice = ModelSelection(problem, held, trace)
    thetas = np.stack([problem.theta(layer)] * 4)
    ws = np.stack([f * problem.w(layer) for f in (0.5, 0.9, 1.2, 1.0)])
    thetas[3, 0, 0, 0] = np.nan  # would be the best
    with float64():
        heads = DenseHeads(jnp.asarray(thetas), jnp.asarray(ws))
        state = State(heads, *map(jnp.asarray, [np.zeros(4)] * 3), jnp.ones(4, bool))
    choice.offer_starts(state)
    assert choice.loss == pytest.approx(0.1**2, rel=1e-10)
    np.testing.assert_allclose(choice.layer.w, 0.9 * layer.w, rtol=1e-14)
    choice.offer(layer.replace(w=2 * layer.w))
    assert choice.loss == pytest.approx(0.1**2, rel=1e-10)
    assert trace.best is choice.layer


@pytest.mark.parametrize("n", [3, 8, 9, 10, 40, 112, 5000])
def test_examples_to_choose_by_are_spared_only_where_they_can_be(n):
    examples = make_examples(random_layer(2, D, seed=1), n)
    architecture = examples.architecture(2)
    limit = examples.counting_limit(architecture)
    fit, held = split_for_selection(examples, architecture, seed=0)
    if fit is held:
        assert fit is examples
        assert n - max(1, n // 10) < 1.5 * limit
        return
    assert fit.n + held.n == n
    assert fit.n >= 1.5 * limit
    assert held.n == min(max(1, n // 10), 256)
    together = np.concatenate([fit.hashes(), held.hashes()])
    np.testing.assert_array_equal(np.sort(together), np.sort(examples.hashes()))


@pytest.mark.parametrize("n", [1, 10, 50, 112])
def test_most_heads_is_the_counting_limit_inverted(n):
    examples = make_examples(random_layer(2, D, seed=1), n)
    most = most_heads(examples, examples.architecture())
    assert most == 1 or examples.counting_limit(examples.architecture(most)) <= n
    assert examples.counting_limit(examples.architecture(most + 1)) > n


@pytest.mark.slow
def test_starts_that_agree_are_not_believed_where_examples_are_few():
    # A quick and a patient start end in one wrong minimum here, to seven digits, and without noise.
    layer = random_layer(2, 4, scale=8.0, out_dim=1, seed=114)
    x = np.random.default_rng([114, 77]).standard_normal((34, 6, 4))
    learned = AttentionRegressor(2, random_state=114).fit(x, layer(x))
    assert compare(learned.layer_, layer).max_error < 1e-8


@pytest.mark.parametrize("scale", [2.0, 6.0])
def test_sliding_moves_heads_towards_the_truth_as_the_ridge_fades(scale):
    layer = random_layer(2, D, scale=scale, seed=1)
    examples = make_examples(layer)
    problem = make_problem(examples, 2)
    scales = estimate_scales(problem)
    start, trace = random_starts(problem, 2, 0, 0), Run()
    moved = anneal_first_order(start, problem, trace, scales, 1500, stage="slide")
    again = anneal_first_order(start, problem, Run(), scales, 1500, stage="slide")
    np.testing.assert_array_equal(moved, again)
    losses = [event.loss for event in trace.events]
    assert [event.step for event in trace.events] == [500, 1000, 1500]
    assert losses[-1] < 2e-3 < losses[0]


def test_sliding_stops_with_the_clock():
    problem = make_problem(make_examples(random_layer(2, D, seed=1)), 2, bias=True)
    trace = Run(max_seconds=0.0)
    moved = anneal_first_order(
        random_starts(problem, 1, 0, 0), problem, trace, Scales(2.0, 0.5), 2000, stage="slide"
    )
    assert np.isfinite(moved).all()
    assert len(trace.events) == 1
