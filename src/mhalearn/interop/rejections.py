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
        f"fused query_key_value weights (GPT-NeoX, Falcon, BLOOM: RoPE or ALiBi): {_POSITIONS}"
    ),
    r"\b_W_[KV]$|\b_b_[KV]$": "grouped queries: heads share keys and values",
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


def refuse_llama(shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse q_proj / k_proj / o_proj names: rotary embeddings leave no tensor of their own."""
    for name, shape in shapes.items():
        if not re.search(r"attn\.q_proj\.weight$", name):
            continue
        keys = name.replace("q_proj", "k_proj")
        if keys in shapes and shapes[keys][:1] != shape[:1]:
            raise ValueError(
                f"{keys!r} of shape {shapes[keys]} beside queries {shape} means grouped queries: "
                f"heads share keys and values; mhalearn does not model this (nor RoPE)"
            )
        if name.replace("q_proj", "o_proj") in shapes:
            raise ValueError(
                f"{name!r} means a Llama-style layer with rotary position embedding (RoPE): "
                f"{_POSITIONS}; mhalearn does not model this"
            )


def refuse_config(config: Mapping[str, Any], layer_index: int) -> None:
    """Refuse what a model's config.json says of its attention and the weights do not."""
    kind = config.get("position_embedding_type", "absolute")
    if kind not in ("absolute", None):
        what = "rotary position embedding (RoPE)" if kind == "rotary" else "relative positions"
        raise ValueError(f"position_embedding_type={kind!r} means {what}: {_POSITIONS}")
    if "rope_theta" in config or "rope_scaling" in config or "rope_parameters" in config:
        raise ValueError(f"config.json means rotary position embedding (RoPE): {_POSITIONS}")
    heads, keys = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if config.get("multi_query") or (keys is not None and keys != heads):
        raise ValueError("config.json means grouped queries: heads share keys and values")
    if config.get("scale_attn_weights", True) is False:
        raise ValueError("scale_attn_weights=false: logits without 1 / sqrt(head dimension)")
    if config.get("scale_attn_by_inverse_layer_idx") and layer_index > 0:
        raise ValueError(
            f"scale_attn_by_inverse_layer_idx=true divides the logits of layer {layer_index} "
            "by its number: scale its query weights yourself and change config.json"
        )
