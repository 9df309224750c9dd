"""Honest failure: what a run may call RECOVERED, and what it must call something else.

One shape serves the whole table, so that programs are compiled once: two heads, four features, four
tokens, 120 examples at a counting limit of four.
"""

import dataclasses

import numpy as np
import pytest

from mhalearn.data import Examples
from mhalearn.data.inputs import sample_inputs
from mhalearn.estimator import AttentionRegressor
from mhalearn.judge.certify import certify
from mhalearn.judge.consistency_checks import all_examples
from mhalearn.judge.evidence import Evidence
from mhalearn.judge.residual_dependence import residual_dependence_test
from mhalearn.judge.subsets import Subsets
from mhalearn.judge.verdict import judge
from mhalearn.layer.comparison import compare
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.random_layers import random_layer
from mhalearn.learners import NewtonOptions
from mhalearn.run.outcome import Candidate, Outcome
from mhalearn.run.run import Run

N, K, D = 120, 4, 4
TWO, THREE = random_layer(2, D, seed=3), random_layer(3, D, seed=3)
X = sample_inputs("gaussian", N, K, D, seed=1)
Y = TWO(X)
SIZE = float(np.sqrt(np.mean(Y**2)))

FITTED, STUCK = Outcome.FITTED, Outcome.STUCK
NOT_IDENTIFIED, TOO_FEW = Outcome.NOT_IDENTIFIED, Outcome.TOO_FEW_EXAMPLES
ON_SPAN = Outcome.RECOVERED_ON_SPAN


def rng(seed=0):
    return np.random.default_rng(seed)


def learn(x, y, n_heads=2, **options):
    return AttentionRegressor(n_heads, **options).fit(x, y)


def with_small_third_head(size):
    return THREE.replace(w=THREE.w * np.array([1, 1, size])[:, None, None])


def evidence_on(layer, train, certify, run=None, bias=False):
    """Of a layer that nobody had to search for."""
    both = (np.concatenate(pair) for pair in zip(train.arrays(), certify.arrays(), strict=True))
    working_set = Examples(*both)
    subsets = Subsets(working_set, working_set, train, certify)
    architecture = train.architecture(layer.n_heads, bias=bias)
    return Evidence(Candidate(layer), architecture, subsets, run or Run())


DUPLICATE = AttentionLayer(TWO.theta[[0, 0]], TWO.w)


# What is not a layer seen exactly


def noisy(level, dtype=np.float64):
    return X, (Y + level * SIZE * rng().standard_normal(Y.shape)).astype(dtype)


def shuffled():
    return X, Y[rng().permutation(N)]


def mlp_of_example():
    a, b = rng(1).standard_normal((K * D, 40)), rng(2).standard_normal((40, K * D))
    return X, (np.maximum(X.reshape(N, -1) @ a, 0) @ b).reshape(Y.shape)


def mlp_of_token():
    a, b = rng(1).standard_normal((D, 40)), rng(2).standard_normal((40, D))
    return X, np.tanh(X @ a) @ b


def linear_attention():
    return X, np.einsum("nra,mab,njb,njc,mce->nre", X, TWO.theta, X, X, TWO.w) / K


def corrupted_rows():
    y = Y.copy()
    y[rng(4).random((N, K)) < 0.05] += 1.0
    return X, y


def one_corrupted(example, by=1.0):
    y = Y.copy()
    y[example] += by
    return X, y


def one_corrupted_entry(example):
    y = Y.copy()
    y[example, 1, 2] += 1e-5
    return X, y


def one_label_without_tokens():
    """Tokens that are all zero make every layer return zero, whatever its parameters."""
    x, y = X.copy(), Y.copy()
    x[17], y[17] = 0.0, 1.0
    return x, y


def labelled(x, layer=TWO):
    return x, layer(x)


def constant_tokens():
    return np.repeat(X[:, :1], K, axis=1)


def tokens_in_a_subspace():
    return X[..., :3] @ rng(5).standard_normal((3, D))


def one_hot_tokens():
    return np.eye(D)[rng(6).integers(0, D, (N, K))]


