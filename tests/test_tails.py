"""Lemmas measured: bounds that are proved hold, oracles agree, and a sparse Theta breaks them."""

import itertools
import json
import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import binomtest, norm

import mhalearn as mha
from mhalearn import tails
from mhalearn.data import Examples
from mhalearn.learners.chen_li.phase2_certification import screen_pairs
from mhalearn.tails.anticoncentration import at_most_in_interval, distance_to_normal, erdos
from mhalearn.tails.softmax import find_change

LAYER = mha.random_layer(2, 16, scale=4.0, seed=3)
QUICK = {"n": 20_000, "seed": 5}


def signs(d: int) -> np.ndarray:
    return np.array(list(itertools.product([-1.0, 1.0], repeat=d)))


def sparse_theta(d: int = 16) -> np.ndarray:
    """Four entries, of the norm that LAYER's heads have."""
    theta = np.zeros((d, d))
    theta[:2, :2] = [[1, 1], [1, -1]]
    return 4 * theta / np.linalg.norm(theta)


@pytest.mark.parametrize("inputs", ["boolean", "gaussian"])
@pytest.mark.parametrize(("m", "d", "k", "scale"), [(1, 6, 2, 1.0), (3, 16, 4, 4.0)])
def test_no_proved_bound_is_contradicted(inputs: str, m: int, d: int, k: int, scale: float) -> None:
    records = tails.table(mha.random_layer(m, d, scale=scale, seed=m), k, inputs, **QUICK)
    assert len(records) == 9
    for record in records:
        assert record.holds, record.name
        assert np.all((record.lower <= record.measured) & (record.measured <= record.upper))
    # All but certified rows, and agreement of signs, have a bound that is proved.
    assert sum(record.proved for record in records) == (8 if inputs == "gaussian" else 7)


def test_sparse_theta_is_far_from_normal_where_a_dense_one_is_near() -> None:
    dense, sparse = (tails.berry_esseen(theta, **QUICK) for theta in (LAYER, sparse_theta()))
    assert dense.measured.max() < 0.02
    assert sparse.lower.max() > 0.1
    assert sparse.holds
    assert sparse.bounds[0].values[0] > 1.5 * dense.bounds[0].values[0]


def test_sparse_theta_has_a_large_small_ball() -> None:
    t = [0.05]
    dense, sparse = (tails.small_ball(theta, t=t, **QUICK) for theta in (LAYER, sparse_theta()))
    # Half of the queries have one weight, and of two signs half cancel; or all weights vanish.
    assert sparse.lower[0] > 20 * dense.upper[0]
    assert sparse.holds


def test_a_false_bound_is_contradicted() -> None:
    """The normal law's chance, claimed for signs with few weights, is caught."""
    record = tails.small_ball(sparse_theta(), t=[0.05], **QUICK)
    normal = tails.small_ball(sparse_theta(), "gaussian", t=[0.05], **QUICK).bounds[0]
    assert record.contradicts(normal).all()


def test_bounds_hold_against_all_signs() -> None:
    """Every sign of a small token, instead of draws."""
    rng = np.random.default_rng(0)
    x, t = signs(7), np.linspace(0, 2, 9)
    for a in rng.standard_normal((20, 7)):
        sums, centre = x @ a, rng.standard_normal(1)
        exact = np.mean(np.abs(sums[:, None] - centre) <= t, axis=0)
        assert np.all(exact <= at_most_in_interval(a[None], centre, t, 1, gaussian=False) + 1e-12)
        assert np.all(exact <= erdos(a[None], t, 1) + 1e-12)
        grid = np.linspace(-3, 3, 101)
        standard = np.mean(sums[:, None] <= grid * np.linalg.norm(a), axis=0)
        apart = np.max(np.abs(standard - norm.cdf(grid)))
        assert apart <= distance_to_normal(a[None], 1, gaussian=False)[0]


def test_hanson_wright_holds_against_all_pairs_of_signs() -> None:
    theta = np.random.default_rng(1).standard_normal((5, 5))
    record = tails.hanson_wright(theta, n=100)
    exact = np.mean(np.abs(signs(5) @ theta @ signs(5).T)[..., None] >= record.t, axis=(0, 1))
    for bound in record.bounds:
        assert np.all(exact <= bound.values)


def test_softmax_changes_no_more_with_a_weight_than_the_coupling_says() -> None:
    theta = np.random.default_rng(2).standard_normal((3, 3))
    x, length = signs(3), 2
    logits = x @ theta @ x.T
    own = np.diagonal(logits)[:, None]
    p = (1 / (1 + np.exp(logits - own))).mean(axis=1)  # given the query, over the other token
    weight = (x[:, :length] > 0).sum(axis=1)
    means = np.array([p[weight == w].mean() for w in range(length + 1)])
    assert np.max(np.abs(np.diff(means))) <= find_change(theta, 2, length)
    record = tails.softmax_concentration(theta, 2, length=length, n=30_000)
    mean = p.mean()
    chance = np.array([math.comb(length, w) for w in range(length + 1)]) / 2**length
    exact = chance @ (np.abs(means - mean)[:, None] >= record.t)
    assert np.all((record.lower <= exact) & (exact <= record.upper))


