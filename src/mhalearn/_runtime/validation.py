"""What callers pass, checked at the boundary: a ValueError with the value and the remedy."""

import numbers
import operator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import issparse

from mhalearn._runtime.arrays import is_bfloat16, is_tensor, to_numpy, widen_bfloat16


def check_inputs(
    x: ArrayLike, d: int | None = None, lengths: ArrayLike | None = None, name: str = "X"
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Validate X (n, k, d) and its lengths at the boundary; the dtype is kept."""
    array = check_array(name, x, 3, "(examples, tokens, features)", narrow=True)
    n, k, width = array.shape
    if n == 0 or width == 0:
        raise ValueError(f"{name} has shape {array.shape}: it is empty; pass at least one example")
    if k < 2:
        raise ValueError(
            f"{name} has shape {array.shape}: attention over k = {k} token is constant; pass k >= 2"
        )
    if d is not None and width != d:
        raise ValueError(f"{name} has {width} features a token, the layer has d = {d}")
    if lengths is None:
        return array, np.full(n, k, np.int64)
    sizes = np.asarray(to_numpy(lengths))
    if sizes.shape != (n,) or not np.issubdtype(sizes.dtype, np.integer):
        raise ValueError(f"lengths must be {n} integers, one an example; got shape {sizes.shape}")
    if sizes.min() < 1 or sizes.max() > k:
        raise ValueError(f"lengths must lie between 1 and k = {k}")
    return array, sizes.astype(np.int64)


def check_positions(positions: ArrayLike, n: int, k: int) -> NDArray[np.float64]:
    """Position ids (k,) or (n, k) of n examples of k tokens, as doubles (n, k)."""
    given = np.asarray(to_numpy(positions))
    if given.shape not in ((k,), (1, k), (n, k)) or not np.issubdtype(given.dtype, np.integer):
        raise ValueError(
            f"positions have shape {given.shape} and dtype {given.dtype}: pass integers of shape "
            f"({k},) or ({n}, {k}), one a token"
        )
    return np.broadcast_to(given.astype(np.float64), (n, k))


def check_array(
    name: str, value: ArrayLike, ndim: int, axes: str = "", *, narrow: bool = False
) -> NDArray[Any]:
    """A finite real numeric array of the given rank, or a ValueError that says what to change.

    value: also a tensor of PyTorch or an array of JAX.
    axes: their names in words, where the array holds examples.
    narrow: leave bfloat16 what it is, for arrays that are widened where they are computed with;
    without, it comes out as float32.
    """
    if issparse(value):
        raise ValueError(f"{name} is sparse, which is not supported: pass {name}.toarray()")
    try:
        array = np.asarray(to_numpy(value))
    # RuntimeError and NotImplementedError: a tensor that NumPy cannot look into.
    except (ValueError, TypeError, RuntimeError):
        raise ValueError(f"{name} is not an array: {_explain(value)}") from None
    array = array if narrow else widen_bfloat16(array)
    if np.iscomplexobj(array):
        # The words up to the colon are scikit-learn's, which its checks look for.
        raise ValueError(
            f"Complex data not supported: {name} has dtype {array.dtype}; pass real numbers"
        )
    if array.dtype == np.bool_:
        raise ValueError(f"{name} has dtype bool: pass numbers (for +-1 inputs, int8)")
    if not _is_real(array.dtype):
        raise ValueError(f"{name} has dtype {array.dtype}: pass real numbers (int or float)")
    if array.ndim != ndim:
        one = f"; for one example pass {name}[None]" if axes and array.ndim == ndim - 1 else ""
        raise ValueError(
            f"{name} has shape {array.shape}: expected {ndim} axes{axes and f' {axes}'}, "
            f"got {array.ndim}{one}"
        )
    if not np.all(np.isfinite(array)):
        bad = int(array.size - np.isfinite(array).sum())
        raise ValueError(f"{name} has {bad} NaN or infinite entries: remove or replace them")
    return array


def _is_real(dtype: np.dtype[Any]) -> bool:
    number = np.issubdtype(dtype, np.integer) or np.issubdtype(dtype, np.floating)
    return number or is_bfloat16(dtype)


def _explain(value: Any) -> str:
    if is_tensor(value):
        parts = (getattr(value, name, "") for name in ("dtype", "layout", "device"))
        kind = ", ".join(map(str, parts))
        return f"a tensor ({kind}) that NumPy cannot hold; pass a dense one of floats"
    if isinstance(value, list | tuple) and any(map(is_tensor, value)):
        return "it is a list of tensors; pass torch.stack of them"
    return "pass a rectangular array of numbers"


def check_shape(n: int, k: int, d: int) -> tuple[int, int, int]:
    n, k, d = check_count("n", n), check_count("k", k), check_count("d", d)
    if k < 2:
        raise ValueError(f"k={k}: attention over one token is constant; take k >= 2")
    return n, k, d


def is_number(value: Any) -> bool:
    """Whether a value can be compared with numbers: no text, no array, not True or False."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_count(name: str, value: int, *, least: int = 1) -> int:
    """An int of at least `least`, or a ValueError that says so."""
    try:
        count = operator.index(value)
    except TypeError:
        count = None
    if count is None or isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: pass an integer of at least {least}")
    if count < least:
        raise ValueError(f"{name}={count}: pass an integer of at least {least}")
    return count


def read_count(text: str) -> int | None:
    """The number that text from a file holds; None where it is no count, or one beyond 64 bits."""
    return int(text) if text.isdecimal() and len(text) < 19 else None


def is_integer(value: Any) -> bool:
    """Whether a value is a whole number, and not True or False."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
