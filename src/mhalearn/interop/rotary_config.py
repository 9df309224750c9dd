"""What a model's config.json says of rotary positions and of windows, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from mhalearn._runtime.validation import is_integer, is_number
from mhalearn.layer.rope import Rope
from mhalearn.layer.rope_scaling import SCALINGS, Scaling, read_scaling

Config = Mapping[str, Any]


def number(config: Config, *names: str) -> int:
    """A count that the config must have, under one of some names."""
    for name in names:
        if is_integer(config.get(name)) and config[name] > 0:
            return int(config[name])
    raise ValueError(f"config.json says no {names[0]}: pass the configuration of this model")


def layer_kind(config: Config, layer_index: int) -> str | None:
    """What `layer_types` has for a layer: full_attention or sliding_attention; None: not a word."""
    kinds = config.get("layer_types")
    if not isinstance(kinds, list) or layer_index >= len(kinds):
        return None
    kind = kinds[layer_index]
    if kind not in ("full_attention", "sliding_attention"):
        raise ValueError(f"layer_types has {kind!r} for layer {layer_index}, which is not modelled")
    return str(kind)


def read_rope(
    config: Config,
    layer_index: int,
    head_dim: int,
    *,
    base: float | None = 10000.0,
    layout: str = "half",
    by_kind: Config | None = None,
) -> Rope:
    """Rotary positions of a layer.

    base: where the config has none. by_kind: parameters of this layer's kind, where older configs
    keep them under names of their own.
    """
    said = config.get("rope_parameters")
    kind = layer_kind(config, layer_index)
    if isinstance(said, Mapping) and kind in said:
        said = said[kind]
    if by_kind is not None and not isinstance(said, Mapping):
        said = by_kind
    if not isinstance(said, Mapping):
        scaling = config.get("rope_scaling")
        said = dict(scaling) if isinstance(scaling, Mapping) else {}
    told = {name: value for name, value in said.items() if value is not None}
    found = told.pop("rope_theta", config.get("rope_theta", base))
    if not is_number(found):
        raise ValueError("config.json says no rope_theta: pass the configuration of this model")
    older = config.get("partial_rotary_factor", 1.0)
    share = told.pop("partial_rotary_factor", 1.0 if older is None else older)
    size = int(head_dim * share) if is_number(share) else 0
    fraction = size / head_dim  # a share of dimensions, whole ones
    return Rope(float(found), fraction, layout, _scaling(told, config))


def _scaling(told: dict[str, Any], config: Config) -> Scaling | None:
    name = told.pop("rope_type", told.pop("type", "default"))
    told.pop("type", None)
    if name == "default":
        return None
    if not isinstance(name, str) or name not in SCALINGS:
        raise ValueError(
            f"rope_type={name!r} in config.json, which is not modelled: {', '.join(SCALINGS)} are"
        )
    trained = config.get("max_position_embeddings")
    if name == "dynamic":  # which looks at the model's own length, whatever else is said
        told["max_position_embeddings"] = trained
    else:
        told.setdefault("original_max_position_embeddings", trained)
    if name == "yarn" and "factor" not in told and is_number(trained):
        told["factor"] = trained / told["original_max_position_embeddings"]
    known = {one.name for one in fields(SCALINGS[name])}
    if name in ("linear", "dynamic"):  # whose formulas have no place for it
        told = {key: value for key, value in told.items() if key in known}
    return read_scaling({"rope_type": name} | told)


def read_window(config: Config, layer_index: int, slides: bool) -> int | None:
    """The window of a layer. slides: whether it has one where `layer_types` does not say."""
    kind = layer_kind(config, layer_index)
    slides = slides if kind is None else kind == "sliding_attention"
    size = config.get("sliding_window")
    if not slides or size is None:
        return None
    return number(config, "sliding_window")
