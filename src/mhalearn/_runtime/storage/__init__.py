"""Files: safetensors and npz, nothing that can execute.

Writes are atomic: readers see the old file or the new one, never half of it. A file that cannot be
read or written as asked is a `ValueError` of one line with the path, the problem and the remedy; an
`OSError` is left for what breaks from outside while bytes are on their way (a full disk).
"""

from mhalearn._runtime.storage.atomic import (
    beside,
    check_writable,
    is_alive,
    remove_leftovers,
    write_atomically,
)
from mhalearn._runtime.storage.numpy_files import read_npy, read_npz, write_npz
from mhalearn._runtime.storage.paths import AnyPath, check_file, show
from mhalearn._runtime.storage.tensors import (
    Header,
    Tensors,
    check_names,
    check_tensors,
    peek_shapes,
    peek_tensors,
    read_tensors,
    write_tensors,
)

__all__ = [
    "AnyPath",
    "Header",
    "Tensors",
    "beside",
    "check_file",
    "check_names",
    "check_tensors",
    "check_writable",
    "is_alive",
    "peek_shapes",
    "peek_tensors",
    "read_npy",
    "read_npz",
    "read_tensors",
    "remove_leftovers",
    "show",
    "write_atomically",
    "write_npz",
    "write_tensors",
]
