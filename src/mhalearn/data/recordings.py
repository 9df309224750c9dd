"""Recordings: examples from what goes into a module of a torch model and comes out of it."""

import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sized
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from mhalearn._runtime import storage
from mhalearn._runtime.arrays import is_tensor
from mhalearn.data.examples import Examples
from mhalearn.data.loading import load_examples
from mhalearn.data.padding import check_alike, join_padded, move_to_front
from mhalearn.data.shards import write_shards
from mhalearn.data.sources import ExampleBlock, check_examples
from mhalearn.interop.hooks import Recorded, Recorder
from mhalearn.run.events import Event

# Bytes of X and Y that are gathered before they are written as a shard.
_SHARD = 2**26


def record(
    model: Any,
    module: str,
    batches: Iterable[Any],
    *,
    output: str | None = None,
    mask: str | None = None,
    out: str | Path | None = None,
    progress: Callable[[Event], None] | None = None,
) -> Examples:
    """Examples of one attention module of a torch model: its inputs and outputs, by forward hooks.

        examples = mha.record(model, "encoder.layer.2.attention", batches)

    module: its name in `model.named_modules()`. It is called once in a pass, gets tokens (n, k, d)
    first or as hidden_states, and returns (n, k, e), alone or first in a tuple. A module that holds
    more than one attention layer (a block, an encoder) is refused, and the attention in it named.
    batches: what the model is called on, one after the other: tensors, tuples of arguments, or
    dicts of keyword arguments, brought to the model's device. One tensor or dict is one batch.
    output: another module whose output is taken, as "...attention.output.dense" of BERT, whose
    "...attention" adds its input and normalises.
    mask: the name of the model's argument that is one for tokens and zero for padding, where it is
    none of attention_mask and key_padding_mask, which are found in the batch and in the call of the
    module. Padding on the left or on the right is left out: an example is its real tokens, in their
    order, and `lengths` says how many.
    out: a new folder to write shards to as batches come; without, all examples are held in memory.
    progress: called with an Event after each batch.

    The model is in eval mode meanwhile, without gradients. Numbers keep the model's own precision,
    bfloat16 too. Whether the module's masks were causal is told in `metadata["causal"]`.
    """
    if out is not None and Path(out).suffix in (".safetensors", ".npz"):
        raise ValueError(
            f"out={storage.show(out)}: name a folder, which gets a file for every part; or leave "
            "it out, and save the examples"
        )
    if isinstance(batches, Mapping) or is_tensor(batches) or isinstance(batches, np.ndarray):
        batches = [batches]
    recorder = Recorder(model, module, output, mask)
    metadata: dict[str, Any] = {
        "model": type(recorder.model).__name__,
        "module": module if output is None else f"{module} -> {output}",
    }
    # Closed whatever happens, so that the model is left as it was.
    with closing(_blocks(recorder, batches, metadata, progress)) as blocks:
        if out is not None:
            write_shards(out, _in_shards(blocks), metadata)
            return load_examples(out)
        x, y, lengths = join_padded(list(blocks))
    return Examples(x, y, lengths if lengths.min() < x.shape[1] else None, metadata=metadata)


def _blocks(
    recorder: Recorder,
    batches: Iterable[Any],
    metadata: dict[str, Any],
    progress: Callable[[Event], None] | None,
) -> Generator[ExampleBlock, None, None]:
    """The examples of each batch; what masks say of all goes to the metadata."""
    began, total = time.monotonic(), len(batches) if isinstance(batches, Sized) else None
    first: ExampleBlock | None = None
    number = examples = tokens = longest = 0
    with recorder.hooked():
        for number, batch in enumerate(batches, 1):
            try:
                recorded = recorder.run(batch)
                block = _as_block(recorded)
                check_alike(first or block, block)
            except ValueError as error:
                raise ValueError(f"batch {number}: {error}") from None
            first = first or block
            if recorded.causal is not None:
                metadata["causal"] = bool(metadata.get("causal", False) or recorded.causal)
            examples, tokens = examples + len(block.x), tokens + int(block.lengths.sum())
            longest = max(longest, int(block.lengths.max()))
            yield block
            if progress is not None:
                known = {} if total is None else {"of": total}
                detail = f"{examples} examples, {tokens} tokens"
                seconds = time.monotonic() - began
                progress(Event("recording", number, math.nan, seconds, detail, data=known))
    if number == 0:
        raise ValueError("batches is empty: pass at least one batch")
    if longest < 2:
        raise ValueError("every sequence has one token, over which attention is constant")


def _as_block(recorded: Recorded) -> ExampleBlock:
    x, y, real, _ = recorded
    real = np.ones(x.shape[:2], bool) if real is None else real
    return check_examples(*move_to_front(x, y, real))


def _in_shards(blocks: Iterator[ExampleBlock]) -> Iterator[ExampleBlock]:
    """Blocks joined until they fill a shard."""
    waiting: list[ExampleBlock] = []
    size = 0
    for block in blocks:
        waiting.append(block)
        size += block.x.nbytes + block.y.nbytes
        if size >= _SHARD:
            yield join_padded(waiting)
            waiting, size = [], 0
    if waiting:
        yield join_padded(waiting)
