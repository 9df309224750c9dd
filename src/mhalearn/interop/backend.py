"""PyTorch where it is installed, and weights as NumPy arrays. No torch at import."""

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.arrays import to_numpy, widen_bfloat16


def require_torch() -> Any:
    """The torch package, or one line that says how to get it."""
    try:
        import torch
    except ImportError:
        raise ValueError('PyTorch is not installed: pip install "mhalearn[torch]"') from None
    return torch


def loaded_torch() -> Any:
    """torch if somebody imported it: without that, nothing at hand can come from it."""
    return sys.modules.get("torch")


def weight(name: str, value: Any) -> NDArray[Any]:
    """One entry of a state dict as an array of its own: what is read must not change later.

    bfloat16 comes out as float32, which keeps every value.
    """
    if str(getattr(value, "device", "")) == "meta":
        raise ValueError(f"{name} is on the meta device and has no values: load the weights first")
    if getattr(value, "is_sparse", False) or getattr(value, "is_quantized", False):
        raise ValueError(f"{name} is sparse or quantised: pass a dense floating tensor")
    try:
        array = widen_bfloat16(np.asarray(to_numpy(value))).copy()
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name} is a {type(value).__name__}: pass a tensor or array") from None
    array.setflags(write=False)
    return array
