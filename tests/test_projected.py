"""Heads held by their projections: forward against a naive loop, for every variant."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

import mhalearn as mha
from mhalearn._runtime.programs import float64
from mhalearn.layer.batches import make_chunk
from mhalearn.layer.position_bias import Alibi, T5Bias
from mhalearn.layer.projected import Projected
from mhalearn.layer.qk_norm import QKNorm
from mhalearn.layer.rope_scaling import DynamicNTK, LinearScaling, Llama3, Yarn

ROPE = mha.Rope(base=100.0)
VARIANTS = {
    "rotary": {"rope": ROPE},
    "interleaved": {"rope": mha.Rope(100.0, layout="interleaved")},
    "partial rotary": {"rope": mha.Rope(100.0, fraction=0.5)},
    "linear scaling": {"rope": mha.Rope(50.0, scaling=LinearScaling(4.0))},
    "dynamic NTK": {"rope": mha.Rope(50.0, scaling=DynamicNTK(2.0, 4))},
    "YaRN": {"rope": mha.Rope(50.0, scaling=Yarn(4.0, 64, beta_fast=4.0))},
    "YaRN, not truncated": {
        "rope": mha.Rope(50.0, scaling=Yarn(4.0, 64, 4.0, attention_factor=1.3, truncate=False))
    },
    "llama3": {"rope": mha.Rope(500.0, scaling=Llama3(8.0, 1.0, 4.0, 64))},
    "grouped": {"kv_heads": 2},
    "multi-query": {"kv_heads": 1},
    "window": {"window": 3},
    "causal window": {"window": 2, "causal": True},
    "sinks": {"sinks": True},
    "soft-cap": {"softcap": 0.7},
    "own scale": {"logit_scale": 0.9},
    "RMS norm": {"qk_norm": True},
    "L2 norm": {"qk_norm": "l2", "logit_scale": 3.0},
    "RMS norm of all heads": {"qk_norm": QKNorm(across_heads=True, epsilon=1e-2), "kv_heads": 2},
    "ALiBi": {"position_bias": "alibi", "causal": True},
    "ALiBi, 6 heads": {"position_bias": Alibi(), "n_heads": 6},
    "T5": {"position_bias": T5Bias(8, 6)},
    "T5, causal": {"position_bias": T5Bias(8, 6, bidirectional=False), "causal": True},
    "biases": {"kv_heads": 2, "key_vector": True, "out_bias": True},
    "Qwen2": {"rope": ROPE, "kv_heads": 2, "key_vector": True, "causal": True},
    "Gemma 3": {"rope": ROPE, "kv_heads": 2, "qk_norm": True, "window": 3, "causal": True},
    "gpt-oss": {
        "rope": ROPE,
        "kv_heads": 2,
        "sinks": True,
        "window": 3,
        "key_vector": True,
        "out_bias": True,
        "causal": True,
    },
    "narrow values": {"value_dim": 3, "rope": ROPE, "kv_heads": 2},
    "cross-attention": {"memory": 3, "head_dim": 3},
    "cross-attention with more": {
        "memory": 6,
        "kv_heads": 2,
        "sinks": True,
        "softcap": 1.5,
        "qk_norm": QKNorm(epsilon=1e-3),
        "key_vector": True,
        "out_bias": True,
        "value_dim": 3,
    },
    "latent": {"latent": mha.Latent(4, epsilon=1e-3), "head_dim": 3},
    "latent, not normalised": {"latent": mha.Latent(4, 5, norm=False), "value_dim": 3},
    "DeepSeek-V2 Lite": {
        "latent": mha.Latent(4, epsilon=1e-3),
        "rope": mha.Rope(100.0, fraction=0.5, layout="interleaved"),
        "value_dim": 3,
        "causal": True,
    },
    "DeepSeek-V3": {
        "latent": mha.Latent(4, 5, epsilon=1e-3),
        "rope": mha.Rope(100.0, fraction=0.5, scaling=Yarn(4.0, 64, beta_fast=4.0)),
        "value_dim": 3,
        "logit_scale": 0.8,
        "causal": True,
    },
    "latent with more": {
        "latent": mha.Latent(3, 4),
        "rope": mha.Rope(100.0, fraction=0.5),
        "sinks": True,
        "softcap": 1.5,
        "window": 3,
        "position_bias": T5Bias(8, 6),
        "out_dim": 3,
    },
    "latent of a memory": {"latent": mha.Latent(4), "memory": 6},
    "everything": {
        "rope": mha.Rope(100.0, 0.5, "interleaved", LinearScaling(2.0)),
        "kv_heads": 2,
        "window": 4,
        "sinks": True,
        "softcap": 1.5,
        "qk_norm": QKNorm(epsilon=1e-3),
        "position_bias": T5Bias(8, 6, bidirectional=False),
        "logit_scale": 0.6,
        "key_vector": True,
        "out_bias": True,
        "causal": True,
        "out_dim": 3,
    },
}
N, K, D = 3, 6, 5
LENGTHS = np.array([6, 4, 1])
POSITIONS = np.array([[0, 1, 2, 3, 4, 5], [7, 9, 10, 14, 15, 90], [3, 2, 1, 0, 5, 8]])


def inputs_of(layer, seed=0):
    """Tokens, and a second sequence where the layer takes one."""
    rng = np.random.default_rng(seed)
    x, width = rng.standard_normal((N, K, D)), layer.architecture.memory
    if width is None:
        return x, {}
    return x, {"memory": rng.standard_normal((N, 8, width)), "memory_lengths": np.array([8, 3, 1])}


def layer_of(name):
    return mha.random_layer(**({"n_heads": 4, "d": D, "head_dim": 4} | VARIANTS[name]), seed=1)


@pytest.mark.parametrize("name", VARIANTS)
def test_forward_and_patterns_are_those_of_a_loop(name):
    layer = layer_of(name)
    x, beside = inputs_of(layer)
    for options in ({}, {"lengths": LENGTHS}, {"lengths": LENGTHS, "positions": POSITIONS}):
        if beside:
            options = options | beside
            options.pop("positions", None)
        outputs, weights = oracles.projected_layer(x, layer.architecture, layer.params, **options)
        np.testing.assert_allclose(layer(x, **options), outputs, rtol=0, atol=1e-12)
        np.testing.assert_allclose(layer.patterns(x, **options), weights, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["rotary", "partial rotary", "ALiBi", "T5", "everything"])
def test_shifted_positions_change_nothing_and_spread_ones_do(name):
    layer = layer_of(name)
    x = np.random.default_rng(0).standard_normal((N, K, D))
    near = np.arange(K)
    np.testing.assert_allclose(layer(x, positions=near + 50), layer(x), atol=1e-11)
    np.testing.assert_array_equal(layer(x, positions=near), layer(x))
    assert np.abs(layer(x, positions=3 * near) - layer(x)).max() > 1e-3


@pytest.mark.parametrize("name", ["grouped", "biases", "own scale"])
def test_heads_that_only_share_keys_have_theta_and_w(name):
    layer = layer_of(name)
    x = np.random.default_rng(0).standard_normal((N, K, D))
    plain = layer.to_attention_layer()
    np.testing.assert_allclose(plain(x, LENGTHS), layer(x, LENGTHS), atol=1e-12)
    assert plain.architecture.head_dim == 4
    np.testing.assert_array_equal(plain(x, positions=POSITIONS), plain(x))


def test_heads_with_positions_have_no_theta():
    with pytest.raises(ValueError, match="heads with rope have no single matrix Theta"):
        layer_of("rotary").to_attention_layer()


@pytest.mark.parametrize("name", ["rotary", "everything"])
def test_products_by_automatic_differentiation_are_differences(name):
    layer = layer_of(name)
    kind, params = layer.parametrisation, layer.params
    with float64():
        x = np.random.default_rng(0).standard_normal((N, K, D))
        chunk = jax.tree.map(jnp.asarray, make_chunk(x, LENGTHS, **layer.chunk_options()))
        params = jax.tree.map(jnp.asarray, params)
        step = kind.init(np.random.default_rng(2))
        step = {key: step[key] for key in params}
        outputs = jax.jit(lambda params: kind.outputs(params, chunk))
        change = jax.jit(lambda params, step: kind.jvp(params, None, chunk, step))(params, step)
        there, here = (
            outputs(jax.tree.map(lambda p, s, t=t: p + t * s, params, step)) for t in (1e-6, -1e-6)
        )
        np.testing.assert_allclose(change, (there - here) / 2e-6, atol=1e-8)
        sizes = jax.jit(lambda params: kind.term_sizes(params, chunk))(params)
        assert np.all(sizes + 1e-12 >= np.abs(outputs(params)))


def test_random_layers_have_thetas_of_the_scale():
    layer = mha.random_layer(4, 6, 2.5, head_dim=4, kv_heads=2, rope=mha.Rope(), seed=3)
    query, key = layer.params["query"], np.repeat(layer.params["key"], 2, axis=0)
    theta = query @ key.swapaxes(1, 2) / 2.0
    np.testing.assert_allclose(np.linalg.norm(theta, axis=(1, 2)), 2.5)
    again = mha.random_layer(4, 6, 2.5, head_dim=4, kv_heads=2, rope=mha.Rope(), seed=3)
    np.testing.assert_array_equal(again.params["query"], query)
    assert "rope=Rope(" in layer.metadata["teacher"]
    assert repr(layer) == "ProjectedLayer(n_heads=4, d=6, head_dim=4, out_dim=6, kv_heads, rope)"


def test_head_dim_alone_is_a_rank():
    plain = mha.random_layer(2, 6, head_dim=3, seed=4)
    np.testing.assert_array_equal(plain.theta, mha.random_layer(2, 6, rank=3, seed=4).theta)
    with pytest.raises(ValueError, match="rank=2 and head_dim=3 mean the same"):
        mha.random_layer(2, 6, rank=2, head_dim=3)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"head_dim": None}, "head_dim is missing: heads with rope"),
        ({"head_dim": 3}, "fraction=1 of head_dim=3 rotates 3 dimensions"),
        ({"kv_heads": 3}, "4 heads do not share keys in equal groups"),
        ({"kv_heads": 0}, "kv_heads=0"),
        ({"window": 0}, "window=0"),
        ({"softcap": -1.0}, "softcap=-1.0"),
        ({"logit_scale": float("nan")}, "logit_scale=nan"),
        ({"qk_norm": "layer"}, "kind 'layer'"),
        ({"qk_norm": QKNorm("l2", across_heads=True)}, "across heads"),
        ({"position_bias": "sinusoid"}, "position_bias='sinusoid'"),
        ({"attention": Projected}, "attention is a class of your own"),
    ],
    ids=str,
)
def test_what_no_heads_have_is_refused(bad, said):
    with pytest.raises(ValueError, match=said):
        mha.Architecture(**({"d": 6, "n_heads": 4, "head_dim": 4, "rope": mha.Rope()} | bad))


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"base": 1.0}, "base=1.0"),
        ({"fraction": 0.0}, "fraction=0.0"),
        ({"fraction": 1.5}, "fraction=1.5"),
        ({"layout": "thirds"}, "layout='thirds'"),
        ({"scaling": {"factor": 2.0}}, "rope_type=None: rotary scalings are linear, dynamic"),
        ({"scaling": {"rope_type": "longrope"}}, "rope_type='longrope'"),
        ({"scaling": {"rope_type": "linear"}}, "a linear scaling needs factor"),
        ({"scaling": {"rope_type": "linear", "factor": -1}}, "factor=-1 in a linear scaling"),
        ({"scaling": {"rope_type": "linear", "factor": 2, "x": 1}}, "'x' is no part"),
    ],
    ids=str,
)
def test_what_is_no_rope_is_refused(bad, said):
    with pytest.raises(ValueError, match=said):
        mha.Rope(**bad)


def test_a_scaling_may_be_a_mapping_as_config_json_has_it():
    said = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert mha.Rope(scaling=said) == mha.Rope(scaling=Yarn(4.0, 64))
    assert hash(mha.Rope(scaling=said)) == hash(mha.Rope(scaling=Yarn(4.0, 64)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"key": None}, "key is missing"),
        ({"sink": np.zeros(4)}, "'sink' is no parameter"),
        ({"query": np.zeros((4, 5, 3))}, r"query has shape \(4, 5, 3\): expected \(4, 5, 4\)"),
        ({"value": np.full((4, 5, 4), np.nan)}, "value has 80 NaN"),
    ],
    ids=str,
)
def test_parameters_of_other_shapes_are_refused(changes, said):
    layer = layer_of("rotary")
    with pytest.raises(ValueError, match=said):
        layer.replace(params=layer.params | changes)


def test_a_plain_architecture_has_no_projected_layer():
    with pytest.raises(ValueError, match="make an AttentionLayer"):
        mha.ProjectedLayer(mha.Architecture(4, 2, 2), {})


@pytest.mark.parametrize(
    "bad", [np.zeros(5, int), np.zeros((2, K), int), np.zeros(K), "near"], ids=str
)
def test_positions_are_integers_one_a_token(bad):
    x = np.random.default_rng(0).standard_normal((N, K, D))
    with pytest.raises(ValueError, match="positions have shape"):
        layer_of("rotary")(x, positions=bad)


@pytest.mark.parametrize(
    "given",
    [
        {"rope": ROPE},
        {"kv_heads": 1},
        {"window": 2},
        {"sinks": True},
        {"softcap": 5.0},
        {"qk_norm": True},
        {"position_bias": "alibi"},
    ],
    ids=str,
)
def test_methods_for_softmax_heads_refuse_such_heads_by_name(given):
    x = np.random.default_rng(0).standard_normal((8, 4, 4))
    with pytest.raises(ValueError, match=f"^{next(iter(given))}: .* use newton"):
        mha.AttentionRegressor(2, "adam", head_dim=2, **given).fit(x, x)


@pytest.mark.parametrize(
    "name", ["Qwen2", "everything", "biases", "latent, not normalised", "DeepSeek-V3"]
)
def test_a_layer_is_certified_on_fresh_examples_and_another_is_not(name):
    layer = layer_of(name)
    x = mha.sample_inputs("gaussian", 300, K, D, seed=3)
    found = mha.certify(layer, x, layer(x))
    assert found.recovered, found.reason
    assert "none was tested" in found.reason  # mirrored heads are looked for among plain ones
    moved = layer.params | {"key": layer.params["key"] * (1 + 1e-6)}
    assert not mha.certify(layer.replace(params=moved), x, layer(x)).recovered
    few = mha.certify(layer, x[:2], layer(x[:2]))
    assert not few.recovered
