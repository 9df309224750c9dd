"""Attention of Hugging Face models, read from their weights, against their own modules."""

import re
from dataclasses import replace

import numpy as np
import pytest
from blocks import ROOT

import mhalearn as mha
from mhalearn.interop.families import FAMILIES, to_huggingface

torch = pytest.importorskip("torch", reason="reads PyTorch's modules")
transformers = pytest.importorskip("transformers", reason="compares with Hugging Face's modules")

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
WIDE = {"head_dim": 12}
SLIDING = {"sliding_window": 3}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "truncate": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
GLOBAL = {
    "full_attention": LINEAR,
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
# Model type, configuration, layer, and what the layer must have.
MODELS = {
    "Llama": ("llama", WIDE | {"attention_bias": True}, 1, {"kv_heads", "rope"}),
    "Llama 3.1": ("llama", {"rope_parameters": LLAMA3}, 0, {"kv_heads", "rope"}),
    "Llama, linear": ("llama", {"rope_parameters": LINEAR}, 0, {"kv_heads", "rope"}),
    "Llama, dynamic NTK": (
        "llama",
        {"rope_parameters": DYNAMIC, "max_position_embeddings": 6},
        0,
        {"kv_heads", "rope"},
    ),
    "Mistral": ("mistral", SLIDING, 1, {"kv_heads", "rope", "window"}),
    "Qwen2": ("qwen2", {}, 0, {"kv_heads", "rope"}),
    "Qwen2, sliding": (
        "qwen2",
        SLIDING | {"use_sliding_window": True, "max_window_layers": 1},
        1,
        {"kv_heads", "rope", "window"},
    ),
    "Qwen3": ("qwen3", WIDE, 1, {"kv_heads", "rope", "qk_norm"}),
    "Gemma 2": (
        "gemma2",
        WIDE | SLIDING | {"query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0},
        0,
        {"kv_heads", "rope", "window", "softcap", "logit_scale"},
    ),
    "Gemma 2, full": ("gemma2", WIDE, 1, {"kv_heads", "rope", "softcap", "logit_scale"}),
    "Gemma 3": (
        "gemma3_text",
        WIDE | SLIDING | {"rope_parameters": GLOBAL},
        0,
        {"kv_heads", "rope", "window", "qk_norm", "logit_scale"},
    ),
    "Gemma 3, full": (
        "gemma3_text",
        WIDE
        | SLIDING
        | {"rope_parameters": GLOBAL, "layer_types": ["sliding_attention", "full_attention"]},
        1,
        {"kv_heads", "rope", "qk_norm", "logit_scale"},
    ),
    "Phi-3": ("phi3", SLIDING, 0, {"kv_heads", "rope", "window"}),
    "OLMo 2": ("olmo2", {}, 1, {"kv_heads", "rope", "qk_norm"}),
    "gpt-oss": (
        "gpt_oss",
        SLIDING
        | {
            "head_dim": 8,
            "rope_parameters": YARN,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
        0,
        {"kv_heads", "rope", "window", "sinks"},
    ),
    "Gemma": ("gemma", WIDE, 1, {"kv_heads", "rope"}),
    "Granite": ("granite", {"attention_multiplier": 0.5}, 0, {"kv_heads", "rope", "logit_scale"}),
    "Mixtral": (
        "mixtral",
        SLIDING | {"num_local_experts": 2},
        0,
        {"kv_heads", "rope", "window"},
    ),
    "Qwen3 MoE": (
        "qwen3_moe",
        WIDE | SLIDING | EXPERTS | {"use_sliding_window": True},
        0,
        {"kv_heads", "rope", "qk_norm", "window"},
    ),
    "StarCoder2": ("starcoder2", SLIDING, 1, {"kv_heads", "rope", "window"}),
    "GPT-NeoX": ("gpt_neox", {"num_key_value_heads": None}, 1, {"rope"}),
    "GPT-J": ("gptj", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}, 1, {"rope"}),
    "BLOOM": ("bloom", {"n_head": 4, "n_layer": 2}, 1, {"position_bias"}),
    "T5": (
        "t5",
        {"d_model": 32, "d_kv": 6, "num_heads": 4, "num_layers": 2, "d_ff": 16},
        1,
        {"position_bias", "logit_scale"},
    ),
}
PARTS = {
    "gpt_neox": (r"layers\.{}\.attention", "query_key_value", "dense"),
    "gptj": (r"h\.{}\.attn", "q_proj", "out_proj"),
    "bloom": (r"h\.{}\.self_attention", "query_key_value", "dense"),
    "t5": (r"{}\.layer\.0\.SelfAttention", "q", "o"),
    "phi3": (r"layers\.{}\.self_attn", "qkv_proj", "o_proj"),
}


def make_model(kind, changes):
    """A small model with weights at random, none of them near its start."""
    settings = {"gptj": {}, "t5": {"vocab_size": 50, "pad_token_id": 0}}.get(kind, SIZES)
    if kind in ("gptj", "bloom"):
        settings = {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
        settings |= {"hidden_size": 32} if kind == "bloom" else {"n_positions": 64}
    given = {name: value for name, value in (settings | changes).items() if value is not None}
    config = transformers.AutoConfig.for_model(kind, **given)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    make = transformers.T5EncoderModel if kind == "t5" else transformers.AutoModel.from_config
    model = make(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if re.search("attn|attention|SelfAttention", name):
                weight.normal_(0.0, 0.3)
    return model, config.to_dict()


def record(model, kind, layer):
    """What goes into the attention of a layer, and what comes out of its last projection."""
    block, first, last = PARTS.get(kind, (r"layers\.{}\.self_attn", "q_proj", "o_proj"))
    seen = {}
    for name, module in model.named_modules():
        if re.search(block.format(layer) + rf"\.{first}$", name):
            module.register_forward_pre_hook(lambda _, given: seen.update(x=given[0]))
        if re.search(block.format(layer) + rf"\.{last}$", name):
            module.register_forward_hook(lambda _, given, made: seen.update(y=made))
    with torch.no_grad():
        model(input_ids=torch.randint(1, 50, (2, 12)))
    return seen["x"].numpy(), seen["y"].numpy()


@pytest.mark.parametrize("name", MODELS)
def test_attention_is_that_of_the_models_own_module(name):
    kind, changes, index, extras = MODELS[name]
    model, config = make_model(kind, changes)
    x, y = record(model, kind, index)
    layer = mha.from_huggingface(model.state_dict(), index, config=config)
    assert set(layer.architecture.extras()) == extras
    assert layer.causal == (kind != "t5")
    found = layer(x)
    assert np.abs(found - y).max() < 1e-6 * np.abs(y).max()
    for key, weight in to_huggingface(layer).items():
        assert np.array_equal(model.state_dict()[key].numpy(), weight), key
    # What the variant is made of matters: without it the outputs are others.
    for extra in extras - {"kv_heads", "qk_norm", "sinks"}:
        if extra == "position_bias" and kind == "t5":
            continue
        scale = {
            "logit_scale": layer.architecture.logit_scale or layer.params["key"].shape[2] ** -0.5
        }
        changed = replace(layer.architecture, **(scale | {extra: None}))
        without = layer.replace(architecture=changed)
        assert np.abs(without(x) - y).max() > 1e-4 * np.abs(y).max(), extra


def test_the_table_of_the_docs_says_what_was_compared():
    page = (ROOT / "docs" / "interop.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| (`[^|]+`) \| (`[^|]+`) \|$", page, flags=re.MULTILINE)
    told = {kind: (name, fields) for name, kinds, fields in rows for kind in kinds.split(", ")}
    assert {kind.strip("`") for kind in told} == set(FAMILIES)
    for kind, family in FAMILIES.items():
        name, fields = told[f"`{kind}`"]
        compared = [one for one in MODELS.values() if FAMILIES[one[0]].name == family.name]
        assert name == family.name
        assert compared, f"{name} is not compared with Hugging Face's module"
        assert set(re.findall(r"\w+", fields)) == set().union(*(one[3] for one in compared))