def test_intervals_are_those_of_scipy() -> None:
    lower, upper = tails.clopper_pearson([0, 3, 10], 10, 0.95)
    for place, count in enumerate((0, 3, 10)):
        limits = binomtest(count, 10).proportion_ci(0.95, method="exact")
        assert (lower[place], upper[place]) == pytest.approx((limits.low, limits.high))


def test_proxy_has_the_same_inner_product_with_every_head() -> None:
    layer = mha.random_layer(3, 6, seed=1)
    proxy = tails.find_proxy(layer)
    assert np.allclose(np.einsum("mde,de->m", layer.theta, proxy), np.sum(proxy**2))
    with pytest.raises(ValueError, match="no proxy"):
        tails.find_proxy(np.stack([layer.theta[0], -layer.theta[0]]))


def test_certified_rows_are_those_of_the_screen() -> None:
    """The learner's own screen, on the same tokens: the scores it gives the same rows."""
    from mhalearn.tails.certified import _best_scores

    tokens = mha.sample_inputs("boolean", 4000, 3, 16, seed=2).astype(float)
    examples = Examples(tokens, LAYER(tokens))
    found = screen_pairs(examples, LAYER.w.sum(axis=0), 500)
    scores = _best_scores(tokens, LAYER.theta, LAYER.w, False)
    mine = {int(place) for place in np.flatnonzero(scores < 0.3)}
    theirs = set(found.example[(found.row == 0) & (found.score < 0.33)].tolist())
    assert len(mine) > 20
    assert mine <= theirs


def test_matched_rows_are_certified_ones() -> None:
    asked = {"tolerances": [0.1, 0.2, 0.4], **QUICK}
    certified = tails.certified_share(LAYER, 3, **asked)
    matched = tails.certified_share(LAYER, 3, matched=True, **asked)
    assert np.all(matched.measured <= certified.measured)
    assert matched.measured[-1] > 0.5 * certified.measured[-1]


def test_rows_with_equal_tokens_are_not_certified() -> None:
    """Of two words three tokens cannot all be distinct."""
    words = mha.sample_inputs("gaussian", 2, 2, 16, seed=1)[:, 0]
    assert tails.certified_share(LAYER, 3, inputs=words, n=1000).measured.max() == 0


def test_draws_are_those_of_the_seed_and_laws_may_be_the_callers() -> None:
    vocabulary = mha.sample_inputs("gaussian", 50, 2, 16, seed=1)[:, 0]
    for inputs in ("boolean", vocabulary, lambda n, k, d, rng: rng.laplace(size=(n, k, d))):
        first, again, other = (
            tails.small_ball(LAYER, inputs, n=2000, seed=seed) for seed in (1, 1, 2)
        )
        assert np.array_equal(first.measured, again.measured)
        assert not np.array_equal(first.measured, other.measured)
        assert first.proved == isinstance(inputs, str)


def test_record_survives_json_and_is_drawn() -> None:
    record = tails.agreement(LAYER, 3, n=2000)
    again = tails.read_tail(json.loads(json.dumps(record.to_json())))
    assert again.to_json() == record.to_json()
    axes = tails.plot(again).axes[0]
    assert axes.get_xlabel() == record.abscissa
    assert "| agreement" in tails.to_markdown((record,))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: tails.small_ball(np.zeros((4, 4))), "is zero"),
        (lambda: tails.small_ball(np.ones((4, 3))), r"expected \(d, d\)"),
        (lambda: tails.small_ball(LAYER, head=2), "heads 0 to 1"),
        (lambda: tails.small_ball(LAYER, "uniform"), "unknown"),
        (lambda: tails.small_ball(LAYER, np.ones((3, 5))), r"tokens \(v, 16\)"),
        (lambda: tails.small_ball(LAYER, t=[1.0, 0.5]), "must increase"),
        (lambda: tails.small_ball(LAYER, confidence=1.0), "between 0 and 1"),
        (lambda: tails.margin_tail(LAYER, 1), "k=1"),
        (lambda: tails.softmax_concentration(LAYER, 3, np.ones((3, 16))), "Hamming weight"),
        (lambda: tails.softmax_concentration(LAYER, 3, length=17), "16 features"),
        (lambda: tails.agreement(mha.random_layer(2, 4, causal=True), 3), "causal"),
    ],
)
def test_callers_mistakes_are_named(call: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()
