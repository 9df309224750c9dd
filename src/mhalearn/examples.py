"""Examples (X, F(X)): in memory, sharded on disk, or drawn on demand from a callable.

Where examples live is a `Source`: blocks that can be read one by one. `Examples` is the same for
all sources, and holds one block and one chunk at a time when it walks over them.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mhalearn import storage
from mhalearn.inputs import (
    Sampler,
    Stream,
    block_size,
    check_count,
    check_kind,
    check_shape,
    draw_block,
    generator,
)
from mhalearn.layer import check_array, check_inputs

Indices = slice | ArrayLike

_INDEX = "index.json"
_KIND = "examples"
_REQUIRED = ("X", "Y")
_SAVED = "give a .safetensors file, an .npz file with arrays X and Y, or a folder of shards"


class Block(NamedTuple):
    """Examples that lie together in memory."""

    x: NDArray[Any]
    y: NDArray[Any]
    lengths: NDArray[np.int64]

    def rows(self, part: slice | NDArray[np.int64]) -> "Block":
        return Block(self.x[part], self.y[part], self.lengths[part])


@runtime_checkable
class Source(Protocol):
    """Where examples live: blocks of examples of one shape, read one at a time, in any order."""

    starts: list[int]  # the first example of each block, and at the end the number of examples
    shape: tuple[int, int, int]  # k, d, e
    y_dtype: np.dtype[Any]
    has_lengths: bool

    def block(self, index: int) -> Block: ...

    def lengths(self, index: int) -> NDArray[np.int64]:
        """The lengths in a block, without reading the rest of it."""
        ...


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
        self._source: Source = _Arrays(_check_examples(X, Y, lengths), lengths is not None)
        self.metadata = _check_metadata(metadata)

    @classmethod
    def _over(cls, source: Source, metadata: Mapping[str, Any]) -> "Examples":
        examples = cls.__new__(cls)
        examples._source = source
        examples.metadata = _check_metadata(metadata)
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
            _Drawn(f, inputs, n, k, d, seed, noise),
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
                    yield _joined(waiting)
                    waiting, count = [], 0
        if waiting:
            yield _joined(waiting)

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
        block = _joined(found)
        if len(found) > 1:
            block = block.rows(np.argsort(np.concatenate(places)))
        x, y, lengths = block
        return Examples(x, y, lengths if self.has_lengths else None, metadata=self.metadata)

    def hashes(self) -> NDArray[np.uint64]:
        """A 64-bit hash of each example's values, the same for every dtype that holds them exactly.

        Padding does not count, and 0.0 equals -0.0. Cost: a few microseconds an example.
        """
        found = np.empty(self.n, np.uint64)
        place = 0
        for x, y, lengths in self._chunks(1024):
            # Adding zero turns -0.0 into 0.0.
            x, y = x.astype("<f8") + 0.0, y.astype("<f8") + 0.0
            for x_i, y_i, length in zip(x, y, lengths.tolist(), strict=True):
                shape = np.array([length, self.d, self.out_dim], "<u8")
                digest = hashlib.blake2b(shape.tobytes(), digest_size=8)
                digest.update(x_i[:length].tobytes())
                digest.update(y_i[:length].tobytes())
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
            self._save_shards(path, check_count("shard_size", shard_size))
        elif suffix == ".safetensors":
            self._save_block(path, self.arrays(), self.metadata)
        elif suffix == ".npz":
            tensors = self._tensors(self.arrays())
            storage.write_npz(path, tensors | {"metadata": np.array(_as_json(self.metadata))})
        else:
            raise ValueError(
                f"{storage.show(path)}: name a .safetensors or .npz file, "
                "or pass shard_size to write a folder of shards"
            )

    def _tensors(self, block: Block) -> storage.Tensors:
        tensors: storage.Tensors = {"X": block.x, "Y": block.y}
        return tensors | {"lengths": block.lengths} if self.has_lengths else tensors

    def _save_block(self, path: str | Path, block: Block, metadata: Mapping[str, Any]) -> None:
        said = {"kind": _KIND, "metadata": _as_json(metadata)}
        storage.write_tensors(path, self._tensors(block), said)

    def _save_shards(self, path: str | Path, shard_size: int) -> None:
        with _new_folder(path) as folder:
            self._fill_folder(folder, shard_size)

    def _fill_folder(self, folder: Path, shard_size: int) -> None:
        shards = []
        for number, block in enumerate(self._chunks(shard_size)):
            name = f"shard-{number:05d}.safetensors"
            self._save_block(folder / name, block, {})
            shards.append({"file": name, "n": len(block.x)})
        index = {
            "kind": _KIND,
            "k": self.k,
            "d": self.d,
            "out_dim": self.out_dim,
            "has_lengths": self.has_lengths,
            "shards": shards,
            "metadata": self.metadata,
            "mhalearn_version": storage.mhalearn_version(),
        }
        text = json.dumps(index, indent=1, sort_keys=True) + "\n"
        storage.write_atomically(folder / _INDEX, text.encode())


def load_examples(path: str | Path) -> Examples:
    """Examples from a .safetensors or .npz file (arrays X, Y, lengths), or from a folder of shards.

    Files are read at once; of a folder only the headers, and then one shard at a time.
    """
    path = Path(path)
    if path.suffix not in (".safetensors", ".npz"):
        if os.path.isdir(path):
            return _load_shards(path)
        storage.check_file(path)
        raise ValueError(f"{storage.show(path)}: not a format of examples; {_SAVED}")
    if path.suffix == ".npz":
        arrays = storage.read_npz(path, _REQUIRED)
        said = arrays.get("metadata")
        metadata = str(said) if said is not None and said.dtype.kind == "U" else "{}"
    else:
        arrays, header = storage.read_tensors(path, kind=_KIND, required=_REQUIRED)
        metadata = header.get("metadata", "{}")
    try:
        return Examples(
            arrays["X"], arrays["Y"], arrays.get("lengths"), metadata=_from_json(metadata)
        )
    except ValueError as error:
        raise ValueError(f"{storage.show(path)}: {error}") from None


# The three sources


class _Arrays:
    """Examples in memory: one block."""

    def __init__(self, block: Block, has_lengths: bool) -> None:
        self._block = block
        self.starts = [0, len(block.x)]
        self.shape = (*block.x.shape[1:], block.y.shape[2])
        self.y_dtype = block.y.dtype
        self.has_lengths = has_lengths

    def block(self, index: int) -> Block:
        return self._block

    def lengths(self, index: int) -> NDArray[np.int64]:
        return self._block.lengths


class _Shards:
    """Examples in a folder: a block is a shard, read when asked for.

    The headers were right when the folder was opened. A shard that cannot be read later, or has
    changed, was broken from outside: an OSError. Bad values in it are bad data: a ValueError.
    """

    def __init__(self, paths: list[Path], starts: list[int], header: storage.Header) -> None:
        self._paths = paths
        self.starts = starts
        (_, k, d), (_, _, e) = header.shapes["X"], header.shapes["Y"]
        self.shape = (k, d, e)
        self.y_dtype = header.dtypes["Y"]
        self.has_lengths = "lengths" in header.shapes

    def block(self, index: int) -> Block:
        tensors = self._read(index, "X", "Y", "lengths")
        path = self._paths[index]
        try:
            block = _check_examples(tensors["X"], tensors["Y"], tensors.get("lengths"))
        except ValueError as error:
            raise ValueError(f"{storage.show(path)}: {error}") from None
        n = self.starts[index + 1] - self.starts[index]
        k, d, e = self.shape
        same_shape = block.x.shape == (n, k, d) and block.y.shape == (n, k, e)
        if not same_shape or ("lengths" in tensors) != self.has_lengths:
            raise OSError(f"{storage.show(path)} has changed since it was opened: open it again")
        return block

    def lengths(self, index: int) -> NDArray[np.int64]:
        if self.has_lengths:
            return self._read(index, "lengths")["lengths"].astype(np.int64)
        return np.full(self.starts[index + 1] - self.starts[index], self.shape[0], np.int64)

    def _read(self, index: int, *names: str) -> storage.Tensors:
        try:
            return storage.read_tensors(
                self._paths[index], kind=_KIND, required=_REQUIRED, only=names
            )[0]
        except ValueError as error:
            raise OSError(f"lost a shard: {error}") from None


class _Drawn:
    """Examples of a callable: a block of inputs has its own random stream, labels are computed."""

    def __init__(
        self,
        f: Callable[[Any], Any],
        inputs: str | Sampler,
        n: int,
        k: int,
        d: int,
        seed: int,
        noise: float,
    ) -> None:
        self._f, self._inputs, self._seed, self._noise = f, inputs, seed, noise
        self._sigma = None if noise else 0.0  # known once the first block has been labelled
        self.starts = [*range(0, n, block_size(k, d)), n]
        self.has_lengths = False
        labels = self._labels(draw_block(inputs, 0, min(n, 2), k, d, seed))
        self.shape = (k, d, labels.shape[2])
        self._f_dtype = labels.dtype
        rounds = noise > 0 and np.issubdtype(labels.dtype, np.integer)
        self.y_dtype = np.dtype(np.float64) if rounds else labels.dtype

    def block(self, index: int) -> Block:
        k, d, e = self.shape
        n = self.starts[index + 1] - self.starts[index]
        x = draw_block(self._inputs, index, n, k, d, self._seed)
        y = self._labels(x)
        if y.shape[2] != e or y.dtype != self._f_dtype:
            raise ValueError(
                f"f returned e = {y.shape[2]}, {y.dtype}, after e = {e}, {self._f_dtype}: "
                "it must keep the shape and dtype of its outputs"
            )
        if index == 0 and self._sigma is None:
            self._sigma = self._noise * float(np.sqrt(np.mean(y.astype(np.float64) ** 2)))
        if self._sigma is None:
            self.block(0)
        if self._sigma:
            rng = generator(self._seed, Stream.NOISE, index)
            y = (y + self._sigma * rng.standard_normal(y.shape)).astype(self.y_dtype)
        return _frozen(Block(x, y.astype(self.y_dtype, copy=False), self.lengths(index)))

    def lengths(self, index: int) -> NDArray[np.int64]:
        return np.full(self.starts[index + 1] - self.starts[index], self.shape[0], np.int64)

    def _labels(self, x: NDArray[Any]) -> NDArray[Any]:
        """What f says of some inputs; f gets a copy, in case it works in place."""
        output = self._f(x.copy())
        if hasattr(output, "detach"):  # PyTorch: off the graph and the device, to a dtype NumPy has
            output = output.detach().cpu()
            output = output.float() if "bfloat16" in str(output.dtype) else output
        labels = check_array("the output of f", output, 3)
        if labels.shape[:2] != x.shape[:2] or labels.shape[2] == 0:
            raise ValueError(
                f"f returned shape {labels.shape} for X of shape {x.shape}: "
                f"expected ({x.shape[0]}, {x.shape[1]}, e)"
            )
        return labels


# Folders of shards


@contextmanager
def _new_folder(path: str | Path) -> Iterator[Path]:
    """An empty folder to fill; when that fails, nothing of it is left."""
    folder = Path(path)
    shown = storage.show(path)
    if folder.suffix in (".safetensors", ".npz"):
        raise ValueError(f"{shown}: with shard_size, name a folder, without {folder.suffix}")
    made = not os.path.lexists(folder)
    if made:
        storage.check_writable(folder)
        folder.mkdir()
    elif not os.path.isdir(folder):
        raise ValueError(f"{shown} is a file: with shard_size, name a new folder")
    elif os.listdir(folder):
        raise ValueError(f"{shown} is not empty: name a new folder, or empty it first")
    try:
        storage.check_writable(folder / _INDEX)
        yield folder
    except BaseException:
        for shard in folder.glob("shard-*.safetensors"):
            shard.unlink()
        if made:
            with suppress(OSError):  # somebody else's file is in it by now
                folder.rmdir()
        raise


def _load_shards(folder: Path) -> Examples:
    path = folder / _INDEX
    shown = storage.show(path)
    if not os.path.lexists(path):
        raise ValueError(
            f"{shown} does not exist: this is no folder of shards, or writing it was cut short; "
            "save the examples again"
        )
    storage.check_file(path)
    try:
        index = json.loads(path.read_bytes())
        if index["kind"] != _KIND:
            raise ValueError
        shards = [(str(shard["file"]), int(shard["n"])) for shard in index["shards"]]
        k, d, e = (int(index[name]) for name in ("k", "d", "out_dim"))
        has_lengths, metadata = bool(index["has_lengths"]), index["metadata"]
        # A shard's name is a plain one: an index cannot send a reader elsewhere.
        if not shards or any(Path(name).name != name or n < 1 for name, n in shards):
            raise ValueError
        if not isinstance(metadata, dict):
            raise ValueError
        check_shape(1, k, d)
        check_count("out_dim", e)
    except OSError as error:
        raise ValueError(f"{shown} cannot be read ({error.strerror}): check it") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise ValueError(f"{shown} is damaged or no index: save the examples again") from None
    paths = [folder / name for name, _ in shards]
    first: storage.Header | None = None
    for shard, (_, n) in zip(paths, shards, strict=True):
        header = storage.peek_tensors(shard, kind=_KIND, required=_REQUIRED)
        first = first or header
        expected = {"X": (n, k, d), "Y": (n, k, e)} | ({"lengths": (n,)} if has_lengths else {})
        if header.shapes != expected or header.dtypes != first.dtypes:
            raise ValueError(
                f"{storage.show(shard)} differs from what index.json says or from the first shard "
                f"({_layout(header)}): save the examples again"
            )
    starts = [0, *np.cumsum([n for _, n in shards]).tolist()]
    assert first is not None
    return Examples._over(_Shards(paths, starts, first), metadata)


def _layout(header: storage.Header) -> str:
    parts = [f"{name} {header.dtypes[name]} {shape}" for name, shape in header.shapes.items()]
    return ", ".join(ascii(part)[1:-1] for part in sorted(parts))


# Checks and small parts


def _check_examples(x: ArrayLike, y: ArrayLike, lengths: ArrayLike | None) -> Block:
    tokens, sizes = check_inputs(x, None, lengths)
    labels = check_array("Y", y, 3)
    if labels.shape[:2] != tokens.shape[:2] or labels.shape[2] == 0:
        n, k, _ = tokens.shape
        raise ValueError(
            f"Y has shape {labels.shape}: expected ({n}, {k}, e) to match X of shape {tokens.shape}"
        )
    return _frozen(Block(tokens, labels, sizes))


def _frozen(block: Block) -> Block:
    """Read-only views: whoever gets a chunk cannot change the examples."""
    views = [array.view() for array in block]
    for view in views:
        view.setflags(write=False)
    return Block(*views)


def _joined(blocks: list[Block]) -> Block:
    if len(blocks) == 1:
        return blocks[0]
    return _frozen(Block(*(np.concatenate(arrays) for arrays in zip(*blocks, strict=True))))


def _as_json(metadata: Mapping[str, Any]) -> str:
    return json.dumps(metadata, sort_keys=True, allow_nan=False)


def _from_json(text: str) -> dict[str, Any]:
    try:
        metadata = json.loads(text)
    except (ValueError, RecursionError):
        metadata = None
    if not isinstance(metadata, dict):
        raise ValueError("its metadata is not a JSON object: save the examples again")
    return metadata


def _check_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Metadata as it will come back from a file."""
    try:
        checked = json.loads(_as_json(dict(metadata or {})))
    except (ValueError, TypeError, RecursionError):
        raise ValueError("metadata: pass a mapping from names to what JSON can hold") from None
    return dict(checked)
