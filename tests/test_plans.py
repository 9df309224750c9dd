"""The plans of the phases: literal, decode, any step of the reader's, from any start."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import linprog

import mhalearn as mha
from mhalearn import cli
from mhalearn._runtime.programs import float64
from mhalearn.data import Examples
from mhalearn.layer.batches import make_chunk
from mhalearn.learners import ChenLiOptions, Constants, chen_li
from mhalearn.learners.chen_li import decode
from mhalearn.learners.chen_li.epsilon_net import net_points
from mhalearn.learners.chen_li.input_distribution import whiten_tokens
from mhalearn.learners.chen_li.phase1_crude_sum import correlate, take_moments
from mhalearn.learners.chen_li.phase2_body import HullBody
from mhalearn.learners.options import find_options
from mhalearn.learners.registry import find_learner
from mhalearn.run.outcome import Outcome

HEADS, D, K, N = 2, 8, 3, 20_000


@pytest.fixture(scope="module")
def truth():
    return mha.random_layer(n_heads=HEADS, d=D, scale=4.0, seed=21)


@pytest.fixture(scope="module")
def examples(truth):
    x = mha.sample_inputs("boolean", N, K, D, seed=22)
    return Examples(x, truth(x))


@pytest.fixture(scope="module")
def decoded(examples):
    return chen_li.run(examples, HEADS, "decode")


def relative(estimate, exact):
    return np.linalg.norm(estimate - exact) / np.linalg.norm(exact)


# Decoding


def test_decoded_patterns_are_the_heads_own(truth):
    """With exact projections, whatever the heads attend to; of equal tokens nothing is decoded."""
    x = mha.sample_inputs("gaussian", 30, K, D, seed=1)
    x[0, 1] = x[0, 0]
    with float64():
        chunk = make_chunk(
            x, np.full(30, K), key_vector=False, out_bias=False, causal=False, labels=truth(x)
        )
        p, spread, left = chen_li.decode_patterns(jnp.asarray(truth.w), chunk)
    logits = np.einsum("nrd,mde,nje->nrmj", x, truth.theta, x)
    exact = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    assert np.abs(np.asarray(p)[1:] - exact[1:]).max() < 1e-9
    assert np.isinf(np.asarray(spread)[0]).all()
    assert np.asarray(left)[1:].max() < 1e-20


def test_small_gram_matrices_are_inverted_and_singular_ones_told():
    rng = np.random.default_rng(0)
    factors = rng.normal(size=(5, 6, 9))
    factors[2, 4] = factors[2, 1]
    matrices = 100 * np.einsum("bad,bcd->bac", factors, factors)
    with float64():
        inverse, regular = decode._invert(jnp.asarray(matrices))
    assert np.asarray(regular).tolist() == [True, True, False, True, True]
    for place in (0, 1, 3, 4):
        assert np.allclose(inverse[place], np.linalg.inv(matrices[place]), rtol=1e-8)
    assert not np.asarray(inverse[2]).any()


def test_decoding_takes_the_phases_to_rounding_before_polish(truth, decoded):
    assert decoded.net.error > 1e-8
    assert decoded.error < 1e-14
    assert mha.compare(decoded.layer, truth).max_error < 1e-6
    assert decoded.decoded.errors[0] == pytest.approx(decoded.net.error, rel=0.5)


def test_decoding_alone_does_not_find_the_basin(truth, examples):
    """From a random start it ends where it began, or nearly: the phases matter."""
    rng = np.random.default_rng(0)
    theta = rng.normal(size=truth.theta.shape) / 2
    start = chen_li.exact(truth.replace(theta=theta, w=0.5 * truth.w[::-1])).before(7)
    found = chen_li.run(examples, HEADS, "decode", start)
    assert found.error > 1e-3
    assert found.error <= found.decoded.errors[0]


def test_under_noise_decoding_does_not_make_things_worse(truth, examples):
    x, y, _ = examples.arrays()
    noisy = y + 0.1 * y.std() * np.random.default_rng(3).normal(size=y.shape)
    found = chen_li.run(Examples(x, noisy), HEADS, "decode", chen_li.exact(truth).before(6))

    def error(layer):
        return np.sum((layer(x[-4000:]) - y[-4000:]) ** 2) / np.sum(y[-4000:] ** 2)

    assert error(found.layer) <= 1.05 * error(found.net.layer)


# The literal plan


def test_the_correlation_is_the_papers(examples):
    x, y, _ = examples.subset(slice(0, 500)).arrays()
    expected = np.mean(
        [a.T.astype(float) @ np.ones((K, K)) @ b for a, b in zip(x, y, strict=True)], 0
    )
    found = correlate(take_moments(examples.subset(slice(0, 500))))
    assert np.allclose(found, expected / K)


def test_every_row_that_the_programme_accepts_is_certified_and_no_other(truth, examples):
    """Against one programme a row, written another way; the first look may spare none of them."""
    part, epsilon = examples.subset(slice(0, 150)), 0.2
    constants = Constants()
    total = 1.05 * truth.w.sum(axis=0)
    rows = chen_li.certify_every_row(part, total, epsilon, epsilon, 20 * D**2)
    x, y, _ = part.arrays()
    expected = set()
    for n, r in np.ndindex(150, K):
        if len(np.unique(x[n], axis=0)) < K:
            continue
        images = x[n].astype(float) @ total
        cost = np.concatenate([np.zeros(K), np.ones(D)])
        matrix = np.block([[images.T, -np.eye(D)], [-images.T, -np.eye(D)]])
        simplex = np.concatenate([np.ones(K), np.zeros(D)])[None]
        label = y[n, r]
        solved = linprog(cost, matrix, np.concatenate([label, -label]), simplex, [1.0])
        p = solved.x[:K]
        if np.linalg.norm(label - p @ images) <= epsilon * np.linalg.norm(label):
            support = [a for a in range(K) if p[a] >= constants.support]
            expected |= {(n, r, a, b) for a in support for b in support if a > b}
    found = {
        tuple(map(int, one))
        for one in zip(rows.example, rows.row, rows.pair[:, 0], rows.pair[:, 1], strict=True)
    }
    assert len(expected) > 5
    assert found == expected


def test_least_squares_over_the_simplex_equal_an_independent_solver(truth, examples):
    from scipy.optimize import nnls

    x, y, _ = examples.subset(slice(0, 40)).arrays()
    total = truth.w.sum(axis=0)
    found = chen_li.fit_simplex(x.astype(float), y[:, 0], total).attention
    for p, tokens, label in zip(found, x.astype(float), y[:, 0], strict=True):
        heavy = 1e4  # the sum of the weights as one more equation
        images = np.vstack([(tokens @ total).T, heavy * np.ones(K)])
        other, _ = nnls(images, np.append(label, heavy))
        assert np.abs(p - other).max() < 1e-4 or np.isclose(
            np.linalg.norm(label - p @ tokens @ total),
            np.linalg.norm(label - other @ tokens @ total),
            rtol=1e-5,
        )


def test_membership_queries_alone_find_the_span_of_a_known_body():
    rng = np.random.default_rng(0)
    d, heads = 3, 3
    theta = rng.normal(size=(heads, d, d))
    span = chen_li.exact_span(theta)
    # A box-like body, thin but for the directions of the hull.
    basis = np.linalg.svd(span.wide.reshape(2, -1))[2]
    reach = np.where(np.arange(d * d) < 2, 50.0, 0.3)

    class Box:
        def contains(self, thetas):
            flat = (thetas - span.proxy).reshape(len(thetas), -1) @ basis.T
            return np.all(np.abs(flat) <= reach, axis=1)

    found = chen_li.span_by_membership(Box(), span.proxy, heads, constants=Constants(facets=10.0))
    assert chen_li.span_angle(found, span) < 0.05
    assert found.queries > 0


def test_linear_optimisation_finds_the_span_of_the_hull(truth):
    known = chen_li.exact(truth)
    found = chen_li.span_by_queries(known.bodies[0], HEADS)
    assert chen_li.span_angle(found, known.span) < 1e-6
    assert known.bodies[0].contains(truth.theta + 1e-12).all()
    assert not known.bodies[0].contains(truth.theta + 0.1).any()


@pytest.mark.parametrize("heads", [2, 3, 4])
def test_the_net_holds_a_good_tuple_of_any_number_of_heads(heads):
    """From the exact span, of heads that are on the grid: the error is that of the grid's own."""
    d, k = 6, 3
    rng = np.random.default_rng(heads)
    axes = np.linalg.qr(rng.normal(size=(d * d, heads)))[0].T.reshape(heads, d, d)
    layer = mha.AttentionLayer(3.0 * axes, rng.normal(size=(heads, d, d)) / d**0.5)
    x = mha.sample_inputs("boolean", 400, k, d, seed=heads)
    problems = [
        chen_li_problem(Examples(x[part], layer(x[part])), heads)
        for part in (slice(0, 200), slice(200, None))
    ]
    span = chen_li.exact_span(layer.theta)
    norm = float(np.linalg.norm(span.proxy))
    spacing = 3.0 / norm / {2: 3, 3: 1.5, 4: 1}[heads]
    found, error, errors = chen_li.literal_net(
        replace(span, wide=span.wide), *problems, radius=1.05 * 3.0 / norm, spacing=spacing
    )
    assert len(errors) > 5
    assert errors[0] == error < 0.5 * errors[-1]
    assert found.n_heads == heads
    assert np.isclose(error, relative_error(found, x[200:], layer(x[200:])), rtol=1e-6)


