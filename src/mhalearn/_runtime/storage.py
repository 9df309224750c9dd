"""Files: safetensors and npz, nothing that can execute.

Writes are atomic: readers see the old file or the new one, never half of it. A file that cannot be
read or written as asked is a `ValueError` of one line with the path, the problem and the remedy; an
`OSError` is left for what breaks from outside while bytes are on their way (a full disk).
"""

import errno
import json
import math
import os
import re
import secrets
import stat
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from struct import Struct
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from mhalearn._runtime.arrays import is_bfloat16, recognise_bfloat16
from mhalearn._runtime.checksums import (
    CHECKSUMS,
    digest_array,
    make_checksums,
    split_checksums,
)
from mhalearn._runtime.version import __version__

AnyPath = str | os.PathLike[str]
Tensors = dict[str, NDArray[Any]]

# What safetensors calls the dtypes that mhalearn writes.
_DTYPES = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}
_NUMPY_DTYPES = {code: np.dtype(name) for name, code in _DTYPES.items() if name != "bfloat16"}
_NUMPY_DTYPES["BF16"] = np.dtype(ml_dtypes.bfloat16)
# The record at the end of a zip archive: signature, disks, files here and in all, sizes.
_END_OF_ZIP = Struct("<4s4H2LH")
# Bytes of a tensor that are looked at at once.
_PIECE = 2**24
_FROM_OUTSIDE = {errno.ENOSPC, errno.EDQUOT, errno.EIO}


def show(path: AnyPath) -> str:
    """A path as an error message may hold it: on one line, in printable characters."""
    text = os.fspath(path)
    return text if text and text.isprintable() else repr(text)


# Writing


def write_atomically(path: AnyPath, data: bytes) -> None:
    """Put data in a file, all of it or nothing: temporary file, fsync, rename."""
    _write(path, [data])


