import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import safetensors.numpy
from damage import count_silent_changes

from mhalearn.data.inputs import sample_inputs
from mhalearn.layer.layer import AttentionLayer, load_layer
from mhalearn.layer.random_layers import random_layer


def oracle(layer, x, lengths=None):
    return oracles.attention_layer(
        x,
        layer.theta,
        layer.w,
        layer.key_vector,
        layer.out_bias,
        causal=layer.causal,
        lengths=lengths,
    )


@pytest.mark.parametrize("key_vector", [False, True])
@pytest.mark.parametrize("out_bias", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("n", "k", "d", "e", "m"),
    [(1, 2, 1, 1, 1), (3, 4, 3, 3, 2), (2, 5, 4, 2, 3), (4, 3, 2, 5, 1)],
)
def test_the_layer_equals_a_naive_loop(n, k, d, e, m, padded, causal, out_bias, key_vector):
    layer = random_layer(
        m, d, out_dim=e, key_vector=key_vector, out_bias=out_bias, causal=causal, seed=n + k
    )
    x = sample_inputs("gaussian", n, k, d, seed=3)
    lengths = np.random.default_rng(5).integers(1, k + 1, n) if padded else None
    y = layer(x, lengths)
    assert y.shape == (n, k, e)
    assert y.dtype == np.float64
    np.testing.assert_allclose(y, oracle(layer, x, lengths), rtol=0, atol=1e-12)


@pytest.mark.parametrize("scale", [20.0, 400.0])
def test_saturated_attention_neither_overflows_nor_drifts(scale):
    layer = random_layer(2, 4, scale=scale, seed=1)
    x = sample_inputs("gaussian", 3, 5, 4, seed=2)
    np.testing.assert_allclose(layer(x), oracle(layer, x), rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.float16, np.float32, np.float64, ">f8"])
def test_every_input_dtype_gives_the_same_float64_output(dtype):
    layer = random_layer(2, 4, seed=1)
    x = sample_inputs("boolean", 3, 5, 4, seed=2)
    y = layer(x.astype(dtype))
    assert y.dtype == np.float64
    np.testing.assert_array_equal(y, layer(x.astype(np.float64)))


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float32, jnp.bfloat16])
def test_jax_inputs_are_computed_in_float64_and_the_global_flag_is_untouched(dtype):
    layer = random_layer(2, 4, seed=1)
    x = sample_inputs("boolean", 3, 5, 4, seed=2)
    before = jax.config.jax_enable_x64
    y = layer(jnp.asarray(x, dtype))
    assert jax.config.jax_enable_x64 == before
    assert not before
    assert jnp.ones(2).dtype == jnp.float32
    assert isinstance(y, np.ndarray)
    np.testing.assert_allclose(y, oracle(layer, x), rtol=0, atol=1e-12)


def test_many_examples_give_what_few_give():
    layer = random_layer(3, 8, key_vector=True, out_bias=True, seed=1)
    n = 20_000  # several workspaces, the last of them part full
    x = sample_inputs("gaussian", n, 6, 8, seed=2)
    y = layer(x)
    for start in (0, 7_000, n - 3):
        few = x[start : start + 3]
        np.testing.assert_allclose(y[start : start + 3], oracle(layer, few), rtol=0, atol=1e-12)
    one_by_one = np.concatenate([layer(part) for part in np.array_split(x, 3)])
    np.testing.assert_allclose(y, one_by_one, rtol=0, atol=1e-13)


def test_padding_is_never_looked_at():
    layer = random_layer(2, 4, key_vector=True, out_bias=True, seed=1)
    x = sample_inputs("gaussian", 4, 5, 4, seed=2)
    lengths = np.array([5, 3, 1, 2])
    y = layer(x, lengths)
    other = x.copy()
    other[np.arange(5) >= lengths[:, None]] = 1e6
    np.testing.assert_array_equal(layer(other, lengths), y)
    np.testing.assert_allclose(y[1, :3], layer(x[1:2, :3])[0], rtol=0, atol=1e-13)
    assert not y[1, 3:].any()