def chen_li_problem(examples, heads):
    from mhalearn.layer.dense import Dense
    from mhalearn.solvers.scaled_problem import make_problem

    return make_problem(examples, Dense(examples.architecture(heads)))


def relative_error(layer, x, y):
    return np.sum((layer(x) - y) ** 2) / np.sum(y**2)


def test_a_net_of_too_many_tuples_is_refused(truth, examples):
    problem = chen_li_problem(examples.subset(slice(0, 20)), HEADS)
    span = chen_li.exact_span(truth.theta)
    with pytest.raises(ValueError, match="a smaller spacing"):
        net_points(span, 1.0, 3.0)
    with pytest.raises(ValueError, match="a larger spacing"):
        chen_li.literal_net(span, problem, problem, radius=2.0, spacing=0.01)


def test_the_statement_about_the_choice_holds_as_often_as_it_says():
    """Coin flips: the bound on the mean, for many candidates, fails rarely; for one less slack."""
    rng = np.random.default_rng(0)
    fails = 0
    for _ in range(200):
        errors = (rng.random((20, 300)) < 0.2).astype(float)
        best = errors[np.argmin(errors.mean(axis=1))]
        fails += chen_li.bound_error(best, 20, 0.1).bound < 0.2
    assert fails <= 20
    one, many = (chen_li.bound_error(best, count, 0.05).bound for count in (1, 1000))
    assert best.mean() < one < many <= 1.0