def write_tensors(path: AnyPath, tensors: Tensors, metadata: dict[str, str]) -> None:
    """Write a safetensors file, atomically; equal contents give equal bytes.

    The header is laid out here because the safetensors library leaves its order to a hash map.
    Cost: two passes over the tensors, one for their checksums; no copy of those already contiguous.
    """
    metadata = {"mhalearn_version": __version__} | metadata
    if not all(
        isinstance(text, str) and _is_unicode(text) for pair in metadata.items() for text in pair
    ):
        raise ValueError(
            f"{show(path)}: metadata must be strings of Unicode text; convert it first"
        )
    arrays = {name: _storable(path, name, array) for name, array in tensors.items()}
    # Wide items first, so that every tensor is aligned to its own item size.
    names = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))
    layout = {name: (_DTYPES[array.dtype.name], array.shape) for name, array in arrays.items()}
    digests = {name: digest_array([array]) for name, array in arrays.items()}
    metadata = metadata | {CHECKSUMS: make_checksums(metadata, layout, digests)}
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    end = 0
    for name in names:
        start, end = end, end + arrays[name].nbytes
        header[name] = {
            "dtype": layout[name][0],
            "shape": list(layout[name][1]),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    parts = [len(text).to_bytes(8, "little"), text]
    _write(path, [*parts, *(arrays[name].reshape(-1).view(np.uint8).data for name in names)])


def write_npz(path: AnyPath, arrays: Tensors) -> None:
    """Write an npz file, atomically. Memory: a second copy of the arrays."""
    buffer = BytesIO()
    np.savez(buffer, allow_pickle=False, **dict(sorted(arrays.items())))
    _write(path, [buffer.getbuffer()])


def remove_leftovers(path: AnyPath) -> None:
    """Remove what writes of this file left beside it when their process was killed.

    What another process is writing now stays. So call it before this process writes the file.
    """
    target = _target(path)
    pattern = re.compile(rf"\.{_mark(target)}-([0-9]{{1,18}})-[0-9a-f]{{16}}\.tmp")
    with suppress(OSError):
        for name in os.listdir(target.parent):
            match = pattern.fullmatch(name)
            if match and (int(match[1]) == os.getpid() or not is_alive(int(match[1]))):
                (target.parent / name).unlink(missing_ok=True)


def is_alive(pid: int) -> bool:
    """Whether there is a process of this number here; yes, where the system cannot be asked."""
    if os.name != "posix":
        return True  # there, asking by a signal would end it
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # somebody else's
        return True
    return True


def beside(path: AnyPath, ending: str) -> Path:
    """A hidden file beside the one a path names, links followed; always the same one."""
    target = _target(path)
    return target.parent / f".{_mark(target)}{ending}"


def check_writable(path: AnyPath) -> None:
    """Raise now the ValueError that a write would raise later. Leaves nothing behind."""
    with _temporary(path, _target(path)):
        pass


def _storable(path: AnyPath, name: str, array: NDArray[Any]) -> NDArray[Any]:
    if array.dtype.name not in _DTYPES:
        raise ValueError(
            f"{show(path)}: {name} has dtype {array.dtype}, which cannot be stored; "
            "convert it to float64 or an integer type"
        )
    # bfloat16 has the byte order of the machine, and no other.
    little = array.dtype if is_bfloat16(array.dtype) else array.dtype.newbyteorder("<")
    return np.asarray(array, dtype=little, order="C")


def _is_unicode(text: str) -> bool:
    """Whether a string can be encoded: file names from the system may hold lone surrogates."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _write(path: AnyPath, parts: Iterable[bytes | memoryview]) -> None:
    target = _target(path)
    try:
        with _temporary(path, target) as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
            file.close()
            os.replace(file.name, target)
    except OSError as error:  # in the caller's words, not of a temporary file
        raise OSError(error.errno, _reason(error), show(path)) from None
    _sync_folder(target.parent)


def _target(path: AnyPath) -> Path:
    """The file a path names, links followed; a ValueError if no file can be there."""
    try:
        target = Path(os.path.realpath(path))
        mode = target.stat().st_mode
    except FileNotFoundError:
        return target
    except NotADirectoryError:
        raise ValueError(f"{show(path)}: {show(target.parent)} is not a folder") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{show(path)}: not a usable path ({_reason(error)})") from None
    if stat.S_ISDIR(mode):
        raise ValueError(f"{show(path)} is a folder: give the name of a file")
    if not stat.S_ISREG(mode):
        raise ValueError(f"{show(path)} is not a regular file: give the name of a file")
    return target


@contextmanager
def _temporary(path: AnyPath, target: Path) -> Iterator[BinaryIO]:
    """An empty file beside the target, gone afterwards unless it was renamed."""
    temporary = beside(target, f"-{os.getpid()}-{secrets.token_hex(8)}.tmp")
    try:
        file = open(temporary, "xb")  # noqa: SIM115
    except FileNotFoundError:
        folder = show(target.parent)
        raise ValueError(f"{show(path)}: folder {folder} does not exist; create it first") from None
    except OSError as error:
        if error.errno in _FROM_OUTSIDE:
            raise
        raise ValueError(
            f"{show(path)}: cannot write to folder {show(target.parent)} ({_reason(error)}); "
            "choose another place"
        ) from None
    try:
        yield file
    finally:
        with suppress(OSError):  # what a failed write left in the buffer cannot be written either
            file.close()
        temporary.unlink(missing_ok=True)


def _mark(target: Path) -> str:
    """What the temporary files of a target have in common; its own name may be too long."""
    return blake2b(os.fsencode(target.name), digest_size=4).hexdigest()


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut, where the system lets a folder be synced."""
    if os.name != "posix":
        return
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# Reading


class Header(NamedTuple):
    """What a safetensors file says of itself before any tensor is read."""

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, np.dtype[Any]]  # as `read_tensors` returns them
    metadata: dict[str, str]


def read_tensors(
    path: AnyPath,
    *,
    kind: str | None,
    required: tuple[str, ...],
    only: tuple[str, ...] | None = None,
    rows: slice | None = None,
) -> tuple[Tensors, dict[str, str]]:
    """The tensors of a safetensors file (all, or those in `only`) and its metadata.

    rows: of each tensor only these, along its first axis; the rest of it is not read.
    The file must say that it is of this `kind` (None: a file of another library may say anything)
    and hold the required tensors. Dtypes stay what they are; bfloat16 is that of ml_dtypes. Tensors
    that are read whole must match the checksums that the file carries, if it does; for parts of
    them there is `check_tensors`.
    """
    with _opened(path, kind, required) as (file, metadata, digests):
        tensors = {}
        for name in sorted(file.keys() if only is None else set(only) & set(file.keys())):
            tensor = file.get_tensor(name) if rows is None else file.get_slice(name)[rows]
            if rows is None and name in digests:
                _check_digest(path, name, digests[name], [tensor])
            tensors[name] = tensor
        return tensors, metadata


