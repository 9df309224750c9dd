"""Hugging Face and TransformerLens weights, against NumPy as those libraries compute attention."""

import json

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import torch

import mhalearn as mha
from mhalearn import interop

D, HEADS, H = 12, 3, 4


def softmax(logits):
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def split_heads(x):
    """(n, k, m h) -> (n, m, k, h), as both models reshape and transpose."""
    n, k, width = x.shape
    return x.reshape(n, k, HEADS, width // HEADS).transpose(0, 2, 1, 3)


def attend(query, key, value, causal):
    logits = query @ key.transpose(0, 1, 3, 2) / np.sqrt(query.shape[-1])
    if causal:
        logits = np.where(np.tri(logits.shape[-1], dtype=bool), logits, -np.inf)
    mixed = softmax(logits) @ value
    n, m, k, h = mixed.shape
    return mixed.transpose(0, 2, 1, 3).reshape(n, k, m * h)


def bert_attention(state, start, x):
    """BertSelfAttention and the dense layer of BertSelfOutput: nn.Linear, x W^T + b."""

    def linear(name, x):
        return x @ state[f"{start}{name}.weight"].T + state[f"{start}{name}.bias"]

    parts = (split_heads(linear(f"self.{name}", x)) for name in ("query", "key", "value"))
    return linear("output.dense", attend(*parts, causal=False))


def gpt2_attention(state, start, x):
    """GPT2Attention: Conv1D, x W + b, one weight for queries, keys and values; causal."""
    packed = x @ state[f"{start}c_attn.weight"] + state[f"{start}c_attn.bias"]
    mixed = attend(*map(split_heads, np.split(packed, 3, axis=-1)), causal=True)
    return mixed @ state[f"{start}c_proj.weight"] + state[f"{start}c_proj.bias"]


def lens_attention(state, start, x, causal):
    """TransformerLens's AbstractAttention, head by head."""
    names = [f"{kind}_{part}" for kind in "Wb" for part in "QKVO"]
    get = {name: state[f"{start}{name}"] for name in names}
    total = get["b_O"].astype(np.float64)
    for i in range(len(get["W_Q"])):
        query, key, value = (x @ get[f"W_{part}"][i] + get[f"b_{part}"][i] for part in "QKV")
        logits = query @ key.transpose(0, 2, 1) / np.sqrt(get["W_Q"].shape[2])
        if causal:
            logits = np.where(np.tri(logits.shape[-1], dtype=bool), logits, -np.inf)
        total = total + softmax(logits) @ value @ get["W_O"][i]
    return total


def draw(shapes, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    drawn = {name: rng.standard_normal(shape) / 3 for name, shape in shapes.items()}
    return {name: np.asarray(array, dtype) for name, array in drawn.items()}


def bert_state(prefix="", layers=2, d=D, dtype=np.float32):
    shapes = {f"{prefix}embeddings.word_embeddings.weight": (7, d)}
    for i in range(layers):
        block = f"{prefix}encoder.layer.{i}."
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            shapes[f"{block}attention.{name}.weight"] = (d, d)
            shapes[f"{block}attention.{name}.bias"] = (d,)
        shapes[f"{block}attention.output.LayerNorm.weight"] = (d,)
        shapes[f"{block}attention.output.LayerNorm.bias"] = (d,)
        shapes[f"{block}intermediate.dense.weight"] = (4 * d, d)
    return draw(shapes, dtype)


def gpt2_state(prefix="", layers=2, dtype=np.float32):
    shapes = {f"{prefix}wte.weight": (7, D)}
    for i in range(layers):
        block = f"{prefix}h.{i}.attn."
        shapes |= {f"{block}c_attn.weight": (D, 3 * D), f"{block}c_attn.bias": (3 * D,)}
        shapes |= {f"{block}c_proj.weight": (D, D), f"{block}c_proj.bias": (D,)}
        shapes |= {f"{block}bias": (1, 1, 9, 9), f"{block}masked_bias": ()}
        shapes |= {f"{prefix}h.{i}.mlp.c_fc.weight": (D, 4 * D)}
    return draw(shapes, dtype)


def lens_state(layers=2, dtype=np.float32, m=HEADS, h=5):
    shapes = {"embed.W_E": (7, D)}
    for i in range(layers):
        block = f"blocks.{i}.attn."
        shapes |= {f"{block}W_{part}": (m, D, h) for part in "QKV"} | {f"{block}W_O": (m, h, D)}
        shapes |= {f"{block}b_{part}": (m, h) for part in "QKV"} | {f"{block}b_O": (D,)}
        shapes |= {f"blocks.{i}.mlp.W_in": (D, 4 * D)}
    return draw(shapes, dtype)


X = mha.sample_inputs("gaussian", 4, 6, D, seed=1)


@pytest.mark.parametrize("prefix", ["", "bert.", "model.text.roberta."])
@pytest.mark.parametrize("layer_index", [0, 1])
def test_bert(prefix, layer_index):
    state = bert_state(prefix)
    layer = mha.from_huggingface(state, layer_index, HEADS)
    assert (layer.n_heads, layer.d, layer.causal) == (HEADS, D, False)
    expected = bert_attention(state, f"{prefix}encoder.layer.{layer_index}.attention.", X)
    np.testing.assert_allclose(layer(X), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("prefix", ["", "transformer."])
@pytest.mark.parametrize("layer_index", [0, 1])
def test_gpt2(prefix, layer_index):
    state = gpt2_state(prefix)
    layer = mha.from_huggingface(state, layer_index, n_heads=HEADS)
    assert layer.causal
    expected = gpt2_attention(state, f"{prefix}h.{layer_index}.attn.", X)
    np.testing.assert_allclose(layer(X), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_transformer_lens(causal):
    state = lens_state()
    layer = mha.from_huggingface(state, 1, causal=causal)
    expected = lens_attention(state, "blocks.1.attn.", X, causal)
    np.testing.assert_allclose(layer(X), expected, rtol=0, atol=1e-12)
    back = interop.to_transformer_lens(layer, 1)
    assert set(back) == {name for name in state if name.startswith("blocks.1.attn.")}
    for name, array in back.items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, state[name])


def test_the_mask_of_transformer_lens_says_whether_it_is_causal():
    state = lens_state()
    assert not mha.from_huggingface(state).causal
    mask = np.tri(9, dtype=bool)
    buffers = {"blocks.0.attn.mask": mask, "blocks.0.attn.IGNORE": np.float32(-np.inf)}
    assert mha.from_huggingface(state | buffers).causal
    assert not mha.from_huggingface(state | {"blocks.0.attn.mask": np.ones_like(mask)}).causal
    local = mask & ~np.tri(9, k=-3, dtype=bool)
    with pytest.raises(ValueError, match="local attention"):
        mha.from_huggingface(state | {"blocks.0.attn.mask": local})


def test_full_rank_heads_fit_transformer_lens():
    truth = mha.random_layer(2, 6, key_vector=True, out_bias=True, seed=3)
    state = interop.to_transformer_lens(truth)
    assert state["blocks.0.attn.W_Q"].shape == (2, 6, 6)
    assert mha.compare(mha.from_huggingface(state), truth).max_error < 1e-12
    with pytest.raises(ValueError, match="a head dimension of 3 holds rank 3"):
        interop.to_transformer_lens(truth, head_dim=3)
    with pytest.raises(ValueError, match="out_dim=4 beside d=6"):
        interop.to_transformer_lens(mha.random_layer(2, 6, out_dim=4))


@pytest.mark.parametrize("make", [bert_state, gpt2_state])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_files_and_state_dicts_of_torch_are_the_same_layer(make, dtype, tmp_path):
    state = make(dtype=dtype)
    safetensors.numpy.save_file(state, tmp_path / "model.safetensors")
    tensors = {
        name: torch.from_numpy(array.astype(np.float32)).to(
            {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(array.dtype.name)
        )
        for name, array in state.items()
    }
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    sources = (state, tensors, tmp_path / "model.safetensors", str(tmp_path / "pytorch_model.bin"))
    layers = [mha.from_huggingface(source, 1, HEADS) for source in sources]
    for layer in layers[1:]:
        np.testing.assert_array_equal(layer.theta, layers[0].theta)
        np.testing.assert_array_equal(layer.w, layers[0].w)
        np.testing.assert_array_equal(layer.out_bias, layers[0].out_bias)


def test_weights_go_out_as_they_came_in():
    state = bert_state()
    module = mha.to_torch(mha.from_huggingface(state, 1, HEADS))
    start = "encoder.layer.1.attention."
    packed = [state[f"{start}self.{name}.weight"] for name in ("query", "key", "value")]
    np.testing.assert_array_equal(module.in_proj_weight.detach(), np.concatenate(packed))
    np.testing.assert_array_equal(
        module.out_proj.weight.detach(), state[f"{start}output.dense.weight"]
    )
    state = gpt2_state()
    module = mha.to_torch(mha.from_huggingface(state, 1, HEADS))
    np.testing.assert_array_equal(module.in_proj_weight.detach().T, state["h.1.attn.c_attn.weight"])
    np.testing.assert_array_equal(module.out_proj.bias.detach(), state["h.1.attn.c_proj.bias"])


# Keys and values that heads share


def grouped_attention(x, query, key, value, out, heads, groups, causal=True):
    """Head by head, with nn.Linear weights (rows, d): head i uses keys and values of i's group."""
    h = len(query) // heads
    total = np.zeros((*x.shape[:2], len(out)))
    for i in range(heads):
        mine = slice(i * h, (i + 1) * h)
        group = i // (heads // groups)
        shared = slice(group * h, (group + 1) * h)
        logits = (x @ query[mine].T) @ (x @ key[shared].T).transpose(0, 2, 1) / np.sqrt(h)
        if causal:
            logits = np.where(np.tri(x.shape[1], dtype=bool), logits, -np.inf)
        total += softmax(logits) @ (x @ value[shared].T) @ out[:, mine].T
    return total


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(
    "how",
    [
        {"rope": False},
        {"config": {"position_embedding_type": "nope"}},
        {"config": {"no_rope_layers": [0], "rope_theta": 1e4, "layer_types": ["full_attention"]}},
    ],
    ids=["stated", "nope", "by layer"],
)
def test_grouped_queries_without_rotary_positions_are_heads(groups, how):
    heads, h = 4, 5
    rows = {"q": heads * h, "k": groups * h, "v": groups * h}
    start = "model.layers.0.self_attn."
    shapes = {f"{start}{name}_proj.weight": (count, D) for name, count in rows.items()}
    state = draw(shapes | {f"{start}o_proj.weight": (D, heads * h)})
    if "config" in how:
        how = {"config": how["config"] | {"num_key_value_heads": groups}}
    layer = mha.from_huggingface(state, 0, heads, **how)
    weights = (state[f"{start}{name}_proj.weight"] for name in "qkvo")
    expected = grouped_attention(X, *weights, heads, groups)
    np.testing.assert_allclose(layer(X), expected, rtol=0, atol=1e-12)
    assert layer.n_heads == heads
    with pytest.raises(ValueError, match="RoPE"):
        mha.from_huggingface(state, 0, heads)
    with pytest.raises(ValueError, match="RoPE"):
        mha.from_huggingface(state, 0, heads, rope=False, config={"rope_theta": 1e4})


def test_biases_are_shared_with_their_keys():
    start = "model.layers.0.self_attn."
    rows = {"q": 12, "k": 6, "v": 6, "o": D}
    state = draw({f"{start}{name}_proj.weight": (count, 12) for name, count in rows.items()})
    biases = draw({f"{start}{name}_proj.bias": (count,) for name, count in rows.items()}, seed=1)
    layer = mha.from_huggingface(state | biases, 0, 4, rope=False)
    # A constant feature carries the biases.
    ones = np.concatenate([X, np.ones((*X.shape[:2], 1))], axis=2)
    wide = [
        np.column_stack([state[f"{start}{n}_proj.weight"], biases[f"{start}{n}_proj.bias"]])
        for n in "qkv"
    ]
    expected = grouped_attention(ones, *wide, state[f"{start}o_proj.weight"], 4, 2)
    np.testing.assert_allclose(
        layer(X), expected + biases[f"{start}o_proj.bias"], rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("keys", [5, 15])
def test_keys_that_do_not_divide_among_heads_are_refused(keys):
    with pytest.raises(ValueError, match="does not divide among so many heads"):
        mha.from_huggingface(llama(keys=keys), 0, HEADS, rope=False)


def bigcode():
    """One nn.Linear makes all queries, then one key, then one value."""
    start = "transformer.h.0.attn."
    shapes = {f"{start}c_attn.weight": (D + 2 * H, D), f"{start}c_proj.weight": (D, D)}
    return draw(shapes | {f"{start}c_attn.bias": (D + 2 * H,), f"{start}c_proj.bias": (D,)})


def test_a_multi_query_layer_of_gpt_bigcode():
    state, start = bigcode(), "transformer.h.0.attn."
    layer = mha.from_huggingface(state, 0, config={"n_head": HEADS, "multi_query": True})
    ones = np.concatenate([X, np.ones((*X.shape[:2], 1))], axis=2)
    packed = np.column_stack([state[f"{start}c_attn.weight"], state[f"{start}c_attn.bias"]])
    parts = np.split(packed, (D, D + H))
    expected = grouped_attention(ones, *parts, state[f"{start}c_proj.weight"], HEADS, 1)
    np.testing.assert_allclose(layer(X), expected + state[f"{start}c_proj.bias"], atol=1e-12)
    assert layer.causal


def test_grouped_heads_of_transformer_lens():
    state = lens_state(layers=1, m=4)
    block = "blocks.0.attn."
    shared = {name: state.pop(f"{block}{name}")[::2] for name in ("W_K", "W_V", "b_K", "b_V")}
    layer = mha.from_huggingface(state | {f"{block}_{n}": part for n, part in shared.items()})
    whole = {f"{block}{name}": part[[0, 0, 1, 1]] for name, part in shared.items()}
    expected = lens_attention(state | whole, block, X, False)
    np.testing.assert_allclose(layer(X), expected, rtol=0, atol=1e-12)


# Configurations


@pytest.fixture
def bert_file(tmp_path):
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(bert_state(), path)
    return path


def test_a_configuration_beside_the_file_tells_the_heads(bert_file):
    with pytest.raises(ValueError, match=r"model.safetensors: encoder.* n_heads is missing"):
        mha.from_huggingface(bert_file)
    config = bert_file.with_name("config.json")
    config.write_text(json.dumps({"num_attention_heads": HEADS, "model_type": "bert"}))
    assert mha.from_huggingface(bert_file).n_heads == HEADS
    with pytest.raises(ValueError, match=r"n_heads=4, but config.json says 3"):
        mha.from_huggingface(bert_file, n_heads=4)
    config.write_text(json.dumps({"num_attention_heads": HEADS, "is_decoder": True}))
    assert mha.from_huggingface(bert_file).causal
    assert not mha.from_huggingface(bert_file, causal=False).causal
    assert mha.from_huggingface(gpt2_state(), config={"n_head": HEADS}).n_heads == HEADS


@pytest.mark.parametrize("text", ["", "[1]", "{", "\x00", "[" * 100_000])
def test_a_damaged_configuration_is_refused(bert_file, text):
    bert_file.with_name("config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config.json is not readable JSON"):
        mha.from_huggingface(bert_file, n_heads=HEADS)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"position_embedding_type": "relative_key"}, "relative positions"),
        ({"position_embedding_type": "rotary"}, "RoPE"),
        ({"rope_theta": 1e4}, "RoPE"),
        ({"position_embedding_type": "rope", "num_key_value_heads": 1}, "RoPE"),
        ({"no_rope_layers": [0, 1]}, r"RoPE\) in layer 1"),
        ({"num_attention_heads": 3, "num_key_value_heads": 1}, "share keys and values in 1 groups"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "2 groups of 3 heads"),
        ({"num_attention_heads": 3, "multi_query": True}, "these weights do not"),
        ({"attn_temperature_tuning": True}, "attn_temperature_tuning"),
        ({"attention_multiplier": 0.1}, "attention_multiplier=0.1"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"sliding_window": 512}, "local attention"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "'chunked_attention' there"),
        ({"scale_attn_weights": False}, "scale_attn_weights"),
        ({"scale_attn_by_inverse_layer_idx": True}, "divides the logits of layer 1"),
        ({"num_attention_heads": 6, "pruned_heads": {"1": [0]}}, "n_heads is missing"),
    ],
)
def test_configurations_of_other_attention_are_refused(config, words):
    with pytest.raises(ValueError, match=words):
        mha.from_huggingface(bert_state(), 1, config=config)