def noise_in_a_small_column():
    layer = TWO.replace(w=TWO.w * np.array([1e7, 1, 1, 1]))
    y = layer(X)
    y[..., 1:] += 1e-6 * rng().standard_normal(y[..., 1:].shape)
    return X, y


def weak_feature(dtype):
    x = X.copy()
    x[..., -1] *= 3e-3
    return x, TWO(x).astype(dtype)


def repeated(n, level):
    """A few noisy examples many times over, their tokens in other orders: nothing to check with."""
    which = np.arange(105) % n  # as many as other fits have when some are held out
    x, y = X[which], (Y + level * rng().standard_normal(Y.shape))[which]
    orders = np.stack([rng(i).permutation(K) for i in range(105)])[..., None]
    return np.take_along_axis(x, orders, axis=1), np.take_along_axis(y, orders, axis=1)


def square(copies):
    """Four noisy examples are as many equations as unknowns; any labels would be met exactly."""
    x, y = X[:4], Y[:4] + 1e-3 * rng().standard_normal(Y[:4].shape)
    pairs = [copies(x, y, rng(i)) for i in range(15)]
    return np.concatenate([pair[0] for pair in pairs]), np.concatenate([p[1] for p in pairs])


def mirrored(x, y, g):
    sign = g.choice([-1.0, 1.0], (len(x), 1, 1))
    return sign * x, sign * y


def jittered(size):
    return lambda x, y, g: (x + size * g.standard_normal(x.shape), y)


def few_tell():
    """Of one token four times attention tells nothing; four other examples tell Theta's 16."""
    g = rng(2)
    x = np.concatenate([X[:2], np.repeat(X[2:, :1], K, axis=1)])
    p = g.dirichlet(np.full(K, 3.0), (N, K))
    return x, p @ x @ g.standard_normal((D, D))


def network():
    out = np.tanh(X @ rng(1).standard_normal((D, 30))) @ rng(2).standard_normal((30, D))
    return out / np.sqrt(np.mean(out**2))


def with_a_network(dtype):
    return X, (Y + 1.5e-3 * SIZE * network()).astype(dtype)


def small_column_of_a_network(dtype):
    y = Y.copy()
    y[..., 0] = 3e-4 * network()[..., 0]
    return X, y.astype(dtype)


def one_entry_off(dtype, by):
    y = Y.astype(dtype)
    y[7, 1, 2] += by
    return X, y


OPPOSITE = AttentionLayer(TWO.theta, np.stack([TWO.w[0], -TWO.w[0]]))
FAINT = random_layer(1, D, seed=0).replace(theta=1e-3 * random_layer(1, D, seed=0).theta)


