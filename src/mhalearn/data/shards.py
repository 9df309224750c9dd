"""Examples in files: one block in a .safetensors file, or many in a folder of shards."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime import storage
from mhalearn._runtime.checksums import digest_json
from mhalearn._runtime.validation import check_count, check_shape
from mhalearn._runtime.version import __version__
from mhalearn.data.padding import pad_block
from mhalearn.data.sources import ExampleBlock, check_examples

KIND = "examples"
REQUIRED = ("X", "Y")
INDEX = "index.json"
# Bytes of a block: whatever the size of a shard, that much of it is in memory at a time.
_BLOCK = 2**24


def block_tensors(block: ExampleBlock, has_lengths: bool) -> storage.Tensors:
    tensors: storage.Tensors = {"X": block.x, "Y": block.y}
    return tensors | {"lengths": block.lengths} if has_lengths else tensors


def write_file(
    path: str | Path,
    arrays: Callable[[], ExampleBlock],
    has_lengths: bool,
    metadata: Mapping[str, Any],
) -> None:
    """Write all examples to a .safetensors or .npz file; they are asked for if it can be one."""
    suffix = Path(path).suffix
    if suffix == ".safetensors":
        write_block(path, arrays(), has_lengths, metadata)
    elif suffix == ".npz":
        tensors = block_tensors(arrays(), has_lengths)
        storage.write_npz(path, tensors | {"metadata": np.array(as_json(metadata))})
    else:
        raise ValueError(
            f"{storage.show(path)}: name a .safetensors or .npz file, "
            "or pass shard_size to write a folder of shards"
        )


def write_block(
    path: str | Path, block: ExampleBlock, has_lengths: bool, metadata: Mapping[str, Any]
) -> None:
    said = {"kind": KIND, "metadata": as_json(metadata)}
    storage.write_tensors(path, block_tensors(block, has_lengths), said)


def write_shards(
    path: str | Path,
    blocks: Iterator[ExampleBlock],
    metadata: Mapping[str, Any],
    has_lengths: bool | None = None,
) -> None:
    """Write each block as a shard, and the index last: a folder with an index is complete.

    Blocks may have different k, and lengths then; shorter ones are padded when they are read.
    has_lengths: None where only the last block tells whether any example is shorter than k.
    metadata: read after the last block.
    """
    with new_folder(path) as folder:
        shards, shortest, d, e = [], [], 0, 0
        for number, block in enumerate(blocks):
            name = f"shard-{number:05d}.safetensors"
            write_block(folder / name, block, has_lengths is not False, {})
            shards.append({"file": name, "n": len(block.x), "k": block.x.shape[1]})
            shortest.append(int(block.lengths.min()))
            d, e = block.x.shape[2], block.y.shape[2]
        k = max(shard["k"] for shard in shards)
        if has_lengths is None:
            has_lengths = min(shortest) < k
        index = {
            "kind": KIND,
            "k": k,
            "d": d,
            "out_dim": e,
            "has_lengths": has_lengths,
            "shards": shards,
            "metadata": metadata,
            "mhalearn_version": __version__,
        }
        index["checksum"] = digest_json(index)
        text = json.dumps(index, indent=1, sort_keys=True) + "\n"
        storage.write_atomically(folder / INDEX, text.encode())


class Shards:
    """Examples in a folder: a block is a shard, or a part of a large one, read when asked for.

    The headers were right when the folder was opened. A shard that cannot be read later, or has
    changed, was broken from outside: an OSError. Bad values in it are bad data: a ValueError.
    Cost: a shard that carries checksums is read once more, before its first block, to compare them.
    """

    def __init__(
        self,
        shards: list[tuple[Path, int]],
        shape: tuple[int, int, int],
        has_lengths: bool,
        header: storage.Header,
    ) -> None:
        k, d, e = self.shape = shape
        self.y_dtype = header.dtypes["Y"]
        self.has_lengths = has_lengths
        each = k * (d * header.dtypes["X"].itemsize + e * self.y_dtype.itemsize)
        most = max(1, _BLOCK // each)
        self._blocks: list[tuple[Path, slice]] = []
        self._checked: set[Path] = set()
        self.starts = [0]
        for path, n in shards:
            first = self.starts[-1]
            for start in range(0, n, most):
                # The last block goes to the end, so that a shard that has grown is noticed.
                last = start + most >= n
                self._blocks.append((path, slice(start, None if last else start + most)))
                self.starts.append(first + min(n, start + most))

    def block(self, index: int) -> ExampleBlock:
        names = ("X", "Y", "lengths") if self.has_lengths else ("X", "Y")
        tensors = self._read(index, *names)
        path = self._blocks[index][0]
        try:
            block = check_examples(tensors["X"], tensors["Y"], tensors.get("lengths"))
        except ValueError as error:
            raise ValueError(f"{storage.show(path)}: {error}") from None
        n = self.starts[index + 1] - self.starts[index]
        k, d, e = self.shape
        block = pad_block(block, k) if self.has_lengths else block
        same_shape = block.x.shape == (n, k, d) and block.y.shape == (n, k, e)
        if not same_shape or len(tensors) != len(names):
            raise OSError(f"{storage.show(path)} has changed since it was opened: open it again")
        return block

    def lengths(self, index: int) -> NDArray[np.int64]:
        if self.has_lengths:
            return self._read(index, "lengths")["lengths"].astype(np.int64)
        return np.full(self.starts[index + 1] - self.starts[index], self.shape[0], np.int64)

    def _read(self, index: int, *names: str) -> storage.Tensors:
        path, rows = self._blocks[index]
        try:
            if path not in self._checked:
                storage.check_tensors(path, kind=KIND)
                self._checked.add(path)
            return storage.read_tensors(path, kind=KIND, required=REQUIRED, only=names, rows=rows)[
                0
            ]
        except ValueError as error:
            raise OSError(f"lost a shard: {error}") from None


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
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
        storage.check_writable(folder / INDEX)
        yield folder
    except BaseException:
        for shard in folder.glob("shard-*.safetensors"):
            shard.unlink()
        if made:
            with suppress(OSError):  # somebody else's file is in it by now
                folder.rmdir()
        raise


def open_shards(folder: Path) -> tuple[Shards, dict[str, Any]]:
    """The source over a folder and its metadata; only headers are read."""
    path = folder / INDEX
    shown = storage.show(path)
    if not os.path.lexists(path):
        inside = folder / "examples.safetensors"
        if inside.exists():  # what `mhalearn generate` wrote
            raise ValueError(
                f"{storage.show(folder)} is no folder of shards: give {storage.show(inside)}"
            )
        raise ValueError(
            f"{shown} does not exist: this is no folder of shards, or writing it was cut short; "
            "save the examples again"
        )
    storage.check_file(path)
    try:
        index = json.loads(path.read_bytes())
        # An index that carries no checksum is an old one, or was written by hand.
        if index["kind"] != KIND or index.pop("checksum", None) not in (None, digest_json(index)):
            raise ValueError
        k, d, e = (int(index[name]) for name in ("k", "d", "out_dim"))
        has_lengths, metadata = bool(index["has_lengths"]), index["metadata"]
        shards = [
            (str(shard["file"]), int(shard["n"]), int(shard.get("k", k)))
            for shard in index["shards"]
        ]
        # A shard's name is a plain one: an index cannot send a reader elsewhere.
        if not shards or any(Path(name).name != name or n < 1 for name, n, _ in shards):
            raise ValueError
        if any(not (2 <= own <= k) or (own < k and not has_lengths) for _, _, own in shards):
            raise ValueError
        if not isinstance(metadata, dict):
            raise ValueError
        check_shape(1, k, d)
        check_count("out_dim", e)
    except OSError as error:
        raise ValueError(f"{shown} cannot be read ({error.strerror}): check it") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise ValueError(f"{shown} is damaged or no index: save the examples again") from None
    first: storage.Header | None = None
    for name, n, own in shards:
        shard = folder / name
        header = storage.peek_tensors(shard, kind=KIND, required=REQUIRED)
        first = first or header
        expected: dict[str, tuple[int, ...]] = {"X": (n, own, d), "Y": (n, own, e)}
        # Recordings have lengths in every shard, which say nothing where all are k.
        if has_lengths or "lengths" in header.shapes:
            expected["lengths"] = (n,)
        if header.shapes != expected or header.dtypes != first.dtypes:
            raise ValueError(
                f"{storage.show(shard)} differs from what index.json says or from the first shard "
                f"({_layout(header)}): save the examples again"
            )
    assert first is not None
    placed = [(folder / name, n) for name, n, _ in shards]
    return Shards(placed, (k, d, e), has_lengths, first), metadata


def _layout(header: storage.Header) -> str:
    parts = [f"{name} {header.dtypes[name]} {shape}" for name, shape in header.shapes.items()]
    return ", ".join(ascii(part)[1:-1] for part in sorted(parts))


def as_json(metadata: Mapping[str, Any]) -> str:
    return json.dumps(metadata, sort_keys=True, allow_nan=False)


def from_json(text: str) -> dict[str, Any]:
    try:
        metadata = json.loads(text)
    except (ValueError, RecursionError):
        metadata = None
    if not isinstance(metadata, dict):
        raise ValueError("its metadata is not a JSON object: save the examples again")
    return metadata


def check_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Metadata as it will come back from a file."""
    try:
        checked = json.loads(as_json(dict(metadata or {})))
    except (ValueError, TypeError, RecursionError):
        raise ValueError("metadata: pass a mapping from names to what JSON can hold") from None
    return dict(checked)
