"""Examples from what a caller has: arrays, files, a folder of shards, a dataset."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from mhalearn._runtime import storage
from mhalearn._runtime.arrays import to_numpy
from mhalearn.data.datasets import is_dataset_folder
from mhalearn.data.examples import Examples
from mhalearn.data.padding import move_to_front, read_mask
from mhalearn.data.shards import KIND, REQUIRED, from_json, open_shards
from mhalearn.data.sources import share_blocks
from mhalearn.interop.torch_files import load_torch

_SAVED = (
    "give a .safetensors, .npz or .pt file with X and Y, a folder of shards, or one of a dataset"
)
_SUFFIXES = (".safetensors", ".npz", ".pt", ".pth")
# What inputs and outputs are called in files of tensors, and masks beside them.
_PAIRS = (("X", "Y"), ("x", "y"), ("inputs", "outputs"))
_MASKS = ("mask", "attention_mask")


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


def load_examples(
    path: str | Path,
    *,
    inputs: str | None = None,
    outputs: str | None = None,
    mask: str | None = None,
) -> Examples:
    """Examples from a file, a folder of shards, or a folder of a Hugging Face dataset.

    .safetensors, .npz: arrays X (n, k, d), Y (n, k, e) and, where they differ, lengths (n,).
    .pt, .pth: a dict of tensors that torch.save wrote, X and Y or x and y, with lengths, or mask or
    attention_mask (n, k); read by weights_only loading, so that nothing in it is executed.
    inputs, outputs, mask: the names, where they are others, of arrays of any of these files or of
    columns of a dataset; a mask is one for tokens and zero for padding, left or right.

    Files and datasets are read at once; of shards only the headers, and then one at a time. Under
    `jax.distributed` all processes load a folder, and each reads shards of its own.
    """
    path = Path(path)
    if (inputs is None) != (outputs is None) or (mask is not None and inputs is None):
        raise ValueError("inputs, outputs: give the names of both, and then that of a mask")
    if os.path.isdir(path):
        return _load_folder(path, inputs, outputs, mask)
    if path.suffix not in _SUFFIXES:
        storage.check_file(path)
        beside = "give X.npy and Y.npy, or " if path.suffix == ".npy" else ""
        raise ValueError(f"{storage.show(path)}: not a format of examples; {beside}{_SAVED}")
    arrays, metadata = _read(path, None if inputs is None or outputs is None else (inputs, outputs))
    try:
        return _from_arrays(arrays, inputs, outputs, mask, from_json(metadata))
    except ValueError as error:
        raise ValueError(f"{storage.show(path)}: {error}") from None


def load_pair(inputs: str | Path, outputs: str | Path) -> Examples:
    """Examples from two .npy files, X (n, k, d) and Y (n, k, e)."""
    paths = Path(inputs), Path(outputs)
    for path in paths:
        if path.suffix != ".npy":
            storage.check_file(path)
            raise ValueError(
                f"{storage.show(path)}: of two files both must be .npy, X first and then Y; of "
                f"one, {_SAVED}"
            )
    x, y = map(storage.read_npy, paths)
    try:
        return Examples(x, y)
    except ValueError as error:
        both = " and ".join(map(storage.show, paths))
        raise ValueError(f"{both}: {error}") from None


def _load_folder(path: Path, inputs: str | None, outputs: str | None, mask: str | None) -> Examples:
    if is_dataset_folder(path):
        if inputs is None or outputs is None:
            raise ValueError(
                f"{storage.show(path)} is a dataset: name its columns, inputs and outputs "
                "(--inputs, --outputs)"
            )
        return Examples.from_dataset(path, inputs, outputs, mask)
    if inputs is not None:
        raise ValueError(f"{storage.show(path)}: shards have the names X and Y; leave inputs out")
    source, about = open_shards(path)
    return Examples._over(share_blocks(source), about)


def _read(path: Path, named: tuple[str, str] | None) -> tuple[Mapping[str, Any], str]:
    """Arrays of a file by their names, and its metadata in JSON."""
    if path.suffix == ".npz":
        arrays = storage.read_npz(path, named or REQUIRED)
        said = arrays.get("metadata")
        return arrays, str(said) if said is not None and said.dtype.kind == "U" else "{}"
    if path.suffix == ".safetensors":
        kind = KIND if named is None else None  # another library's file says nothing of itself
        tensors, header = storage.read_tensors(path, kind=kind, required=named or REQUIRED)
        return tensors, header.get("metadata", "{}") if kind else "{}"
    loaded = load_torch(path, "save a dict of tensors, X and Y")
    if not isinstance(loaded, Mapping) or "hidden_states" in loaded.keys() - {*(named or ())}:
        raise ValueError(
            f"{storage.show(path)} holds a {type(loaded).__name__}"
            + (" with hidden_states" if isinstance(loaded, Mapping) else "")
            + " and not the tensors X and Y of one attention layer; hidden states of a whole model "
            "have whole blocks between them: record its attention with mhalearn.record"
        )
    return {str(name): value for name, value in loaded.items()}, "{}"


def _from_arrays(
    arrays: Mapping[str, Any],
    inputs: str | None,
    outputs: str | None,
    mask: str | None,
    metadata: Mapping[str, Any],
) -> Examples:
    pairs = _PAIRS if inputs is None or outputs is None else ((inputs, outputs),)
    found = [pair for pair in pairs if arrays.keys() >= {*pair}]
    if not found:
        wanted, known = " and ".join(pairs[0]), ", ".join(map(repr, arrays)) or "none"
        raise ValueError(f"there are no tensors {wanted}, but {known}: give inputs and outputs")
    x, y = (arrays[name] for name in found[0])
    masks = [name for name in _MASKS if name in arrays] if mask is None else [mask]
    if not masks or (mask is None and "lengths" in arrays):
        return Examples(x, y, arrays.get("lengths"), metadata=metadata)
    if masks[0] not in arrays:
        raise ValueError(f"there is no {mask!r}, but {', '.join(map(repr, arrays))}")
    tokens, labels = (np.asarray(to_numpy(part)) for part in (x, y))
    if tokens.ndim != 3 or labels.ndim != 3:
        return Examples(x, y)  # which says what is wrong with them
    real = read_mask(arrays[masks[0]], len(tokens), tokens.shape[1], masks[0])
    x, y, lengths = move_to_front(tokens, labels, real, masks[0])
    return Examples(x, y, lengths if lengths.min() < x.shape[1] else None, metadata=metadata)
