"""State dicts, in memory or in a file, and the way from one attention layer in them to Factors.

Of a .safetensors file only the header and the weights of one layer are read, without torch. Other
files are PyTorch's, and read by torch with weights_only=True: nothing in them is executed.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime import storage
from mhalearn._runtime.arrays import widen_bfloat16
from mhalearn.interop.backend import require_torch, weight
from mhalearn.interop.naming import Naming, WeightNames, find_blocks
from mhalearn.interop.rejections import refuse_llama, refuse_names
from mhalearn.interop.torch_files import load_torch

WeightSource = Mapping[str, Any] | str | os.PathLike[str]


class StateDict(NamedTuple):
    """Named weights that are read when they are needed."""

    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str], NDArray[Any]]
    metadata: dict[str, str]  # what a .safetensors file says of itself


class FoundWeights(NamedTuple):
    """One attention layer of a state dict."""

    factors: Any  # as its naming cuts them
    causal: bool
    block: WeightNames


def open_state_dict(source: WeightSource) -> StateDict:
    """A mapping of names to tensors or arrays, or a file of one."""
    if isinstance(source, Mapping):
        return _of_mapping(source)
    if not isinstance(source, str | os.PathLike):
        raise ValueError(
            f"{type(source).__name__} is no state dict: pass model.state_dict() or a file"
        )
    if Path(source).is_dir() or Path(source).name.endswith(".index.json"):
        return _of_shards(Path(source))
    if Path(source).suffix != ".safetensors":
        return _of_mapping(_load_pickled(source))
    shapes, metadata = storage.peek_shapes(source)

    def read(name: str) -> NDArray[Any]:
        found = storage.read_tensors(source, kind=None, required=(name,), only=(name,))[0]
        return widen_bfloat16(found[name])

    return StateDict(shapes, read, metadata)


def _of_shards(source: Path) -> StateDict:
    """A model in several .safetensors files: the folder, or the index that says what is where."""
    index = source / "model.safetensors.index.json" if source.is_dir() else source
    if source.is_dir() and not index.is_file():
        return open_state_dict(source / "model.safetensors")
    try:
        said = json.loads(index.read_text())
    except (OSError, ValueError, RecursionError):
        said = None
    files = said.get("weight_map") if isinstance(said, dict) else None
    if not (isinstance(files, dict) and files and all(map(_is_beside, files.values()))):
        raise ValueError(
            f"{storage.show(index)} is no index of shards: give one with a weight_map from names "
            "to .safetensors files beside it"
        )
    shards = {name: open_state_dict(index.parent / name) for name in sorted(set(files.values()))}
    for name, file in files.items():
        if name not in shards[file].shapes:
            raise ValueError(f"{storage.show(index)}: there is no {name!r} in {file}")
    shapes = {name: shards[file].shapes[name] for name, file in files.items()}
    return StateDict(shapes, lambda name: shards[files[name]].read(name), {})


def _is_beside(name: Any) -> bool:
    """Whether an index may name this file: one in its own folder."""
    return isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors")


def _of_mapping(tensors: Mapping[str, Any]) -> StateDict:
    named = {str(name): value for name, value in tensors.items() if hasattr(value, "shape")}
    if not named:
        raise ValueError("the state dict holds no tensors: pass module.state_dict() or its file")
    shapes = {name: tuple(value.shape) for name, value in named.items()}
    return StateDict(shapes, lambda name: weight(name, named[name]), {})


def _load_pickled(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    remedy = "save module.state_dict(), with torch.save or as .safetensors"
    loaded = load_torch(path, remedy)
    for key in ("state_dict", "model_state_dict", "model"):  # as training scripts wrap it
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    if not isinstance(loaded, Mapping):
        raise ValueError(
            f"{storage.show(path)} holds a {type(loaded).__name__}: save module.state_dict()"
        )
    return loaded


def write_state_dict(
    path: str | os.PathLike[str],
    tensors: Mapping[str, NDArray[Any]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a state dict, atomically: .safetensors (which holds the metadata too), or by torch."""
    if Path(path).suffix == ".safetensors":
        storage.write_tensors(path, dict(tensors), dict(metadata or {}))
        return
    torch = require_torch()
    buffer = BytesIO()
    torch.save({name: torch.tensor(array) for name, array in tensors.items()}, buffer)
    storage.write_atomically(path, buffer.getvalue())


