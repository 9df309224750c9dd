"""Attention layers out of Hugging Face and TransformerLens weights."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mhalearn._runtime import storage
from mhalearn.interop.factors import WeightFactors
from mhalearn.interop.families import find_family, read_projected
from mhalearn.interop.naming import BERT, GPT2, LLAMA, TRANSFORMER_LENS
from mhalearn.interop.rejections import refuse_config, says_rope
from mhalearn.interop.state_dict import WeightSource, find_layer, open_state_dict


def from_huggingface(
    source: WeightSource,
    layer_index: int = 0,
    n_heads: int | None = None,
    *,
    causal: bool | None = None,
    config: Mapping[str, Any] | None = None,
    prefix: str | None = None,
    rope: bool | None = None,
    cross: bool = False,
) -> Any:
    """The attention layer of a state dict: an AttentionLayer where heads have a Theta and a W each
    (BERT, GPT-2, TransformerLens, Llama without rotary positions), a ProjectedLayer of the models
    whose `model_type` in the config is one of `interop.families.FAMILIES`.

    source: a mapping from names to tensors or arrays, or a file: .safetensors (no torch needed), a
    folder or index of several, or PyTorch's (read with weights_only=True). The layer maps what goes
    into the attention block (for GPT-2 the normalised hidden states) to the output projection,
    without residual and LayerNorm.
    n_heads: needed where neither the shapes nor the config tell it. config: the model's
    configuration; that of a file is the config.json beside it, if there is one.
    causal: as the architecture has it unless given: BERT not, GPT-2 and Llama causal,
    TransformerLens as its mask buffer says and not causal without one. prefix: what the names begin
    with, where a state dict holds several models.
    rope: False reads Llama-style names, which do not tell whether queries and keys are rotated, as
    those of a layer without rotary positions.
    cross: the layer whose keys and values come from the encoder, of T5 and Whisper's decoders.
    Keys and values that heads share (grouped or multi-query attention) are written out for each.
    Logits are divided by sqrt(head dimension), as these architectures do unless their configuration
    says otherwise. The layer carries the weights, so exports return the same bits.
    Refused by name: models of other types with rotary or relative positions, settings that change
    the logits in ways not modelled, any tensor in the block that the architecture does not have.
    """
    state = open_state_dict(source)
    place = "" if isinstance(source, Mapping) else f"{storage.show(source)}: "
    if config is None:
        config = {} if isinstance(source, Mapping) else config_beside(source)
    try:
        family = None if rope is False else find_family(config)
        if family is not None:
            if causal is not None or rope is not None or n_heads is not None:
                raise ValueError(
                    f"the config says all of a {family.name} layer: leave n_heads, causal and rope "
                    "out"
                )
            return read_projected(state, family, config, layer_index, prefix, cross)
        if cross:
            raise ValueError("cross: only models with an encoder, of a model_type in the config")
        refuse_config(config, layer_index)
        if rope:
            raise ValueError("rope=True needs a config with its model_type and its frequencies")
        told = says_rope(config, layer_index) if rope is None else rope
        found = find_layer(
            state,
            (BERT, GPT2, TRANSFORMER_LENS, *((LLAMA,) if told is False else ())),
            layer_index=layer_index,
            sizes=_heads(n_heads, config),
            prefix=prefix,
        )
        _check_groups(found.factors, config)
    except ValueError as error:
        raise ValueError(f"{place}{error}") from None
    if causal is None:
        causal = found.causal or config.get("is_decoder") is True
    return found.factors.to_layer(causal, {"imported": "huggingface", "layer": str(layer_index)})


def _heads(n_heads: int | None, config: Mapping[str, Any]) -> int | None:
    told = config.get("num_attention_heads", config.get("n_head"))
    if config.get("pruned_heads"):  # the number differs from layer to layer
        told = None
    if told is None or type(told) is not int:
        return n_heads
    if n_heads not in (None, told):
        raise ValueError(f"n_heads={n_heads}, but config.json says {told}: leave one out")
    return told


def _check_groups(factors: WeightFactors, config: Mapping[str, Any]) -> None:
    """Refuse weights whose heads do not share keys as the config says: they are another model's."""
    groups = 1 if config.get("multi_query") else config.get("num_key_value_heads")
    if type(groups) is not int or groups == factors.n_heads:
        return
    if groups < 1 or factors.n_heads % groups:
        raise ValueError(f"config.json says {groups} groups of {factors.n_heads} heads: repair it")
    for part in (factors.key, factors.value):
        grouped = part.reshape(groups, -1, *part.shape[1:])
        if not np.array_equal(grouped, np.broadcast_to(grouped[:, :1], grouped.shape)):
            raise ValueError(
                f"config.json says that heads share keys and values in {groups} groups, and these "
                "weights do not: pass the configuration of this model"
            )


def config_beside(source: str | os.PathLike[str]) -> Mapping[str, Any]:
    """The config.json beside a file, or nothing."""
    folder = Path(source) if Path(source).is_dir() else Path(source).parent
    path = folder / "config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise ValueError(f"{storage.show(path)} is not readable JSON: repair it or move it away")
    return config
