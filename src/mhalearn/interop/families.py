"""Models whose attention is read as projected heads: what each family has, by its config.json."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mhalearn.interop.naming import Naming
from mhalearn.interop.projections import (
    Block,
    Cut,
    Interleaved,
    Params,
    Separate,
    Sizes,
    Stacked,
)
from mhalearn.interop.rotary_config import Config, layer_kind, number, read_rope, read_window
from mhalearn.interop.state_dict import StateDict, find_layer
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.position_bias import T5Bias
from mhalearn.layer.projected_layer import ProjectedLayer
from mhalearn.layer.qk_norm import QKNorm

# What an architecture has beside its sizes.
Beside = dict[str, Any]


class Family(NamedTuple):
    """A kind of model, by the `model_type` of its config."""

    name: str
    naming: Naming
    sizes: Callable[[Config], Sizes]
    beside: Callable[[Config, int, int], Beside]  # of config, layer_index, head_dim
    # Settings of the config that it knows; others that change logits are refused.
    knows: tuple[str, ...] = ()
    gain_offset: float = 0.0  # norms multiply by this plus the gain


def find_family(config: Config) -> Family | None:
    """The family of a model's type; None where it is another, or not said."""
    kind = config.get("model_type")
    return FAMILIES.get(kind) if isinstance(kind, str) else None


def read_projected(
    state: StateDict, family: Family, config: Config, layer_index: int, prefix: str | None
) -> ProjectedLayer:
    """One attention layer of a model; a ValueError says what of it is not modelled."""
    if isinstance(config.get("text_config"), Mapping):
        config = config["text_config"]
    _refuse(config, family)
    sizes = family.sizes(config)
    found = find_layer(
        state, (family.naming,), layer_index=layer_index, sizes=sizes, prefix=prefix, plain=False
    )
    params: Params = dict(found.factors)
    beside = family.beside(config, layer_index, sizes.head_dim)
    if isinstance(beside.get("position_bias"), T5Bias):
        decodes = found.block.prefix.removesuffix("layer.0.SelfAttention.").rfind("decoder.") >= 0
        buckets = (beside["position_bias"].buckets, beside["position_bias"].max_distance)
        beside |= {"causal": decodes, "position_bias": T5Bias(*buckets, bidirectional=not decodes)}
        if "position_table" not in params:  # which the first layer keeps for all
            first = found.block.prefix.replace(f"block.{layer_index}.", "block.0.")
            params["position_table"] = _first_table(state, first)
    for side in ("query", "key"):
        if f"{side}_gain" in params:
            gain = params[f"{side}_gain"].astype(np.float64) + family.gain_offset
            heads = sizes.heads if side == "query" else sizes.groups
            wide = beside["qk_norm"].across_heads
            params[f"{side}_gain"] = gain.reshape(heads, -1) if wide else gain
    causal_unless_said: Beside = {"causal": True}
    architecture = Architecture(
        params["query"].shape[1],
        sizes.heads,
        sizes.head_dim,
        params["out"].shape[2],
        bias=any(name.endswith("_bias") for name in params),
        kv_heads=sizes.groups,
        **causal_unless_said | beside,
    )
    said = {"imported": "huggingface", "layer": str(layer_index), "family": family.name}
    said |= {"prefix": found.block.prefix, "model_type": str(config.get("model_type"))}
    return ProjectedLayer(architecture, params, metadata=said)


def to_huggingface(layer: ProjectedLayer) -> dict[str, NDArray[Any]]:
    """The weights of a layer that `from_huggingface` read, under their names, in float32.

    Bit by bit those that were read, of float32 and narrower ones, while nothing was changed; gains
    of Gemma, which are stored less one, unless they are below 1e-9.
    """
    kind, prefix = (layer.metadata.get(name) for name in ("model_type", "prefix"))
    family = FAMILIES.get(kind or "")
    if family is None or prefix is None:
        raise ValueError(
            "the layer does not say from which model it was read: from_huggingface does"
        )
    params = dict(layer.params)
    for name in ("query_gain", "key_gain"):
        if name in params:
            params[name] = params[name].ravel() - family.gain_offset
    block = family.naming.factors
    assert isinstance(block, Block)
    found = {}
    for name, array in block.write(params).items():
        place = prefix
        if name in _T5_TABLE:
            place = re.sub(r"block\.\d+\.", "block.0.", prefix)
        found[f"{place}{name}"] = np.ascontiguousarray(array, np.float32)
    return found


# Settings that change what the logits or the weights are, unless they are off.
_SETTINGS = (
    "attention_multiplier",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "clip_qkv",
    "no_rope_layers",
    "attn_temperature_tuning",
    "use_qk_norm",
    "qk_layernorm",
    "use_bidirectional_attention",
)


