"""What four libraries call the weights of an attention layer, and how they lay them out.

A block is one attention layer of a model: all names that begin alike, up to the layer's number and
the word for attention. Each naming knows its anchor (a weight every block has), the names it reads,
those that say nothing about the function, and how to cut the arrays into heads.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.validation import read_count
from mhalearn.interop.factors import WeightFactors

Weights = Mapping[str, NDArray[Any]]


class Naming(NamedTuple):
    """How a library names and lays out one attention layer."""

    name: str
    block: str  # a pattern of what stands before the names below; its groups: root and layer
    anchor: tuple[str, ...]  # one of these is in every block
    reads: tuple[str, ...]
    ignores: str  # a pattern of names in the block that do not change the function
    causal: bool
    factors: Callable[[Weights, int | None], WeightFactors]


def _bert(weights: Weights, n_heads: int | None) -> WeightFactors:
    query, key, value = (
        _take(weights, f"self.{part}.weight", 2) for part in ("query", "key", "value")
    )
    if len(key) != len(query):
        raise ValueError(f"keys of shape {key.shape} beside queries {query.shape}: {_GROUPED}")
    heads = _count_heads(n_heads, "self.query.weight", query)
    return WeightFactors(
        query=_rows("query", query, heads),
        key=_rows("key", key, heads),
        value=_rows("value", value, heads),
        out=_rows("output.dense", _take(weights, "output.dense.weight", 2).T, heads),
        query_bias=_entries(weights.get("self.query.bias"), heads),
        key_bias=_entries(weights.get("self.key.bias"), heads),
        value_bias=_entries(weights.get("self.value.bias"), heads),
        out_bias=weights.get("output.dense.bias"),
    )


def _gpt2(weights: Weights, n_heads: int | None) -> WeightFactors:
    packed = _take(weights, "c_attn.weight", 2)
    if packed.shape[1] != 3 * packed.shape[0]:
        # Some models keep these names for nn.Linear, and not all of them order the rows alike.
        linear = packed.shape[0] == 3 * packed.shape[1]
        raise ValueError(
            f"c_attn.weight has shape {packed.shape}: GPT-2 keeps (d, 3 d); "
            + ("transpose the nn.Linear weights c_attn and c_proj" if linear else _GROUPED)
        )
    heads = _count_heads(n_heads, "c_attn.weight", packed)
    query, key, value = np.split(packed.T, 3)
    return WeightFactors(
        query=_rows("query", query, heads),
        key=_rows("key", key, heads),
        value=_rows("value", value, heads),
        out=_rows("c_proj", _take(weights, "c_proj.weight", 2), heads),
        **_packed_biases(weights.get("c_attn.bias"), heads),
        out_bias=weights.get("c_proj.bias"),
    )


def _transformer_lens(weights: Weights, n_heads: int | None) -> WeightFactors:
    query, key, value, out = (_take(weights, f"W_{letter}", 3) for letter in "QKVO")
    heads = len(query)
    if n_heads not in (None, heads):
        raise ValueError(f"n_heads={n_heads}: W_Q has shape {query.shape}, {heads} heads")
    if len(key) != heads:
        raise ValueError(f"W_K has shape {key.shape} beside W_Q {query.shape}: {_GROUPED}")
    return WeightFactors(
        query=np.swapaxes(query, 1, 2),
        key=np.swapaxes(key, 1, 2),
        value=np.swapaxes(value, 1, 2),
        out=out,
        query_bias=weights.get("b_Q"),
        key_bias=weights.get("b_K"),
        value_bias=weights.get("b_V"),
        out_bias=weights.get("b_O"),
    )


def _torch(weights: Weights, n_heads: int | None) -> WeightFactors:
    out = _take(weights, "out_proj.weight", 2)
    if "in_proj_weight" in weights:
        packed = _take(weights, "in_proj_weight", 2)
        if packed.shape[0] % 3:
            raise ValueError(f"in_proj_weight has shape {packed.shape}: expected (3 d, d)")
        query, key, value = np.split(packed, 3)
    else:
        query, key, value = (_take(weights, f"{letter}_proj_weight", 2) for letter in "qkv")
        for name, part in (("kdim", key), ("vdim", value)):
            if part.shape != query.shape:
                raise ValueError(
                    f"{name}={part.shape[-1]} beside embed_dim={query.shape[-1]}: keys and values "
                    "of another sequence; a layer of self-attention has them equal"
                )
    heads = _count_heads(n_heads, "out_proj.weight", out)
    return WeightFactors(
        query=_rows("query", query, heads),
        key=_rows("key", key, heads),
        value=_rows("value", value, heads),
        out=_rows("out_proj", out.T, heads),
        **_packed_biases(weights.get("in_proj_bias"), heads),
        out_bias=weights.get("out_proj.bias"),
    )


def _take(weights: Weights, name: str, ndim: int) -> NDArray[Any]:
    """A weight that must be there; a KeyError names it if not."""
    array = weights[name]
    if array.ndim != ndim or array.size == 0:
        raise ValueError(f"{name} has shape {array.shape}: expected {ndim} axes, none empty")
    return array


def _count_heads(n_heads: int | None, name: str, array: NDArray[Any]) -> int:
    if n_heads is None:
        raise ValueError(
            f"n_heads is missing: {name} of shape {array.shape} does not tell the number of heads; "
            "pass n_heads (--heads), num_attention_heads in a model's config.json"
        )
    if n_heads < 1:
        raise ValueError(f"n_heads={n_heads}: a layer has at least one head")
    return n_heads


_GROUPED = "grouped or multi-query attention shares keys among heads; mhalearn does not model it"


def _rows(name: str, matrix: NDArray[Any], heads: int) -> NDArray[Any]:
    """(m h, d) as (m, h, d)."""
    if matrix.shape[0] % heads:
        raise ValueError(
            f"n_heads={heads}: the {name} weight has shape {matrix.shape}, "
            "which does not divide into so many heads"
        )
    return matrix.reshape(heads, -1, matrix.shape[1])


def _entries(bias: NDArray[Any] | None, heads: int) -> NDArray[Any] | None:
    """(m h,) as (m, h)."""
    if bias is None:
        return None
    if bias.ndim != 1 or bias.size == 0 or bias.size % heads:
        raise ValueError(f"a bias has shape {bias.shape}, which does not divide into {heads} heads")
    return bias.reshape(heads, -1)


def _packed_biases(bias: NDArray[Any] | None, heads: int) -> dict[str, Any]:
    if bias is None:
        return {}
    if bias.ndim != 1 or bias.size % 3:
        raise ValueError(f"the packed bias has shape {bias.shape}: expected (3 d,)")
    names = ("query_bias", "key_bias", "value_bias")
    return {
        name: _entries(part, heads) for name, part in zip(names, np.split(bias, 3), strict=True)
    }


def _weights_and_biases(*names: str) -> tuple[str, ...]:
    return tuple(f"{name}.{kind}" for name in names for kind in ("weight", "bias"))


BERT = Naming(
    name="BERT",
    block=r"(?P<root>(?:.*\.)?)layer\.(?P<layer>\d+)\.attention\.",
    anchor=("self.query.weight",),
    reads=_weights_and_biases("self.query", "self.key", "self.value", "output.dense"),
    ignores=r"output\.LayerNorm\..*",
    causal=False,
    factors=_bert,
)
GPT2 = Naming(
    name="GPT-2",
    block=r"(?P<root>(?:.*\.)?)h\.(?P<layer>\d+)\.attn\.",
    anchor=("c_attn.weight",),
    reads=_weights_and_biases("c_attn", "c_proj"),
    ignores="bias|masked_bias",  # the causal mask and the number it masks with
    causal=True,
    factors=_gpt2,
)
TRANSFORMER_LENS = Naming(
    name="TransformerLens",
    block=r"(?P<root>(?:.*\.)?)blocks\.(?P<layer>\d+)\.attn\.",
    anchor=("W_Q",),
    reads=tuple(f"{kind}_{letter}" for kind in "Wb" for letter in "QKVO"),
    ignores="mask|IGNORE",
    causal=False,  # unless a mask says otherwise
    factors=_transformer_lens,
)
TORCH = Naming(
    name="torch.nn.MultiheadAttention",
    # No root: the module is its own model, whatever else the state dict holds.
    block=r"(?:(?:.*\.)?(?P<layer>\d+)\.)?(?:[A-Za-z_]\w*\.)*",
    anchor=("in_proj_weight", "q_proj_weight"),
    reads=(
        *("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight"),
        *_weights_and_biases("out_proj"),
    ),
    ignores="",
    causal=False,
    factors=_torch,
)


class WeightNames(NamedTuple):
    """Where one attention layer stands among the names of a state dict."""

    naming: Naming
    prefix: str
    root: str  # what the names of the model begin with that the layer belongs to
    layer: int


def find_blocks(naming: Naming, names: Mapping[str, Any]) -> list[WeightNames]:
    """All attention layers of a naming, in the order of the state dict."""
    anchor = "|".join(map(re.escape, naming.anchor))
    pattern = re.compile(f"(?P<prefix>{naming.block})(?:{anchor})")
    found = []
    for name in names:
        if match := pattern.fullmatch(name):
            groups = match.groupdict()
            layer = read_count(groups["layer"] or "0")
            if layer is not None:
                root = groups.get("root", match["prefix"])
                found.append(WeightNames(naming, match["prefix"], root, layer))
    return found
