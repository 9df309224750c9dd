"""What a config.json says of attention, in its older and newer forms, and what is refused."""

import json

import numpy as np
import pytest
import safetensors.numpy

import mhalearn as mha
from mhalearn.interop import to_huggingface
from mhalearn.layer.position_bias import T5Bias
from mhalearn.layer.rope_scaling import DynamicNTK, LinearScaling, Llama3, Yarn

D, M, G, H = 8, 4, 2, 4
LLAMA = {
    "model_type": "llama",
    "hidden_size": D,
    "num_attention_heads": M,
    "num_key_value_heads": G,
    "head_dim": H,
    "max_position_embeddings": 64,
}


def weights(layers=2, gains=False, sinks=False):
    rng = np.random.default_rng(0)
    shapes = {
        "q_proj": (M * H, D),
        "k_proj": (G * H, D),
        "v_proj": (G * H, D),
        "o_proj": (D, M * H),
    }
    state = {}
    for layer in range(layers):
        place = f"model.layers.{layer}.self_attn."
        for name, shape in shapes.items():
            state[f"{place}{name}.weight"] = rng.standard_normal(shape).astype(np.float32)
        if gains:
            for name in ("q_norm", "k_norm"):
                state[f"{place}{name}.weight"] = rng.standard_normal(H).astype(np.float32)
        if sinks:
            state[f"{place}sinks"] = rng.standard_normal(M).astype(np.float32)
    return state


def read(changes, index=0, state=None):
    return mha.from_huggingface(state or weights(), index, config=LLAMA | changes).architecture


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({}, mha.Rope()),
        ({"rope_theta": 5e5}, mha.Rope(5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, mha.Rope(5e5)),
        ({"rope_theta": 100, "partial_rotary_factor": 0.5}, mha.Rope(100, 0.5)),
        (
            {"rope_scaling": {"type": "linear", "factor": 8.0}},
            mha.Rope(scaling=LinearScaling(8.0)),
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            mha.Rope(scaling=DynamicNTK(2.0, 64)),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 16}},
            mha.Rope(scaling=Yarn(4.0, 16)),
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 16}},
            mha.Rope(scaling=Yarn(4.0, 16)),
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 32,
                }
            },
            mha.Rope(scaling=Llama3(8.0, 1.0, 4.0, 32)),
        ),
    ],
    ids=str,
)
def test_rotary_positions_in_all_their_spellings(changes, rope):
    assert read(changes).rope == rope


@pytest.mark.parametrize(
    ("changes", "index", "window"),
    [
        ({"model_type": "mistral", "sliding_window": 5}, 1, 5),
        ({"model_type": "mistral", "sliding_window": None}, 1, None),
        ({"model_type": "qwen2", "sliding_window": 5, "use_sliding_window": False}, 1, None),
        ({"model_type": "qwen2", "sliding_window": 5, "use_sliding_window": True}, 0, 5),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 5,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            0,
            None,
        ),
        ({"model_type": "llama", "sliding_window": 5}, 0, None),
        ({"model_type": "gemma2", "sliding_window": 5, "query_pre_attn_scalar": 4}, 0, 5),
        ({"model_type": "gemma2", "sliding_window": 5, "query_pre_attn_scalar": 4}, 1, None),
        (
            {
                "model_type": "mistral",
                "sliding_window": 5,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            0,
            None,
        ),
    ],
    ids=str,
)
def test_windows_by_layer(changes, index, window):
    assert read(changes, index).window == window


def test_gemma_3_has_its_own_frequencies_for_each_kind_of_layer():
    older = {
        "model_type": "gemma3_text",
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window": 5,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
    }
    state = weights(gains=True)
    near, far = (read(older, index, state) for index in (0, 1))
    assert (near.rope, near.window) == (mha.Rope(1e4), 5)
    assert (far.rope, far.window) == (mha.Rope(1e6, scaling=LinearScaling(8.0)), None)
    assert far.logit_scale == 0.25
    layer = mha.from_huggingface(
        state, 0, config={"model_type": "gemma3", "text_config": LLAMA | older}
    )
    gain = state["model.layers.0.self_attn.q_norm.weight"].astype(float)
    np.testing.assert_array_equal(layer.params["query_gain"], gain + 1.0)


def test_weights_are_read_bit_by_bit():
    state = weights()
    layer = mha.from_huggingface(state, 1, config=LLAMA)
    query = state["model.layers.1.self_attn.q_proj.weight"]
    out = state["model.layers.1.self_attn.o_proj.weight"]
    for i in range(M):
        np.testing.assert_array_equal(layer.params["query"][i], query[i * H : (i + 1) * H].T)
        np.testing.assert_array_equal(layer.params["out"][i], out[:, i * H : (i + 1) * H].T)