def _refuse(config: Config, family: Family) -> None:
    for name in _SETTINGS:
        if name not in family.knows and config.get(name) not in (None, False):
            raise ValueError(f"{name}={config[name]!r} in config.json: {family.name} has no such")


def _first_table(state: StateDict, place: str) -> Any:
    name = f"{place}relative_attention_bias.weight"
    if name not in state.shapes:
        raise ValueError(f"there is no {name!r}, the position bias that all layers share")
    return state.read(name)


# Sizes


def _usual(config: Config) -> Sizes:
    heads = number(config, "num_attention_heads", "n_head")
    groups = config.get("num_key_value_heads")
    width = number(config, "hidden_size", "n_embd", "n_embed")
    head_dim = config.get("head_dim")
    return Sizes(
        heads,
        heads if groups is None else number(config, "num_key_value_heads"),
        width // heads if head_dim is None else number(config, "head_dim"),
    )


def _t5_sizes(config: Config) -> Sizes:
    heads = number(config, "num_heads")
    return Sizes(heads, heads, number(config, "d_kv"))


# What heads have


def _llama(config: Config, layer: int, head_dim: int) -> Beside:
    return {"rope": read_rope(config, layer, head_dim)}


def _windowed(config: Config, layer: int, head_dim: int) -> Beside:
    """Every layer has the window, if there is one (Mistral, Phi-3)."""
    return _llama(config, layer, head_dim) | {"window": read_window(config, layer, True)}


def _qwen2(config: Config, layer: int, head_dim: int) -> Beside:
    first = config.get("max_window_layers")
    slides = bool(config.get("use_sliding_window")) and layer >= (first or 0)
    return _llama(config, layer, head_dim) | {"window": read_window(config, layer, slides)}


def _qwen3(config: Config, layer: int, head_dim: int) -> Beside:
    return _qwen2(config, layer, head_dim) | {"qk_norm": _rms(config)}


def _qwen3_moe(config: Config, layer: int, head_dim: int) -> Beside:
    window = read_window(config, layer, bool(config.get("use_sliding_window")))
    return _llama(config, layer, head_dim) | {"window": window, "qk_norm": _rms(config)}


def _granite(config: Config, layer: int, head_dim: int) -> Beside:
    return _llama(config, layer, head_dim) | {"logit_scale": config.get("attention_multiplier")}


def _olmo2(config: Config, layer: int, head_dim: int) -> Beside:
    return _llama(config, layer, head_dim) | {"qk_norm": _rms(config, across_heads=True)}


def _gemma2(config: Config, layer: int, head_dim: int) -> Beside:
    return {
        "rope": read_rope(config, layer, head_dim),
        "window": read_window(config, layer, layer % 2 == 0),
        "softcap": config.get("attn_logit_softcapping"),
        "logit_scale": number(config, "query_pre_attn_scalar") ** -0.5,
    }


def _gemma3(config: Config, layer: int, head_dim: int) -> Beside:
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


def _gpt_oss(config: Config, layer: int, head_dim: int) -> Beside:
    rope = read_rope(config, layer, head_dim, base=150000.0)
    return {"rope": rope, "window": read_window(config, layer, layer % 2 == 0), "sinks": True}


def _gpt_neox(config: Config, layer: int, head_dim: int) -> Beside:
    older = {
        "rope_theta": config.get("rotary_emb_base", 10000.0),
        "partial_rotary_factor": config.get("rotary_pct", 0.25),
    }
    scaling = config.get("rope_scaling")
    older |= dict(scaling) if isinstance(scaling, Mapping) else {}
    return {"rope": read_rope(config, layer, head_dim, by_kind=older)}


def _gptj(config: Config, layer: int, head_dim: int) -> Beside:
    share = {
        "rope_theta": 10000.0,
        "partial_rotary_factor": number(config, "rotary_dim") / head_dim,
    }
    return {"rope": read_rope({}, layer, head_dim, layout="interleaved", by_kind=share)}


def _bloom(config: Config, layer: int, head_dim: int) -> Beside:
    return {"position_bias": "alibi"}


def _t5(config: Config, layer: int, head_dim: int) -> Beside:
    farthest = number({"relative_attention_max_distance": 128} | dict(config), _FARTHEST)
    buckets = number(config, "relative_attention_num_buckets")
    return {"position_bias": T5Bias(buckets, farthest), "logit_scale": 1.0}


_FARTHEST = "relative_attention_max_distance"