TABLE = [
    ("noise of 1e-6", noisy(1e-6), 2, {FITTED}),
    ("noise of 1e-3", noisy(1e-3), 2, {FITTED}),
    ("noise of 0.1", noisy(0.1), 2, {FITTED}),
    ("noise above float32 precision", noisy(5e-6, np.float32), 2, {FITTED}),
    ("noise above float16 precision", noisy(0.03, np.float16), 2, {FITTED}),
    ("noise in a small column", noise_in_a_small_column(), 2, {FITTED}),
    ("quantised to hundredths", (X, np.round(Y, 2)), 2, {FITTED}),
    ("quantised to binary places", (X, np.round(64 * Y) / 64), 2, {FITTED}),
    ("integer labels", (X, np.round(100 * Y).astype(np.int32)), 2, {FITTED}),
    ("too few examples", (X[:3], Y[:3]), 2, {TOO_FEW}),
    ("one example", (X[:1], Y[:1]), 2, {TOO_FEW}),
    ("one example many times", (X[np.zeros(N, int)], Y[np.zeros(N, int)]), 2, {TOO_FEW}),
    ("three examples many times", repeated(3, 0.1), 2, {TOO_FEW}),
    ("no more equations than unknowns", repeated(4, 1e-3), 2, {FITTED, NOT_IDENTIFIED, STUCK}),
    ("four examples and mirror images", square(mirrored), 2, {FITTED}),
    ("four examples and near copies", square(jittered(1e-14)), 2, {FITTED}),
    ("few examples tell of attention", few_tell(), 1, {FITTED, STUCK, NOT_IDENTIFIED}),
    ("tokens in pairs", labelled(np.repeat(X[:, :2], 2, axis=1), OPPOSITE), 2, {NOT_IDENTIFIED}),
    ("attention float16 hardly sees", (X, FAINT(X).astype("f2")), 1, {FITTED}),
    (
        "a network below float16's floor",
        (X, (Y + 1.5e-3 * SIZE * network()).astype("f2")),
        2,
        {FITTED},
    ),
    ("a small column of a network", small_column_of_a_network("f2"), 2, {FITTED}),
    ("one float16 entry off", one_entry_off("f2", 0.5), 2, {FITTED}),
    ("float16 noise", (X, rng().standard_normal(Y.shape).astype("f2")), 2, {STUCK}),
    ("tokens on a line", labelled(np.sign(X[..., :1]) * X[0, 0]), 2, {FITTED, TOO_FEW}),
    ("too few heads", (X, THREE(X)), 2, {STUCK}),
    ("a small head too few", (X, with_small_third_head(1e-4)(X)), 2, {FITTED}),
    (
        "a head below float32's floor too few",
        (X, with_small_third_head(3e-6)(X).astype(np.float32)),
        2,
        {FITTED},
    ),
    (
        "a head below float16's floor too few",
        (X, with_small_third_head(2e-2)(X).astype(np.float16)),
        2,
        {FITTED, NOT_IDENTIFIED},
    ),
    ("a head too many", (X, Y), 3, {NOT_IDENTIFIED}),
    ("equal heads", (X, DUPLICATE(X)), 2, {NOT_IDENTIFIED}),
    ("labels shuffled", shuffled(), 2, {STUCK}),
    ("a network of the example", mlp_of_example(), 2, {STUCK}),
    ("a network of the token", mlp_of_token(), 2, {STUCK}),
    ("linear attention", linear_attention(), 2, {STUCK}),
    ("a residual path", (X, Y + X), 2, {STUCK}),
    ("an output bias", (X, Y + 1.0), 2, {STUCK}),
    ("a causal mask", (X, TWO.replace(causal=True)(X)), 2, {FITTED, STUCK}),
    ("corrupted rows", corrupted_rows(), 2, {FITTED, STUCK}),
    ("one corrupted example", one_corrupted(7), 2, {FITTED}),
    ("one slightly corrupted entry", one_corrupted_entry(50), 2, {FITTED}),
    ("one label without tokens", one_label_without_tokens(), 2, {FITTED}),
    ("constant tokens", labelled(constant_tokens()), 2, {NOT_IDENTIFIED}),
    (
        "constant tokens, one head",
        labelled(constant_tokens(), random_layer(1, D, seed=3)),
        1,
        {NOT_IDENTIFIED},
    ),
    ("tokens in a subspace", labelled(tokens_in_a_subspace()), 2, {ON_SPAN}),
    ("one-hot tokens", labelled(one_hot_tokens()), 2, {ON_SPAN}),
    ("a feature float16 hardly sees", weak_feature(np.float16), 2, {NOT_IDENTIFIED}),
    ("zero labels", (X, 0 * Y), 2, {NOT_IDENTIFIED}),
    ("zero inputs and labels", (0 * X, 0 * Y), 2, {NOT_IDENTIFIED, TOO_FEW}),
    ("labels without inputs", (0 * X, 1 + 0 * Y), 2, {STUCK, TOO_FEW}),
]


# Where nothing can be found the search goes through all its rounds; daily, through the first two.
BRIEF = NewtonOptions(plenty=NewtonOptions().plenty[:2])
DAILY = [
    pytest.param(*row[1:], BRIEF if STUCK in row[3] else NewtonOptions(), id=row[0])
    for row in TABLE
]
PATIENT = [
    pytest.param(*row[1:], NewtonOptions(), id=f"{row[0]}, patiently", marks=pytest.mark.slow)
    for row in TABLE
    if STUCK in row[3]
]