@pytest.mark.slow
def test_the_literal_plan_runs_from_end_to_end_and_says_what_it_may():
    layer = mha.random_layer(n_heads=2, d=10, scale=4.0, seed=3)
    examples = mha.Examples.from_callable(layer, "boolean", n=80_000, k=K, d=10, seed=4)
    found = chen_li.run(examples, 2, chen_li.LITERAL, constants=Constants(facets=1.2))
    assert found.plan == "literal"
    assert [one.name for one in found.crude.candidates] == ["all tokens"]
    assert all(isinstance(body, chen_li.ConvexBody) for body in found.bodies)
    assert {name for name, _ in found.span.angles} == {"linear optimisation", "eigenvectors"}
    stated = found.net.generalisation
    assert stated.error < stated.bound
    assert stated.candidates == len(found.net.candidates)
    x = mha.sample_inputs("boolean", 4000, K, 10, seed=9)
    assert relative_error(found.layer, x, layer(x)) < stated.bound


# Plans, starts, constants


def test_any_step_may_be_the_readers(truth, examples):
    """The exact sum in place of phase 1: phases 3 and 4 then have nothing to mend."""
    exact = chen_li.exact(truth).crude
    asked = []

    def certify(task, total, round_):
        asked.append(round_)
        return chen_li.PRACTICAL.certify(task, total, round_)

    plan = replace(chen_li.PRACTICAL, name="mine", crude_sum=lambda task: exact, certify=certify)
    found = chen_li.run(examples, HEADS, plan)
    assert found.plan == "mine"
    assert asked == [0, 1]
    assert np.array_equal(found.crude.estimate, truth.w.sum(axis=0))
    assert repr(plan) == "Plan('mine')"


@pytest.mark.parametrize("phase", [5, 6, 7])
def test_a_phase_can_be_begun_from_the_truth(truth, examples, phase):
    known = chen_li.exact(truth).before(phase)
    found = chen_li.run(examples, HEADS, "decode", known)
    assert found.error < 1e-20
    assert found.rows == ()
    with pytest.raises(ValueError, match="2 to 7"):
        known.before(1)


def test_a_body_that_was_given_keeps_no_rows_of_another(truth, decoded):
    known = chen_li.exact(truth)
    later = replace(known, rows=decoded.rows[1:], bodies=(known.bodies[0], decoded.bodies[1]))
    assert later.before(3).rows == ()
    assert later.before(5).rows == decoded.rows[1:]
    assert decoded.before(3).rows == decoded.rows[:1]


def test_phases_are_saved_and_gone_on_from(decoded, examples, tmp_path):
    path = tmp_path / "phases.safetensors"
    decoded.save(path)
    again = chen_li.load_phases(path)
    assert again.plan == "decode"
    assert np.array_equal(again.layer.theta, decoded.layer.theta)
    assert [len(rows) for rows in again.rows] == [len(rows) for rows in decoded.rows]
    assert again.crude.chosen.name == decoded.crude.chosen.name
    assert again.span.angles == decoded.span.angles
    assert type(again.bodies[0]) is type(decoded.bodies[0])
    found = chen_li.run(examples, HEADS, "decode", again.before(7))
    assert found.error < 1e-14
    with pytest.raises(ValueError, match="layer"):
        mha.load_layer(path)
    decoded.layer.save(path)
    with pytest.raises(ValueError, match="phases"):
        chen_li.load_phases(path)


