"""What Architecture counts, against the rank of a Jacobian written out once more."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from mhalearn import AttentionLayer, Examples, random_layer
from mhalearn.layer import architecture as module
from mhalearn.layer.architecture import Architecture, ParameterCount
from mhalearn.layer.dense import Dense
from mhalearn.layer.factored import Factored

D, K, N = 4, 4, 60
RANKS, OUTPUTS = (None, 1, 2, 3), (2, 4, 6)
LENGTHS = {"equal": [K], "mixed": [4, 2, 3, 1]}


def random_point(a, rng):
    """A_i B_i^T = Theta_i with v_i as its last row, C_i D_i = W_i, and c; whole matrices where no
    rank is asked for, with the identity, which does not move, as their other factor."""
    m, d, e, q = a.n_heads, a.d, a.out_dim, a.d + a.bias
    c = rng.standard_normal((int(a.bias), e))
    if a.head_dim is None:
        moving = {"a": (m, q, d), "d": (m, d, e)}
    else:
        h, r = a.head_dim, min(a.head_dim, e)
        moving = {"a": (m, q, h), "b": (m, d, h), "c": (m, d, r), "d": (m, r, e)}
    return {name: rng.standard_normal(shape) for name, shape in moving.items()} | {"bias": c}


def outputs(point, x, lengths, causal):
    """The layer, with complex parameters allowed; rows past a length are zero."""
    n, k, d = x.shape
    y = np.zeros((n, k, point["d"].shape[-1]), complex)
    eye = np.broadcast_to(np.eye(d), (len(point["a"]), d, d))
    for a, b, c, out in zip(
        point["a"], point.get("b", eye), point.get("c", eye), point["d"], strict=True
    ):
        queries = np.concatenate([x, np.ones((n, k, 1))], axis=2)[..., : len(a)]
        scores = np.exp(queries @ a @ b.T @ x.swapaxes(1, 2) / 4)
        scores *= (np.arange(k) < lengths[:, None])[:, None]
        if causal:
            scores *= np.tri(k)
        y += scores / scores.sum(axis=2, keepdims=True) @ x @ c @ out
    y += point["bias"].sum(axis=0)
    return y * (np.arange(k) < lengths[:, None])[..., None]


def jacobian(a, lengths, seed=0):
    """Of N examples, (N, K e, parameters), by complex steps, which subtract nothing."""
    rng = np.random.default_rng(seed)
    point, x = random_point(a, rng), rng.standard_normal((N, K, a.d))
    columns = []
    for name, array in point.items():
        for place in np.ndindex(array.shape):
            moved = array.astype(complex)
            moved[place] += 1e-30j
            columns.append(outputs(point | {name: moved}, x, lengths, a.causal).imag / 1e-30)
    return np.stack([column.reshape(N, -1) for column in columns], axis=-1)


def rank_of(blocks):
    flat = blocks.reshape(-1, blocks.shape[-1])
    values = np.linalg.svd(flat, compute_uv=False)
    return int(np.sum(values > 1e-9 * values[0]))


CASES = [
    pytest.param(
        Architecture(D, m, rank, e, bias, causal),
        id=f"{m} heads, rank {rank}, {e} outputs{', bias' * bias}{', causal' * causal}",
    )
    for m, rank, e, bias, causal in itertools.product(
        (1, 2), RANKS, OUTPUTS, (False, True), (False, True)
    )
]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("a", CASES)
def test_counts_and_limits_are_those_of_a_jacobian(a, lengths):
    """All unknowns are seen by many examples, by few more than the limit, and never by fewer."""
    sizes = np.resize(LENGTHS[lengths], N)
    blocks, unknowns = jacobian(a, sizes), a.count()
    assert rank_of(blocks) == unknowns
    limits = [math.inf, *(a.counting_limit(sizes[:n]) for n in range(1, N + 1))]
    below = max((n for n in range(1, N) if n < limits[n]), default=0)
    enough = min(n for n in range(1, N) if n >= limits[n] + 2)
    assert rank_of(blocks[:enough]) == unknowns
    if below:
        assert rank_of(blocks[:below]) < unknowns
    if lengths == "equal":
        assert limits[-1] == a.counting_limit(K)
        assert below == math.ceil(limits[-1]) - 1


def test_unknowns_are_counted_by_kind():
    assert Architecture(4, 2, bias=True).count_by_kind() == ParameterCount(32, 8, 32, 4)
    narrow = Architecture(6, 3, 2, out_dim=5, bias=True).count_by_kind()
    # Rank 2: Theta 2 (12 - 2), with a last row 2 more; W 2 (6 + 5 - 2).
    assert narrow == ParameterCount(theta=60, key_vectors=6, w=54, out_bias=5)
    assert (narrow.attention, narrow.total) == (66, 125)
    assert Architecture(6, 3, 2, out_dim=5, bias=True).count() == 125


def test_outputs_are_as_many_as_features_unless_given():
    assert Architecture(4).out_dim == Architecture(4).outputs == 4
    assert Architecture(4, out_dim=4) == Architecture(4)
    assert Architecture(4, out_dim=7).outputs == 7
    assert hash(Architecture(4, 2)) == hash(Architecture(4, 2, out_dim=4))


@pytest.mark.parametrize("e", OUTPUTS)
def test_full_rank_is_no_low_rank(e):
    full, any_rank = Architecture(D, 2, D, e), Architecture(D, 2, None, e)
    assert not full.is_low_rank
    assert not any_rank.is_low_rank
    assert full.count_by_kind() == any_rank.count_by_kind()
    assert full.counting_limit(K) == any_rank.counting_limit(K)
    assert full.with_any_rank() == any_rank
    assert isinstance(full.parametrisation(), Dense)
    narrow = Architecture(D, 2, 3, e)
    assert narrow.is_low_rank
    assert narrow.ov_rank == min(3, e)
    assert narrow.parametrisation() == Factored(narrow)
    assert narrow.count() < any_rank.count()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("e", OUTPUTS)
@pytest.mark.parametrize("rank", RANKS)
def test_parametrisations_hold_the_unknowns_and_their_gauge(rank, e, bias):
    a = Architecture(D, 2, rank, e, bias)
    kind = a.parametrisation()
    held = sum(np.size(part) for part in kind.init(np.random.default_rng(0)))
    # Of each pair of factors, an invertible matrix of its rank.
    gauge = 2 * (a.qk_rank**2 + a.ov_rank**2) if a.is_low_rank else 0
    assert kind.size() == held == a.count() + gauge
    assert kind.count() == a.count()


def test_a_number_of_heads_may_stay_open():
    a = Architecture(4, head_dim=2, bias=True)
    assert a.with_heads(3) == Architecture(4, 3, 2, bias=True)
    assert a.with_heads(3).with_heads(None) == a
    assert a.usual_heads() == 2
    assert Architecture(5, head_dim=2).usual_heads() == 3
    assert Architecture(5).usual_heads() == 1
    for ask in (a.count, a.count_by_kind, lambda: a.heads, lambda: a.counting_limit(3)):
        with pytest.raises(ValueError, match="n_heads is open"):
            ask()


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"n_heads": 0}, "n_heads=0"),
        ({"n_heads": -1}, "n_heads=-1"),
        ({"n_heads": True}, "n_heads=True"),
        ({"d": 0}, "d=0"),
        ({"d": True}, "d=True"),
        ({"head_dim": 0}, "head_dim=0"),
        ({"head_dim": 5}, "head_dim=5: a head of d = 4 features has rank at most 4"),
        ({"head_dim": True}, "head_dim=True"),
        ({"out_dim": 0}, "out_dim=0"),
        ({"out_dim": True}, "out_dim=True"),
    ],
    ids=str,
)
def test_what_is_no_architecture_is_refused(bad, said):
    with pytest.raises(ValueError, match=said):
        Architecture(**({"d": 4} | bad))
    if "d" not in bad:
        with pytest.raises(ValueError, match=said):
            replace(Architecture(4, 2), **bad)


def test_many_narrow_heads_are_searched_for_by_their_factors(monkeypatch):
    assert Architecture(384, 12, 32).prefers_factors
    assert Architecture(384, head_dim=32).prefers_factors
    assert Architecture(384, head_dim=32).usual_heads() == 12
    assert not Architecture(384, 12).prefers_factors
    assert not Architecture(384, 12, 200).prefers_factors
    assert not Architecture(16, 4, 2).prefers_factors
    monkeypatch.setattr(module, "_LARGE", 100)
    assert Architecture(16, 4, 2).prefers_factors


# Membership


def test_a_class_contains_layers_of_its_sizes_mask_and_biases():
    layer = random_layer(2, 4, out_dim=3, causal=True)
    own = Architecture(4, 2, None, 3, causal=True)
    assert own.contains(layer)
    assert own.with_heads(None).contains(layer)
    assert replace(own, bias=True).contains(layer)  # with biases of zero
    others = {"d": 5, "n_heads": 3, "out_dim": 4, "causal": False}
    for name, value in others.items():
        assert not replace(own, **{name: value}).contains(layer)
    for biased in ({"key_vector": True}, {"out_bias": True}):
        assert not own.contains(random_layer(2, 4, out_dim=3, causal=True, **biased))


def test_a_class_of_low_rank_contains_layers_of_at_most_that_rank_in_theta_and_w():
    layer = random_layer(2, 4, rank=2, key_vector=True)
    ranks = [Architecture(4, 2, rank, bias=True).contains(layer) for rank in (1, 2, 3, 4, None)]
    assert ranks == [False, True, True, True, True]
    rng, two = np.random.default_rng(0), Architecture(4, 2, 2, bias=True)
    for name in ("theta", "w"):
        array = getattr(layer, name)
        for size, inside in ((1e-13, True), (1e-6, False)):
            moved = array + size * rng.standard_normal(array.shape)
            assert two.contains(layer.replace(**{name: moved})) == inside
    # A key vector beside the rows of Theta makes one more dimension.
    beside = layer.replace(key_vector=rng.standard_normal((2, 4)))
    assert not two.contains(beside)
    assert Architecture(4, 2, 3, bias=True).contains(beside)
    # Units do not matter, and a head of zeros has every rank.
    assert two.contains(layer.replace(w=1e-30 * layer.w))
    zero = AttentionLayer(np.zeros((1, 4, 4)), np.zeros((1, 4, 4)))
    assert Architecture(4, 1, 1).contains(zero)


def test_a_layer_says_its_class():
    layer = random_layer(2, 4, rank=2, out_dim=3, out_bias=True, causal=True)
    sizes = Architecture(4, 2, None, 3, bias=True, causal=True)
    assert layer.architecture == sizes
    told = {"2": 2, "3": 3, "1": None, "4": 4, "5": None, "0": None, "two": None, "-2": None}
    for said, head_dim in told.items():  # a rank it has not is not believed
        known = layer.replace(metadata={"head_dim": said}).architecture
        assert known == replace(sizes, head_dim=head_dim)
        assert known.contains(layer)
    assert random_layer(2, 4).architecture == Architecture(4, 2)


def test_examples_say_the_sizes():
    examples = Examples(np.ones((3, 5, 4)), np.ones((3, 5, 2)), [2, 5, 3])
    assert examples.architecture() == Architecture(4, out_dim=2)
    found = examples.architecture(2, head_dim=1, bias=True, causal=True)
    assert found == Architecture(4, 2, 1, 2, True, True)
    assert examples.counting_limit(found) == found.counting_limit([2, 5, 3])


@pytest.mark.parametrize("a", [Architecture(4, 2), Architecture(6, 3, 1, 2, True, True)])
def test_limits_depend_on_lengths_and_not_on_their_order_or_number(a):
    limit = a.counting_limit([2, 5, 3])
    assert a.counting_limit([5, 3, 2]) == limit
    assert a.counting_limit([5, 5, 3, 3, 2, 2]) == pytest.approx(limit, rel=1e-15)
    assert a.counting_limit([5, 5]) == a.counting_limit(5) < limit
    assert a.counting_limit(1) == math.inf


def test_limits_grow_with_what_is_unknown():
    a = Architecture(6, 2, 2)
    limit = a.counting_limit(4)
    assert limit < a.with_heads(3).counting_limit(4)
    assert limit < a.with_any_rank().counting_limit(4)
    assert limit <= replace(a, bias=True).counting_limit(4)
    assert limit <= replace(a, causal=True).counting_limit(4)
    assert limit > a.counting_limit(6)
