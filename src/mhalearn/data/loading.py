"""Examples from what a caller has: arrays, files, a folder of shards."""

import os
from pathlib import Path

from numpy.typing import ArrayLike

from mhalearn._runtime import storage
from mhalearn.data.examples import Examples
from mhalearn.data.shards import KIND, REQUIRED, from_json, open_shards
from mhalearn.data.sources import share_blocks

_SAVED = "give a .safetensors file, an .npz file with arrays X and Y, or a folder of shards"


def as_examples(
    x: ArrayLike | Examples, y: ArrayLike | None, lengths: ArrayLike | None = None
) -> Examples:
    """X and Y, or an Examples in place of both."""
    if isinstance(x, Examples):
        if y is not None or lengths is not None:
            raise ValueError("pass either an Examples or X and Y, not both")
        examples = x
    elif y is None:
        # The words up to the colon are scikit-learn's, which its checks look for.
        raise ValueError(
            "fit requires y to be passed, but the target y is None: pass X and Y, or an Examples"
        )
    else:
        examples = Examples(x, y, lengths)
    return examples


def load_examples(path: str | Path) -> Examples:
    """Examples from a .safetensors or .npz file (arrays X, Y, lengths), or from a folder of shards.

    Files are read at once; of a folder only the headers, and then one shard at a time. Under
    `jax.distributed` all processes load a folder, and each reads shards of its own.
    """
    path = Path(path)
    if path.suffix not in (".safetensors", ".npz"):
        if os.path.isdir(path):
            source, about = open_shards(path)
            return Examples._over(share_blocks(source), about)
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
