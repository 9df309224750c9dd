"""Whole blocks out of Hugging Face weights: BERT, GPT-2, and Llama with its kin."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from mhalearn._runtime import storage
from mhalearn._runtime.types import Float64
from mhalearn._runtime.validation import is_number
from mhalearn.interop.factors import carried_factors
from mhalearn.interop.huggingface import config_beside, from_huggingface
from mhalearn.interop.state_dict import StateDict, WeightSource, open_state_dict
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.block.block import Block, block_of
from mhalearn.layer.block.design import BlockDesign
from mhalearn.layer.block.parametrisation import join
from mhalearn.layer.projected_layer import ProjectedLayer
from mhalearn.layer.units import Units

Config = Mapping[str, Any]

# What transformers calls activations, and what they are called here; and with a gate.
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
# Of gates, which may also be sigmoids.
_UNITS = {"gelu": "geglu", "gelu_tanh": "geglu_tanh", "relu": "reglu", "silu": "swiglu"}
_GATED = {name: _UNITS[plain] for name, plain in _ACTIVATIONS.items()} | {"sigmoid": "glu"}


class Layout(NamedTuple):
    """How a family names the parts of a block, beside its attention."""

    name: str
    block: str  # a pattern of what stands before; its group: layer
    attention: str  # a pattern of the names that are the attention's
    norms: tuple[str, str]
    up: str
    down: str
    gate: str | None
    transposed: bool  # weights are (outputs, inputs), as nn.Linear has them
    norm: str
    norm_kind: str
    settings: dict[str, tuple[str, ...]]  # where the config says activation and epsilon
    model_types: tuple[str, ...] = ()  # those it is for; empty: any


_BERT = Layout(
    "BERT",
    r"(?:.*\.)?layer\.(?P<layer>\d+)\.",
    r"attention\.(self\.|output\.dense\.)",
    ("attention.output.LayerNorm", "output.LayerNorm"),
    "intermediate.dense",
    "output.dense",
    None,
    True,
    "post",
    "layer",
    {"activation": ("hidden_act",), "epsilon": ("layer_norm_eps",)},
)
_GPT2 = Layout(
    "GPT-2",
    r"(?:.*\.)?h\.(?P<layer>\d+)\.",
    r"attn\.",
    ("ln_1", "ln_2"),
    "mlp.c_fc",
    "mlp.c_proj",
    None,
    False,
    "pre",
    "layer",
    {"activation": ("activation_function",), "epsilon": ("layer_norm_epsilon",)},
)
_LLAMA = Layout(
    "Llama",
    r"(?:.*\.)?layers\.(?P<layer>\d+)\.",
    r"self_attn\.",
    ("input_layernorm", "post_attention_layernorm"),
    "mlp.up_proj",
    "mlp.down_proj",
    "mlp.gate_proj",
    True,
    "pre",
    "rms",
    {"activation": ("hidden_activation", "hidden_act"), "epsilon": ("rms_norm_eps",)},
    ("llama", "mistral", "qwen2", "qwen3", "gemma"),
)
_LAYOUTS = (_BERT, _GPT2, _LLAMA)


def block_from_huggingface(
    source: WeightSource,
    layer_index: int = 0,
    n_heads: int | None = None,
    *,
    config: Config | None = None,
    prefix: str | None = None,
) -> Block:
    """The transformer block of a state dict, from the residual stream to the residual stream.

    Names as in BERT (post-norm), GPT-2 (pre-norm), or Llama, Mistral, Qwen2, Qwen3 and Gemma
    (pre-norm, RMSNorm, gated). source, layer_index, n_heads, prefix: as in `from_huggingface`.
    config: the model's configuration, which says activation and epsilon; that of a file is the
    config.json beside it.
    Refused by name: other model types with Llama's names, activations that are not modelled, any
    tensor of the block that its family does not have (experts, adapters, more norms).
    """
    state = open_state_dict(source)
    if config is None:
        config = {} if isinstance(source, Mapping) else config_beside(source)
    try:
        layout, place = _find(state, layer_index, prefix)
        _check(layout, place, state, config)
        activation, epsilon = _activation(layout, config), _epsilon(layout, config)
        offset = 1.0 if config.get("model_type") == "gemma" else 0.0
        parts = {"feed_forward": _feed_forward(layout, state, place)}
        for number, name in enumerate(layout.norms, 1):
            parts[f"norm_{number}"] = _norm(state, place + name, offset)
    except ValueError as error:
        where = "" if isinstance(source, Mapping) else f"{storage.show(source)}: "
        raise ValueError(f"{where}{error}") from None
    attention = from_huggingface(source, layer_index, n_heads, config=config, prefix=place)
    heads, parts["attention"] = _heads(attention)
    design = BlockDesign(
        heads,
        parts["feed_forward"]["up"].shape[1],
        activation,
        "up_bias" in parts["feed_forward"],
        norm=layout.norm,
        norm_kind=layout.norm_kind,
        epsilon=epsilon,
        norm_bias="bias" in parts["norm_1"],
    )
    said = {"imported": "huggingface", "layer": str(layer_index), "family": layout.name}
    return block_of(design, join(parts), metadata=said)


def _find(state: StateDict, layer_index: int, prefix: str | None) -> tuple[Layout, str]:
    """The layout of a block, and what its names begin with."""
    found = set()
    for layout in _LAYOUTS:
        pattern = re.compile(f"(?P<place>{layout.block}){re.escape(layout.up)}\\.weight")
        for name in state.shapes:
            met = pattern.fullmatch(name)
            if met and int(met["layer"]) == layer_index and name.startswith(prefix or ""):
                found.add((layout.name, met["place"]))
    if not found:
        known = ", ".join(layout.name for layout in _LAYOUTS)
        raise ValueError(
            f"no block {layer_index} named as in {known} among {len(state.shapes)} tensors: "
            "rename the weights, or pass the right file and layer_index"
        )
    if len(found) > 1:
        places = ", ".join(sorted(repr(place) for _, place in found))
        raise ValueError(f"{places} are blocks {layer_index}: choose one by its prefix")
    name, place = found.pop()
    return next(layout for layout in _LAYOUTS if layout.name == name), place


def _check(layout: Layout, place: str, state: StateDict, config: Config) -> None:
    """Refuse what a block of this layout does not compute."""
    kind = config.get("model_type")
    if layout.model_types and kind not in layout.model_types:
        raise ValueError(
            f"model_type={kind!r}: blocks with {layout.name}'s names are read of "
            f"{', '.join(layout.model_types)}; pass config=, the model's config.json"
        )
    weights = (*layout.norms, layout.up, layout.down, *((layout.gate,) if layout.gate else ()))
    known = {f"{name}.{part}" for name in weights for part in ("weight", "bias")}
    for name in sorted(state.shapes):
        inner = name.removeprefix(place)
        if name.startswith(place) and inner not in known and not re.match(layout.attention, inner):
            raise ValueError(
                f"{name!r} is no part of a {layout.name} block: one that uses it computes "
                "something else"
            )


def _setting(layout: Layout, config: Config, what: str) -> tuple[str, Any]:
    names = layout.settings[what]
    name = next((name for name in names if config.get(name) is not None), names[-1])
    return name, config.get(name)


def _activation(layout: Layout, config: Config) -> str:
    name, said = _setting(layout, config, "activation")
    known = _ACTIVATIONS if layout.gate is None else _GATED
    if not isinstance(said, str) or said not in known:
        raise ValueError(
            f"{name}={said!r} in the config: activations that are known are {', '.join(known)}"
        )
    return known[said]


def _epsilon(layout: Layout, config: Config) -> float:
    name, said = _setting(layout, config, "epsilon")
    if not is_number(said) or said < 0:
        raise ValueError(f"{name}={said!r} in the config: pass the epsilon of the norms")
    return float(said)


def _heads(layer: Any) -> tuple[Architecture, dict[str, Float64]]:
    """Heads by their projections, as the model has them."""
    if isinstance(layer, ProjectedLayer):
        zeros = layer.parametrisation.from_layer(layer, Units())
        return layer.architecture, {name: np.asarray(leaf) for name, leaf in zeros.items()}
    factors = carried_factors(layer)
    assert factors is not None
    named = {name: array.astype(np.float64) for name, array in factors.arrays().items()}
    for side in ("query", "key", "value"):
        named[side] = named[side].swapaxes(1, 2)
    architecture = Architecture(
        layer.d, layer.n_heads, factors.head_dim, bias=factors.has_bias, causal=layer.causal
    )
    if architecture.bias:
        m, h = layer.n_heads, factors.head_dim
        for side in ("query", "key", "value"):
            named.setdefault(f"{side}_bias", np.zeros((m, h)))
        named.setdefault("out_bias", np.zeros(layer.d))
    return architecture, named


def _norm(state: StateDict, name: str, offset: float) -> dict[str, Float64]:
    found = {"gain": _read(state, f"{name}.weight") + offset}
    if f"{name}.bias" in state.shapes:
        found["bias"] = _read(state, f"{name}.bias")
    return found


def _feed_forward(layout: Layout, state: StateDict, place: str) -> dict[str, Float64]:
    named = {"up": layout.up, "down": layout.down}
    if layout.gate is not None:
        named["gate"] = layout.gate
    found = {}
    for part, name in named.items():
        weight = _read(state, f"{place}{name}.weight")
        found[part] = weight.T if layout.transposed else weight
    if any(f"{place}{name}.bias" in state.shapes for name in named.values()):
        for part, name in named.items():
            there = f"{place}{name}.bias" in state.shapes
            zeros = np.zeros(found[part].shape[1])
            found[f"{part}_bias"] = _read(state, f"{place}{name}.bias") if there else zeros
    return found


def _read(state: StateDict, name: str) -> Float64:
    if name not in state.shapes:
        raise ValueError(f"there is no {name!r}: the block is cut")
    return np.asarray(state.read(name), np.float64)
