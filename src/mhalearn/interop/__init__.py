"""In and out of other libraries: PyTorch's modules, Hugging Face and TransformerLens weights."""

from mhalearn.interop.blocks import block_from_huggingface
from mhalearn.interop.callables import as_function
from mhalearn.interop.factors import WeightFactors, carried_factors, factorise
from mhalearn.interop.families import to_huggingface
from mhalearn.interop.huggingface import from_huggingface
from mhalearn.interop.state_dict import write_state_dict
from mhalearn.interop.torch_module import (
    causal_mask,
    from_torch,
    from_torch_state,
    to_torch,
    to_torch_state,
)
from mhalearn.interop.transformer_lens import to_transformer_lens

__all__ = [
    "WeightFactors",
    "as_function",
    "block_from_huggingface",
    "carried_factors",
    "causal_mask",
    "factorise",
    "from_huggingface",
    "from_torch",
    "from_torch_state",
    "to_huggingface",
    "to_torch",
    "to_torch_state",
    "to_transformer_lens",
    "write_state_dict",
]
