"""Arrays as NumPy writes them, without pickles."""

import os
import warnings
from io import BytesIO
from struct import Struct
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.arrays import recognise_bfloat16
from mhalearn._runtime.storage.atomic import write_parts
from mhalearn._runtime.storage.paths import AnyPath, check_file, looks_like, show
from mhalearn._runtime.storage.tensors import Tensors, check_names

# The record at the end of a zip archive: signature, disks, files here and in all, sizes.
_END_OF_ZIP = Struct("<4s4H2LH")


def write_npz(path: AnyPath, arrays: Tensors) -> None:
    """Write an npz file, atomically. Memory: a second copy of the arrays."""
    buffer = BytesIO()
    np.savez(buffer, allow_pickle=False, **dict(sorted(arrays.items())))
    write_parts(path, [buffer.getbuffer()])


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
            f"{show(path)} is not a readable .npz file of numbers ({looks_like(path)}); "
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
            f"{show(path)} is not a readable .npy file of numbers ({looks_like(path)}); "
            "save it again with numpy.save and a plain numeric array"
        ) from None


def _count_members(file: BinaryIO) -> int | None:
    """How many files the last record of a zip archive says there are; None where it is not at the
    very end. Python's zipfile goes by the list before it, which one changed byte may shorten."""
    file.seek(-_END_OF_ZIP.size, os.SEEK_END)
    signature, *_, count, _, _, _ = _END_OF_ZIP.unpack(file.read(_END_OF_ZIP.size))
    return count if signature == b"PK\5\6" and count < 2**16 - 1 else None
