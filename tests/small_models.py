"""Small models of Hugging Face's own code, with weights at random, to compare with."""

import re

import pytest

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
HYBRID = {
    "attention_multiplier": 0.5,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "shared_intermediate_size": 8,
    "position_embedding_type": None,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
}
FALCON = {"num_key_value_heads": None, "num_attention_heads": 4, "alibi": False}
MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "q_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 2,
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
    "Granite MoE": (
        "granitemoe",
        {"attention_multiplier": 0.5, "num_local_experts": 2, "num_experts_per_tok": 1},
        0,
        {"kv_heads", "rope", "logit_scale"},
    ),
    "Granite MoE shared": (
        "granitemoeshared",
        {
            "attention_multiplier": 0.5,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "shared_intermediate_size": 8,
        },
        1,
        {"kv_heads", "rope", "logit_scale"},
    ),
    "Granite hybrid": (
        "granitemoehybrid",
        HYBRID | {"layer_types": ["attention", "attention"]},
        1,
        {"kv_heads", "logit_scale"},
    ),
    "Granite hybrid, rotary": (
        "granitemoehybrid",
        HYBRID | {"layer_types": ["attention"] * 2, "position_embedding_type": "rope"},
        0,
        {"kv_heads", "logit_scale", "rope"},
    ),
    "Qwen2 MoE": (
        "qwen2_moe",
        EXPERTS | {"shared_expert_intermediate_size": 8},
        0,
        {"kv_heads", "rope"},
    ),
    "Phi": ("phi", {"partial_rotary_factor": 0.5}, 1, {"kv_heads", "rope"}),
    "OLMo": ("olmo", {}, 0, {"kv_heads", "rope"}),
    "OLMo 3": ("olmo3", SLIDING, 0, {"kv_heads", "rope", "qk_norm", "window"}),
    "OLMo 3, full": (
        "olmo3",
        SLIDING
        | {
            "rope_parameters": GLOBAL,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        1,
        {"kv_heads", "rope", "qk_norm"},
    ),
    "OLMoE": (
        "olmoe",
        {"num_experts": 2, "num_experts_per_tok": 1},
        0,
        {"kv_heads", "rope", "qk_norm"},
    ),
    "Apertus": ("apertus", {"rope_parameters": LLAMA3}, 1, {"kv_heads", "rope", "qk_norm"}),
    "SmolLM3": ("smollm3", {"no_rope_layers": [1, 0]}, 0, {"kv_heads", "rope"}),
    "SmolLM3, not rotated": ("smollm3", {"no_rope_layers": [1, 0]}, 1, {"kv_heads"}),
    "SmolLM3, sliding": (
        "smollm3",
        SLIDING
        | {
            "use_sliding_window": True,
            "no_rope_layers": [1, 1],
            "layer_types": ["sliding_attention", "full_attention"],
        },
        0,
        {"kv_heads", "rope", "window"},
    ),
    "StableLM": (
        "stablelm",
        {"use_qkv_bias": True, "partial_rotary_factor": 0.25},
        0,
        {"kv_heads", "rope"},
    ),
    "Cohere": ("cohere", {}, 1, {"kv_heads", "rope"}),
    "Cohere 2": ("cohere2", SLIDING | {"head_dim": 8}, 0, {"kv_heads", "rope", "window"}),
    "Cohere 2, full": (
        "cohere2",
        SLIDING | {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]},
        1,
        {"kv_heads"},
    ),
    "DeepSeek-V2": (
        "deepseek_v2",
        MLA | {"q_lora_rank": None, "topk_method": "greedy"},
        0,
        {"latent", "rope", "value_dim"},
    ),
    "DeepSeek-V3": ("deepseek_v3", MLA, 1, {"latent", "rope", "value_dim"}),
    "DeepSeek-V3, YaRN": (
        "deepseek_v3",
        MLA | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8}},
        0,
        {"latent", "rope", "value_dim", "logit_scale"},
    ),
    "DeepSeek-V3, halves": (
        "deepseek_v3",
        MLA | {"rope_interleave": False},
        0,
        {"latent", "rope", "value_dim"},
    ),
    "Falcon": ("falcon", FALCON | {"multi_query": True}, 1, {"kv_heads", "rope"}),
    "Falcon, new": (
        "falcon",
        FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
        0,
        {"kv_heads", "rope"},
    ),
    "Falcon, one key a head": ("falcon", FALCON | {"multi_query": False}, 0, {"rope"}),
    "CodeGen": (
        "codegen",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
        1,
        {"rope"},
    ),
    "GPT-Neo": (
        "gpt_neo",
        {
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 3,
        },
        1,
        {"logit_scale", "window"},
    ),
    "GPT-Neo, global": (
        "gpt_neo",
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
        0,
        {"logit_scale"},
    ),
    "OPT": (
        "opt",
        {"ffn_dim": 16, "word_embed_proj_dim": 32, "num_key_value_heads": None},
        1,
        {"logit_scale"},
    ),
    "XGLM": (
        "xglm",
        {
            "d_model": 32,
            "attention_heads": 4,
            "num_layers": 2,
            "ffn_dim": 16,
            "num_key_value_heads": None,
        },
        1,
        {"logit_scale"},
    ),
    "MPT": ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2}, 0, {"position_bias"}),
    "GPT-NeoX": ("gpt_neox", {"num_key_value_heads": None}, 1, {"rope"}),
    "GPT-J": ("gptj", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}, 1, {"rope"}),
    "BLOOM": ("bloom", {"n_head": 4, "n_layer": 2}, 1, {"position_bias"}),
    "mT5": (
        "mt5",
        {"d_model": 32, "d_kv": 6, "num_heads": 4, "num_layers": 2, "d_ff": 16},
        0,
        {"position_bias", "logit_scale"},
    ),
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
    "t5": (r"encoder\.block\.{}\.layer\.0\.SelfAttention", "q", "o"),
    "mt5": (r"encoder\.block\.{}\.layer\.0\.SelfAttention", "q", "o"),
    "falcon": (r"h\.{}\.self_attention", "query_key_value", "dense"),
    "codegen": (r"h\.{}\.attn", "qkv_proj", "out_proj"),
    "gpt_neo": (r"h\.{}\.attn\.attention", "q_proj", "out_proj"),
    "opt": (r"layers\.{}\.self_attn", "q_proj", "out_proj"),
    "xglm": (r"layers\.{}\.self_attn", "q_proj", "out_proj"),
    "mpt": (r"blocks\.{}\.attn", "Wqkv", "out_proj"),
    "phi": (r"layers\.{}\.self_attn", "q_proj", "dense"),
    "deepseek_v2": (r"layers\.{}\.self_attn", "kv_a_proj_with_mqa", "o_proj"),
    "deepseek_v3": (r"layers\.{}\.self_attn", "kv_a_proj_with_mqa", "o_proj"),
    "phi3": (r"layers\.{}\.self_attn", "qkv_proj", "o_proj"),
}


