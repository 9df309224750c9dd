"""Examples (X, F(X)): in memory, sharded on disk, or drawn on demand from a callable.

`Examples` is the same for all sources, and holds one block and one chunk at a time when it walks
over them.
"""

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mhalearn import storage
from mhalearn.examples.files import (
    KIND,
    REQUIRED,
    as_json,
    block_tensors,
    check_metadata,
    from_json,
    open_shards,
    write_block,
    write_shards,
)
from mhalearn.examples.sources import Arrays, Block, Drawn, Source, check_examples, joined
from mhalearn.inputs import Sampler, check_count, check_kind, check_shape

Indices = slice | ArrayLike

_SAVED = "give a .safetensors file, an .npz file with arrays X and Y, or a folder of shards"


class Examples:
    """Labelled examples of a layer: X (n, k, d), Y (n, k, e), and lengths (n,) where they differ.

    X and Y keep their dtypes. Rows past an example's length are padding: nobody looks at them.
    metadata: anything JSON can hold; it travels with the files.
    """

    def __init__(
        self,
        X: ArrayLike,
        Y: ArrayLike,
        lengths: ArrayLike | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self._source: Source = Arrays(check_examples(X, Y, lengths), lengths is not None)
        self.metadata = check_metadata(metadata)

    @classmethod
    def _over(cls, source: Source, metadata: Mapping[str, Any]) -> "Examples":
        examples = cls.__new__(cls)
        examples._source = source
        examples.metadata = check_metadata(metadata)
        return examples

    @classmethod
    def from_callable(
        cls,
        f: Callable[[Any], Any],
        inputs: str | Sampler = "boolean",
        *,
        n: int,
        k: int,
        d: int,
        seed: int = 0,
        noise: float = 0.0,
    ) -> "Examples":
        """Examples of a black box f: (n, k, d) -> (n, k, e), drawn when they are used.

        inputs: as in `sample_inputs`, and the same inputs for the same seed. f sees int8 for
        "boolean", and may return a NumPy, JAX or PyTorch array. Every pass calls f on the same
        blocks of inputs, whatever chunks are asked for; a deterministic f gives the same examples.
        Here f is called on at most two examples, to learn e and the dtype.
        noise: standard deviation of Gaussian label noise, relative to the root mean square of the
        labels in the first block.
        """
        check_kind(inputs)
        n, k, d = check_shape(n, k, d)
        check_count("seed", seed, least=0)
        if not callable(f):
            raise ValueError(f"f is a {type(f).__name__}: pass a callable from X to Y")
        if not (math.isfinite(noise) and noise >= 0):
            raise ValueError(f"noise={noise}: pass a number of at least 0")
        name = inputs if isinstance(inputs, str) else getattr(inputs, "__name__", "sampler")
        return cls._over(
            Drawn(f, inputs, n, k, d, seed, noise),
            {"inputs": name, "seed": int(seed), "noise": float(noise)},
        )

    @property
    def n(self) -> int:
        return self._source.starts[-1]

    @property
    def k(self) -> int:
        return self._source.shape[0]

    @property
    def d(self) -> int:
        return self._source.shape[1]

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

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        return f"Examples(n={self.n}, k={self.k}, d={self.d}, out_dim={self.out_dim})"

    def chunks(self, size: int) -> Iterator[Block]:
        """All examples in order, `size` at a time (the last chunk may be smaller): X, Y, lengths.

        Memory: one chunk and one block of the source.
        """
        return self._chunks(check_count("size", size))

    def _chunks(self, size: int) -> Iterator[Block]:
        waiting: list[Block] = []
        count = 0
        for index in range(len(self._source.starts) - 1):
            block = self._source.block(index)
            start = 0
            while start < len(block.x):
                part = block.rows(slice(start, start + size - count))
                waiting.append(part)
                start, count = start + len(part.x), count + len(part.x)
                if count == size:
                    yield joined(waiting)
                    waiting, count = [], 0
        if waiting:
            yield joined(waiting)

    def arrays(self) -> Block:
        """X, Y and lengths of all examples, in memory."""
        return next(self._chunks(self.n))

    def subset(self, indices: Indices) -> "Examples":
        """Some of the examples, in memory, in the order asked for: a slice, numbers, or a mask."""
        try:
            asked = indices if isinstance(indices, slice) else np.asarray(indices)
            chosen = np.arange(self.n)[asked]
        except (IndexError, ValueError, TypeError):
            chosen = np.arange(0)
        if chosen.ndim != 1 or chosen.size == 0:
            raise ValueError(
                f"subset: choose at least one example by a slice, a mask of {self.n}, or a list of "
                f"numbers from 0 to {self.n - 1}"
            )
        starts = self._source.starts
        home = np.searchsorted(starts, chosen, side="right") - 1
        found: list[Block] = []
        places: list[NDArray[np.int64]] = []
        for index in np.unique(home):
            here = np.flatnonzero(home == index)
            found.append(self._source.block(int(index)).rows(chosen[here] - starts[index]))
            places.append(here)
        block = joined(found)
        if len(found) > 1:
            block = block.rows(np.argsort(np.concatenate(places)))
        x, y, lengths = block
        return Examples(x, y, lengths if self.has_lengths else None, metadata=self.metadata)

    def hashes(self) -> NDArray[np.uint64]:
        """A 64-bit hash of each example's values, the same for every dtype that holds them exactly.

        Padding does not count, and 0.0 equals -0.0. Cost: a few microseconds an example.
        """
        return self._hashes(lambda x, y: [x, y])

    def input_hashes(self) -> NDArray[np.uint64]:
        """As `hashes`, of the inputs alone and whatever the order of their tokens.

        Inputs with equal hashes give a layer that sees no order the same equations.
        """
        return self._hashes(lambda x, _: sorted(x, key=np.ndarray.tobytes))

    def _hashes(
        self, parts: Callable[[NDArray[Any], NDArray[Any]], list[NDArray[Any]]]
    ) -> NDArray[np.uint64]:
        found = np.empty(self.n, np.uint64)
        place = 0
        for x, y, lengths in self._chunks(1024):
            # Adding zero turns -0.0 into 0.0.
            x, y = x.astype("<f8") + 0.0, y.astype("<f8") + 0.0
            for x_i, y_i, length in zip(x, y, lengths.tolist(), strict=True):
                shape = np.array([length, self.d, self.out_dim], "<u8")
                digest = hashlib.blake2b(shape.tobytes(), digest_size=8)
                for part in parts(x_i[:length], y_i[:length]):
                    digest.update(part.tobytes())
                found[place] = int.from_bytes(digest.digest(), "little")
                place += 1
        return found

    def counting_limit(
        self, n_heads: int, bias: bool = False, head_dim: int | None = None
    ) -> float:
        """The number of examples below which no method can determine the layer: N_min.

        The larger of unknowns / (k e) and Theta unknowns / (k min(e, m (k - 1))): an example has
        k e scalars, and only that many of them speak about the attention. bias: key vectors and
        output bias are unknown too. head_dim: heads of that rank, with fewer unknowns. Where
        lengths differ, the scalars of an example are averaged over the examples' lengths.
        """
        m, d, e = check_count("n_heads", n_heads), self.d, self.out_dim
        h = d if head_dim is None else check_count("head_dim", head_dim)
        if h > d:
            raise ValueError(f"head_dim={h}: a head of d = {d} features has rank at most {d}")
        narrow = min(h, e)  # the rank of W_i; the formulas give d^2 and d e at full rank
        of_theta = m * h * (2 * d - h)
        of_w = m * narrow * (d + e - narrow)
        of_bias = m * h + e if bias else 0
        lengths = np.array([self.k])
        if self.has_lengths:
            blocks = range(len(self._source.starts) - 1)
            lengths = np.concatenate([self._source.lengths(index) for index in blocks])
        scalars = np.mean(lengths * e)
        about_theta = np.mean(lengths * np.minimum(e, m * (lengths - 1)))
        if about_theta == 0:  # every example has one token: its attention is constant
            return math.inf
        return float(max((of_theta + of_w + of_bias) / scalars, of_theta / about_theta))

    def save(self, path: str | Path, *, shard_size: int | None = None) -> None:
        """Write the examples to a .safetensors or .npz file, atomically, or to a folder of shards.

        shard_size: examples in a shard; the path is then a new folder, complete once its index.json
        is there, and `load_examples` reads it one shard at a time. Memory: a shard with shard_size,
        all examples without.
        """
        suffix = Path(path).suffix
        if shard_size is not None:
            blocks = self._chunks(check_count("shard_size", shard_size))
            write_shards(path, blocks, self._source, self.metadata)
        elif suffix == ".safetensors":
            write_block(path, self.arrays(), self.has_lengths, self.metadata)
        elif suffix == ".npz":
            tensors = block_tensors(self.arrays(), self.has_lengths)
            storage.write_npz(path, tensors | {"metadata": np.array(as_json(self.metadata))})
        else:
            raise ValueError(
                f"{storage.show(path)}: name a .safetensors or .npz file, "
                "or pass shard_size to write a folder of shards"
            )


def load_examples(path: str | Path) -> Examples:
    """Examples from a .safetensors or .npz file (arrays X, Y, lengths), or from a folder of shards.

    Files are read at once; of a folder only the headers, and then one shard at a time.
    """
    path = Path(path)
    if path.suffix not in (".safetensors", ".npz"):
        if os.path.isdir(path):
            return Examples._over(*open_shards(path))
        storage.check_file(path)
        raise ValueError(f"{storage.show(path)}: not a format of examples; {_SAVED}")
    if path.suffix == ".npz":
        arrays = storage.read_npz(path, REQUIRED)
        said = arrays.get("metadata")
        metadata = str(said) if said is not None and said.dtype.kind == "U" else "{}"
    else:
        arrays, header = storage.read_tensors(path, kind=KIND, required=REQUIRED)
        metadata = header.get("metadata", "{}")
    try:
        return Examples(
            arrays["X"], arrays["Y"], arrays.get("lengths"), metadata=from_json(metadata)
        )
    except ValueError as error:
        raise ValueError(f"{storage.show(path)}: {error}") from None