def check_tensors(path: AnyPath, *, kind: str) -> None:
    """Refuse a file whose tensors do not match the checksums it carries.

    Cost: the file is read once, some 16 MiB of it in memory; nothing where it carries none.
    """
    with _opened(path, kind, ()) as (file, _, digests):
        for name, digest in digests.items():
            _check_digest(path, name, digest, _row_parts(file, name))


def peek_shapes(path: AnyPath) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Shapes and metadata of any safetensors file, whoever wrote it and whatever its dtypes."""
    with _opened(path, None, ()) as (file, metadata, _):
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        return shapes, metadata


def peek_tensors(path: AnyPath, *, kind: str, required: tuple[str, ...]) -> Header:
    """Shapes, dtypes and metadata of a safetensors file. Cost: its header is read, no tensor."""
    with _opened(path, kind, required) as (file, metadata, _):
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        codes = {name: part.get_dtype() for name, part in slices.items()}
        for name, code in codes.items():
            if code not in _NUMPY_DTYPES:
                raise ValueError(f"{show(path)}: {name} has dtype {code}; save it as F32 or F64")
        return Header(
            {name: tuple(part.get_shape()) for name, part in slices.items()},
            {name: _NUMPY_DTYPES[code] for name, code in codes.items()},
            metadata,
        )


def read_npz(path: AnyPath, required: tuple[str, ...]) -> Tensors:
    """All arrays of an npz file.

    Arrays of Python objects, which need unpickling, are refused.
    Cost: the file is read twice, once for its checksums.
    """
    check_file(path)
    try:
        # Headers of foreign files are read leniently; a warning there helps nobody.
        with warnings.catch_warnings(action="ignore"), open(path, "rb") as file:
            loaded = np.load(file, allow_pickle=False)
            if not isinstance(loaded, np.lib.npyio.NpzFile):
                raise ValueError("a single array, not an archive")
            with loaded:
                # NumPy reads what an array's header asks for, and may not come to its checksum.
                if loaded.zip is None or loaded.zip.testzip() is not None:
                    raise ValueError("an array that does not match its checksum")
                if _count_members(file) not in (None, len(loaded.zip.infolist())):
                    raise ValueError("a list of arrays that is cut short")
                arrays = {name: loaded[name] for name in loaded.files}
                if not all(isinstance(array, np.ndarray) for array in arrays.values()):
                    raise ValueError("an archive of something else than arrays")
                arrays = {name: recognise_bfloat16(array) for name, array in arrays.items()}
    except MemoryError:
        raise ValueError(f"{show(path)}: its arrays do not fit into memory; split them") from None
    # zipfile, zlib, struct and NumPy each have their own exceptions for damaged bytes.
    except Exception:
        raise ValueError(
            f"{show(path)} is not a readable .npz file of numbers ({_looks_like(path)}); "
            "save it again with numpy.savez and plain numeric arrays"
        ) from None
    check_names(path, arrays, required)
    return arrays


def read_npy(path: AnyPath) -> NDArray[Any]:
    """The array of an .npy file. One of Python objects, which needs unpickling, is refused.

    Memory: the array, once the file is known to hold as many bytes as its header says.
    """
    check_file(path)
    try:
        with warnings.catch_warnings(action="ignore"):
            mapped = np.load(path, mmap_mode="r", allow_pickle=False)
            if not isinstance(mapped, np.ndarray) or mapped.dtype.kind not in "biufV":
                raise ValueError("something else than numbers")
            return recognise_bfloat16(np.array(mapped))
    except MemoryError:
        raise ValueError(f"{show(path)}: its array does not fit into memory") from None
    except Exception:
        raise ValueError(
            f"{show(path)} is not a readable .npy file of numbers ({_looks_like(path)}); "
            "save it again with numpy.save and a plain numeric array"
        ) from None


def _count_members(file: BinaryIO) -> int | None:
    """How many files the last record of a zip archive says there are; None where it is not at the
    very end. Python's zipfile goes by the list before it, which one changed byte may shorten."""
    file.seek(-_END_OF_ZIP.size, os.SEEK_END)
    signature, *_, count, _, _, _ = _END_OF_ZIP.unpack(file.read(_END_OF_ZIP.size))
    return count if signature == b"PK\5\6" and count < 2**16 - 1 else None


