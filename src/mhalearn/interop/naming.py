"""What five libraries call the weights of an attention layer, and how they lay them out.

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
from mhalearn.interop.cutting import (
    Weights,
    count_heads,
    divides,
    entries_of_heads,
    packed_biases,
    rows_of_heads,
    shared_entries,
    shared_rows,
    take,
)
from mhalearn.interop.factors import WeightFactors


class Naming(NamedTuple):
    """How a library names and lays out one attention layer."""

    name: str
    block: str  # a pattern of what stands before the names below; its groups: root and layer
    anchor: tuple[str, ...]  # one of these is in every block
    reads: tuple[str, ...]
    ignores: str  # a pattern of names in the block that do not change the function
    causal: bool
    # From weights and what is told of their sizes (mostly the number of heads) to WeightFactors or,
    # of decoders, to parameters of projected heads.
    factors: Callable[[Weights, Any], Any]


def _bert(weights: Weights, n_heads: int | None) -> WeightFactors:
    query, key, value = (
        take(weights, f"self.{part}.weight", 2) for part in ("query", "key", "value")
    )
    if len(key) != len(query):
        raise ValueError(
            f"keys of shape {key.shape} beside queries {query.shape}: BERT's heads share none; "
            "rename the weights of one whose heads do to Llama's (q_proj, k_proj, v_proj, o_proj)"
        )
    heads = count_heads(n_heads, "self.query.weight", query)
    return WeightFactors(
        query=rows_of_heads("query", query, heads),
        key=rows_of_heads("key", key, heads),
        value=rows_of_heads("value", value, heads),
        out=rows_of_heads("output.dense", take(weights, "output.dense.weight", 2).T, heads),
        query_bias=entries_of_heads(weights.get("self.query.bias"), heads),
        key_bias=entries_of_heads(weights.get("self.key.bias"), heads),
        value_bias=entries_of_heads(weights.get("self.value.bias"), heads),
        out_bias=weights.get("output.dense.bias"),
    )


def _gpt2(weights: Weights, n_heads: int | None) -> WeightFactors:
    packed = take(weights, "c_attn.weight", 2)
    if n_heads and len(packed) * n_heads == packed.shape[1] * (n_heads + 2) and n_heads > 1:
        return _gpt_bigcode(weights, n_heads)
    if packed.shape[1] != 3 * packed.shape[0]:
        # Some models keep these names for nn.Linear, and not all of them order the rows alike.
        linear = packed.shape[0] == 3 * packed.shape[1]
        raise ValueError(
            f"c_attn.weight has shape {packed.shape}: GPT-2 keeps (d, 3 d), "
            "multi-query GPTBigCode (d + 2 d / heads, d)"
            + ("; transpose the nn.Linear weights c_attn and c_proj" if linear else "")
        )
    heads = count_heads(n_heads, "c_attn.weight", packed)
    query, key, value = np.split(packed.T, 3)
    return WeightFactors(
        query=rows_of_heads("query", query, heads),
        key=rows_of_heads("key", key, heads),
        value=rows_of_heads("value", value, heads),
        out=rows_of_heads("c_proj", take(weights, "c_proj.weight", 2), heads),
        **packed_biases(weights.get("c_attn.bias"), heads),
        out_bias=weights.get("c_proj.bias"),
    )


def _gpt_bigcode(weights: Weights, heads: int) -> WeightFactors:
    """GPT-2's names for nn.Linear weights, with one key and one value for all heads."""
    packed = take(weights, "c_attn.weight", 2)
    d = packed.shape[1]
    cuts = (d, d + d // heads)
    query, key, value = np.split(packed, cuts)
    bias = weights.get("c_attn.bias")
    biases: dict[str, Any] = {}
    if bias is not None:
        if bias.shape != packed.shape[:1]:
            raise ValueError(f"c_attn.bias has shape {bias.shape} beside {packed.shape}")
        names = ("query_bias", "key_bias", "value_bias")
        shares = (entries_of_heads, shared_entries, shared_entries)
        parts = zip(names, shares, np.split(bias, cuts), strict=True)
        biases = {name: share(part, heads) for name, share, part in parts}
    return WeightFactors(
        query=rows_of_heads("query", query, heads),
        key=shared_rows("key", key, heads, d // heads),
        value=shared_rows("value", value, heads, d // heads),
        out=rows_of_heads("c_proj", take(weights, "c_proj.weight", 2).T, heads),
        **biases,
        out_bias=weights.get("c_proj.bias"),
    )


def _llama(weights: Weights, n_heads: int | None) -> WeightFactors:
    query, key, value = (take(weights, f"{letter}_proj.weight", 2) for letter in "qkv")
    heads = count_heads(n_heads, "q_proj.weight", query)
    queries = rows_of_heads("query", query, heads)
    h = queries.shape[1]
    out = take(weights, "o_proj.weight", 2)
    if len(out) != query.shape[1]:
        raise ValueError(f"o_proj.weight has shape {out.shape} beside tokens of {query.shape[1]}")
    biases = [weights.get(f"{letter}_proj.bias") for letter in "qkv"]
    return WeightFactors(
        query=queries,
        key=shared_rows("key", key, heads, h),
        value=shared_rows("value", value, heads, h),
        out=rows_of_heads("o_proj", out.T, heads),
        query_bias=entries_of_heads(biases[0], heads),
        key_bias=shared_entries(biases[1], heads, h),
        value_bias=shared_entries(biases[2], heads, h),
        out_bias=weights.get("o_proj.bias"),
    )


def _transformer_lens(weights: Weights, n_heads: int | None) -> WeightFactors:
    query, out = take(weights, "W_Q", 3), take(weights, "W_O", 3)
    heads = len(query)
    if n_heads not in (None, heads):
        raise ValueError(f"n_heads={n_heads}: W_Q has shape {query.shape}, {heads} heads")
    weights = {**weights, **_unshared(weights, heads)}
    key, value = take(weights, "W_K", 3), take(weights, "W_V", 3)
    if len(key) != heads:
        raise ValueError(
            f"W_K has shape {key.shape} beside W_Q {query.shape}: TransformerLens calls keys that "
            "heads share _W_K"
        )
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
    out = take(weights, "out_proj.weight", 2)
    if "in_proj_weight" in weights:
        packed = take(weights, "in_proj_weight", 2)
        if packed.shape[0] % 3:
            raise ValueError(f"in_proj_weight has shape {packed.shape}: expected (3 d, d)")
        query, key, value = np.split(packed, 3)
    else:
        query, key, value = (take(weights, f"{letter}_proj_weight", 2) for letter in "qkv")
        for name, part in (("kdim", key), ("vdim", value)):
            if part.shape != query.shape:
                raise ValueError(
                    f"{name}={part.shape[-1]} beside embed_dim={query.shape[-1]}: keys and values "
                    "of another sequence; a layer of self-attention has them equal"
                )
    heads = count_heads(n_heads, "out_proj.weight", out)
    return WeightFactors(
        query=rows_of_heads("query", query, heads),
        key=rows_of_heads("key", key, heads),
        value=rows_of_heads("value", value, heads),
        out=rows_of_heads("out_proj", out.T, heads),
        **packed_biases(weights.get("in_proj_bias"), heads),
        out_bias=weights.get("out_proj.bias"),
    )


def _unshared(weights: Weights, heads: int) -> dict[str, NDArray[Any]]:
    """What TransformerLens stores once for several heads in a row, head by head."""
    found = {}
    for name in ("W_K", "W_V", "b_K", "b_V"):
        groups = weights.get(f"_{name}")
        if groups is None:
            continue
        if name in weights or groups.ndim == 0 or not divides(len(groups), heads):
            raise ValueError(
                f"_{name} has shape {groups.shape} beside {heads} heads: pass weights of one layer "
                "whose heads share keys and values in equal groups"
            )
        found[name] = np.repeat(groups, heads // len(groups), axis=0)
    return found


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
    reads=(
        *(f"{kind}_{letter}" for kind in "Wb" for letter in "QKVO"),
        *(f"_{kind}_{letter}" for kind in "Wb" for letter in "KV"),
    ),
    ignores="mask|IGNORE",
    causal=False,  # unless a mask says otherwise
    factors=_transformer_lens,
)
LLAMA = Naming(
    name="Llama without rotary positions",
    block=r"(?P<root>(?:.*\.)?)layers\.(?P<layer>\d+)\.self_attn\.",
    anchor=("q_proj.weight",),
    reads=_weights_and_biases("q_proj", "k_proj", "v_proj", "o_proj"),
    ignores="",
    causal=True,
    factors=_llama,
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
