"""The six phases: each against an independent answer, the learner end to end, honest breakdowns."""

import itertools

import numpy as np
import pytest
from scipy.optimize import linprog, minimize

import mhalearn as mha
from mhalearn.layer.dense import Dense
from mhalearn.learners import ChenLiOptions, Constants, chen_li
from mhalearn.learners.chen_li import Breakdown, learn_chen_li, run_phases
from mhalearn.learners.chen_li.body_shape import fit_shape
from mhalearn.learners.chen_li.breakdown import check_rank
from mhalearn.learners.chen_li.epsilon_net import literal_net
from mhalearn.learners.chen_li.input_distribution import recognise_inputs
from mhalearn.learners.chen_li.phase2_body import ConvexBody, sculpt_body
from mhalearn.learners.chen_li.phase2_certification import (
    certify_rows,
    screen_pairs,
    solve_programmes,
)
from mhalearn.learners.chen_li.phase3_refined_sum import large_margin_rows, refine_projection_sum
from mhalearn.learners.chen_li.phase5_span import span_by_queries
from mhalearn.learners.chen_li.programme_vertices import has_few_vertices, solve_by_vertices
from mhalearn.learners.chen_li.span import exact_span, span_angle
from mhalearn.run.outcome import Outcome
from mhalearn.run.run import Run
from mhalearn.solvers.scaled_problem import make_problem

HEADS, D, K, N = 2, 8, 3, 40_000


@pytest.fixture(scope="module")
def truth():
    return mha.random_layer(n_heads=HEADS, d=D, scale=4.0, seed=11)


@pytest.fixture(scope="module")
def examples(truth):
    return mha.Examples.from_callable(truth, "boolean", n=N, k=K, d=D, seed=12)


@pytest.fixture(scope="module")
def rows(truth, examples):
    return screen_pairs(examples, truth.w.sum(axis=0), 5 * D * D)


@pytest.fixture(scope="module")
def phases(examples):
    return run_phases(examples, HEADS, Run())


def relative(estimate, exact):
    return np.linalg.norm(estimate - exact) / np.linalg.norm(exact)


def test_the_screen_finds_the_best_pairs_of_a_naive_loop(truth, examples):
    part, total = examples.subset(slice(0, 300)), truth.w.sum(axis=0)
    x, y, _ = part.arrays()
    scores = []
    for n, r, (a, b) in itertools.product(range(300), range(K), [(1, 0), (2, 0), (2, 1)]):
        along = (x[n, a].astype(float) - x[n, b]) @ total
        apart = y[n, r] - x[n, b] @ total
        q = apart @ along / (along @ along) if along @ along > 0 else 0.0
        if 0.1 < q < 0.9 and len(np.unique(x[n], axis=0)) == K:
            left = np.linalg.norm(apart - q * along) / np.linalg.norm(along)
            scores.append((left / (q * (1 - q)), n, r, a, b))
    expected = {tuple(found[1:]) for found in sorted(scores)[:20]}
    rows = screen_pairs(part, total, 20)
    found = zip(rows.example, rows.row, rows.pair[:, 0], rows.pair[:, 1], strict=True)
    assert {tuple(int(i) for i in one) for one in found} == expected


def test_screen_and_programme_agree_on_the_pair_and_the_programme_is_never_worse(truth, rows):
    total = truth.w.sum(axis=0)
    own = np.zeros((len(rows), K), bool)
    own[np.arange(len(rows))[:, None], rows.pair] = True
    face = certify_rows(rows.tokens, rows.labels, total, own)
    assert np.abs(face.residual - rows.residual).max() < 1e-6
    whole = certify_rows(rows.tokens, rows.labels, total)
    assert np.all(whole.residual <= face.residual + 1e-9)
    assert np.allclose(whole.attention.sum(axis=1), 1.0)


@pytest.mark.parametrize(("k", "e"), [(2, 5), (3, 8), (4, 6)])
def test_the_best_vertex_of_a_programme_is_what_a_simplex_method_finds(k, e):
    rng = np.random.default_rng(k)
    images = rng.normal(size=(60, k, e))
    images[:5, 0] = images[:5, 1]  # equal tokens: planes that do not meet in one point
    labels = np.einsum("ck,cke->ce", rng.dirichlet(np.ones(k), 60), images)
    labels[20:] += 0.5 * rng.normal(size=(40, e))
    labels[30] = 0.0
    upper = np.ones((60, k))
    upper[40:, 0] = 0.0
    assert has_few_vertices(k, e)
    found, expected = (
        solve(images, labels, upper) for solve in (solve_by_vertices, solve_programmes)
    )
    left, least = (
        np.abs(labels - np.einsum("ck,cke->ce", p, images)).sum(axis=1) for p in (found, expected)
    )
    assert np.abs(left - least).max() < 1e-9
    assert found.min() >= 0
    assert np.abs(found.sum(axis=1) - 1).max() < 1e-12
    assert found[40:, 0].max() == 0
    assert not has_few_vertices(6, 24)