def test_causal_outputs_do_not_see_later_tokens():
    layer = random_layer(2, 4, causal=True, seed=1)
    x = sample_inputs("gaussian", 2, 5, 4, seed=2)
    later = x.copy()
    later[:, 3:] += 1.0
    np.testing.assert_allclose(layer(later)[:, :3], layer(x)[:, :3], rtol=0, atol=1e-13)
    assert np.abs(layer(later)[:, 3:] - layer(x)[:, 3:]).min() > 1e-6


def test_permuting_tokens_permutes_outputs():
    layer = random_layer(3, 5, key_vector=True, out_bias=True, seed=1)
    x = sample_inputs("gaussian", 4, 6, 5, seed=2)
    order = np.random.default_rng(0).permutation(6)
    np.testing.assert_allclose(layer(x[:, order]), layer(x)[:, order], rtol=0, atol=1e-12)


def test_a_signed_permutation_of_features_changes_nothing():
    layer = random_layer(3, 5, key_vector=True, out_bias=True, seed=1)
    x = sample_inputs("gaussian", 4, 6, 5, seed=2)
    rng = np.random.default_rng(0)
    r = np.eye(5)[rng.permutation(5)] * rng.choice([-1.0, 1.0], 5)
    turned = layer.replace(
        theta=r.T @ layer.theta @ r, w=r.T @ layer.w, key_vector=layer.key_vector @ r
    )
    np.testing.assert_allclose(turned(x @ r), layer(x), rtol=0, atol=1e-12)
    assert np.abs(turned(x) - layer(x)).max() > 1e-3


def test_reordering_heads_changes_neither_function_nor_canonical_form():
    layer = random_layer(4, 5, key_vector=True, seed=1)
    x = sample_inputs("gaussian", 4, 6, 5, seed=2)
    order = [2, 0, 3, 1]
    other = layer.replace(
        theta=layer.theta[order], w=layer.w[order], key_vector=layer.key_vector[order]
    )
    np.testing.assert_allclose(other(x), layer(x), rtol=0, atol=1e-12)
    for name in ("theta", "w", "key_vector"):
        np.testing.assert_array_equal(
            getattr(other.canonical(), name), getattr(layer.canonical(), name)
        )


def test_canonical_form_merges_drops_and_orders():
    base = random_layer(3, 4, key_vector=True, out_bias=True, seed=1)
    a, b, c = range(3)
    heads = [a, b, a, c, c, b]
    w = np.stack(
        [0.1 * base.w[a], base.w[b], 0.2 * base.w[a], base.w[c], -base.w[c], 4.0 * base.w[b]]
    )
    layer = base.replace(theta=base.theta[heads], w=w, key_vector=base.key_vector[heads])
    canonical = layer.canonical()
    np.testing.assert_array_equal(canonical.theta, base.theta[[b, a]])
    np.testing.assert_array_equal(canonical.key_vector, base.key_vector[[b, a]])
    np.testing.assert_allclose(canonical.w, np.stack([5 * base.w[b], 0.3 * base.w[a]]), rtol=1e-14)
    np.testing.assert_array_equal(canonical.out_bias, base.out_bias)
    x = sample_inputs("gaussian", 4, 6, 4, seed=2)
    np.testing.assert_allclose(canonical(x), layer(x), rtol=0, atol=1e-12)
    again = canonical.canonical()
    np.testing.assert_array_equal(again.theta, canonical.theta)


def test_heads_are_ordered_by_what_merging_makes_of_them():
    base = random_layer(2, 4, seed=1)
    unit = base.w / np.linalg.norm(base.w, axis=(1, 2), keepdims=True)
    layer = AttentionLayer(base.theta[[0, 1, 1]], np.stack([unit[0], 0.7 * unit[1], 0.7 * unit[1]]))
    np.testing.assert_array_equal(layer.canonical().theta, base.theta[[1, 0]])


def test_heads_that_differ_only_in_their_key_vector_are_not_merged():
    base = random_layer(2, 4, key_vector=True, seed=1)
    layer = base.replace(theta=base.theta[[0, 0]])
    assert layer.canonical().n_heads == 2
    assert layer.replace(key_vector=None).canonical().n_heads == 1