def _rms(config: Config, across_heads: bool = False) -> QKNorm:
    epsilon = config.get("rms_norm_eps", 1e-6)
    return QKNorm("rms", epsilon, across_heads)


# Names


def _naming(name: str, block: str, reads: tuple[str, ...], cut: Cut, beside: Beside) -> Naming:
    """The names of a block: weights and biases of `reads`, and what is read under another name."""
    full = tuple(f"{part}.{kind}" for part in reads for kind in ("weight", "bias"))
    return Naming(
        name=name,
        block=rf"(?P<root>(?:.*\.)?){block}",
        anchor=(f"{reads[0]}.weight",),
        reads=(*full, *beside),
        ignores=r"rotary_emb\.inv_freq|bias|masked_bias",
        causal=True,
        factors=Block(cut, beside),
    )


_LLAMA_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj")
_SELF_ATTENTION = r"layers\.(?P<layer>\d+)\.self_attn\."
_GAINS = {"q_norm.weight": "query_gain", "k_norm.weight": "key_gain"}


def _llama_names(name: str, beside: Beside | None = None) -> Naming:
    cut = Separate(*_LLAMA_PARTS)
    return _naming(name, _SELF_ATTENTION, _LLAMA_PARTS, cut, beside or {})


_PHI3 = ("qkv_proj", "o_proj")
_FUSED = ("query_key_value", "dense")
_GPTJ = ("q_proj", "k_proj", "v_proj", "out_proj")
_T5 = ("q", "k", "v", "o")
_NEOX_BLOCK = r"layers\.(?P<layer>\d+)\.attention\."
_BLOOM_BLOCK = r"h\.(?P<layer>\d+)\.self_attention\."
_GPTJ_BLOCK = r"h\.(?P<layer>\d+)\.attn\."
_T5_BLOCK = r"(?:encoder|decoder)\.block\.(?P<layer>\d+)\.layer\.0\.SelfAttention\."
_T5_TABLE = {"relative_attention_bias.weight": "position_table"}
_SCALAR = "query_pre_attn_scalar"

_GEMMA3 = Family(
    "Gemma 3", _llama_names("Gemma 3", _GAINS), _usual, _gemma3, (_SCALAR,), gain_offset=1.0
)
FAMILIES: dict[str, Family] = {
    "llama": Family("Llama", _llama_names("Llama"), _usual, _llama),
    "gemma": Family("Gemma", _llama_names("Gemma"), _usual, _llama),
    "granite": Family(
        "Granite", _llama_names("Granite"), _usual, _granite, ("attention_multiplier",)
    ),
    "mixtral": Family("Mixtral", _llama_names("Mixtral"), _usual, _windowed),
    "qwen3_moe": Family("Qwen3 MoE", _llama_names("Qwen3 MoE", _GAINS), _usual, _qwen3_moe),
    "starcoder2": Family("StarCoder2", _llama_names("StarCoder2"), _usual, _windowed),
    "mistral": Family("Mistral", _llama_names("Mistral"), _usual, _windowed),
    "qwen2": Family("Qwen2", _llama_names("Qwen2"), _usual, _qwen2),
    "qwen3": Family("Qwen3", _llama_names("Qwen3", _GAINS), _usual, _qwen3),
    "gemma2": Family(
        "Gemma 2", _llama_names("Gemma 2"), _usual, _gemma2, (_SCALAR, "attn_logit_softcapping")
    ),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "phi3": Family(
        "Phi-3",
        _naming("Phi-3", _SELF_ATTENTION, _PHI3, Stacked(*_PHI3), {}),
        _usual,
        _windowed,
    ),
    "olmo2": Family("OLMo 2", _llama_names("OLMo 2", _GAINS), _usual, _olmo2),
    "gpt_oss": Family("gpt-oss", _llama_names("gpt-oss", {"sinks": "sink"}), _usual, _gpt_oss),
    "gpt_neox": Family(
        "GPT-NeoX",
        _naming("GPT-NeoX", _NEOX_BLOCK, _FUSED, Interleaved(*_FUSED), {}),
        _usual,
        _gpt_neox,
    ),
    "gptj": Family(
        "GPT-J", _naming("GPT-J", _GPTJ_BLOCK, _GPTJ, Separate(*_GPTJ), {}), _usual, _gptj
    ),
    "bloom": Family(
        "BLOOM",
        _naming("BLOOM", _BLOOM_BLOCK, _FUSED, Interleaved(*_FUSED), {}),
        _usual,
        _bloom,
    ),
    "t5": Family("T5", _naming("T5", _T5_BLOCK, _T5, Separate(*_T5), _T5_TABLE), _t5_sizes, _t5),
}