def test_equal_tokens_certify_nothing(truth):
    """They share their weight: the label shows log(p_a / (p_b + p_c)), which no head has."""
    tokens = mha.sample_inputs("boolean", 500, K, D, seed=5)
    tokens[:, 2] = tokens[:, 1]
    one = truth.replace(theta=truth.theta[:1], w=truth.w[:1])
    found = screen_pairs(mha.Examples(tokens, one(tokens)), one.w[0], 100)
    assert len(found) == 0


def test_certified_rows_are_rows_on_which_the_heads_agree(truth, rows):
    logits = np.einsum("cd,mde,ce->cm", rows.query, truth.theta, rows.difference)
    errors = np.abs(logits - rows.log_odds[:, None]).max(axis=1)
    assert np.median(errors) < 0.2
    assert np.mean(errors < 1.0) > 0.95


def test_minimum_norm_point_equals_an_independent_solver():
    rng = np.random.default_rng(0)
    query, difference, point = (
        rng.normal(size=(12, 2)),
        rng.normal(size=(12, 2)),
        rng.normal(size=4),
    )
    normals = np.stack([np.outer(*pair).ravel() for pair in zip(query, difference, strict=True)])
    offsets = normals @ point + 0.1 * rng.normal(size=12)
    body = ConvexBody(query, difference, offsets, np.full(12, 0.3), box=2.0, penalty=5.0)
    found = body.minimum_norm_point().ravel()

    def objective(theta):
        slack = np.maximum(np.abs(normals @ theta - offsets) - 0.3, 0)
        return 0.5 * theta @ theta + 5.0 * slack.sum()

    options = {"maxiter": 20_000, "xatol": 1e-9, "fatol": 1e-12}
    other = minimize(objective, point, method="Nelder-Mead", options=options)
    assert objective(found) <= other.fun + 1e-6
    assert np.abs(found).max() <= 2.0 + 1e-6


def test_linear_optimisation_membership_and_width_of_a_known_box():
    eye = np.eye(2)
    body = ConvexBody(eye[[0, 0]], eye, np.zeros(2), np.array([1.0, 0.5]), box=3.0, penalty=100.0)
    best = body.maximise(np.array([[1.0, 1.0], [1.0, 0.0]]))
    assert np.allclose(best.ravel()[:3], [1.0, 0.5, 3.0])
    assert body.width(np.array([[0.0, 1.0], [0.0, 0.0]])) == pytest.approx(1.0)
    assert body.membership(np.zeros((2, 2))).inside
    outside = body.membership(np.array([[1.5, 0.0], [0.0, 0.0]]))
    assert not outside.inside
    assert outside.violation == pytest.approx(0.5)


@pytest.fixture(scope="module")
def polytope():
    rng = np.random.default_rng(5)
    query, difference = rng.normal(size=(2, 40, 3))
    return ConvexBody(query, difference, 0.2 * rng.normal(size=40), np.full(40, 0.5), box=2.0)


def test_members_on_a_ray_are_those_that_satisfy_every_row(polytope):
    rng = np.random.default_rng(6)
    for inside, start in ((True, np.zeros((3, 3))), (False, rng.normal(size=(3, 3)))):
        ways, lengths = rng.normal(size=(200, 3, 3)), rng.exponential(0.2, size=200)
        ways[:50, 0] = 0.0
        found = polytope.along(start, ways)(lengths)
        points = start + lengths[:, None, None] * ways
        assert found.tolist() == [polytope.membership(point).inside for point in points]
        assert not inside or 0.2 < found.mean() < 0.8
    way, turned = ways[0], ways[0] + 0.1 * np.eye(9).reshape(9, 3, 3)
    one, other = polytope.along(start, way, 0.1), polytope.along(start, turned)
    for length in (0.0, 0.1, 0.3, 1.0):
        assert np.array_equal(one(np.full(9, length)), other(np.full(9, length)))


