"""Many devices and many processes: where examples lie, and what all processes know.

Every process runs the same program on its own part of the examples. Arrays of examples are spread
over all devices along their examples; whatever is summed over examples is then known to all, and
XLA moves the sums. What processes decide on the host (a clock, Ctrl-C) they decide together.
"""

import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from mhalearn._runtime.arrays import recognise_bfloat16

AXIS = "examples"
# Multiplications in a forward pass over all examples from which spreading them pays: some hundred
# microseconds of one device, against tens for each sum that devices exchange.
WORTH = 1e9
_HEADER = 256


def n_processes() -> int:
    return jax.process_count() if jax.distributed.is_initialized() else 1


def process_index() -> int:
    """The number of this process."""
    return jax.process_index() if jax.distributed.is_initialized() else 0


def is_first() -> bool:
    """Whether this process is the one that writes files and speaks."""
    return process_index() == 0


def count_useful_devices(work: int) -> int:
    """Devices to spread examples over: all of all processes, or one where that would not pay.

    work: multiplications in a forward pass over the examples.
    """
    return jax.device_count() if work >= WORTH else 1


def shard_examples(local: NDArray[Any]) -> jax.Array:
    """An array (c, b, ...) over all devices along its second axis, from a process's (c, b', ...).

    b' is the same in all processes, and a multiple of their devices.
    """
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    c, b, *rest = local.shape
    whole = NamedSharding(mesh, PartitionSpec(None, AXIS))
    shape = (c, b * n_processes(), *rest)
    return jax.make_array_from_process_local_data(whole, local, shape)


def replicate(tree: Any) -> Any:
    """The same arrays, wherever XLA left their parts, in every process."""
    return tree if n_processes() == 1 else jax.tree.map(_replicated, tree)


def _replicated(leaf: Any) -> Any:
    whole = not isinstance(leaf, jax.Array) or leaf.is_fully_addressable
    if whole or leaf.is_fully_replicated:
        return leaf
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    with jax.enable_x64(True):
        return jax.jit(lambda leaf: leaf, out_shardings=NamedSharding(mesh, PartitionSpec()))(leaf)


def shard_locally(array: NDArray[Any]) -> Any:
    """An array (b, ...) over this process's devices, where they divide b; for work of its own."""
    local = jax.local_devices()
    if len(local) == 1 or len(array) % len(local):
        return array
    mesh = Mesh(np.array(local), (AXIS,))
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(AXIS)))


def any_process(flag: bool) -> bool:
    """Whether it is true in any process: how clocks, which differ, decide alike."""
    if n_processes() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.array([flag], np.int32)).any())


def broadcast_from_first(value: float) -> float:
    """The first process's value, in all of them."""
    return float(all_gather_rows(np.array([value]))[0]) if n_processes() > 1 else value


def sum_over_processes(array: NDArray[Any]) -> NDArray[Any]:
    """The sum over processes."""
    return all_gather_rows(array[None]).sum(axis=0) if n_processes() > 1 else array


def all_gather_rows(array: NDArray[Any]) -> NDArray[Any]:
    """The rows of all processes one after the other; bit by bit, whatever JAX's precision is."""
    if n_processes() == 1:
        return array
    counts = multihost_utils.process_allgather(np.array([len(array)], np.int32)).ravel()
    if not counts.max():
        return array
    padded = np.zeros((counts.max(), *array.shape[1:]), array.dtype)
    padded[: len(array)] = array
    rows = multihost_utils.process_allgather(padded.reshape(-1).view(np.uint8))
    parts = np.ascontiguousarray(rows).view(array.dtype).reshape(len(counts), *padded.shape)
    return np.concatenate([part[:count] for part, count in zip(parts, counts, strict=True)])


def broadcast_from_owner(owner: int, arrays: Sequence[NDArray[Any]] | None) -> list[NDArray[Any]]:
    """The owner's arrays, in all processes; the others need not know their shapes."""
    source = process_index() == owner
    header, payload = np.zeros(_HEADER, np.uint8), np.zeros(0, np.uint8)
    if source:
        assert arrays is not None
        said = json.dumps([(array.dtype.str, array.shape) for array in arrays]).encode()
        header[: len(said)] = np.frombuffer(said, np.uint8)
        parts = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
        payload = np.concatenate(parts)
    header = np.asarray(multihost_utils.broadcast_one_to_all(header, is_source=source))
    shapes = json.loads(header.tobytes().rstrip(b"\0"))
    sizes = [int(np.prod(shape)) * np.dtype(kind).itemsize for kind, shape in shapes]
    if not source:
        payload = np.zeros(sum(sizes), np.uint8)
    payload = np.asarray(multihost_utils.broadcast_one_to_all(payload, is_source=source))
    cuts = np.split(payload, np.cumsum(sizes)[:-1])
    return [
        recognise_bfloat16(np.ascontiguousarray(cut).view(kind)).reshape(shape)
        for cut, (kind, shape) in zip(cuts, shapes, strict=True)
    ]
