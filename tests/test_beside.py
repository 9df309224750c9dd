"""A second sequence, and position ids, travel with the tokens of examples."""

import numpy as np
import pytest

import mhalearn as mha

N, K, D = 40, 5, 4


def cross_layer(**options):
    return mha.random_layer(**({"n_heads": 2, "d": D, "head_dim": 3, "memory": 3} | options))


def sequences(tokens, width=3, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((N, K, D)), rng.standard_normal((N, tokens, width))


@pytest.mark.parametrize("tokens", [3, K, 9])
@pytest.mark.parametrize("given", ["all", "memory lengths", "both lengths"])
def test_examples_bring_their_memory_to_the_layer(tokens, given, tmp_path):
    layer, (x, memory) = cross_layer(), sequences(tokens)
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, K + 1, N) if given == "both lengths" else None
    sizes = None if given == "all" else rng.integers(1, tokens + 1, N)
    y = layer(x, lengths, memory=memory, memory_lengths=sizes)
    assert y.shape == (N, K, D)
    examples = mha.Examples(x, y, lengths, memory=memory, memory_lengths=sizes)
    assert (examples.n, examples.d, examples.columns.memory) == (N, D, 3)
    assert examples.architecture(2, head_dim=3) == layer.architecture
    expected = np.full(N, tokens) if sizes is None else sizes
    found = np.broadcast_to(examples.memory_lengths, N)
    np.testing.assert_array_equal(found, expected)
    examples.save(tmp_path / "some.safetensors")
    examples.save(tmp_path / "shards", shard_size=7)
    for name in ("some.safetensors", "shards"):
        again = mha.load_examples(tmp_path / name).subset(np.arange(N)[::-1])
        tokens_again, labels, counts = again.arrays()
        np.testing.assert_allclose(layer(tokens_again, counts), labels, atol=1e-13)
        assert again.columns == examples.columns


def test_the_padding_of_a_memory_is_not_looked_at():
    layer, (x, memory) = cross_layer(), sequences(6)
    sizes = np.random.default_rng(1).integers(1, 6, N)
    spoilt = memory.copy()
    spoilt[np.arange(6) >= sizes[:, None]] = 1e300
    found = layer(x, memory=spoilt, memory_lengths=sizes)
    np.testing.assert_array_equal(found, layer(x, memory=memory, memory_lengths=sizes))
    alone = [layer(x[i : i + 1], memory=np.tile(memory[i : i + 1, :1], (1, 2, 1))) for i in (0, 1)]
    first = layer(x[:2], memory=memory[:2], memory_lengths=[1, 1])
    np.testing.assert_allclose(first, np.concatenate(alone), atol=1e-13)


def test_one_query_may_look_at_many():
    layer, (x, memory) = cross_layer(), sequences(6)
    few = layer(x[:, :1], memory=memory)
    assert few.shape == (N, 1, D)
    np.testing.assert_allclose(few, layer(x, memory=memory)[:, :1], atol=1e-13)
    patterns = layer.patterns(x[:, :1], memory=memory)
    assert patterns.shape == (N, 2, 1, 6)
    np.testing.assert_allclose(patterns.sum(axis=-1), 1.0)


@pytest.mark.parametrize("options", [{"rope": mha.Rope(10.0, fraction=0.5)}, {"latent": 2}])
def test_examples_bring_their_positions(options, tmp_path):
    if "latent" in options:
        options = {"latent": mha.Latent(2, 3), "position_bias": "t5"}
    layer = mha.random_layer(2, D, head_dim=4, causal=True, **options)
    x, _ = sequences(3)
    positions = np.cumsum(np.random.default_rng(1).integers(1, 200, (N, K)), axis=1)
    y = layer(x, positions=positions)
    examples = mha.Examples(x.astype(np.float32), y, positions=positions)
    assert (examples.d, examples.columns.marked) == (D, True)
    examples.save(tmp_path / "some.npz")
    tokens, _, _ = mha.load_examples(tmp_path / "some.npz").arrays()
    assert tokens.shape == (N, K, D + 1)
    np.testing.assert_allclose(layer(tokens), layer(x.astype(np.float32), positions=positions))
    assert np.abs(layer(tokens) - layer(x)).max() > 0.1


def test_a_layer_is_certified_on_what_the_examples_bring():
    layer, (x, memory) = cross_layer(), sequences(7)
    fresh = mha.Examples(x, layer(x, memory=memory), memory=memory)
    tokens, labels, lengths = fresh.arrays()
    assert mha.certify(layer, fresh).recovered
    other = layer.replace(params=layer.params | {"out": layer.params["out"] * (1 + 1e-6)})
    assert not mha.certify(other, fresh).recovered
    assert tokens.shape == (N, 7, D + 3)
    assert lengths.tolist() == [K] * N
    assert not labels[:, K:].any()


def test_fewer_keys_ask_for_more_examples():
    layer = cross_layer(d=4 * D, out_dim=12)
    limits = [layer.architecture.counting_limit(K, tokens) for tokens in (1, 2, 3, 8)]
    assert limits[0] == np.inf
    assert limits[1] > limits[2] >= limits[3]
    x, memory = sequences(3)
    x = np.tile(x, 4)
    y = layer(x, memory=memory)
    examples = mha.Examples(x, y, memory=memory, memory_lengths=np.full(N, 2))
    assert examples.counting_limit(layer.architecture) == limits[1]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x, m: cross_layer()(x), "takes keys and values from a second sequence"),
        (lambda x, m: cross_layer(memory=2)(x, memory=m), "4 and 3 features a token, the layer"),
        (lambda x, m: cross_layer()(x, memory=m[:3]), "memory has 3 examples, X has 40"),
        (lambda x, m: cross_layer()(x, memory_lengths=[2]), "memory_lengths without memory"),
        (lambda x, m: mha.random_layer(2, D)(x, memory=m), "keys and values of this layer are of"),
        (lambda x, m: mha.Examples(x, x, memory=m, positions=np.arange(K)), "have no distance"),
        (lambda x, m: mha.Examples(x, x, memory_lengths=[2]), "memory_lengths without memory"),
        (lambda x, m: mha.Examples(x, x[:, :2], memory=m), "Y has shape"),
        (lambda x, m: mha.Examples(x, x, positions=np.arange(3)), "positions have shape"),
        (lambda x, m: cross_layer(causal=True), "neither before nor after"),
        (lambda x, m: cross_layer(latent=mha.Latent(9)), "narrower than the tokens"),
        (lambda x, m: cross_layer(latent=mha.Latent(2), kv_heads=1), "kv_heads: heads with a lat"),
        (lambda x, m: mha.Latent(0), "rank=0"),
        (lambda x, m: mha.Latent(2, epsilon=-1), "epsilon=-1 of a latent"),
    ],
)
def test_mistakes_are_said(call, said):
    with pytest.raises(ValueError, match=said):
        call(*sequences(3))