def test_canonical_tolerance_is_relative():
    base = random_layer(1, 4, seed=1)
    for size in (1e-6, 1.0, 1e6):
        theta = size * np.concatenate([base.theta, base.theta * (1 + 1e-6)])
        layer = AttentionLayer(theta, size * np.concatenate([base.w, base.w]))
        assert layer.canonical().n_heads == 2
        assert layer.canonical(tolerance=1e-5).n_heads == 1


def test_the_canonical_form_of_nothing_is_one_zero_head():
    base = random_layer(2, 4, out_dim=3, key_vector=True, out_bias=True, seed=1)
    cancelling = base.replace(
        theta=base.theta[[0, 0]],
        w=np.stack([base.w[0], -base.w[0]]),
        key_vector=base.key_vector[[0, 0]],
    )
    for layer in (cancelling, base.replace(w=np.zeros_like(base.w))):
        canonical = layer.canonical()
        assert (canonical.n_heads, canonical.d, canonical.out_dim) == (1, 4, 3)
        assert not canonical.theta.any()
        assert not canonical.w.any()
        np.testing.assert_array_equal(canonical.out_bias, base.out_bias)


@pytest.mark.parametrize("extras", [False, True])
def test_save_and_load_are_bit_exact(tmp_path, extras):
    layer = random_layer(
        3, 5, out_dim=2, key_vector=extras, out_bias=extras, causal=extras, seed=1
    ).replace(seen=np.array([0, 2**64 - 1, 7], np.uint64) if extras else None)
    path = tmp_path / "layer.safetensors"
    layer.save(path)
    loaded = load_layer(path)
    for name in ("theta", "w", "key_vector", "out_bias", "seen"):
        saved, found = getattr(layer, name), getattr(loaded, name)
        if saved is None:
            assert found is None
        else:
            assert found.dtype == saved.dtype
            assert found.tobytes() == saved.tobytes()
    assert loaded.causal is extras
    assert "mhalearn_version" in loaded.metadata
    assert {name: loaded.metadata[name] for name in layer.metadata} == layer.metadata
    first = path.read_bytes()
    loaded.save(path)
    assert path.read_bytes() == first


def test_flipped_bytes_in_a_layer_file_are_told(tmp_path):
    path = tmp_path / "layer.safetensors"
    seen = np.arange(20, dtype=np.uint64)
    layer = random_layer(2, 4, key_vector=True, seed=1).replace(seen=seen, metadata={"seed": "1"})
    layer.save(path)

    def is_same(found):
        arrays = (*found.parameters().values(), found.seen)
        expected = (*layer.parameters().values(), layer.seen)
        return (
            found.causal == layer.causal
            and all(map(np.array_equal, arrays, expected))
            and found.metadata.get("seed") == "1"
        )

    assert count_silent_changes(path, lambda: load_layer(path), is_same) == 0


def test_a_layer_file_without_checksums_is_read(tmp_path):
    path = tmp_path / "layer.safetensors"
    layer = random_layer(2, 4, seed=1)
    safetensors.numpy.save_file({"theta": layer.theta, "w": layer.w}, path, {"kind": "layer"})
    np.testing.assert_array_equal(load_layer(path).theta, layer.theta)
    assert load_layer(path).metadata == {}


def test_factors_travel_with_the_layer_until_its_parameters_change(tmp_path):
    factors = {"query": np.ones((2, 3, 5), np.float32), "out_bias": np.zeros(2, np.float16)}
    layer = random_layer(2, 5, out_dim=2, seed=1).canonical().replace(factors=factors)
    layer.save(tmp_path / "layer.safetensors")
    for kept in (
        load_layer(tmp_path / "layer.safetensors"),
        layer.replace(causal=True, metadata={}, seen=None),
        layer.canonical(),
    ):
        assert kept.factors.keys() == factors.keys()
        for name, factor in factors.items():
            assert kept.factors[name].dtype == factor.dtype
            np.testing.assert_array_equal(kept.factors[name], factor)
    twice = AttentionLayer(layer.theta[[0, 0]], layer.w, factors=factors)
    for changed in (
        layer.replace(theta=layer.theta),
        layer.replace(w=layer.w),
        layer.replace(key_vector=np.zeros((2, 5))),
        layer.replace(out_bias=np.zeros(2)),
        AttentionLayer(layer.theta[::-1], layer.w[::-1], factors=factors).canonical(),
        twice.canonical(),
    ):
        assert changed.factors is None


