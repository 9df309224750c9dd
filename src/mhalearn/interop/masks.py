"""Masks of attention as libraries write them: which tokens are real, and which see which.

Of two axes, (n, k): one or True for a real token (`attention_mask`), or True for padding
(`key_padding_mask`). Of more, (n, heads, k, k) with any axis of one: True where a query may look,
or zero there and a very negative number elsewhere; torch's own `attn_mask` has True where it may
not.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.arrays import to_numpy, widen_bfloat16

# Numbers below this are added to logits to forbid a key; above, they are a bias.
_FORBIDDEN = -1e3
# True, or anything but zero, is padding under these names.
_PADDING = ("key_padding_mask", "src_key_padding_mask", "padding_mask")

Bools = NDArray[np.bool_]


class Seen(NamedTuple):
    """What masks say of a batch."""

    real: Bools | None  # (n, k); None where no mask was found
    causal: bool | None  # None where nothing says so


def read_masks(
    batch: Mapping[str, Any],
    call: Mapping[str, Any],
    shape: tuple[int, int],
    *,
    named: str | None = None,
    true_blocks: bool = False,
) -> Seen:
    """The masks of a batch, by the names of the model's arguments, and of the module's own call.

    shape: n, k of the module's tokens. named: the argument of the model that is one for real
    tokens, where it is not attention_mask. true_blocks: the module is torch's, and its attn_mask
    has True where a query may not look.
    """
    n, k = shape
    if named is not None and named not in batch:
        known = ", ".join(map(repr, batch)) or "none"
        raise ValueError(f"mask={named!r}: the batch has no such entry; it has {known}")
    real = _padding_of(batch, n, k, named)
    if real is None:
        real = _padding_of(call, n, k, None)
    pairs = _pairs_of(call, n, k, true_blocks)
    if pairs is None:
        said = call.get("is_causal")
        return Seen(real, said if isinstance(said, bool) else None)
    # Without a mask of tokens, real ones are those that some query sees; or the last one, which is
    # real under left padding: some libraries let padding itself see everything.
    guesses: list[Bools] = [np.any(pairs, axis=1), pairs[:, -1]]
    if real is not None:
        guesses, pairs = [real], pairs & real[:, None]
    for guess in guesses:
        if (causal := _is_causal(pairs, guess)) is not None:
            return Seen(guess, causal)
    raise ValueError(
        "the module is called with a mask under which tokens see neither all tokens nor all "
        "earlier ones (a window, or several sequences in a row), which no layer here models"
    )


def _padding_of(arguments: Mapping[str, Any], n: int, k: int, named: str | None) -> Bools | None:
    """Real tokens by a mask of two axes."""
    kept = "attention_mask" if named is None else named
    mask = _array(arguments.get(kept))
    if mask is not None and (named is not None or mask.ndim == 2):
        return _check(mask, n, k, kept) != 0
    for name in _PADDING if named is None else ():
        mask = _array(arguments.get(name))
        if mask is not None:
            padding = _check(mask, n, k, name)
            # A mask of floats is added to logits.
            return padding == 0 if mask.dtype.kind != "f" else padding > _FORBIDDEN
    return None


def _check(mask: NDArray[Any], n: int, k: int, name: str) -> NDArray[Any]:
    if mask.shape != (n, k):
        raise ValueError(
            f"{name} has shape {mask.shape}, the module's tokens ({n}, {k}): pass mask=, the name "
            "of a mask with an entry for each of them"
        )
    return mask


def _pairs_of(call: Mapping[str, Any], n: int, k: int, true_blocks: bool) -> Bools | None:
    """Which keys each query may see (n, k, k), by a mask of pairs."""
    for name in ("attention_mask", "attn_mask"):
        mask = _array(call.get(name))
        if mask is None or (name == "attention_mask" and mask.ndim == 2):
            continue
        if mask.dtype.kind == "b":
            allowed = ~mask if true_blocks else mask
        else:
            allowed = mask > _FORBIDDEN if mask.dtype.kind == "f" else mask != 0
        if allowed.ndim == 3 and len(allowed) not in (1, n):  # examples times heads
            allowed = allowed.reshape(n, -1, *allowed.shape[1:])
        allowed = allowed[None] if allowed.ndim == 2 else allowed
        allowed = allowed[:, None] if allowed.ndim == 3 else allowed
        try:
            same = np.broadcast_to(allowed[..., :k], (n, allowed.shape[1], k, k))
        except ValueError:
            raise ValueError(
                f"{name} has shape {mask.shape}, the module's tokens ({n}, {k}): it is not a mask "
                "of their pairs"
            ) from None
        if not np.array_equal(same.all(axis=1), same.any(axis=1)):
            raise ValueError(f"{name} differs between heads, which no layer here models")
        return np.asarray(same[:, 0])
    return None


def _is_causal(pairs: Bools, real: Bools) -> bool | None:
    """Whether real tokens see the earlier ones alone, rather than all real ones; None where they
    see something else."""
    seen = pairs & real[:, :, None]
    together = real[:, :, None] & real[:, None, :]
    for causal, expected in (
        (False, together),
        (True, together & np.tri(real.shape[1], dtype=bool)),
    ):
        if np.array_equal(seen, expected):
            return causal
    return None


def _array(value: Any) -> NDArray[Any] | None:
    if value is None or not hasattr(value, "shape"):
        return None
    array = widen_bfloat16(np.asarray(to_numpy(value)))
    return array if array.ndim >= 2 else None
