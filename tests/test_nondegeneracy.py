import jax
import numpy as np
import pytest

from mhalearn.data.inputs import sample_inputs
from mhalearn.judge import nondegeneracy
from mhalearn.judge.nondegeneracy import check_nondegeneracy
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.random_layers import random_layer

K = 4


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    """Most tests look at closed forms: a small measurement will do."""
    monkeypatch.setattr(nondegeneracy, "_ROWS", 800)
    monkeypatch.setattr(nondegeneracy, "_ROWS_AT_ONCE", 800)


def values(layer, k=K, seed=0):
    return {item.name: item.value for item in check_nondegeneracy(layer, k=k, seed=seed).items}


def verdicts(layer, k=K):
    return {item.name: item.ok for item in check_nondegeneracy(layer, k=k).items}


def test_random_layers_pass(monkeypatch):
    monkeypatch.setattr(nondegeneracy, "_ROWS", 40_000)
    for seed in range(3):
        report = check_nondegeneracy(random_layer(2, 8, scale=4.0, seed=seed), k=3)
        assert report.ok, [item for item in report.items if not item.ok]
    assert not jax.config.jax_enable_x64


def test_equal_heads_are_coherent():
    layer = random_layer(2, 8, seed=1)
    for sign in (1.0, -1.0):
        same = AttentionLayer(
            layer.theta[[0, 0]] * np.array([1.0, 3.0 * sign])[:, None, None], layer.w
        )
        assert values(same)["coherence of Theta"] == pytest.approx(1.0, abs=1e-14)
        assert not verdicts(same)["coherence of Theta"]
        assert verdicts(same)["coherence of W"]
    same = layer.replace(w=layer.w[[0, 0]])
    assert values(same)["coherence of W"] == pytest.approx(1.0, abs=1e-14)
    assert not verdicts(same)["coherence of W"]


def test_coherence_is_the_largest_cosine():
    layer = random_layer(3, 5, seed=1)
    for name, matrices in (("coherence of Theta", layer.theta), ("coherence of W", layer.w)):
        cosines = [
            abs(np.sum(matrices[i] * matrices[j]))
            / (np.linalg.norm(matrices[i]) * np.linalg.norm(matrices[j]))
            for i in range(3)
            for j in range(i)
        ]
        assert values(layer)[name] == pytest.approx(max(cosines), rel=1e-12)


def test_one_head_is_coherent_with_none():
    assert values(random_layer(1, 8, seed=1))["coherence of Theta"] == 0.0


def test_orthogonal_heads_are_not_coherent():
    theta = np.zeros((2, 4, 4))
    theta[0, :2], theta[1, 2:] = 1.0, 1.0
    assert values(random_layer(2, 4, seed=1).replace(theta=theta))["coherence of Theta"] == 0.0


def test_a_vanishing_head_is_degenerate():
    layer = random_layer(2, 8, seed=1)
    for name, changed in (
        ("Theta", layer.replace(theta=layer.theta * np.array([1.0, 0.0])[:, None, None])),
        ("W", layer.replace(w=layer.w * np.array([1.0, 0.0])[:, None, None])),
    ):
        found = values(changed)
        assert found[f"coherence of {name}"] == 1.0
        assert found[f"effective rank of {name}"] == 0.0
        assert not check_nondegeneracy(changed, k=K).ok


def test_effective_rank_of_known_matrices():
    rng = np.random.default_rng(3)
    low = np.einsum("ma,mb->mab", rng.normal(size=(2, 8)), rng.normal(size=(2, 8)))
    turned = np.linalg.qr(rng.normal(size=(2, 8, 8)))[0]
    layer = AttentionLayer(low, turned)
    found = values(layer)
    assert found["effective rank of Theta"] == pytest.approx(1.0, rel=1e-12)
    assert found["effective rank of W"] == pytest.approx(8.0, rel=1e-12)
    assert not verdicts(layer)["effective rank of Theta"]
    assert verdicts(layer)["effective rank of W"]
    # The least head counts: singular values 2, 1, 1 have effective rank 6 / 4.
    mixed = np.stack([turned[0], turned[1] @ np.diag([2.0, 1, 1, 0, 0, 0, 0, 0])])
    assert values(layer.replace(w=mixed))["effective rank of W"] == pytest.approx(1.5)


def test_one_output_is_not_held_against_a_layer():
    assert verdicts(random_layer(1, 8, out_dim=1, seed=1))["effective rank of W"]


def test_density_of_known_matrices():
    layer = random_layer(2, 8, seed=1)
    diagonal = np.stack([np.diag(np.arange(1.0, 9.0)), layer.theta[1]])
    assert values(layer.replace(theta=diagonal))["density of Theta"] == pytest.approx(1.0)
    assert not verdicts(layer.replace(theta=diagonal))["density of Theta"]
    signs = np.random.default_rng(2).choice([-3.0, 3.0], size=(2, 8, 8))
    assert values(layer.replace(theta=signs))["density of Theta"] == pytest.approx(8.0)
    # One sparse column among dense rows is found too, and so is one that vanishes.
    column = signs.copy()
    column[1, :, 2] = 0.0
    column[1, 0, 2] = 1.0
    assert values(layer.replace(theta=column))["density of Theta"] == pytest.approx(1.0)
    for axis in (0, 1):
        empty = signs.copy()
        empty[(1, slice(None), 2) if axis else (1, 2)] = 0.0
        assert values(layer.replace(theta=empty))["density of Theta"] == 0.0