def test_parameters_are_copied_and_read_only():
    theta = np.ones((1, 2, 2))
    layer = AttentionLayer(theta, np.ones((1, 2, 2)))
    theta[:] = 5
    assert (layer.theta == 1).all()
    with pytest.raises(ValueError, match="read-only"):
        layer.theta[0, 0, 0] = 2


def test_repr_says_what_the_layer_is():
    layer = random_layer(2, 4, out_dim=3, causal=True)
    assert repr(layer) == "AttentionLayer(n_heads=2, d=4, out_dim=3, causal)"


THETA, W = np.ones((2, 3, 3)), np.ones((2, 3, 4))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((np.ones((2, 3)), W), "theta has shape"),
        ((np.ones((0, 3, 3)), W), "at least one head"),
        ((np.ones((2, 3, 4)), W), r"expected \(heads, d, d\)"),
        ((THETA, np.ones((3, 3, 4))), "to match theta"),
        ((THETA, np.ones((2, 3, 0))), "to match theta"),
        ((THETA, W, np.ones((2, 4))), "key_vector has shape"),
        ((THETA, W, None, np.ones(3)), "out_bias has shape"),
        ((THETA * np.nan, W), "NaN"),
        ((THETA * 1j, W), "complex128"),
        ((THETA.astype(bool), W), "bool"),
    ],
)
def test_wrong_parameters_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        AttentionLayer(*arguments)


@pytest.mark.parametrize(
    ("x", "lengths", "words"),
    [
        (
            np.ones((4, 3)),
            None,
            r"expected 3 axes \(examples, tokens, features\), got 2; .*X\[None\]",
        ),
        (np.ones((4, 1, 3)), None, "k >= 2"),
        (np.ones((0, 2, 3)), None, "empty"),
        (np.ones((4, 2, 5)), None, "5 features"),
        (np.full((4, 2, 3), np.inf), None, "24 NaN or infinite"),
        (np.ones((4, 2, 3), bool), None, "bool"),
        (np.full((4, 2, 3), "a"), None, "dtype"),
        (np.ones((4, 2, 3)), [1, 2], "4 integers"),
        (np.ones((4, 2, 3)), [1.0, 2, 1, 1], "4 integers"),
        (np.ones((4, 2, 3)), [0, 2, 1, 1], "between 1 and k = 2"),
        (np.ones((4, 2, 3)), [3, 2, 1, 1], "between 1 and k = 2"),
    ],
)
def test_wrong_inputs_are_refused(x, lengths, words):
    with pytest.raises(ValueError, match=words):
        AttentionLayer(THETA, W)(x, lengths)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("key_vector", [False, True])
@pytest.mark.parametrize("lengths", [None, [5, 2, 1, 4]])
def test_patterns_are_those_of_a_loop(causal, key_vector, lengths):
    layer = random_layer(2, 3, key_vector=key_vector, seed=3).replace(causal=causal)
    x = np.random.default_rng(0).standard_normal((4, 5, 3))
    found = layer.patterns(x, lengths)
    expected = oracles.attention_patterns(
        x, layer.theta, layer.key_vector, causal=causal, lengths=lengths
    )
    assert found.shape == (4, 2, 5, 5)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)
    inside = np.arange(5) < np.array(lengths or [5] * 4)[:, None]
    np.testing.assert_allclose(found.sum(axis=3).transpose(0, 2, 1)[inside], 1.0, rtol=1e-12)
    mixed = np.einsum("nmrj,njd,mde->nre", found, x, layer.w)
    np.testing.assert_allclose(mixed, layer(x, lengths), rtol=1e-9, atol=1e-12)


def test_patterns_of_many_examples_come_in_chunks(monkeypatch):
    layer = random_layer(2, 3, seed=3)
    x = sample_inputs("gaussian", 40, 5, 3, seed=0)
    expected = oracles.attention_patterns(x, layer.theta)
    monkeypatch.setattr("mhalearn.layer.base._WORKSPACE", 4000)
    np.testing.assert_allclose(layer.patterns(x), expected, rtol=1e-12, atol=1e-14)
    with pytest.raises(ValueError, match="d = 3"):
        layer.patterns(x[..., :2])