# Other architectures


def with_names(state, **shapes):
    return state | draw({name.replace("__", "."): shape for name, shape in shapes.items()})


def llama(keys=D, more=()):
    start = "model.layers.0.self_attn."
    shapes = {f"{start}{name}_proj.weight": (D, D) for name in "qo"}
    shapes |= {f"{start}{name}_proj.weight": (keys, D) for name in "kv"}
    return draw(shapes | dict.fromkeys(more, (4,)))


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (llama(), "Llama-style layer with rotary position embedding"),
        (llama(keys=4), "Llama-style layer with rotary position embedding.*pass rope=False"),
        (
            with_names(bert_state(), encoder__layer__0__attention__self__distance_embedding=(9, H)),
            "relative position embedding",
        ),
        (
            with_names(
                bert_state(), encoder__layer__0__attention__self__rotary_embeddings__inv_freq=(2,)
            ),
            "RoPE",
        ),
        (with_names(lens_state(), blocks__0__attn__rotary_sin=(9, 4)), "RoPE"),
        (with_names(lens_state(), blocks__0__attn___W_K=(1, D, 5)), "_W_K has shape"),
        (with_names(lens_state(), blocks__0__attn__W_K=(1, D, 5)), "share _W_K"),
        (with_names(gpt2_state(), h__0__attn__c_attn__weight=(D, D + 8)), "GPT-2 keeps"),
        (
            with_names(gpt2_state(), h__0__attn__c_attn__weight=(3 * D, D)),
            "transpose the nn.Linear",
        ),
        (
            draw(
                {
                    "encoder.block.0.layer.0.SelfAttention.q.weight": (D, D),
                    "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": (8, 3),
                }
            ),
            r"relative position bias \(T5\)",
        ),
        (draw({"gpt_neox.layers.0.attention.query_key_value.weight": (3 * D, D)}), "GPT-NeoX"),
        (draw({"deberta.encoder.layer.0.attention.self.query_proj.weight": (D, D)}), "DeBERTa"),
        (
            with_names(bert_state(), encoder__layer__0__attention__self__surprise=(3,)),
            "'encoder.layer.0.attention.self.surprise' is no part of BERT's attention",
        ),
        (with_names(bert_state(), encoder__layer__0__attention__self__query__lora_A=(2,)), "LoRA"),
        (draw({"conv.weight": (3, 3)}), "no attention layer named as in BERT or GPT-2"),
        ({}, "holds no tensors"),
        ({"epoch": 3}, "holds no tensors"),
        (bert_state("a.") | bert_state("b."), "choose one by its prefix"),
        (
            with_names(bert_state(), encoder__layer__0__attention__self__key__weight=(6, D)),
            "BERT's heads share none",
        ),
        (with_names(lens_state(), blocks__0__attn__W_O=(D, D)), "expected 3 axes"),
        (
            {k: v for k, v in bert_state().items() if "key.weight" not in k},
            "there is no 'encoder.layer.0.attention.self.key.weight'",
        ),
        (
            with_names(bert_state(), encoder__layer__0__attention__self__key__weight=(D, D + 3)),
            "key weight has shape",
        ),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(state, words):
    # TransformerLens's shapes tell the heads; 3 is right for all.
    with pytest.raises(ValueError, match=words) as refusal:
        mha.from_huggingface(state, n_heads=HEADS)
    assert "\n" not in str(refusal.value)