def test_linear_optimisation_over_a_body_equals_an_independent_solver(polytope):
    rng = np.random.default_rng(7)
    normals, c = polytope.normals, len(polytope.offsets)
    for direction in rng.normal(size=(3, 3, 3)):
        price = polytope.penalty * np.linalg.norm(direction)
        solved = linprog(
            np.concatenate([-direction.ravel(), np.full(c, price)]),
            A_ub=np.block([[normals, -np.eye(c)], [-normals, -np.eye(c)]]),
            b_ub=np.concatenate([polytope.offsets + 0.5, 0.5 - polytope.offsets]),
            bounds=[(-2.0, 2.0)] * 9 + [(0, None)] * c,
        )
        best = polytope.maximise(direction)
        excess = np.maximum(np.abs(polytope.errors(best)) - polytope.tolerances, 0).sum()
        assert np.sum(direction * best) - price * excess == pytest.approx(-solved.fun, rel=1e-5)


def test_shape_and_queries_find_the_span_of_the_heads(truth, rows):
    exact = exact_span(truth.theta)
    shape = fit_shape(rows, HEADS, 2 * D * D)
    assert span_angle(shape.span, exact) < 0.1
    assert relative(shape.proxy, exact.proxy) < 0.1
    assert shape.guess_heads(5)[0] == HEADS
    body = sculpt_body(rows.select(slice(0, 2 * D * D)), shape.proxy)
    queried = span_by_queries(body, HEADS)
    assert queried.queries == 7
    assert span_angle(queried, shape.span) < 0.15


def test_refined_sum_needs_the_proxy_and_robustness(truth, examples):
    total, exact = truth.w.sum(axis=0), exact_span(truth.theta)
    start = 1.2 * total
    margins = large_margin_rows(examples, exact.proxy, 40 * D)
    robust = relative(refine_projection_sum(margins, start).estimate, total)
    plain = relative(refine_projection_sum(margins, start, robust=False).estimate, total)
    random = np.random.default_rng(1).normal(size=(D, D))
    others = large_margin_rows(examples, random, 40 * D)
    control = relative(refine_projection_sum(others, start, robust=False).estimate, total)
    assert robust < 1e-3
    assert robust < 0.1 * plain < 0.1 * control


def test_literal_net_contains_a_good_candidate(truth, examples):
    kind = Dense(examples.architecture(HEADS))
    fit = make_problem(examples.subset(slice(0, 200)), kind)
    held = make_problem(examples.subset(slice(200, 400)), kind)
    span = exact_span(truth.theta)
    coarse = literal_net(span, fit, held, radius=1.6, spacing=0.8)
    fine = literal_net(span, fit, held, radius=1.6, spacing=0.4)
    assert len(coarse[2]) < len(fine[2])
    assert fine[1] == fine[2][0] <= coarse[1]
    assert fine[1] < 0.1
    with pytest.raises(ValueError, match="positive"):
        literal_net(span, fit, held, radius=0.0, spacing=0.4)


def test_phases_learn_the_layer_before_polish(truth, phases):
    total = truth.w.sum(axis=0)
    assert relative(phases.crude.estimate, total) < 0.4
    assert relative(phases.sums[-1].estimate, total) < 1e-2
    assert phases.net.error < 1e-2
    assert mha.compare(phases.net.layer, truth).max_error < 0.2
    assert np.sum(phases.net.candidates < 1.5 * phases.net.candidates[0]) >= 2


@pytest.mark.slow
def test_estimator_recovers_after_polish_and_counts_heads(truth, examples):
    model = mha.AttentionRegressor(n_heads="auto", method="sculpt").fit(examples)
    assert model.outcome_ is Outcome.RECOVERED
    assert model.n_heads_ == HEADS
    assert mha.compare(model.layer_, truth.canonical()).max_error < 1e-10
    stages = [event.stage for event in model.trace_]
    assert next(s for s in stages if s.startswith("phase")) == "phase 1: crude sum"
    assert "theory" in stages


