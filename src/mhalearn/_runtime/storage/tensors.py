"""Safetensors files: written in a fixed order with checksums, read whole or in parts."""

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from mhalearn._runtime.arrays import is_bfloat16
from mhalearn._runtime.checksums import (
    CHECKSUMS,
    digest_array,
    make_checksums,
    split_checksums,
)
from mhalearn._runtime.storage.atomic import write_parts
from mhalearn._runtime.storage.paths import AnyPath, check_file, looks_like, reason, show
from mhalearn._runtime.version import __version__

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
# Bytes of a tensor that are looked at at once.
_PIECE = 2**24


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
    write_parts(path, [*parts, *(arrays[name].reshape(-1).view(np.uint8).data for name in names)])


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
        raise ValueError(f"{show(path)} cannot be read ({reason(error)}): check it") from None
    # AttributeError and TypeError: a dtype that NumPy does not know.
    except (SafetensorError, AttributeError, TypeError):
        wanted = "save it again" if kind is None else f"give a file that mhalearn saved as {kind!r}"
        raise ValueError(
            f"{show(path)} is not a readable .safetensors file ({looks_like(path)}); {wanted}"
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
