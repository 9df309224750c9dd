"""What inputs can ask, against counts by hand and by brute force."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from mhalearn.data import Examples
from mhalearn.data.input_information import measure_information
from mhalearn.data.inputs import sample_inputs
from mhalearn.layer.architecture import Architecture

N, K, D = 12, 3, 4
X = sample_inputs("gaussian", N, K, D, seed=1)


def ask(x, lengths=None, *, bias=False, causal=False, precision=0.0, window=None):
    examples = Examples(x, np.zeros_like(x), lengths)
    given = {} if window is None else {"window": window, "head_dim": 1}
    architecture = examples.architecture(bias=bias, causal=causal, **given)
    return measure_information(examples, architecture, precision=precision)


def test_generic_inputs_all_ask_something_new():
    found = ask(X)
    assert found.rows == N * K
    assert found.examples == N
    assert list(found.group_of) == list(range(N))
    assert (found.others == K - 1).all()
    assert len(found.others) == N * K
    assert not found.centrally_symmetric


@pytest.mark.parametrize("bias", [False, True])
def test_mirror_images_ask_something_new_only_of_biases(bias):
    found = ask(np.concatenate([X, -X]), bias=bias)
    assert found.rows == (1 + bias) * N * K
    assert len(set(found.group_of)) == (1 + bias) * N
    if not bias:
        np.testing.assert_array_equal(found.group_of[:N], found.group_of[N:])


@pytest.mark.parametrize(("jitter", "precision"), [(1e-14, 2e-16), (1e-8, 1e-7), (1e-5, 1e-3)])
def test_copies_that_labels_cannot_tell_apart_ask_nothing_new(jitter, precision):
    g = np.random.default_rng(0)
    copies = np.concatenate([X + jitter * g.standard_normal(X.shape) for _ in range(4)])
    assert ask(copies, precision=precision).examples < 1.05 * N
    assert ask(copies + 0.1 * g.standard_normal(copies.shape)).examples == 4 * N


def test_the_order_of_tokens_asks_nothing_new():
    assert ask(np.concatenate([X, X[:, ::-1]])).rows == N * K
    assert ask(np.concatenate([X, X[:, ::-1]]), causal=True).rows == 2 * N * K


def test_rows_that_see_one_token_do_not_tell_of_attention():
    one = np.repeat(X[:4, :1], K, axis=1)
    found = ask(np.concatenate([one, X[4:]]))
    assert found.rows == 4 + 8 * K
    assert len(found.others) == 8 * K
    zero_queries = X * (np.arange(K) > 0)[:, None]
    assert len(ask(zero_queries).others) == N * (K - 1)


def test_tokens_seen_are_counted_by_brute_force():
    g = np.random.default_rng(3)
    x = g.integers(-1, 2, (40, 4, 2)) + 0.0
    lengths = g.integers(1, 5, 40)
    for causal, window in ((False, None), (True, None), (False, 2), (True, 2), (True, 9)):
        rows, reach = {}, window or 4
        for tokens, length in zip(x, lengths, strict=True):
            for r in range(length):
                end = min(r + 1 if causal else length, r + reach)
                seen = tokens[max(0, r - reach + 1) : end]
                seen = Counter(map(bytes, seen))
                shares = {token: Fraction(count, seen.total()) for token, count in seen.items()}
                rows[bytes(tokens[r]), frozenset(shares.items())] = len(seen)
        found = ask(x, lengths, bias=True, causal=causal, window=window)
        one_token = {key[1] for key, seen in rows.items() if seen == 1}
        assert found.rows == len(one_token) + sum(seen > 1 for seen in rows.values())
        assert sorted(found.others) == sorted(seen - 1 for seen in rows.values() if seen > 1)


def test_equations_about_attention_are_counted():
    assert ask(X[:2]).about_attention(Architecture(D, 1)) == 2 * K * 2 / D**2
    assert ask(X[:2]).about_attention(Architecture(D, 1, 1)) == 2 * K * 1 / (2 * D - 1)
    biased = ask(X[:2], bias=True).about_attention(Architecture(D, 1, bias=True))
    assert biased == 2 * K * 2 / (D**2 + D)  # key vectors are attention too
    causal = ask(X[:2], causal=True).about_attention(Architecture(D, 1, causal=True))
    assert causal == 2 * (0 + 1 + 2) / D**2


@pytest.mark.parametrize("causal", [False, True])
def test_two_tokens_are_known_however_often_they_come(causal):
    assert ask(X[:, :2], causal=causal).centrally_symmetric
    assert ask(np.repeat(X[:, :2], 2, axis=1)).centrally_symmetric
    assert not ask(np.repeat(X[:, :2], [2, 1], axis=1)).centrally_symmetric
    assert ask(X, np.full(N, 2), causal=causal).centrally_symmetric
    assert not ask(X, causal=causal).centrally_symmetric