def test_one_head_is_counted_as_one_and_learned():
    truth = mha.random_layer(n_heads=1, d=D, scale=4.0, seed=3)
    examples = mha.Examples.from_callable(truth, "boolean", n=N // 2, k=K, d=D, seed=4)
    phases = run_phases(examples, None, Run())
    assert phases.net.layer.n_heads == 1
    assert phases.net.error < 1e-8


def test_time_limit_ends_a_pass(examples):
    solution = learn_chen_li(examples, examples.architecture(HEADS), Run(max_seconds=1e-3))
    assert solution.outcome is Outcome.TIME_LIMIT
    assert "phase 1" in solution.reason


def test_passes_tell_their_progress(examples):
    seen = []
    screen_pairs(examples, np.eye(D), 10, watch=lambda done, of: seen.append((done, of)))
    assert seen[-1] == (N, N)


def test_without_polish_a_good_run_is_fitted(examples):
    model = mha.AttentionRegressor(HEADS, "sculpt", polish=False).fit(examples)
    assert model.outcome_ is Outcome.FITTED
    assert "before polish" in model.solution_.reason


def test_zero_label_rows_can_be_certified(truth):
    tokens = np.ones((2, K, D))
    found = certify_rows(tokens, np.zeros((2, D)), truth.w.sum(axis=0))
    assert np.isfinite(found.residual).all()


def test_a_degenerate_sum_is_named(truth):
    check_rank(truth.w.sum(axis=0), K, Constants())
    with pytest.raises(Breakdown, match="degenerate: 1 of its singular values"):
        check_rank(np.outer(np.arange(1, D), np.ones(D)), K, Constants())
    narrow = truth.replace(w=np.einsum("md,e->mde", truth.w[:, :, 0], truth.w[0, 0]))
    examples = mha.Examples.from_callable(narrow, "boolean", n=2000, k=K, d=D)
    with pytest.raises(Breakdown, match=r"above the 1 directions of the labels"):
        run_phases(examples, HEADS, Run())


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("boolean", "boolean"),
        ("gaussian", "gaussian"),
        ("uniform", "other"),
        ("shifted", "other"),
        ("correlated", "other"),
        ("repeated", "other"),
    ],
)
def test_inputs_are_recognised(truth, kind, expected):
    def uniform(n, k, d, rng):
        return rng.uniform(-1, 1, size=(n, k, d))

    def shifted(n, k, d, rng):
        return rng.normal(size=(n, k, d)) + 0.3

    def correlated(n, k, d, rng):
        common = rng.normal(size=(n, k, 1))
        return np.sign(rng.normal(size=(n, k, d)) + common)

    def repeated(n, k, d, rng):
        return np.repeat(rng.choice([-1.0, 1.0], size=(n, 1, d)), k, axis=1)

    samplers = (uniform, shifted, correlated, repeated)
    sampler = {one.__name__: one for one in samplers}.get(kind, kind)
    examples = mha.Examples.from_callable(truth, sampler, n=2000, k=K, d=D)
    assert recognise_inputs(examples).kind == expected


def test_breakdowns_name_the_phase_and_the_number(truth):
    def run(layer, n=2000, k=K, inputs="boolean", heads=HEADS):
        examples = mha.Examples.from_callable(layer, inputs, n=n, k=k, d=D)
        run_phases(examples, heads, Run())

    with pytest.raises(
        Breakdown, match=r"m \(k - 1\) = 10 is above the 8 directions of the labels"
    ):
        run(truth, k=6)
    with pytest.raises(Breakdown, match="rows certify"):
        run(truth, n=50)
    cancelling = truth.replace(w=np.stack([truth.w[0], -truth.w[0]]))
    with pytest.raises(Breakdown, match=r"projections cancel|rows certify"):
        run(cancelling, n=20_000)


def test_flat_attention_certifies_no_pair(truth):
    """All tokens weigh a third: with the exact sum no pair carries a row."""
    flat = truth.replace(theta=1e-3 * truth.theta)
    examples = mha.Examples.from_callable(flat, "boolean", n=2000, k=K, d=D)
    with pytest.raises(Breakdown, match=r"confirmed|certify"):
        chen_li.run(examples, HEADS, start=chen_li.exact(flat).before(2))


def test_a_breakdown_is_an_outcome_and_what_is_not_modelled_is_refused(truth):
    examples = mha.Examples.from_callable(truth, "boolean", n=50, k=K, d=D)
    solution = learn_chen_li(examples, examples.architecture(HEADS), Run())
    assert solution.outcome is Outcome.STUCK
    assert solution.reason.startswith("phase 2")
    with pytest.raises(ValueError, match="bias=True"):
        learn_chen_li(examples, examples.architecture(HEADS, bias=True), Run())
    with pytest.raises(ValueError, match="bias=True"):
        mha.AttentionRegressor(HEADS, "sculpt", bias=True).fit(examples)


def test_a_row_that_is_not_worth_certifying_is_an_option(examples):
    strict = ChenLiOptions(constants=Constants(worst_score=1e-12))
    candidate = learn_chen_li(examples, examples.architecture(HEADS), Run(), strict)
    assert candidate.outcome is Outcome.STUCK
    assert "certify at score 1e-12" in candidate.reason