def check_file(path: AnyPath) -> None:
    """Refuse a path that is missing, a folder or a device, before anything opens it."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise ValueError(f"{show(path)} does not exist: check the path") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{show(path)} cannot be read ({_reason(error)}): check it") from None
    if stat.S_ISDIR(mode):
        raise ValueError(f"{show(path)} is a folder: give the name of a file")
    if not stat.S_ISREG(mode):
        raise ValueError(f"{show(path)} is not a regular file: give the name of a file")


class _Opened(NamedTuple):
    file: Any
    metadata: dict[str, str]  # without checksums
    digests: dict[str, str]  # of tensors; none where the file carries none


@contextmanager
def _opened(path: AnyPath, kind: str | None, required: tuple[str, ...]) -> Iterator[_Opened]:
    check_file(path)
    try:
        with safe_open(path, framework="np") as file:
            metadata, digests = _split_header(path, file)
            found = metadata.get("kind")
            if kind is not None and found != kind:
                said = "does not say what it holds" if found is None else f"holds {found!r}"
                raise ValueError(
                    f"{show(path)} {said}: give a file that mhalearn saved as {kind!r}"
                )
            check_names(path, file.keys(), required)
            yield _Opened(file, metadata, digests)
    except OSError as error:
        raise ValueError(f"{show(path)} cannot be read ({_reason(error)}): check it") from None
    # AttributeError and TypeError: a dtype that NumPy does not know.
    except (SafetensorError, AttributeError, TypeError):
        wanted = "save it again" if kind is None else f"give a file that mhalearn saved as {kind!r}"
        raise ValueError(
            f"{show(path)} is not a readable .safetensors file ({_looks_like(path)}); {wanted}"
        ) from None


def _split_header(path: AnyPath, file: Any) -> tuple[dict[str, str], dict[str, str]]:
    """The metadata of an open file, and the checksums of its tensors, where it carries them."""
    metadata = file.metadata() or {}
    if CHECKSUMS not in metadata:
        return dict(metadata), {}
    slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    layout = {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}
    try:
        return split_checksums(metadata, layout)
    except ValueError as error:
        raise _damaged(path, str(error)) from None


def _check_digest(path: AnyPath, name: str, digest: str, parts: Iterable[NDArray[Any]]) -> None:
    if digest_array(parts) != digest:
        raise _damaged(path, f"{ascii(name)[1:-1]} does not match its checksum")


def _damaged(path: AnyPath, why: str) -> ValueError:
    return ValueError(f"{show(path)} is damaged: {why}; restore it from a copy, or write it again")


def _row_parts(file: Any, name: str) -> Iterator[NDArray[Any]]:
    """A tensor of a file, some of its rows at a time."""
    whole = file.get_slice(name)
    shape = whole.get_shape()
    if not shape:
        yield file.get_tensor(name)
        return
    each = math.prod(shape[1:]) * _NUMPY_DTYPES[whole.get_dtype()].itemsize
    step = max(1, _PIECE // max(1, each))
    for start in range(0, shape[0], step):
        yield whole[start : min(start + step, shape[0])]


def check_names(path: AnyPath, names: Iterable[str], required: tuple[str, ...]) -> None:
    """Refuse a file without tensors that it must have."""
    found = sorted(names)
    missing = [name for name in required if name not in found]
    if missing:
        raise ValueError(
            f"{show(path)} has no array named {' or '.join(missing)} (it has: "
            f"{', '.join(map(ascii, found)) or 'none'}); save it again with {', '.join(required)}"
        )


def _looks_like(path: AnyPath) -> str:
    """A guess at what an unreadable file is, from its first bytes."""
    try:
        with open(path, "rb") as file:
            start = file.read(16)
    except OSError as error:
        return _reason(error)
    if not start:
        return "it is empty"
    if start.startswith(b"\x93NUMPY"):
        return "it looks like a single NumPy array, an .npy file"
    if start[0] == 0x80 and start[1:2] <= b"\x05":
        return "it looks like a pickle, which could run code and is never loaded"
    if start.startswith(b"PK"):
        return "it looks like a zip archive: damaged, or a pickled PyTorch file, never loaded"
    return "damaged, truncated, or of another format"


def _reason(error: Exception) -> str:
    """Why the system refused, without the path it may have put in its message."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split()) or type(error).__name__