def test_the_sum_of_w():
    layer = random_layer(2, 8, seed=1)
    cancelling = layer.replace(w=np.stack([layer.w[0], -layer.w[0]]))
    found, ok = values(cancelling), verdicts(cancelling)
    assert found["size of the sum of W"] == 0.0
    assert found["conditioning of the sum of W"] == 0.0
    assert not ok["size of the sum of W"]
    assert not ok["conditioning of the sum of W"]
    twice = layer.replace(w=np.stack([np.diag(np.arange(1.0, 9.0))] * 2))
    assert values(twice)["size of the sum of W"] == pytest.approx(np.sqrt(2))
    assert values(twice)["conditioning of the sum of W"] == pytest.approx(1 / 8)
    assert values(layer.replace(w=0 * layer.w))["size of the sum of W"] == 0.0


def test_few_heads_and_tokens_against_width():
    layer = random_layer(2, 8, out_dim=6, seed=1)
    assert values(layer, k=4)["heads and tokens against width"] == 1.0
    assert verdicts(layer, k=4)["heads and tokens against width"]
    assert not verdicts(layer, k=5)["heads and tokens against width"]


def test_reordering_heads_changes_nothing():
    layer = random_layer(3, 8, scale=4.0, key_vector=True, seed=1)
    order = [2, 0, 1]
    other = layer.replace(
        theta=layer.theta[order], w=layer.w[order], key_vector=layer.key_vector[order]
    )
    for name, value in values(layer).items():
        assert values(other)[name] == pytest.approx(value, rel=1e-12, abs=1e-15), name


def naive_frequency(layer, x):
    """Rows where every head has 90 % on two tokens, no token above 90 %, and all heads alike."""
    matched = rows = 0
    for tokens in x.astype(np.float64):
        for r, query in enumerate(tokens):
            last = r + 1 if layer.causal else len(tokens)
            patterns = []
            for i in range(layer.n_heads):
                logits = np.array([query @ layer.theta[i] @ tokens[j] for j in range(last)])
                if layer.key_vector is not None:
                    logits += [layer.key_vector[i] @ tokens[j] for j in range(last)]
                powers = np.exp(logits - logits.max())
                patterns.append(np.append(powers / powers.sum(), np.zeros(len(tokens) - last)))
            middle = sum(patterns) / len(patterns)
            alike = all(np.sum(np.abs(p - middle)) / 2 <= 0.05 for p in patterns)
            sparse = all(np.sum(np.sort(p)[-2:]) >= 0.9 and np.max(p) <= 0.9 for p in patterns)
            matched += alike and sparse
            rows += 1
    return matched / rows


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n_heads", [1, 2])
def test_matched_patterns_are_counted_as_by_a_naive_loop(n_heads, causal, biased):
    layer = random_layer(n_heads, 5, scale=3.0, key_vector=biased, causal=causal, seed=2)
    # Heads that are nearly alike make matches frequent enough to count.
    layer = layer.replace(theta=layer.theta[:1] + 0.05 * layer.theta)
    x = sample_inputs("boolean", 800 // K, K, 5, seed=7)
    expected = naive_frequency(layer, x)
    assert 0.01 < expected < 0.9
    assert values(layer, seed=7)["matched sparse patterns"] == expected


def test_the_measurement_may_be_cut_into_pieces(monkeypatch):
    layer = random_layer(1, 5, scale=3.0, seed=2)
    x = sample_inputs("boolean", 200, K, 5, seed=7)
    monkeypatch.setattr(nondegeneracy, "_ROWS_AT_ONCE", 200)
    assert values(layer, seed=7)["matched sparse patterns"] == naive_frequency(layer, x)


def test_flat_attention_matches_no_sparse_pattern():
    flat = random_layer(2, 8, scale=1e-3, seed=1)
    assert values(flat)["matched sparse patterns"] == 0.0
    # With two tokens, even attention is a sparse pattern.
    assert values(flat, k=2)["matched sparse patterns"] == 1.0


def test_a_condition_holds_at_its_threshold():
    at_most = nondegeneracy.Condition("", 1.0, 1.0, True, "")
    at_least = nondegeneracy.Condition("", 1.0, 1.0, False, "")
    assert at_most.ok
    assert at_least.ok
    report = nondegeneracy.NondegeneracyReport
    wrong = nondegeneracy.Condition("", 0.9, 1.0, False, "")
    assert report((at_most, at_least)).ok
    assert not report((at_most, wrong)).ok


def test_one_token_is_rejected():
    with pytest.raises(ValueError, match="k=1"):
        check_nondegeneracy(random_layer(2, 4, seed=1), k=1)


def test_of_wide_layers_fewer_rows_are_looked_at(monkeypatch):
    monkeypatch.setattr(nondegeneracy, "_ROWS", 100_000)
    rows = {d: nondegeneracy._count_rows(random_layer(12, d, seed=0), 8) for d in (16, 160, 384)}
    assert rows[16] == 100_000
    assert 10_000 < rows[160] < 100_000
    assert rows[384] == 10_000
