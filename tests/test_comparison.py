import re
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mhalearn.layer.comparison import compare
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.random_layers import random_layer


def random_pair(m, d, e, biased, seed):
    """Two unrelated layers whose heads differ much in size."""
    rng = np.random.default_rng(seed)
    return [
        AttentionLayer(
            rng.normal(size=(m, d, d)) * rng.lognormal(0, 2, (m, 1, 1)),
            rng.normal(size=(m, d, e)) * rng.lognormal(0, 2, (m, 1, 1)),
            rng.normal(size=(m, d)) if biased else None,
            rng.normal(size=e) if biased else None,
        )
        for _ in range(2)
    ]


def relative(learned, true, heads):
    """|learned - true| over max(norm of the true head, rms norm over heads), by definition."""
    rms = np.sqrt(sum(np.linalg.norm(head) ** 2 for head in heads) / len(heads))
    return np.linalg.norm(learned - true) / max(np.linalg.norm(true), rms)


def brute_force(learned, truth):
    """The best order among all, by the sum of squared relative errors; no key vectors."""
    best = None
    for order in permutations(range(truth.n_heads)):
        theta = [
            relative(learned.theta[j], truth.theta[i], truth.theta) for i, j in enumerate(order)
        ]
        w = [relative(learned.w[j], truth.w[i], truth.w) for i, j in enumerate(order)]
        cost = np.sum(np.square(theta)) + np.sum(np.square(w))
        if best is None or cost < best[0]:
            best = cost, order, theta, w
    return best


@settings(max_examples=60, deadline=None, derandomize=True)
@given(m=st.integers(1, 5), d=st.integers(1, 4), e=st.integers(1, 3), seed=st.integers(0, 2**32))
def test_matching_equals_brute_force(m, d, e, seed):
    learned, truth = random_pair(m, d, e, False, seed)
    cost, order, theta, w = brute_force(learned, truth)
    found = compare(learned, truth)
    np.testing.assert_allclose(
        np.sum(found.theta_errors**2) + np.sum(found.w_errors**2), cost, rtol=1e-12
    )
    np.testing.assert_array_equal(found.order, order)
    np.testing.assert_allclose(found.theta_errors, theta, rtol=1e-12)
    np.testing.assert_allclose(found.w_errors, w, rtol=1e-12)
    np.testing.assert_allclose(found.max_error, max(theta + w), rtol=1e-12)
    assert found.comparable


@settings(max_examples=30, deadline=None, derandomize=True)
@given(m=st.integers(1, 5), seed=st.integers(0, 2**32))
def test_reordered_heads_are_the_same_layer(m, seed):
    truth, _ = random_pair(m, 3, 2, True, seed)
    order = np.random.default_rng(seed).permutation(m)
    shuffled = truth.replace(
        theta=truth.theta[order], w=truth.w[order], key_vector=truth.key_vector[order]
    )
    found = compare(shuffled, truth)
    assert found.max_error == 0.0
    np.testing.assert_array_equal(order[found.order], np.arange(m))


def test_errors_are_relative_to_the_true_head_or_to_the_typical_one():
    theta = np.zeros((2, 2, 2))
    theta[0, 0, 0], theta[1, 0, 1] = 10.0, 0.1
    w = np.zeros((2, 2, 1))
    w[0, 0], w[1, 1] = 3.0, 4.0
    truth = AttentionLayer(theta, w)
    wrong_theta, wrong_w = theta.copy(), w.copy()
    wrong_theta[:, 1, 1] += 0.5
    wrong_w[:, 0] += 0.7
    found = compare(AttentionLayer(wrong_theta, wrong_w), truth)
    rms_theta, rms_w = np.sqrt((10.0**2 + 0.1**2) / 2), np.sqrt((3.0**2 + 4.0**2) / 2)
    np.testing.assert_allclose(found.theta_errors, [0.5 / 10.0, 0.5 / rms_theta])
    np.testing.assert_allclose(found.w_errors, [0.7 / rms_w, 0.7 / 4.0])
    assert found.max_error == max(*found.theta_errors, *found.w_errors)
    # The truth sets the scale, so the other way round is another number.
    double = compare(AttentionLayer(2 * theta, w), truth)
    half = compare(truth, AttentionLayer(2 * theta, w))
    assert double.max_error == pytest.approx(2 * half.max_error)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(factor=st.sampled_from([1e-9, 1e-3, 1e3, 1e9]), seed=st.integers(0, 2**32))