def find_layer(
    state: StateDict,
    namings: tuple[Naming, ...],
    *,
    layer_index: int,
    sizes: Any,
    prefix: str | None,
    plain: bool = True,
) -> FoundWeights:
    """The weights of one attention layer; what the library cannot compute is refused by name.

    sizes: what its naming needs to cut them: the number of heads, where that is all.
    plain: names that mean more than a Theta and a W a head are refused.
    """
    block = _choose(state, namings, layer_index, prefix, plain)
    naming, place = block.naming, block.prefix
    if plain:
        refuse_names(name for name in state.shapes if name.startswith(block.root))
    inside = {name.removeprefix(place) for name in state.shapes if name.startswith(place)}
    unknown = sorted(
        name for name in inside - {*naming.reads} if not re.fullmatch(naming.ignores, name)
    )
    # A module without a prefix may stand beside anything; a prefix belongs to the layer alone.
    if unknown and place:
        raise ValueError(
            f"{place + unknown[0]!r} is no part of {naming.name}'s attention: a layer that uses it "
            "computes something else"
        )
    weights = {name: state.read(place + name) for name in naming.reads if name in inside}
    try:
        factors = naming.factors(weights, sizes)
    except KeyError as missing:
        raise ValueError(f"there is no {place + missing.args[0]!r}: the layer is cut") from None
    except ValueError as error:
        where = f"{storage.show(place.rstrip('.'))}: " if place else ""
        raise ValueError(f"{where}{error}") from None
    causal = _says_causal(state.read(place + "mask")) if "mask" in inside else naming.causal
    return FoundWeights(factors, causal, block)


def _choose(
    state: StateDict,
    namings: tuple[Naming, ...],
    layer_index: int,
    prefix: str | None,
    plain: bool,
) -> WeightNames:
    found = [block for naming in namings for block in find_blocks(naming, state.shapes)]
    if not found:
        if plain:
            refuse_llama(state.shapes)
            refuse_names(state.shapes)
        known = " or ".join(naming.name for naming in namings)
        first = min(state.shapes, default="none at all")
        raise ValueError(
            f"no attention layer named as in {known} among {len(state.shapes)} tensors "
            f"({first!r} and others): rename the weights, or pass the right file"
        )
    begun = [block for block in found if prefix is None or block.prefix.startswith(prefix)]
    if not begun:
        raise ValueError(f"prefix={prefix!r}: no layer's names begin so; {_listed(found)} do")
    chosen = [block for block in begun if block.layer == layer_index]
    if not chosen:
        layers = sorted({block.layer for block in begun})
        raise ValueError(f"layer_index={layer_index}: there are layers {layers[0]} to {layers[-1]}")
    if len({block.prefix for block in chosen}) > 1:
        raise ValueError(f"{_listed(chosen)} are layers {layer_index}: choose one by its prefix")
    return chosen[0]


def _listed(blocks: list[WeightNames]) -> str:
    names = [repr(block.prefix) for block in blocks]
    return ", ".join(names[:4]) + (" and others" if len(names) > 4 else "")


def _says_causal(mask: NDArray[Any]) -> bool:
    """Whether TransformerLens's mask of allowed keys is causal; a local window is refused."""
    allowed = mask.astype(bool)
    if allowed.all():
        return False
    if allowed.ndim == 2 and np.array_equal(allowed, np.tri(*allowed.shape, dtype=bool)):
        return True
    raise ValueError("the mask is neither full nor causal: mhalearn does not model local attention")