def test_weights_go_back_through_a_file(tmp_path):
    state = weights(gains=True)
    layer = mha.from_huggingface(state, 1, config=LLAMA | {"model_type": "qwen3"})
    layer.save(tmp_path / "layer.safetensors")
    again = to_huggingface(mha.load_layer(tmp_path / "layer.safetensors"))
    mine = {name: array for name, array in state.items() if ".1." in name}
    assert again.keys() == mine.keys()
    for name, array in mine.items():
        np.testing.assert_array_equal(again[name], array)
    with pytest.raises(ValueError, match="does not say from which model"):
        to_huggingface(layer.replace(metadata={}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_type='longrope'"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "rope_type='proportional'"),
        ({"rope_scaling": {"type": "linear"}}, "a linear scaling needs factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "short": 1}}, "'short' is no part"),
        ({"rope_theta": "many"}, "no rope_theta"),
        ({"partial_rotary_factor": 0.3}, "rotates 1 dimensions"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ({"attention_multiplier": 0.1}, "attention_multiplier=0.1"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ({"clip_qkv": 8.0}, "clip_qkv=8.0"),
        ({"layer_types": ["chunked_attention", "full_attention"]}, "'chunked_attention'"),
        ({"num_attention_heads": None}, "no num_attention_heads"),
        ({"num_attention_heads": 8}, "the config says 8 heads of 4"),
        ({"num_key_value_heads": 4}, "key weights have shape"),
        ({"num_key_value_heads": -1}, "no num_key_value_heads"),
        ({"model_type": "qwen3"}, "query_gain is missing"),
        ({"model_type": "gpt_oss"}, "sink is missing"),
        ({"model_type": "gpt_neox"}, "no attention layer named as in GPT-NeoX"),
        ({"model_type": "qwen3_next", "rope_theta": 1e4}, "RoPE"),
        ({"model_type": "deepseek_v3"}, "no qk_rope_head_dim"),
    ],
    ids=str,
)
def test_what_is_not_modelled_is_refused_by_name(changes, said):
    with pytest.raises(ValueError, match=said):
        read(changes)


def test_tensors_that_a_family_does_not_have_are_refused():
    with pytest.raises(ValueError, match=r"sinks' is no part of Llama's attention"):
        read({}, state=weights(sinks=True))
    with pytest.raises(ValueError, match="leave n_heads, causal and rope out"):
        mha.from_huggingface(weights(), n_heads=4, config=LLAMA)
    with pytest.raises(ValueError, match="layer_index=2: there are layers 0 to 1"):
        read({}, 2)


def test_t5_keeps_one_table_for_all_layers():
    rng = np.random.default_rng(0)
    state = {"decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": (8, 3)}
    for side in ("encoder", "decoder"):
        for layer in range(2):
            place = f"{side}.block.{layer}.layer.0.SelfAttention."
            state |= {f"{place}{name}.weight": (6, D) for name in "qkv"} | {
                f"{place}o.weight": (D, 6)
            }
    state = {name: rng.standard_normal(shape) for name, shape in state.items()}
    config = {"model_type": "t5", "num_heads": 3, "d_kv": 2, "relative_attention_num_buckets": 8}
    layer = mha.from_huggingface(state, 1, config=config, prefix="decoder")
    assert layer.architecture.position_bias == T5Bias(8, 128, bidirectional=False)
    assert layer.causal
    table = state["decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
    np.testing.assert_array_equal(layer.params["position_table"], table)
    with pytest.raises(ValueError, match="choose one by its prefix"):
        mha.from_huggingface(state, 1, config=config)
    with pytest.raises(ValueError, match=r"encoder.block.0.* the position bias that all layers"):
        mha.from_huggingface(state, 1, config=config, prefix="encoder")


def write_shards(folder):
    state = weights()
    names = sorted(state)
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        part = {name: state[name] for name in names if files[name] == file}
        safetensors.numpy.save_file(part, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return state, index


def test_shards_are_read_by_their_index_or_folder(tmp_path):
    state, index = write_shards(tmp_path)
    whole = mha.from_huggingface(state, 1, config=LLAMA)
    for source in (tmp_path, index):
        layer = mha.from_huggingface(source, 1)
        assert layer.architecture == whole.architecture
        np.testing.assert_array_equal(layer.params["key"], whole.params["key"])
    safetensors.numpy.save_file(state, tmp_path / "model.safetensors")
    index.unlink()
    assert mha.compare(mha.from_huggingface(tmp_path, 1), whole).max_error < 1e-14


@pytest.mark.parametrize(
    "said",
    [
        "{",
        "[]",
        "{}",
        '{"weight_map": {}}',
        '{"weight_map": {"a": "../other.safetensors"}}',
        '{"weight_map": {"a": "/etc/passwd"}}',
        '{"weight_map": {"a": 3}}',
    ],
)
def test_an_index_that_is_none_or_points_elsewhere_is_refused(said, tmp_path):
    _, index = write_shards(tmp_path)
    index.write_text(said)
    with pytest.raises(ValueError, match="no index of shards"):
        mha.from_huggingface(index)


def test_an_index_that_promises_too_much_is_refused(tmp_path):
    _, index = write_shards(tmp_path)
    said = json.loads(index.read_text())
    said["weight_map"]["model.layers.7.self_attn.q_proj.weight"] = (
        "model-00001-of-00002.safetensors"
    )
    index.write_text(json.dumps(said))
    with pytest.raises(ValueError, match=r"there is no 'model.layers.7"):
        mha.from_huggingface(index)
