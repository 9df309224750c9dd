"""torch.nn.MultiheadAttention, in and out: the module, and its state dict without torch."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime import storage
from mhalearn._runtime.validation import read_count
from mhalearn.interop.backend import require_torch
from mhalearn.interop.factors import WeightFactors, carried_factors, factorise
from mhalearn.interop.naming import TORCH
from mhalearn.interop.state_dict import WeightSource, find_layer, open_state_dict
from mhalearn.interop.torch_block import block_to_torch
from mhalearn.layer.block.block import Block
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.projected_layer import ProjectedLayer, by_matrices


def from_torch(module: Any, *, causal: bool = False) -> AttentionLayer:
    """The layer that a torch.nn.MultiheadAttention computes as self-attention, module(x, x, x).

    Packed or unpacked weights, with or without bias, batch_first or not, on any device; bfloat16 is
    read as float32. causal: whether the module is called with a causal mask, which it does not
    know. The layer carries the weights: `to_torch` returns the same bits.
    """
    torch = require_torch()
    if not isinstance(module, torch.nn.MultiheadAttention):
        inner = " (its self_attn is one)" if hasattr(module, "self_attn") else ""
        raise ValueError(
            f"{type(module).__name__} is not a torch.nn.MultiheadAttention{inner}: pass one, "
            "or learn the layer from Examples.from_callable"
        )
    if type(module).forward is not torch.nn.MultiheadAttention.forward:
        raise ValueError(f"{type(module).__name__} has a forward of its own: pass torch's module")
    refuse_random(module)
    for name, size in (("kdim", module.kdim), ("vdim", module.vdim)):
        if size != module.embed_dim:
            raise ValueError(
                f"{name}={size}: self-attention takes keys and values from the tokens themselves; "
                f"pass a module with {name} = embed_dim = {module.embed_dim}"
            )
    if module.bias_k is not None or module.bias_v is not None:
        raise ValueError("add_bias_kv=True: an extra key that is no token is not modelled; drop it")
    if module.add_zero_attn:
        raise ValueError("add_zero_attn=True: an extra key that is no token is not modelled")
    # Read by name and not through state_dict(), which does not know of parametrised weights.
    named = {name: getattr(module, name, None) for name in TORCH.reads if "." not in name}
    named |= {"out_proj.weight": module.out_proj.weight, "out_proj.bias": module.out_proj.bias}
    state = open_state_dict({name: value for name, value in named.items() if value is not None})
    found = find_layer(state, (TORCH,), layer_index=0, sizes=module.num_heads, prefix=None)
    return found.factors.to_layer(causal, {"imported": "torch"})


def from_torch_state(
    source: WeightSource,
    n_heads: int | None = None,
    *,
    layer_index: int = 0,
    causal: bool | None = None,
    prefix: str | None = None,
) -> AttentionLayer:
    """As `from_torch`, from a state dict or its file; the module may lie anywhere inside a model.

    n_heads: the shapes do not tell it; only files written by `mhalearn export` do.
    layer_index: the number in the names, for a stack of layers.
    """
    state = open_state_dict(source)
    place = "" if isinstance(source, Mapping) else f"{storage.show(source)}: "
    if n_heads is None:
        n_heads = read_count(state.metadata.get("n_heads", ""))
    if causal is None:
        causal = state.metadata.get("causal") == "true"
    try:
        found = find_layer(state, (TORCH,), layer_index=layer_index, sizes=n_heads, prefix=prefix)
    except ValueError as error:
        raise ValueError(f"{place}{error}") from None
    return found.factors.to_layer(causal, {"imported": "torch"})


def to_torch(
    layer: AttentionLayer | ProjectedLayer | Block,
    *,
    batch_first: bool = True,
    dtype: Any = None,
    n_heads: int | None = None,
    packed: bool = True,
    tolerance: float = 1e-8,
) -> Any:
    """A torch.nn.MultiheadAttention, in eval mode on the CPU, that computes the layer.

        output, _ = module(x, x, x, need_weights=False)

    A causal layer needs its mask at every call, because the module cannot hold it:
    `module(x, x, x, attn_mask=mhalearn.interop.causal_mask(k))`.
    dtype: a torch dtype; the weights' own unless given (float64 for a layer that carries none).
    packed: one in_proj_weight, or three of their own as modules with kdim have them.
    n_heads, tolerance: as in `to_torch_state`.

    Of a `Block`, a module of its own, `module(x)`, with parameters by the names of its file; only
    dtype says something about it.
    """
    torch = require_torch()
    if isinstance(layer, Block):
        return block_to_torch(layer, dtype)
    state = to_torch_state(layer, n_heads=n_heads, tolerance=tolerance)
    tensors = {name: torch.tensor(array) for name, array in state.items()}
    if dtype is None:
        dtype = next(iter(tensors.values())).dtype
    heads = layer.n_heads if n_heads is None else n_heads
    module = torch.nn.MultiheadAttention(
        layer.d,
        heads,
        bias="in_proj_bias" in tensors,
        kdim=None if packed else layer.d + 1,  # any other width makes torch keep three weights
        batch_first=batch_first,
        dtype=dtype,
    )
    if not packed:
        module.kdim = layer.d
        module.k_proj_weight = torch.nn.Parameter(module.q_proj_weight.detach().clone())
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        tensors |= dict(zip(names, tensors.pop("in_proj_weight").chunk(3), strict=True))
    module.load_state_dict(tensors)
    return module.eval()


def to_torch_state(
    layer: AttentionLayer | ProjectedLayer,
    *,
    n_heads: int | None = None,
    tolerance: float = 1e-8,
) -> dict[str, NDArray[Any]]:
    """The state dict of that module, as NumPy arrays of one dtype. No torch needed.

    The weights the layer carries, bit by bit, or else its singular vectors. torch fixes the head
    dimension at d / heads, so heads of higher rank are refused. n_heads: more heads than the layer
    has are filled with zeros, which makes heads narrower. tolerance: as in `factorise`.
    """
    layer = by_matrices(layer)
    d, heads = layer.d, layer.n_heads if n_heads is None else n_heads
    if layer.out_dim != d:
        raise ValueError(
            f"out_dim={layer.out_dim} beside d={d}: torch.nn.MultiheadAttention has them equal"
        )
    if heads < 1 or d % heads:
        raise ValueError(
            f"n_heads={heads} does not divide d={d}: torch.nn.MultiheadAttention needs "
            f"d = heads x head dimension; pass n_heads (--heads) that divides {d}"
        )
    factors = carried_factors(layer)
    if factors is None or (factors.n_heads, factors.head_dim) != (heads, d // heads):
        factors = factorise(layer, d // heads, heads, tolerance=tolerance)
    return _as_state(factors)


def _as_state(factors: WeightFactors) -> dict[str, NDArray[Any]]:
    m, h, d = factors.query.shape
    dtype = factors.dtype
    parts = (factors.query, factors.key, factors.value)
    state = {
        "in_proj_weight": np.concatenate([part.reshape(m * h, d) for part in parts]),
        "out_proj.weight": factors.out.reshape(m * h, -1).T,
    }
    if factors.has_bias:
        biases = (factors.query_bias, factors.key_bias, factors.value_bias)
        zeros = np.zeros(m * h, dtype)
        state["in_proj_bias"] = np.concatenate(
            [zeros if bias is None else bias.reshape(-1) for bias in biases]
        )
        out_bias = factors.out_bias
        state["out_proj.bias"] = zeros[:d] if out_bias is None else out_bias
    return {name: np.ascontiguousarray(array, dtype) for name, array in state.items()}


def causal_mask(k: int, device: Any = None) -> Any:
    """The attn_mask that makes a torch module of k tokens causal: True where it may not look."""
    torch = require_torch()
    return torch.ones(k, k, dtype=torch.bool, device=device).triu(1)


def refuse_random(module: Any) -> None:
    """Refuse a module some part of which drops entries at random as it is."""
    nn = require_torch().nn
    layers = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
    for name, part in module.named_modules():
        rate = getattr(part, "p", 0.0) if isinstance(part, layers) else 0.0
        if isinstance(part, nn.MultiheadAttention):
            rate = part.dropout
        if part.training and rate > 0:
            where = f"{name}: " if name else ""
            raise ValueError(
                f"{where}dropout={rate} in training mode answers at random: call module.eval()"
            )
