"""Arrays of other libraries as NumPy has them."""

import sys
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray


def is_tensor(value: Any) -> bool:
    """Whether a value is PyTorch's; torch is not imported for that."""
    return hasattr(value, "detach") and hasattr(value, "cpu")  # text files have the first


def to_numpy(value: Any) -> Any:
    """A tensor off its graph and device, as NumPy takes it; anything else as it is.

    bfloat16, which NumPy knows through ml_dtypes alone, keeps its bits.
    """
    if not is_tensor(value):
        return value
    tensor = value.detach().cpu()
    if "bfloat16" not in str(tensor.dtype):
        return tensor
    # NumPy reads no tensor of bfloat16, but one of integers with the same bits.
    integers = tensor.contiguous().view(sys.modules["torch"].int16)
    return integers.numpy().view(ml_dtypes.bfloat16)


def is_bfloat16(dtype: np.dtype[Any]) -> bool:
    return dtype == ml_dtypes.bfloat16


def widen_bfloat16(array: NDArray[Any]) -> NDArray[Any]:
    """bfloat16, which NumPy lacks, as float32, which holds all its values; others as they are."""
    return array.astype(np.float32) if is_bfloat16(array.dtype) else array


def recognise_bfloat16(array: NDArray[Any]) -> NDArray[Any]:
    """bfloat16, which NumPy writes as two bytes without a type, and nothing else so."""
    return array.view(ml_dtypes.bfloat16) if array.dtype == np.dtype("V2") else array
