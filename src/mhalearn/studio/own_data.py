"""Examples of one's own, as they were dropped on the page: read, checked, kept for a while.

    python -m mhalearn.studio.own_data LIMITS FILES

reads files in a process of its own, so that no file can take the server down, and prints their
sizes, or what is wrong with them in one line. All of it is JSON; FILES are paths by names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mhalearn.studio.request import Limits, Sizes

ENDINGS = (".npz", ".npy", ".safetensors")
_ASK = "drop one .npz or .safetensors file with X and Y, or X.npy and Y.npy together"


def check_names(names: Sequence[str]) -> None:
    """Refuse what is no file of examples by its name alone."""
    for name in names:
        if Path(name).suffix.lower() not in ENDINGS:
            raise ValueError(f"{name[:60]}: not a format of examples; {_ASK}")
    arrays = [name for name in names if name.lower().endswith(".npy")]
    if len(names) == 2 and len(arrays) == 2:
        _inputs_and_outputs(names)
    elif len(names) != 1 or arrays:
        raise ValueError(f"{_said(names)}: {_ASK}")


def read_examples(files: Mapping[str, Path], limits: Limits) -> Any:
    """The examples of dropped files, named as the visitor named them. ValueError: one line."""
    from mhalearn.data import Examples
    from mhalearn.data.loading import load_examples

    check_names(list(files))
    unpacked = sum(_unpacked(path) for path in files.values())
    if unpacked > limits.file_bytes:
        raise ValueError(
            f"{_said(list(files))}: {unpacked / 1e6:.0f} MB of numbers, and at most "
            f"{limits.file_bytes / 1e6:.0f} are taken here: use mhalearn learn"
        )
    try:
        if len(files) == 2:
            x, y = (_array(files[name], name) for name in _inputs_and_outputs(list(files)))
            examples = Examples(x, y)
        else:
            path = next(iter(files.values()))
            # Another library's file says nothing of itself, but has the names.
            named = {"inputs": "X", "outputs": "Y"} if path.suffix == ".safetensors" else {}
            examples = load_examples(path, **named)
    except ValueError as error:
        line = " ".join(str(error).split())
        for name, path in files.items():
            line = line.replace(f"{path}", name)
        raise ValueError(line) from None
    _check_sizes(_sizes(examples), limits)
    return examples


def _check_sizes(sizes: Sizes, limits: Limits) -> None:
    numbers = sizes.n * sizes.k * max(sizes.d, sizes.out_dim)
    if max(sizes.d, sizes.out_dim) > limits.file_dim:
        wide = max(sizes.d, sizes.out_dim)
        raise ValueError(
            f"{wide} features: at most {limits.file_dim} are taken here; use mhalearn learn"
        )
    if numbers > limits.numbers:
        raise ValueError(
            f"{sizes.n} examples of {sizes.k} tokens are too much for this page: take at most "
            f"{limits.numbers * sizes.n // numbers}, or use mhalearn learn"
        )


def _sizes(examples: Any) -> Sizes:
    lengths = tuple(np.asarray(examples.lengths).tolist()) if examples.has_lengths else ()
    return Sizes(examples.n, examples.k, examples.d, examples.out_dim, lengths)


def _inputs_and_outputs(names: Sequence[str]) -> tuple[str, str]:
    """Which of two arrays is X: by the first letters of their names."""
    firsts = {}
    for name in names:
        stem = Path(name).stem.lower()
        kind = "x" if stem.startswith(("x", "in")) else "y" if stem[:1] in "yo" else ""
        firsts[kind] = name
    if firsts.keys() != {"x", "y"}:
        raise ValueError(f"{_said(names)}: which is X? Call them X.npy and Y.npy")
    return firsts["x"], firsts["y"]


def _array(path: Path, name: str) -> Any:
    try:
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except Exception:
        raise ValueError(
            f"{name} is not a readable .npy file of numbers; save it again with numpy.save"
        ) from None


def _unpacked(path: Path) -> int:
    """Bytes of a file's arrays: a small archive may hold a large one."""
    if path.suffix.lower() == ".npz":
        with contextlib.suppress(zipfile.BadZipFile, OSError), zipfile.ZipFile(path) as archive:
            return sum(member.file_size for member in archive.infolist())
    return path.stat().st_size


def _said(names: Sequence[str]) -> str:
    return ", ".join(name[:60] for name in names[:3]) or "nothing was dropped"


def main(arguments: list[str]) -> None:
    limits = Limits(**json.loads(arguments[0]))
    files = {name: Path(path) for name, path in json.loads(arguments[1]).items()}
    try:
        told: dict[str, Any] = dataclasses.asdict(_sizes(read_examples(files, limits)))
    except ValueError as error:
        told = {"error": str(error)}
    except MemoryError:
        told = {"error": f"{_said(list(files))}: out of memory; take fewer examples"}
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