# Models with an encoder, or of sounds: what they are called with differs.
SPEECH = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "num_mel_bins": 8,
    "max_source_positions": 10,
    "max_target_positions": 16,
    "vocab_size": 50,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "decoder_start_token_id": 1,
}
SOUND = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 16,
    "conv_dim": (8, 8),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
# Sizes of models whose configurations have other names for them.
SMALL = {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
OTHERS = {
    "gptj": SMALL | {"n_positions": 64},
    "codegen": SMALL | {"n_positions": 64},
    "bloom": SMALL | {"hidden_size": 32},
    "gpt_neo": SMALL | {"hidden_size": 32, "intermediate_size": 16, "max_position_embeddings": 64},
    "mpt": {"vocab_size": 50, "max_seq_len": 64},
    "whisper": SPEECH,
    "hubert": SOUND,
    "wav2vec2": SOUND,
    "t5": {"vocab_size": 50, "pad_token_id": 0},
    "mt5": {"vocab_size": 50, "pad_token_id": 0},
}
ENCODERS = {"t5": "T5EncoderModel", "mt5": "MT5EncoderModel"}


def make_model(kind, changes, make=None):
    """A small model with weights at random, none of them near its start."""
    given = OTHERS.get(kind, SIZES) | changes
    given = {
        name: value for name, value in given.items() if value is not None or name == "q_lora_rank"
    }
    config = transformers.AutoConfig.for_model(kind, **given)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    make = make or ENCODERS.get(kind)
    make = getattr(transformers, make) if make else transformers.AutoModel.from_config
    model = make(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if re.search("attn|attention|SelfAttention|EncDecAttention", name):
                weight.normal_(0.0, 0.3)
    return model, config.to_dict()


def record(model, kind, layer):
    """What goes into the attention of a layer, and what comes out of its last projection."""
    seen = watch(model, *PARTS.get(kind, (r"layers\.{}\.self_attn", "q_proj", "o_proj")), layer)
    with torch.no_grad():
        model(input_ids=torch.randint(1, 50, (2, 12)))
    return seen["x"].numpy(), seen["y"].numpy()


def watch(model, block, first, last, layer):
    """Inputs x of the first projection of a block, and outputs y of its last, once it has run."""
    seen = {}
    for name, module in model.named_modules():
        if re.search(block.format(layer) + rf"\.{first}$", name):
            module.register_forward_pre_hook(lambda _, given: seen.update(x=given[0]))
        if re.search(block.format(layer) + r"\.(k_proj|k)$", name):
            module.register_forward_pre_hook(lambda _, given: seen.update(memory=given[0]))
        if re.search(block.format(layer) + rf"\.{last}$", name):
            module.register_forward_hook(lambda _, given, made: seen.update(y=made))
    return seen
