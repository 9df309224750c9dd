"""Arrays of other libraries as NumPy has them."""

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray


def is_tensor(value: Any) -> bool:
    """Whether a value is PyTorch's; torch is not imported for that."""
    return hasattr(value, "detach") and hasattr(value, "cpu")  # text files have the first


def to_numpy(value: Any) -> Any:
    """A tensor off its graph and device, in a dtype NumPy has; anything else as it is.

    bfloat16 is widened to float32, which keeps every value.
    """
    if not is_tensor(value):
        return value
    tensor = value.detach().cpu()
    return tensor.float() if "bfloat16" in str(tensor.dtype) else tensor


def widen_bfloat16(array: NDArray[Any]) -> NDArray[Any]:
    """bfloat16, which NumPy lacks, as float32, which holds all its values; others as they are."""
    return array.astype(np.float32) if array.dtype == ml_dtypes.bfloat16 else array


def recognise_bfloat16(array: NDArray[Any]) -> NDArray[Any]:
    """NumPy writes bfloat16 as two bytes without a type, and nothing else so."""
    return array.view(ml_dtypes.bfloat16) if array.dtype == np.dtype("V2") else array
