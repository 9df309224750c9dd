"""Architectures that no AttentionLayer computes, refused by name, with the reason."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

_POSITIONS = "its logits depend on where the tokens stand, not on the tokens alone"

# Names of tensors that give an architecture away. The first pattern that a name matches says why.
_NAMES = {
    r"rotary|inv_freq|\brope\b": f"rotary position embedding (RoPE): {_POSITIONS}",
    r"relative_attention_bias|rel_pos_bias|relative_position_bias": (
        f"a relative position bias (T5): {_POSITIONS}"
    ),
    r"distance_embedding": f"a relative position embedding: {_POSITIONS}",
    r"pos_(key|query)_proj|pos_proj|rel_embeddings|attention\.self\.(query_proj|in_proj)": (
        f"disentangled attention (DeBERTa): {_POSITIONS}"
    ),
    r"alibi": f"linear position biases (ALiBi): {_POSITIONS}",
    r"query_key_value": (
        f"fused query_key_value weights (GPT-NeoX, Falcon, BLOOM: RoPE or ALiBi): {_POSITIONS}, "
        "as the config.json of a model type that is known says"
    ),
    r"\b(q_norm|k_norm|q_ln|k_ln)\b": "normalised queries and keys: logits are not x Theta x",
    r"\bbias_[kv]$": "add_bias_kv=True: an extra key and value that is no token",
    r"lora_[AB]|base_layer": "adapter weights (LoRA): merge them into the model first",
}


def refuse_names(names: Iterable[str]) -> None:
    """Refuse names of an architecture that is not modelled."""
    for name in names:
        for pattern, what in _NAMES.items():
            if re.search(pattern, name):
                raise ValueError(f"{name!r} means {what}; mhalearn does not model this")


def refuse_llama(names: Iterable[str]) -> None:
    """Refuse q_proj / o_proj names: rotary embeddings leave no tensor of their own."""
    names = set(names)
    for name in sorted(names):
        if not re.search(r"attn\.q_proj\.weight$", name):
            continue
        if name.replace("q_proj", "o_proj") in names:
            raise ValueError(
                f"{name!r} means a Llama-style layer with rotary position embedding (RoPE): "
                f"{_POSITIONS}. Pass config=, the model's config.json, which says how; if this "
                "layer has none, pass rope=False (--no-rope)"
            )


def says_rope(config: Mapping[str, Any], layer_index: int) -> bool | None:
    """Whether a model's config.json says that a layer rotates queries and keys; None: not a word.

    `no_rope_layers` has, against its name, a 1 for each layer that does.
    """
    by_layer = config.get("no_rope_layers")
    if isinstance(by_layer, list) and layer_index < len(by_layer):
        return bool(by_layer[layer_index])
    kind = config.get("position_embedding_type")
    if kind == "nope":
        return False
    if kind in ("rope", "rotary") or not _ROPE.isdisjoint(config):
        return True
    return None


_ROPE = {"rope_theta", "rope_scaling", "rope_parameters"}
# Settings that change what the logits are, unless they are off.
_LOGITS = ("attention_multiplier", "query_pre_attn_scalar", "attn_logit_softcapping")


def refuse_config(config: Mapping[str, Any], layer_index: int) -> None:
    """Refuse what a model's config.json says of its attention and the weights do not."""
    kind = config.get("position_embedding_type", "absolute")
    if says_rope(config, layer_index):
        where = f" in layer {layer_index}" if "no_rope_layers" in config else ""
        raise ValueError(
            f"config.json means rotary position embedding (RoPE){where}: {_POSITIONS}; "
            f"model_type={config.get('model_type')!r} is none of those that are known"
        )
    if kind not in ("absolute", "nope", None):
        raise ValueError(f"position_embedding_type={kind!r} means relative positions: {_POSITIONS}")
    if config.get("attn_temperature_tuning"):
        raise ValueError(f"attn_temperature_tuning scales queries: {_POSITIONS}")
    for name in _LOGITS:
        if config.get(name) is not None:
            raise ValueError(
                f"{name}={config[name]}: logits are not those of keys and queries over "
                "sqrt(head dimension)"
            )
    window = _window(config, layer_index)
    if window:
        raise ValueError(f"{window}: mhalearn does not model local attention")
    if config.get("scale_attn_weights", True) is False:
        raise ValueError("scale_attn_weights=false: logits without 1 / sqrt(head dimension)")
    if config.get("scale_attn_by_inverse_layer_idx") and layer_index > 0:
        raise ValueError(
            f"scale_attn_by_inverse_layer_idx=true divides the logits of layer {layer_index} "
            "by its number: scale its query weights yourself and change config.json"
        )


def _window(config: Mapping[str, Any], layer_index: int) -> str:
    """What keeps a layer from seeing all tokens before; empty where nothing does."""
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and layer_index < len(kinds):
        kind = kinds[layer_index]
        return "" if kind in ("full_attention", "attention") else f"layer_types has {kind!r} there"
    if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        return ""
    return f"sliding_window={config['sliding_window']}"