def test_exact_phases_are_saved_too(truth, tmp_path):
    path = tmp_path / "phases.safetensors"
    chen_li.exact(truth).save(path)
    assert isinstance(chen_li.load_phases(path).bodies[0], HullBody)


def test_the_estimator_takes_a_plan_and_keeps_the_phases(truth, examples):
    model = mha.AttentionRegressor(HEADS, "sculpt", plan="decode").fit(examples)
    assert model.outcome_ is Outcome.RECOVERED
    assert model.solution_.phases.plan == "decode"
    assert model.solution_.phases.error < 1e-12
    assert mha.compare(model.layer_, truth).max_error < 1e-12


def test_plans_that_mean_nothing_are_refused(examples):
    sculpt = find_learner("sculpt")
    with pytest.raises(ValueError, match="one of practical, literal, decode"):
        mha.AttentionRegressor(HEADS, "sculpt", plan="best").fit(examples)
    with pytest.raises(ValueError, match="has none"):
        mha.AttentionRegressor(HEADS, "newton", plan="decode").fit(examples)
    with pytest.raises(ValueError, match="pass one of them"):
        find_options(sculpt, ChenLiOptions(plan="literal"), "decode")
    assert find_options(sculpt, None, "literal") == ChenLiOptions(plan="literal")


def test_the_command_line_takes_a_plan(examples, tmp_path, capsys):
    path = tmp_path / "examples.safetensors"
    examples.subset(slice(0, 200)).save(path)
    assert cli.run(["learn", str(path), "--plan", "decode"]) == 2
    assert "--method sculpt" in capsys.readouterr().err
    assert cli.run(["learn", str(path), "--method", "sculpt", "--plan", "best"]) == 2
    assert "practical, literal, decode" in capsys.readouterr().err
    asked = ["learn", str(path), "--heads", "2", "--method", "sculpt", "--plan", "decode"]
    assert cli.run([*asked, "--json"]) == 3  # too few rows certify
    assert '"STUCK"' in capsys.readouterr().out


# Distributions


def test_tokens_of_any_distribution_are_whitened_and_said(truth):
    """A vocabulary of Gaussian tokens, stretched and shifted: the layer comes back all the same."""
    rng = np.random.default_rng(5)
    table = rng.normal(size=(200, D)) * np.linspace(0.5, 1.5, D) + 0.3
    x = table[rng.integers(200, size=(N, K))]
    found = chen_li.run(Examples(x, truth(x)), HEADS, "decode")
    assert found.whitening is not None
    assert found.error < 1e-16
    assert mha.compare(found.layer, truth).max_error < 1e-7
    spread = np.cov((x.reshape(-1, D) @ whiten_tokens(x)).T)
    assert np.allclose(spread, np.eye(D), atol=1e-8)


def test_strong_chains_stop_with_a_reason(truth):
    rng = np.random.default_rng(6)
    kept = np.where(rng.random((N, K - 1, D)) < 0.97, 1.0, -1.0)
    first = rng.choice([-1.0, 1.0], size=(N, 1, D))
    x = np.cumprod(np.concatenate([first, kept], axis=1), axis=1)
    model = mha.AttentionRegressor(HEADS, "sculpt").fit(x, truth(x))
    if model.outcome_ is not Outcome.RECOVERED:
        assert model.outcome_ is Outcome.STUCK
        assert "neighbouring tokens correlate" in model.solution_.reason
    assert any("neighbouring tokens correlate" in event.detail for event in model.trace_)


def test_phase_one_is_not_worse_than_the_paper(truth, examples, decoded):
    total = truth.w.sum(axis=0)
    paper = relative(chen_li.paper_sum(examples).estimate, total)
    assert relative(decoded.crude.estimate, total) <= 1.1 * paper


def test_beyond_a_width_no_gram_matrix_is_formed(truth, examples):
    rows = chen_li.screen_pairs(examples, truth.w.sum(axis=0), 6 * D * D)
    dense = chen_li.fit_shape(rows, HEADS, 2 * D * D)
    free = chen_li.fit_shape(rows, HEADS, 2 * D * D, Constants(largest_dense=0), sought=6)
    assert chen_li.span_angle(dense.span, free.span) < 1e-3
    assert relative(free.proxy, dense.proxy) < 1e-3
    assert np.allclose(free.eigenvalues[:4], dense.eigenvalues[:4], rtol=0.3)
