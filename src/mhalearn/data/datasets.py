"""Rows of a dataset as examples: Hugging Face datasets, or any sequence of dicts."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime import storage
from mhalearn._runtime.arrays import to_numpy
from mhalearn.data.padding import check_alike, join_padded, move_to_front, read_mask
from mhalearn.data.sources import ExampleBlock, check_examples

# What `Dataset.save_to_disk` leaves in a folder, and `DatasetDict.save_to_disk`.
_STATE, _SPLITS = "state.json", "dataset_dict.json"


def is_dataset_folder(path: str | os.PathLike[str]) -> bool:
    return any((Path(path) / name).exists() for name in (_STATE, _SPLITS))


def read_dataset(dataset: Any, inputs: str, outputs: str, mask: str | None) -> ExampleBlock:
    """All rows, padded to the longest. Memory: all of them, twice in the end.

    A row is one sequence: inputs (k, d), outputs (k, e), mask (k,), one for a token and zero for
    padding.
    """
    if isinstance(dataset, str | os.PathLike):
        dataset = _load(dataset)
    columns = [name for name in (inputs, outputs, mask) if name is not None]
    dtypes = _declared(dataset, columns)
    if dtypes and hasattr(dataset, "__len__"):  # a stream gives lists, which lose nothing
        # Said outright, because the format makes float32 of whatever is a float.
        dataset = dataset.with_format("numpy", columns=columns, dtype=np.float64)
    if isinstance(dataset, Mapping) or not isinstance(dataset, Iterable):
        splits = ", ".join(map(repr, dataset)) if isinstance(dataset, Mapping) else ""
        said = f" of {splits}: pass one of them" if splits else ": pass rows, each a dict"
        raise ValueError(f"the dataset is a {type(dataset).__name__}{said}")
    blocks: list[ExampleBlock] = []
    for number, row in enumerate(dataset):
        try:
            block = _as_block(row, inputs, outputs, mask, dtypes)
            check_alike(blocks[0] if blocks else block, block)
        except ValueError as error:
            raise ValueError(f"row {number}: {error}") from None
        blocks.append(block)
    if not blocks:
        raise ValueError("the dataset has no rows: pass at least one")
    return join_padded(blocks)


def _load(path: str | os.PathLike[str]) -> Any:
    """A dataset from a folder that `Dataset.save_to_disk` wrote."""
    shown = storage.show(path)
    if not is_dataset_folder(path):
        raise ValueError(f"{shown} is no folder of Dataset.save_to_disk: check the path")
    if (Path(path) / _SPLITS).exists():
        splits = sorted(part.name for part in Path(path).iterdir() if is_dataset_folder(part))
        raise ValueError(f"{shown} holds the splits {', '.join(splits)}: give the folder of one")
    try:
        from datasets import load_from_disk
    except ImportError:
        raise ValueError('datasets is not installed: pip install "mhalearn[datasets]"') from None
    return load_from_disk(os.fspath(path))


def _declared(dataset: Any, columns: list[str]) -> dict[str, np.dtype[Any]]:
    """The dtypes of columns as a Hugging Face dataset declares them; none of any other."""
    features = getattr(dataset, "features", None)
    if not hasattr(dataset, "with_format") or not isinstance(features, Mapping):
        return {}
    found = {}
    for name in columns:
        if name not in features:
            raise ValueError(_missing(name, features))
        feature = features[name]
        while not isinstance(getattr(feature, "dtype", None), str) or hasattr(feature, "feature"):
            inner = getattr(feature, "feature", None)
            feature = feature[0] if inner is None else inner
        found[name] = np.dtype(feature.dtype)
    return found


def _as_block(
    row: Any, inputs: str, outputs: str, mask: str | None, dtypes: Mapping[str, np.dtype[Any]]
) -> ExampleBlock:
    if not isinstance(row, Mapping):
        raise ValueError(f"it is a {type(row).__name__}: pass rows that are dicts")
    x, y = (_tokens(row, name, dtypes.get(name)) for name in (inputs, outputs))
    if len(x) != len(y):
        raise ValueError(f"{inputs} has {len(x)} tokens, {outputs} has {len(y)}: pass as many")
    real = np.ones((1, len(x)), bool)
    if mask is not None:
        if mask not in row:
            raise ValueError(_missing(mask, row))
        real = read_mask(np.asarray(to_numpy(row[mask]))[None], 1, len(x), mask)
    return check_examples(*move_to_front(x[None], y[None], real, mask or "the mask"))


def _tokens(row: Mapping[str, Any], name: str, dtype: np.dtype[Any] | None) -> NDArray[Any]:
    if name not in row:
        raise ValueError(_missing(name, row))
    value = row[name]
    try:
        array = np.asarray(to_numpy(value), np.float64 if isinstance(value, list) else None)
    except (ValueError, TypeError):
        raise ValueError(f"{name} is no rectangular array of numbers, (tokens, features)") from None
    if array.ndim == 3:
        raise ValueError(
            f"{name} has shape {array.shape}: a row is one sequence, (tokens, features), of one "
            "layer; hidden states of all layers of a model are no attention layer's, and a batch "
            "is as many rows"
        )
    if array.ndim != 2 or array.size == 0:
        raise ValueError(f"{name} has shape {array.shape}: a row is (tokens, features)")
    return array if dtype is None else array.astype(dtype)


def _missing(name: str, columns: Iterable[Any]) -> str:
    return f"there is no column {name!r}; there are {', '.join(map(repr, columns)) or 'none'}"