@pytest.mark.parametrize(("data", "n_heads", "expected", "options"), DAILY + PATIENT)
def test_what_is_no_layer_seen_exactly_is_never_recovered(data, n_heads, expected, options):
    estimator = learn(*data, n_heads, options=options)
    assert estimator.outcome_ is not Outcome.RECOVERED
    assert estimator.outcome_ in expected
    assert estimator.solution_.reason
    assert "\n" not in estimator.solution_.reason
    certificate = estimator.certificate_
    if certificate is not None and estimator.outcome_ in (FITTED, STUCK):
        assert not certificate.recovered
    assert np.isfinite(estimator.layer_.theta).all()
    assert np.isfinite(estimator.layer_.w).all()


@pytest.mark.parametrize("example", range(0, N, 15))
@pytest.mark.slow
def test_a_corrupted_example_is_noticed_wherever_it_lies(example):
    assert learn(*one_corrupted(example, 1e-3)).outcome_ is FITTED


# What is, is called so: the table above can fail both ways


RECOVERABLE = [
    ("two heads", (X, Y), TWO, 2),
    ("head count left open", (X, Y), TWO, "auto"),
    ("float32 labels", (X, Y.astype(np.float32)), TWO, 2),
    ("float32 labels stored as float64", (X, Y.astype(np.float32).astype(float)), TWO, 2),
    ("float16 labels", (X, Y.astype(np.float16)), TWO, 2),
    ("float32 inputs", labelled(X.astype(np.float32)), TWO, 2),
    ("boolean inputs", labelled(sample_inputs("boolean", N, K, D, seed=1)), TWO, 2),
    ("every example twice", (X[np.arange(N) // 2], Y[np.arange(N) // 2]), TWO, 2),
    ("equal heads, count left open", (X, DUPLICATE(X)), DUPLICATE, "auto"),
    ("a small third head", (X, with_small_third_head(1e-4)(X)), with_small_third_head(1e-4), 3),
    (
        "no attention",
        (X, X.mean(axis=1, keepdims=True) @ TWO.w[:1].repeat(N, 0) + 0 * X),
        AttentionLayer(0 * TWO.theta[:1], TWO.w[:1]),
        1,
    ),
    ("a head without attention", None, TWO.replace(theta=TWO.theta * [[[1]], [[0]]]), 2),
    ("large labels", (X, 2.0**40 * Y), TWO.replace(w=2.0**40 * TWO.w), 2),
    ("small inputs", (2.0**-30 * X, Y), AttentionLayer(2.0**60 * TWO.theta, 2.0**30 * TWO.w), 2),
]


@pytest.mark.parametrize(
    ("data", "truth", "n_heads"), [pytest.param(*row[1:], id=row[0]) for row in RECOVERABLE]
)
def test_what_is_a_layer_seen_exactly_is_recovered(data, truth, n_heads):
    x, y = labelled(X, truth) if data is None else data
    estimator = learn(x, y, n_heads)
    assert estimator.outcome_ is Outcome.RECOVERED, estimator.solution_.reason
    certificate = estimator.certificate_
    assert certificate.recovered
    assert certificate.null_dimension == 0
    tolerance = {"float16": 2e-3, "float32": 1e-6, "float64": 1e-7}[certificate.label_precision]
    assert compare(estimator.layer_, truth.canonical()).max_error < tolerance
    assert certificate.parameter_bound < 10 * tolerance


def test_recovered_rests_on_examples_that_were_not_used_to_fit():
    """The certificate's examples are an eighth, and no input of theirs is among the others."""
    estimator = learn(X[np.arange(N) // 2], Y[np.arange(N) // 2])
    train = int(estimator.layer_.metadata["n_examples"])
    assert train + estimator.certificate_.n_examples == N
    assert estimator.certificate_.n_examples == 2 * (60 // 8)
    assert estimator.certificate_.n_seen == 0


def test_examples_to_fit_that_contradict_the_layer_forbid_recovered():
    """Held-out examples alone would certify the truth; one other label cannot be made."""
    contradicting, held = Examples(*one_label_without_tokens()), Examples(X[:20], Y[:20])
    evidence = evidence_on(TWO, contradicting, held)
    assert evidence.certificate.recovered
    verdict = judge(evidence)
    assert verdict.outcome is FITTED
    assert "1 of them off" in verdict.reason
    assert judge(evidence_on(TWO, Examples(X, Y), held)).outcome is Outcome.RECOVERED


def test_the_canonical_form_of_equal_heads_is_returned():
    estimator = learn(X, DUPLICATE(X), 2)
    assert estimator.outcome_ is NOT_IDENTIFIED
    assert estimator.n_heads_ == 1
    assert compare(estimator.layer_, DUPLICATE.canonical()).max_error < 1e-10
    assert "n_heads=1" in estimator.solution_.reason


@pytest.mark.slow
def test_a_surplus_head_of_known_rank_has_only_that_many_dimensions():
    layer = random_layer(2, 6, rank=1, out_dim=1, seed=2)
    x = sample_inputs("gaussian", N, 5, 6, seed=2)
    learned = learn(x, layer(x), 3, head_dim=1)
    assert learned.outcome_ is NOT_IDENTIFIED
    assert "dimension at least 11)" in learned.solution_.reason  # 2 d - 1, not d^2


def test_surplus_heads_are_reported_with_the_count_to_ask_for():
    estimator = learn(X, Y, 3)
    assert estimator.n_heads_ == 2
    assert compare(estimator.layer_, TWO.canonical()).max_error < 1e-10
    assert "n_heads=2" in estimator.solution_.reason


@pytest.mark.parametrize(
    ("inputs", "of_head"),
    [
        # Of Theta what meets the missing direction, and one row of W.
        (tokens_in_a_subspace(), D * D - 9 + D),
        # Theta + u 1^T, and W + 1 u^T between two heads.
        (one_hot_tokens(), D + D / 2),
    ],
)
def test_what_tokens_do_not_span_is_counted_and_told(inputs, of_head):
    estimator = learn(inputs, TWO(inputs))
    assert estimator.certificate_.null_dimension == 0
    assert estimator.certificate_.span.n_open == 2 * of_head
    assert f"{2 * of_head:.0f} of {2 * 2 * D * D} parameters" in estimator.solution_.reason


def test_the_dimension_of_the_family_is_told():
    """All of Theta, and W but for its sum over heads."""
    estimator = learn(constant_tokens(), TWO(constant_tokens()))
    m = estimator.n_heads_
    expected = m * D * D + (m - 1) * D * D
    assert estimator.certificate_.null_dimension == expected
    assert f"dimension {expected} " in estimator.solution_.reason


@pytest.mark.parametrize(
    "options", [BRIEF, pytest.param(NewtonOptions(), marks=pytest.mark.slow)], ids=["", "patient"]
)
@pytest.mark.parametrize(
    ("data", "words"),
    [
        (noisy(1e-3), "looks like independent noise"),
        ((X, THREE(X)), "one more head explains"),
        ((X[:3], Y[:3]), "counting limit of 4.0"),
        (one_label_without_tokens(), "1 of them off"),
        (mlp_of_token(), "depends on the inputs"),
    ],
)
def test_the_reason_says_which(data, words, options):
    assert words in learn(*data, options=options).solution_.reason


def test_no_time_to_exclude_a_missing_head_forbids_recovered():
    """A box that computes in float32 errs by more than rounding; is it that, or a small head?"""
    x, y = noisy(1e-7, np.float32)
    subsets = Examples(x[20:], y[20:]), Examples(x[:20], y[:20])
    assert judge(evidence_on(TWO, *subsets)).outcome is Outcome.RECOVERED
    verdict = judge(evidence_on(TWO, *subsets, run=Run(1e-9)))
    assert verdict.outcome is FITTED
    assert "time limit" in verdict.reason


def test_with_two_tokens_a_function_is_recovered_and_said_to_be_one():
    estimator = learn(X[:, :2], TWO(X[:, :2]))
    assert estimator.outcome_ is Outcome.RECOVERED
    assert "other heads can make the same one" in estimator.solution_.reason


@pytest.mark.parametrize(
    ("share", "apart", "labels"), [(0.05, 3e-7, np.float32), (1e-4, 2e-9, np.float64)]
)
def test_nearly_symmetric_tokens_do_not_tell_a_weak_head_from_its_mirror_image(
    share, apart, labels
):
    rng = np.random.default_rng(3)
    layer = random_layer(2, 4, scale=2.0, seed=1)
    layer = layer.replace(w=np.stack([layer.w[0], share * layer.w[1]]))
    tokens = rng.standard_normal((400, 2, 4))
    x = np.concatenate([tokens, -tokens], axis=1) + apart * rng.standard_normal((400, 4, 4))
    estimator = AttentionRegressor(2, random_state=5).fit(x, layer(x).astype(labels))
    assert estimator.outcome_ is Outcome.NOT_IDENTIFIED
    assert not certify(layer, x[:200], layer(x[:200]).astype(labels)).recovered


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_heads_that_cancel_on_two_tokens_are_not_recovered(seed):
    layer = random_layer(2, 4, scale=2.0, seed=1)
    layer = layer.replace(w=np.stack([layer.w[0], -layer.w[0]]))
    x = sample_inputs("boolean", 400, 2, 4, seed=1)
    estimator = AttentionRegressor(2, random_state=seed).fit(x, layer(x))
    assert estimator.outcome_ is Outcome.NOT_IDENTIFIED
    assert "opposite sign in 2 of 2 heads" in estimator.solution_.reason


@pytest.mark.slow
def test_a_head_below_coarse_rounding_but_seen_is_missed_by_no_verdict():
    """Its share is that of the rounding itself, which predicts how much may be left."""
    layer = random_layer(3, 5, scale=2.0, seed=2)
    layer = layer.replace(w=layer.w * np.array([1, 1, 5e-4])[:, None, None])
    x = sample_inputs("boolean", 2000, 4, 5, seed=0)
    estimator = AttentionRegressor(2).fit(x, layer(x).astype(np.float16))
    assert estimator.outcome_ is FITTED
    assert "one more head" in estimator.solution_.reason


def test_the_noise_level_is_that_of_the_noise():
    estimator = learn(*noisy(1e-3))
    assert estimator.certificate_.noise_level == pytest.approx(1e-3 * SIZE, rel=0.15)


def test_too_few_examples_to_spare_any_are_not_recovered_though_fitted():
    # At 1.5 times the counting limit the fit is exact, and right, but nothing is left to show it.
    estimator = learn(X[:6], Y[:6])
    assert estimator.outcome_ is FITTED
    assert estimator.certificate_ is None
    assert "no example could be spared" in estimator.solution_.reason


def test_what_the_estimator_recovered_is_recovered_on_fresh_examples_too():
    estimator = learn(X, Y)
    x = sample_inputs("gaussian", 200, K, D, seed=77)
    certificate = certify(estimator.layer_, x, TWO(x))
    assert certificate.recovered
    assert certificate.n_exceeding == 0
    with pytest.raises(
        ValueError, match="120 of 120 examples are those the layer was learned from"
    ):
        certify(estimator.layer_, X, Y)


def attack(seed):
    """A random truth, and what is learned from inputs, precisions and head counts at random."""
    g = rng(seed)
    m, d, k = int(g.integers(1, 4)), int(g.integers(2, 6)), int(g.integers(3, 6))
    truth = random_layer(m, d, scale=float(g.choice([0.5, 2, 6])), seed=seed)
    kind = ["gaussian", "boolean"][seed % 2]
    x = sample_inputs(kind, int(g.integers(10, 150)), k, d, seed=seed).astype(float)
    if seed % 3 == 0:
        x[..., -1] *= 10.0 ** -g.integers(0, 5)
    y = truth(x).astype(g.choice(["float16", "float32", "float64"]))
    return truth, learn(x, y, int(g.integers(1, 4)), max_seconds=60.0)


@pytest.mark.slow
def test_random_attacks():
    """RECOVERED only if right; and some are, or there is nothing to be wrong about."""
    recovered = 0
    for seed in range(12):
        truth, estimator = attack(seed)
        if estimator.outcome_ is Outcome.RECOVERED:
            recovered += 1
            error = compare(estimator.layer_, truth.canonical()).max_error
            assert error < 2e-2, f"seed {seed}"
    assert recovered >= 2  # seeds 4, 6 and 7 can be; the others have too few heads, or too many


# Structure is named, and never called noise


AWAY = np.abs(np.arange(K)[:, None] - np.arange(K))


def attend(x, change):
    """Attention by a loop of our own, with logits (n, m, k, k) changed."""
    logits = change(np.einsum("nra,mab,njb->nmrj", x, TWO.theta, x))
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    p = weights / weights.sum(axis=-1, keepdims=True)
    return np.einsum("nmrj,njd,mde->nre", p, x, TWO.w)


def rotary_grouped(x):
    """Two query heads that share one key head, turned by positions, as decoders do."""
    g = rng(11)
    queries, key = g.standard_normal((2, D, D)), g.standard_normal((D, D))
    angle = np.arange(K)[:, None] * np.array([1.0, 0.1])

    def turn(t):
        even, odd = t[..., : D // 2], t[..., D // 2 :]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([even * cos - odd * sin, even * sin + odd * cos], axis=-1)

    out = 0.0
    for query, w in zip(queries, TWO.w, strict=True):
        logits = turn(x @ query) @ turn(x @ key).swapaxes(1, 2) / 2
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        out = out + weights / weights.sum(axis=-1, keepdims=True) @ x @ w
    return out


NAMED = [
    (lambda x: attend(x, lambda logits: logits - 0.5 * AWAY), {}, "distance"),
    (rotary_grouped, {}, "posi"),
    (lambda x: attend(x, lambda logits: np.where(AWAY <= 1, logits, -np.inf)), {}, "distance"),
    (TWO.replace(causal=True), {}, "learn with causal=True"),
    (TWO, {"causal": True}, "learn with causal=False"),
    (lambda x: TWO(x) + x, {}, "residual path y = x + F(x)"),
    (lambda x: TWO(x) + x, {"n_heads": 3}, "residual path y = x + F(x)"),
    (lambda x: TWO(x) + 0.3, {}, "bias=True"),
    (lambda x: attend(x, lambda logits: 6 * np.tanh(logits / 6)), {}, "soft cap"),
]


@pytest.mark.parametrize(("box", "settings", "words"), NAMED)
def test_what_is_no_such_layer_is_stuck_for_a_named_reason_and_without_intervals(
    box, settings, words
):
    x = sample_inputs("gaussian", 240, K, D, seed=1)
    learned = learn(x, box(x), **{"n_heads": 2, "options": BRIEF} | settings)
    assert learned.outcome_ is STUCK
    assert words in learned.solution_.reason
    assert "noise" not in learned.solution_.reason
    assert learned.certificate_.noise_level is None
    assert learned.certificate_.intervals is None


def test_a_head_that_passes_its_own_token_on_is_told():
    """It takes the place of a residual path, as far as a head can."""
    x = sample_inputs("gaussian", 240, K, D, seed=3)
    truth = random_layer(2, D, seed=6)
    reason = learn(x, truth(x) + x, options=BRIEF).solution_.reason
    assert "head 1 attends to its own token" in reason
    assert "with W = " in reason
    assert "residual path y = x + F(x)" in reason


@pytest.mark.parametrize(
    ("box", "words"),
    [
        (
            lambda x: attend(x, lambda logits: logits - 0.5 * AWAY),
            "permuting the tokens changes what the box answers",
        ),
        (
            lambda x: TWO(x) + 0.05 * np.sign(np.sin(1e4 * x)),
            "answers the same, so the residual is not noise",
        ),
    ],
)
def test_a_box_is_asked_twice_and_in_another_order_before_noise_is_said(box, words):
    examples = Examples.from_callable(box, inputs="gaussian", n=200, k=K, d=D, seed=0)
    learned = AttentionRegressor(2, options=BRIEF).fit(examples)
    assert words in learned.solution_.reason
    assert learned.certificate_.noise_level is None


def test_a_box_that_answers_at_random_may_be_called_noisy():
    g = rng(3)
    examples = Examples.from_callable(
        lambda x: TWO(x) + 0.01 * g.standard_normal(x.shape), inputs="gaussian", n=200, k=K, d=D
    )
    learned = AttentionRegressor(2).fit(examples)
    assert "looks like independent noise" in learned.solution_.reason
    assert learned.certificate_.noise_level == pytest.approx(0.01, rel=0.15)


def twin(layer):
    """With tokens a, a, a, b and b marked, opposite attention of both heads does the same."""
    marker = np.eye(D)[-1]
    return layer.replace(
        theta=-layer.theta, key_vector=-layer.key_vector + 2 * np.log(3) * marker, w=-layer.w
    )


def test_distant_layers_that_fit_as_well_are_not_said_to_be_excluded():
    g = rng(4)
    layer = random_layer(2, D, key_vector=True, out_bias=True, seed=5)
    layer = layer.replace(w=np.stack([layer.w[0], -layer.w[0]]))
    pairs = g.standard_normal((N, 2, D))
    pairs[..., -1] = [0.0, 1.0]
    x = pairs[:, [0, 0, 0, 1]]
    other = twin(layer)
    assert np.allclose(layer(x), other(x), atol=1e-12)
    subsets = [Examples(x[i], layer(x[i])) for i in (slice(20, None), slice(0, 20))]
    evidence = evidence_on(layer, *subsets, bias=True)
    verdict = judge(evidence)
    if verdict.outcome is Outcome.RECOVERED:
        assert "distant layers" in verdict.reason
    rivalled = dataclasses.replace(evidence, candidate=Candidate(layer, others=(other,)))
    verdict = judge(rivalled)
    assert verdict.outcome is NOT_IDENTIFIED


# Noise or structure


ZERO = AttentionLayer(np.zeros((1, D, D)), np.zeros((1, D, D)))


def gaussian_noise(g):
    return g.standard_normal((60, K, D))


def heavy_tailed_noise(g):
    return g.standard_t(2.5, (60, K, D))


def noise_of_unequal_columns(g):
    return g.standard_normal((60, K, D)) * np.array([1e3, 1, 1e-3, 0])


def noise_that_grows_with_the_input(g):
    return g.standard_normal((60, K, D)) * np.sum(X[:60] ** 2, axis=-1, keepdims=True)


@pytest.mark.parametrize(
    "noise",
    [gaussian_noise, heavy_tailed_noise, noise_of_unequal_columns, noise_that_grows_with_the_input],
)
def test_noise_does_not_look_like_structure(noise):
    runs = 25
    excess = np.array(
        [
            residual_dependence_test(ZERO, Examples(X[:60], noise(rng(seed))), seed)
            for seed in range(runs)
        ]
    )
    assert excess.max() < 6.0  # the verdict's bar
    # The largest of four standardised statistics, one a kernel, as it should be under noise.
    assert np.mean(excess > 3.0) <= 0.1
    assert -0.5 < np.median(excess) < 1.5


@pytest.mark.parametrize(
    "labels",
    [
        lambda: mlp_of_token()[1],
        lambda: linear_attention()[1],
        lambda: Y,
        lambda: X @ rng(9).standard_normal((D, D)),
    ],
)
def test_structure_does_not_look_like_noise(labels):
    y = labels()
    size = np.sqrt(np.mean(y**2))
    for seed in range(5):
        noisy_labels = y + 0.5 * size * rng(seed).standard_normal(y.shape)
        assert residual_dependence_test(ZERO, Examples(X, noisy_labels), seed) > 6.0


def test_a_layer_that_explains_everything_leaves_nothing():
    assert residual_dependence_test(ZERO, Examples(X, 0 * Y), 0) == 0.0


@pytest.mark.parametrize("factor", [1.0, 1 + 1.4e-6])
def test_all_examples_must_be_as_exact_as_the_working_set(factor):
    layer = random_layer(2, 6, seed=3)
    x = sample_inputs("gaussian", 300, 4, 6, seed=1)
    labels = layer(x).astype(np.float32)
    labels[40:] *= np.float32(factor)
    examples = Examples(x, labels)
    few = examples.subset(slice(0, 40))
    subsets = Subsets(examples, few, few, None)
    evidence = Evidence(Candidate(layer), examples.architecture(2), subsets, Run())
    assert (all_examples(evidence) is None) == (factor == 1.0)
