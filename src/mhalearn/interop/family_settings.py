"""What the heads of each family of models have, read from their config.json, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mhalearn.interop.projections import Sizes
from mhalearn.interop.rotary_config import Config, layer_kind, number, read_rope, read_window
from mhalearn.layer.latent import Latent
from mhalearn.layer.position_bias import T5Bias
from mhalearn.layer.qk_norm import QKNorm
from mhalearn.layer.rope_scaling import Yarn

# What an architecture has beside its sizes.
Beside = dict[str, Any]


# Sizes


def usual_sizes(config: Config) -> Sizes:
    names = ("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads")
    heads = number(config, *names)
    groups = config.get("num_key_value_heads")
    width = number(config, "hidden_size", "n_embd", "n_embed", "d_model")
    head_dim = config.get("head_dim")
    return Sizes(
        heads,
        heads if groups is None else number(config, "num_key_value_heads"),
        width // heads if head_dim is None else number(config, "head_dim"),
    )


def t5_sizes(config: Config) -> Sizes:
    heads = number(config, "num_heads")
    return Sizes(heads, heads, number(config, "d_kv"))


# What heads have


def llama(config: Config, layer: int, head_dim: int) -> Beside:
    """Rotary positions and no more."""
    return {"rope": read_rope(config, layer, head_dim)}


def windowed(config: Config, layer: int, head_dim: int) -> Beside:
    """Every layer has the window, if there is one (Mistral, Phi-3)."""
    return llama(config, layer, head_dim) | {"window": read_window(config, layer, True)}


def qwen2(config: Config, layer: int, head_dim: int) -> Beside:
    first = config.get("max_window_layers")
    slides = bool(config.get("use_sliding_window")) and layer >= (first or 0)
    return llama(config, layer, head_dim) | {"window": read_window(config, layer, slides)}


def qwen3(config: Config, layer: int, head_dim: int) -> Beside:
    return qwen2(config, layer, head_dim) | {"qk_norm": _rms(config)}


def qwen3_moe(config: Config, layer: int, head_dim: int) -> Beside:
    window = read_window(config, layer, bool(config.get("use_sliding_window")))
    return llama(config, layer, head_dim) | {"window": window, "qk_norm": _rms(config)}


def granite(config: Config, layer: int, head_dim: int) -> Beside:
    return llama(config, layer, head_dim) | {"logit_scale": config.get("attention_multiplier")}


def olmo2(config: Config, layer: int, head_dim: int) -> Beside:
    return llama(config, layer, head_dim) | {"qk_norm": _rms(config, across_heads=True)}


def gemma2(config: Config, layer: int, head_dim: int) -> Beside:
    return {
        "rope": read_rope(config, layer, head_dim),
        "window": read_window(config, layer, layer % 2 == 0),
        "softcap": config.get("attn_logit_softcapping"),
        "logit_scale": number(config, "query_pre_attn_scalar") ** -0.5,
    }


def gemma3(config: Config, layer: int, head_dim: int) -> Beside:
    slides = (layer + 1) % number({"sliding_window_pattern": 6} | dict(config), _PATTERN) != 0
    kind = layer_kind(config, layer)
    slides = slides if kind is None else kind == "sliding_attention"
    local = {"rope_theta": config.get("rope_local_base_freq", 10000.0)} if slides else None
    if not slides and isinstance(config.get("rope_scaling"), Mapping):
        local = {"rope_theta": config.get("rope_theta", 1e6)} | dict(config["rope_scaling"])
    return {
        "rope": read_rope(config, layer, head_dim, base=1e6, by_kind=local),
        "window": read_window(config, layer, slides),
        "logit_scale": number(config, "query_pre_attn_scalar") ** -0.5,
        "qk_norm": _rms(config),
    }


_PATTERN = "sliding_window_pattern"


def gpt_oss(config: Config, layer: int, head_dim: int) -> Beside:
    rope = read_rope(config, layer, head_dim, base=150000.0)
    return {"rope": rope, "window": read_window(config, layer, layer % 2 == 0), "sinks": True}


def gpt_neox(config: Config, layer: int, head_dim: int) -> Beside:
    older = {
        "rope_theta": config.get("rotary_emb_base", 10000.0),
        "partial_rotary_factor": config.get("rotary_pct", 0.25),
    }
    scaling = config.get("rope_scaling")
    older |= dict(scaling) if isinstance(scaling, Mapping) else {}
    return {"rope": read_rope(config, layer, head_dim, by_kind=older)}


def gptj(config: Config, layer: int, head_dim: int) -> Beside:
    share = {
        "rope_theta": 10000.0,
        "partial_rotary_factor": number(config, "rotary_dim") / head_dim,
    }
    return {"rope": read_rope({}, layer, head_dim, layout="interleaved", by_kind=share)}


def bloom(config: Config, layer: int, head_dim: int) -> Beside:
    return {"position_bias": "alibi"}


def t5(config: Config, layer: int, head_dim: int) -> Beside:
    """Logits are not scaled; the biases are those of encoders until the place is known."""
    farthest = number({"relative_attention_max_distance": 128} | dict(config), _FARTHEST)
    buckets = number(config, "relative_attention_num_buckets")
    return {"position_bias": T5Bias(buckets, farthest), "logit_scale": 1.0}


_FARTHEST = "relative_attention_max_distance"


def _rms(config: Config, across_heads: bool = False) -> QKNorm:
    epsilon = config.get("rms_norm_eps", 1e-6)
    return QKNorm("rms", epsilon, across_heads)


def phi(config: Config, layer: int, head_dim: int) -> Beside:
    return llama({"partial_rotary_factor": 0.5} | dict(config), layer, head_dim)


def stablelm(config: Config, layer: int, head_dim: int) -> Beside:
    return llama({"partial_rotary_factor": 0.25} | dict(config), layer, head_dim)


def cohere(config: Config, layer: int, head_dim: int) -> Beside:
    return {"rope": read_rope(config, layer, head_dim, layout="interleaved")}


def cohere2(config: Config, layer: int, head_dim: int) -> Beside:
    """Layers with a window are rotated, the others are not."""
    every = config.get("sliding_window_pattern") or 4
    window = read_window(config, layer, (layer + 1) % every != 0)
    return (cohere(config, layer, head_dim) if window else {}) | {"window": window}


def olmo3(config: Config, layer: int, head_dim: int) -> Beside:
    """Scalings are for layers without a window."""
    window = read_window(config, layer, (layer + 1) % 4 != 0)
    plain = {"rope_theta": config.get("rope_theta", 500000.0)} if window else None
    rope = read_rope(config, layer, head_dim, base=500000.0, by_kind=plain)
    return {"rope": rope, "window": window, "qk_norm": _rms(config, across_heads=True)}


def apertus(config: Config, layer: int, head_dim: int) -> Beside:
    return llama(config, layer, head_dim) | {"qk_norm": _rms(config)}


def smollm3(config: Config, layer: int, head_dim: int) -> Beside:
    """Every fourth layer is not rotated, unless the config says which."""
    rotated, every = config.get("no_rope_layers"), config.get("no_rope_layer_interval") or 4
    listed = isinstance(rotated, list) and layer < len(rotated)
    turns = bool(rotated[layer]) if listed and rotated else (layer + 1) % every != 0
    window = read_window(config, layer, False) if config.get("use_sliding_window") else None
    return (llama(config, layer, head_dim) if turns else {}) | {"window": window}


def granite_hybrid(config: Config, layer: int, head_dim: int) -> Beside:
    """Attention layers of a model whose other layers are state spaces."""
    kinds = config.get("layer_types", config.get("layers_block_type"))
    if isinstance(kinds, list) and layer < len(kinds) and "attention" not in str(kinds[layer]):
        raise ValueError(f"layer {layer} is {kinds[layer]!r} by config.json, and has no attention")
    said = {key: value for key, value in config.items() if key != "layer_types"}
    scale = {"logit_scale": config.get("attention_multiplier", 1.0)}
    if config.get("position_embedding_type") != "rope":
        return scale
    return llama(said, layer, head_dim) | scale


def falcon(config: Config, layer: int, head_dim: int) -> Beside:
    return llama(config, layer, head_dim)


def falcon_sizes(config: Config) -> Sizes:
    """As many keys as the config says in newer models; one, or one a head, in older."""
    sizes = usual_sizes(config)
    if config.get("new_decoder_architecture"):
        return sizes._replace(groups=number(config, "num_kv_heads"))
    return sizes._replace(groups=1 if config.get("multi_query", True) else sizes.heads)


def plain(config: Config, layer: int, head_dim: int) -> Beside:
    """No more than a Theta and a W a head (OPT)."""
    return {}


def gpt_neo(config: Config, layer: int, head_dim: int) -> Beside:
    """Logits are not scaled; every second layer has a window."""
    kinds = config.get("attention_layers")
    if not isinstance(kinds, list):
        kinds = [
            kind
            for types, times in config.get("attention_types", [])
            for _ in range(times)
            for kind in types
        ]
    if layer >= len(kinds) or kinds[layer] not in ("global", "local"):
        raise ValueError("config.json says no attention_types of global and local layers")
    window = number(config, "window_size") if kinds[layer] == "local" else None
    return {"logit_scale": 1.0, "window": window}


def mpt(config: Config, layer: int, head_dim: int) -> Beside:
    said = config.get("attn_config")
    said = said if isinstance(said, Mapping) else {}
    heads = number(config, "n_heads")
    if said.get("clip_qkv") or said.get("qk_ln") or said.get("prefix_lm"):
        raise ValueError("clip_qkv, qk_ln or prefix_lm in attn_config: MPT's are not modelled")
    if said.get("alibi", True) and heads & (heads - 1):
        raise ValueError(f"{heads} heads, no power of two: MPT orders their slopes otherwise")
    bias = "alibi" if said.get("alibi", True) else None
    return {"position_bias": bias, "logit_scale": said.get("softmax_scale")}


def deepseek_sizes(config: Config) -> Sizes:
    heads = number(config, "num_attention_heads")
    rotated = number(config, "qk_rope_head_dim")
    return Sizes(
        heads,
        heads,
        number(config, "qk_nope_head_dim") + rotated,
        number(config, "v_head_dim"),
        rotated,
        number(config, "kv_lora_rank"),
    )


def deepseek(config: Config, layer: int, head_dim: int) -> Beside:
    """Latents, a rotary key that heads share, and values of a width of their own."""
    rotated = number(config, "qk_rope_head_dim")
    paired = config.get("rope_interleave", True)
    rope = read_rope(config, layer, rotated, layout="interleaved" if paired else "half")
    scale, scaling = None, rope.scaling
    if isinstance(scaling, Yarn) and scaling.mscale_all_dim:  # which grows logits, too
        growth = 0.1 * math.log(max(scaling.factor, 1.0)) * scaling.mscale_all_dim + 1.0
        scale = head_dim**-0.5 * growth**2
    rank = config.get("q_lora_rank")
    return {
        "rope": replace(rope, fraction=rotated / head_dim),
        "latent": Latent(
            number(config, "kv_lora_rank"), None if rank is None else number(config, "q_lora_rank")
        ),
        "value_dim": number(config, "v_head_dim"),
        "logit_scale": scale,
    }


def whisper_sizes(config: Config) -> Sizes:
    heads = number(config, "decoder_attention_heads", "encoder_attention_heads")
    return Sizes(heads, heads, number(config, "d_model") // heads)


# What depends on where in a model a layer stands


def in_decoders(place: str) -> Beside:
    """Causal in decoders alone."""
    return {"causal": "decoder." in place}


def nowhere_causal(place: str) -> Beside:
    return {"causal": False}
