"""Ten faults that the catalogue does not have, written before it, and kept apart from it.

Each says where it lies: which heads, which rows, which sequences. An audit must say "unexplained"
and the same place, and must not name a fault of its own with confidence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.audited.boxes import Box

Array = NDArray[Any]


@dataclass(frozen=True)
class Outside:
    name: str
    make: Callable[[Box], Box]
    # Where it lies; empty where it is in all of them.
    heads: tuple[int, ...] = ()
    rows: tuple[int, int] | None = None  # from, to
    sequences: tuple[int, ...] = ()
    keys: tuple[int, ...] = ()
    distances: tuple[int, ...] = ()


def _at(head: int, change: Callable[[Array], Array]) -> Callable[[Array, int, Array], Array]:
    return lambda a, here, _: change(a) if here == head else a


def _stale_row(y: Array, _: int, __: Array) -> Array:
    found = y.copy()
    found[:, 17] = found[:, 16]
    return found


def _other_sequence(y: Array, _: int, __: Array) -> Array:
    found = y.copy()
    found[1::4] = y[0::4][: len(found[1::4])]
    return found


def _drop_first_key(p: Array, _: int, __: Array) -> Array:
    found = p.copy()
    found[:, 1:, 0] = 0
    return found


def _hole(distance: int) -> Callable[[Array], Array]:
    """Keys so far before a row are left out, and the others normalised."""

    def change(p: Array) -> Array:
        r, j = np.arange(p.shape[-2])[:, None], np.arange(p.shape[-1])[None]
        kept = np.where(r - j == distance, 0, p)
        return (kept * (p.sum(-1, keepdims=True) / kept.sum(-1, keepdims=True))).astype(p.dtype)

    return change


def _double(distance: int) -> Callable[[Array], Array]:
    def change(p: Array) -> Array:
        r, j = np.arange(p.shape[-2])[:, None], np.arange(p.shape[-1])[None]
        return np.where(r - j == distance, 2 * p, p).astype(p.dtype)

    return change


def _top_eight(p: Array) -> Array:
    kept = np.where(p >= np.sort(p, -1)[..., -8:-7], p, 0)
    return kept / kept.sum(-1, keepdims=True)


def _blocks(p: Array, _: int, __: Array) -> Array:
    """Blocks of 16 keys, each normalised by itself, as an online softmax without its correction."""
    blocks = -(-p.shape[-1] // 16)
    found = p.copy()
    for b in range(blocks):
        part = found[..., 16 * b : 16 * b + 16]
        total = part.sum(-1, keepdims=True)
        found[..., 16 * b : 16 * b + 16] = np.where(total > 0, part / np.maximum(total, 1e-30), 0)
    seen = (found.sum(-1, keepdims=True)).clip(1)
    return found / seen


def _sparse(rng: np.random.Generator) -> Callable[[Array], Array]:
    return lambda w: w * (rng.random(w.shape) > 0.2)


def _pruned(box: Box) -> Box:
    weights = box.weights["query"].copy()
    weights[1] = _sparse(np.random.default_rng(5))(weights[1])
    return box.with_weight("query", weights)


def _loud_value(box: Box) -> Box:
    return box.with_(hooks={"mixed": _at(2, lambda v: (v * np.float32(1.3)).astype(v.dtype))})


def _log_rows(logits: Array, _: int, __: Array) -> Array:
    rows = np.log(np.arange(logits.shape[1]) + 2.0) / np.log(16.0)
    return (logits * rows[:, None].astype(np.float32)).astype(logits.dtype)


def _late_rows(y: Array, _: int, x: Array) -> Array:
    """Rows from 24 on see tokens of the row before in their queries: a shifted read."""
    found = y.copy()
    found[:, 24:] = np.roll(y, 1, axis=1)[:, 24:]
    return found


OUTSIDE = (
    Outside(
        "output of row 17 is that of row 16",
        lambda b: b.with_(hooks={"output": _stale_row}),
        rows=(17, 18),
    ),
    Outside(
        "every fourth sequence answers for its neighbour",
        lambda b: b.with_(hooks={"output": _other_sequence}),
        sequences=(1, 5, 9, 13),
    ),
    Outside(
        "the first key is never attended to, by any later row",
        lambda b: b.with_(hooks={"weights": _drop_first_key}),
        rows=(1, 64),
        keys=(0,),
    ),
    Outside(
        "head 1 keeps its eight largest weights alone",
        lambda b: b.with_(hooks={"weights": _at(1, _top_eight)}),
        heads=(1,),
    ),
    Outside(
        "blocks of 16 keys are normalised one by one",
        lambda b: b.with_(hooks={"weights": _blocks}),
        rows=(16, 64),
    ),
    Outside("a fifth of head 1's query weights is zero", _pruned, heads=(1,)),
    Outside("head 2's values are 1.3 times too large", _loud_value, heads=(2,)),
    Outside(
        "logits grow with the logarithm of the row", lambda b: b.with_(hooks={"logits": _log_rows})
    ),
    Outside(
        "rows from 24 on answer for the row before",
        lambda b: b.with_(hooks={"output": _late_rows}),
        rows=(24, 64),
    ),
    Outside(
        "outputs are clipped",
        lambda b: b.with_(
            hooks={
                "output": lambda y, _, __: np.clip(y.astype(np.float32), -0.5, 0.5).astype(y.dtype)
            }
        ),
    ),
    Outside(
        "keys three tokens back are not attended to",
        lambda b: b.with_(hooks={"weights": lambda p, _, __: _hole(3)(p)}),
        distances=(3,),
    ),
    Outside(
        "head 1 counts the token before a row twice",
        lambda b: b.with_(hooks={"weights": _at(1, _double(1))}),
        heads=(1,),
        distances=(1,),
    ),
)