def test_wrong_numbers_are_refused():
    with pytest.raises(ValueError, match="layer_index=2: there are layers 0 to 1"):
        mha.from_huggingface(bert_state(), 2, HEADS)
    with pytest.raises(ValueError, match="does not divide into so many heads"):
        mha.from_huggingface(bert_state(), 0, 5)
    with pytest.raises(ValueError, match="n_heads=2: W_Q has shape"):
        mha.from_huggingface(lens_state(), 0, 2)


def test_one_of_two_models_is_chosen_by_its_prefix():
    both = bert_state("a.") | {k: 2 * v for k, v in bert_state("b.").items()}
    layer = mha.from_huggingface(both, 1, HEADS, prefix="b.")
    expected = bert_attention(both, "b.encoder.layer.1.attention.", X)
    np.testing.assert_allclose(layer(X), expected, rtol=0, atol=1e-12)


def test_damaged_safetensors_files_are_refused(bert_file):
    whole = bert_file.read_bytes()
    for damaged in (b"", whole[:7], whole[:200], whole[:-1], b"\xff" * 64, b"PK" + whole):
        bert_file.write_bytes(damaged)
        with pytest.raises(ValueError, match="not a readable") as refusal:
            mha.from_huggingface(bert_file, n_heads=HEADS)
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("make", [bert_state, gpt2_state, lens_state, llama, bigcode])
def test_any_shapes_are_read_or_refused(make):
    """One weight of a wrong shape is a ValueError, never another exception."""
    state = make() if make in (llama, bigcode) else make(layers=1)
    rng = np.random.default_rng(0)
    for name in [name for name in state if "attn." in name or "attention" in name]:
        for _ in range(20):
            shape = tuple(rng.choice([0, 1, 3, D, 3 * D], rng.integers(0, 4)))
            changed = state | {name: np.zeros(shape, np.float32)}
            try:
                layer = mha.from_huggingface(changed, n_heads=HEADS, rope=False)
            except ValueError:
                continue
            assert shape == state[name].shape or "LayerNorm" in name or name.endswith("bias")
            assert layer.d == D
