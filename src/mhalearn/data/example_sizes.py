"""What examples say of themselves before their values are read: sizes, lengths, limits."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mhalearn.data.beside import read_columns
from mhalearn.data.sources import ExampleSource
from mhalearn.data.walks import cut_anew
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.token_columns import TokenColumns


class ExampleSizes:
    """How many examples a source holds and how large they are, and what that asks of a layer."""

    _source: ExampleSource
    metadata: dict[str, Any]

    @property
    def n(self) -> int:
        return self._source.starts[-1]

    @property
    def k(self) -> int:
        return self._source.shape[0]

    @property
    def d(self) -> int:
        """Features of a token, without what travels beside them."""
        return self.columns.features

    @property
    def columns(self) -> TokenColumns:
        """What the columns of the token array hold."""
        return read_columns(self.metadata, self._source.shape[1])

    @property
    def out_dim(self) -> int:
        return self._source.shape[2]

    @property
    def y_dtype(self) -> np.dtype[Any]:
        return self._source.y_dtype

    @property
    def has_lengths(self) -> bool:
        """Whether lengths were given; without, every example has k tokens."""
        return self._source.has_lengths

    @property
    def rows(self) -> int:
        """Tokens of all examples together, padding left out. Cost: the lengths are read."""
        return int(self.lengths.sum()) if self.has_lengths else self.n * self.k

    @property
    def _entries(self) -> int:
        return self.k * sum(self._source.shape[1:])

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        beside = f", memory={self.columns.memory}" if self.columns.memory else ""
        return f"Examples(n={self.n}, k={self.k}, d={self.d}, out_dim={self.out_dim}{beside})"

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each example, or of any one, (1,), where all have k."""
        if not self.has_lengths:
            return np.array([self.k])
        blocks = range(len(self._source.starts) - 1)
        return np.concatenate([self._source.lengths(index) for index in blocks])

    def architecture(
        self,
        n_heads: int | None = None,
        *,
        head_dim: int | None = None,
        bias: bool = False,
        causal: bool = False,
        **beside: Any,
    ) -> Architecture:
        """A class of layers that could have made these examples, by its sizes.

        beside: other fields of `Architecture`.
        """
        if self.columns.memory:
            beside = {"memory": self.columns.memory} | beside
        return Architecture(self.d, n_heads, head_dim, self.out_dim, bias, causal, **beside)

    def counting_limit(self, architecture: Architecture) -> float:
        """How many examples of these lengths a layer of this class needs at least."""
        lengths = self.lengths if self.has_lengths else self.k
        return architecture.counting_limit(lengths, self.memory_lengths)

    @property
    def memory_lengths(self) -> NDArray[np.int64] | None:
        """Tokens of each example's second sequence, or of any one where all have k; None where
        there is none. Cost: a pass, where they differ."""
        if not self.columns.memory:
            return None
        if not self.columns.marked:
            return np.array([self.k])
        sizes = [block.x[..., -1].sum(axis=1) for block in cut_anew(self._source, 1024)]
        return np.concatenate(sizes).astype(np.int64)