def test_units_do_not_matter(factor, seed):
    learned, truth = random_pair(3, 3, 2, True, seed)
    here = compare(learned, truth)
    there = compare(
        *(
            layer.replace(
                theta=factor * layer.theta,
                key_vector=factor * layer.key_vector,
                w=layer.w / factor,
                out_bias=layer.out_bias / factor,
            )
            for layer in (learned, truth)
        )
    )
    np.testing.assert_allclose(there.max_error, here.max_error, rtol=1e-10)


def test_biases_count():
    truth = random_layer(2, 4, key_vector=True, out_bias=True, seed=1)
    vectors = truth.key_vector.copy()
    vectors[1] += [0.5, 0, 0, 0]
    norms = np.linalg.norm(truth.key_vector, axis=1)
    least = np.linalg.norm(truth.theta, axis=(1, 2)).max() / 2  # a row of Theta, d = 4
    scale = max(norms[1], np.sqrt(np.mean(norms**2)), least)
    found = compare(truth.replace(key_vector=vectors), truth)
    np.testing.assert_allclose(found.key_vector_errors, [0.0, 0.5 / scale])
    np.testing.assert_allclose(found.max_error, 0.5 / scale)
    found = compare(truth.replace(out_bias=truth.out_bias + 10.0), truth)
    assert found.out_bias_error == found.max_error > 1.0
    assert not found.theta_errors.any()


def test_key_vectors_alone_tell_heads_apart():
    base = random_layer(2, 4, key_vector=True, seed=1)
    truth = base.replace(theta=base.theta[[0, 0]], w=base.w[[0, 0]])
    swapped = truth.replace(key_vector=truth.key_vector[::-1])
    found = compare(swapped, truth)
    assert found.max_error == 0.0
    np.testing.assert_array_equal(found.order, [1, 0])


def test_an_absent_bias_is_zero():
    truth = random_layer(2, 4, seed=1)
    zeros = truth.replace(key_vector=np.zeros((2, 4)), out_bias=np.zeros(4))
    assert compare(zeros, truth).max_error == compare(truth, zeros).max_error == 0.0
    # A bias that is not in the truth is measured against a row of W: |W| / sqrt(d).
    learned = truth.replace(out_bias=np.array([0.3, 0.0, 0.0, 0.0]))
    row = np.linalg.norm(truth.w, axis=(1, 2)).max() / 2
    np.testing.assert_allclose(compare(learned, truth).max_error, 0.3 / row)
    assert compare(truth, learned).max_error > 0.1


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (random_layer(3, 4, seed=1), "3 heads beside 2"),
        (random_layer(1, 4, seed=1), "1 head beside 2"),
        (random_layer(2, 5, seed=1), "tokens of 5 features beside 4"),
        (random_layer(2, 4, out_dim=3, seed=1), "outputs of 3 features beside 4"),
        (random_layer(2, 4, causal=True, seed=1), r"one layer is causal.*causal=True"),
        (random_layer(3, 4, causal=True, seed=1), "one layer is causal.*; 3 heads beside 2"),
    ],
    ids=["more-heads", "fewer-heads", "wider", "other-outputs", "causal", "both"],
)
def test_layers_that_cannot_be_matched_are_infinitely_far_apart(other, why):
    truth = random_layer(2, 4, seed=1)
    assert re.match(why, compare(other, truth).why)
    for found in (compare(other, truth), compare(truth, other)):
        assert found.max_error == np.inf
        assert found.out_bias_error == np.inf
        assert not found.comparable
        assert found.why
        assert found.order.size == found.theta_errors.size == found.w_errors.size == 0
    assert compare(truth, truth).why == ""


def test_a_zero_truth_has_absolute_errors():
    zero = AttentionLayer(np.zeros((2, 3, 3)), np.zeros((2, 3, 2)))
    assert compare(zero, zero).max_error == 0.0
    theta = np.zeros((2, 3, 3))
    theta[1, 2, 0] = 0.25
    found = compare(zero.replace(theta=theta), zero)
    np.testing.assert_allclose(np.sort(found.theta_errors), [0.0, 0.25])
    assert found.max_error == 0.25


def test_canonical_forms_are_not_taken():
    base = random_layer(1, 4, seed=1)
    twice = AttentionLayer(base.theta[[0, 0]], base.w[[0, 0]] / 2)
    assert compare(twice, base).max_error == np.inf
    assert compare(twice.canonical(), base).max_error == 0.0
