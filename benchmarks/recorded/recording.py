"""Input and output of an attention block on sentences, split into those to fit and others."""

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mhalearn import AttentionLayer

PRECISIONS = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}


@dataclass(frozen=True)
class Recording:
    """x (n, k, d), y (n, k, e) and lengths (n,), as hooks on a model would give them."""

    x: NDArray[Any]
    y: NDArray[Any]
    lengths: NDArray[np.int64]
    layer: AttentionLayer  # the truth
    head_dim: int

    @property
    def inside(self) -> NDArray[np.bool_]:
        return np.arange(self.x.shape[1]) < self.lengths[:, None]

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    def rounded(self, precision: str) -> "Recording":
        """Inputs and outputs as a model of that precision would hand them over."""
        kind = PRECISIONS[precision]
        return replace(self, x=self.x.astype(kind), y=self.y.astype(kind))

    def subset(self, which: slice) -> "Recording":
        return replace(self, x=self.x[which], y=self.y[which], lengths=self.lengths[which])

    def error_of(self, layer: Any) -> float:
        """Relative squared error of a layer on these tokens."""
        x, y = (part.astype(np.float64) for part in (self.x, self.y))
        wrong = (layer(x, self.lengths) - y)[self.inside]
        return float(np.sum(wrong**2) / np.sum(y[self.inside] ** 2))


def pad(sequences: list[list[int]], longest: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Token numbers (n, k), zeros after each sequence's end, and lengths; longer ones are cut."""
    cut = [sequence[:longest] for sequence in sequences]
    lengths = np.array([len(sequence) for sequence in cut])
    numbers = np.zeros((len(cut), int(lengths.max())), np.int64)
    for row, sequence in zip(numbers, cut, strict=True):
        row[: len(sequence)] = sequence
    return numbers, lengths


def split_tokens(lengths: NDArray[np.int64], fit: int, other: int) -> tuple[slice, slice]:
    """The first sequences that hold so many tokens, and those after them that hold so many."""
    ends = np.cumsum(lengths)
    first = int(np.searchsorted(ends, fit, side="right"))
    last = int(np.searchsorted(ends, ends[first - 1] + other, side="right"))
    if last == first:
        raise SystemExit(f"{ends[-1]} tokens of text: too few for {fit} and {other} others")
    return slice(0, first), slice(first, last)
