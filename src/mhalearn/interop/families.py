"""Attention layers of models, read as projected heads by what their config.json says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mhalearn.interop.family import Family
from mhalearn.interop.family_settings import Beside
from mhalearn.interop.family_table import FAMILIES, T5_TABLE
from mhalearn.interop.projections import Block, Params
from mhalearn.interop.rotary_config import Config
from mhalearn.interop.state_dict import StateDict, find_layer
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.position_bias import T5Bias
from mhalearn.layer.projected_layer import ProjectedLayer


def find_family(config: Config) -> Family | None:
    """The family of a model's type, or of that of its language model; None where it is another, or
    not said."""
    kind, text = config.get("model_type"), config.get("text_config")
    if isinstance(kind, str) and kind in FAMILIES:
        return FAMILIES[kind]
    return find_family(text) if isinstance(text, Mapping) else None


def read_projected(
    state: StateDict,
    family: Family,
    config: Config,
    layer_index: int,
    prefix: str | None,
    cross: bool = False,
) -> ProjectedLayer:
    """One attention layer of a model; a ValueError says what of it is not modelled."""
    if isinstance(config.get("text_config"), Mapping):
        config = config["text_config"]
    _refuse(config, family)
    sizes = family.sizes(config)
    if cross and family.cross is None:
        raise ValueError(f"{family.name} has no cross-attention: leave cross out")
    naming = family.cross if cross and family.cross is not None else family.naming
    found = find_layer(
        state, (naming,), layer_index=layer_index, sizes=sizes, prefix=prefix, plain=False
    )
    params: Params = dict(found.factors)
    causal_unless_said: Beside = {"causal": True}
    beside = causal_unless_said | family.beside(config, layer_index, sizes.head_dim)
    if family.by_place is not None:
        beside |= family.by_place(found.block.prefix)
    if cross:
        beside |= {"causal": False, "position_bias": None, "memory": params["key"].shape[1]}
    if isinstance(beside.get("position_bias"), T5Bias):
        bias, decodes = beside["position_bias"], beside["causal"]
        buckets = (bias.buckets, bias.max_distance)
        beside["position_bias"] = T5Bias(*buckets, bidirectional=not decodes)
        if "position_table" not in params:  # which the first layer keeps for all
            first = found.block.prefix.replace(f"block.{layer_index}.", "block.0.")
            params["position_table"] = _first_table(state, first)
    _place_gains(params, family, beside)
    architecture = _architecture(params, sizes.head_dim, beside)
    said = {"imported": "huggingface", "layer": str(layer_index), "family": family.name}
    said |= {"prefix": found.block.prefix, "model_type": str(config.get("model_type"))}
    return ProjectedLayer(architecture, params, metadata=said)


def _place_gains(params: Params, family: Family, beside: Beside) -> None:
    """Gains of norms as they multiply, a head each where all heads are normalised together."""
    for side in ("query", "key"):
        if f"{side}_gain" in params:
            gain = params[f"{side}_gain"].astype(np.float64) + family.gain_offset
            wide = beside["qk_norm"].across_heads
            params[f"{side}_gain"] = gain.reshape(len(params[side]), -1) if wide else gain


def _architecture(params: Params, head_dim: int, beside: Beside) -> Architecture:
    """Of heads that have no more than a Theta and a W, too: their scale is then written out."""
    query = params.get("query_latent", params["query"])
    told: Beside = {
        "d": query.shape[-2],
        "n_heads": len(params["query"]),
        "head_dim": head_dim,
        "out_dim": params["out"].shape[2],
        "bias": any(name.endswith("_bias") for name in params),
        "kv_heads": len(params["key"]),
    }
    made = Architecture(**told | beside)
    return (
        Architecture(**told | beside | {"logit_scale": head_dim**-0.5}) if made.is_plain else made
    )


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
    naming = family.naming if layer.architecture.memory is None else family.cross
    block = None if naming is None else naming.factors
    assert isinstance(block, Block)
    found = {}
    for name, array in block.write(params).items():
        place = prefix
        if name in T5_TABLE:
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
    "alibi",
    "scale_attn_by_inverse_layer_idx",
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
