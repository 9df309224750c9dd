"""Where examples live: blocks read one by one, in memory, drawn from a callable, or a choice."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mhalearn._runtime import devices
from mhalearn._runtime.seeds import Stream, generator
from mhalearn._runtime.validation import check_array, check_inputs
from mhalearn.data.answers import Answers
from mhalearn.data.box import Box, BoxFailed
from mhalearn.data.inputs import Sampler, block_size, draw_block
from mhalearn.run.events import Event


class ExampleBlock(NamedTuple):
    """Examples that lie together in memory."""

    x: NDArray[Any]
    y: NDArray[Any]
    lengths: NDArray[np.int64]

    def rows(self, part: slice | NDArray[np.int64]) -> "ExampleBlock":
        return ExampleBlock(self.x[part], self.y[part], self.lengths[part])


@runtime_checkable
class ExampleSource(Protocol):
    """Where examples live: blocks of examples of one shape, read one at a time, in any order."""

    starts: list[int]  # the first example of each block, and at the end the number of examples
    shape: tuple[int, int, int]  # k, d, e
    y_dtype: np.dtype[Any]
    has_lengths: bool

    def block(self, index: int) -> ExampleBlock: ...

    def lengths(self, index: int) -> NDArray[np.int64]:
        """The lengths in a block, without reading the rest of it."""
        ...


class ArraySource:
    """Examples in memory: one block."""

    def __init__(self, block: ExampleBlock, has_lengths: bool) -> None:
        self._block = block
        self.starts = [0, len(block.x)]
        self.shape = (*block.x.shape[1:], block.y.shape[2])
        self.y_dtype = block.y.dtype
        self.has_lengths = has_lengths

    def block(self, index: int) -> ExampleBlock:
        return self._block

    def lengths(self, index: int) -> NDArray[np.int64]:
        return self._block.lengths


class DrawnSource:
    """Examples of a callable: a block of inputs has its own random stream, labels are asked for.

    Answers are held while they are few, or kept in a file: those are never asked for again.
    """

    def __init__(
        self,
        box: Box,
        inputs: str | Sampler,
        n: int,
        k: int,
        d: int,
        seed: int,
        noise: float,
        progress: Callable[[Event], None] | None = None,
        keep: str | Path | None = None,
    ) -> None:
        self._box, self._inputs, self._seed, self._noise = box, inputs, seed, noise
        self._progress, self._began = progress, time.monotonic()
        self._sigma = None if noise else 0.0  # known once the first block has been labelled
        self.starts = [*range(0, n, block_size(k, d)), n]
        self.has_lengths = False
        name = inputs if isinstance(inputs, str) else "sampler"
        about = {"version": 1, "inputs": name, "seed": seed, "k": k, "d": d}
        self._answers = Answers(keep, about, hold=box.costs)
        x = draw_block(inputs, 0, min(n, 2), k, d, seed)
        labels = self._answered(0, x)
        box.repeated = self._ask_twice(x[:1], labels[:1])
        self.shape = (k, d, labels.shape[2])
        self._f_dtype = labels.dtype
        rounds = noise > 0 and np.issubdtype(labels.dtype, np.integer)
        self.y_dtype = np.dtype(np.float64) if rounds else labels.dtype

    def block(self, index: int) -> ExampleBlock:
        k, d, _ = self.shape
        n = self.starts[index + 1] - self.starts[index]
        x = draw_block(self._inputs, index, n, k, d, self._seed)
        y = self._answered(self.starts[index], x)
        if index == 0 and self._sigma is None:
            self._sigma = self._noise * float(np.sqrt(np.mean(y.astype(np.float64) ** 2)))
        if self._sigma is None:
            self.block(0)
        if self._sigma:
            rng = generator(self._seed, Stream.NOISE, index)
            y = (y + self._sigma * rng.standard_normal(y.shape)).astype(self.y_dtype)
        if self._progress is not None:
            done, n = self.starts[index + 1], self.starts[-1]
            seconds = time.monotonic() - self._began
            self._progress(Event("labelling", done, math.nan, seconds, data={"of": n}))
        return frozen(ExampleBlock(x, y.astype(self.y_dtype, copy=False), self.lengths(index)))

    def lengths(self, index: int) -> NDArray[np.int64]:
        return np.full(self.starts[index + 1] - self.starts[index], self.shape[0], np.int64)

    @property
    def box(self) -> Box | None:
        """The callable, where no noise is added to what it says."""
        return None if self._noise else self._box

    def _answered(self, first: int, x: NDArray[Any]) -> NDArray[Any]:
        """The labels of sequences from number `first` on: known ones, and the box is asked for the
        others, which are kept at once."""
        parts: list[NDArray[Any]] = []
        done = 0
        while done < len(x):
            known = self._answers.find(first + done, x[done:])
            if known is None:
                rest = x[done : done + 1] if self._box.one_by_one else x[done:]
                known = self._ask(rest)
                self._check_alike(known, parts)
                self._answers.add(first + done, rest, known)
            parts.append(known)
            done += len(known)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _ask(self, x: NDArray[Any]) -> NDArray[Any]:
        try:
            return self._box(x)
        except BoxFailed as error:
            raise BoxFailed(f"{error}; {self._answers.remedy}") from error.__cause__

    def _check_alike(self, labels: NDArray[Any], before: list[NDArray[Any]]) -> None:
        """Refuse another width or dtype than that of the first answers."""
        if not before and not hasattr(self, "shape"):
            return
        e, dtype = (
            (before[0].shape[2], before[0].dtype) if before else (self.shape[2], self._f_dtype)
        )
        if labels.shape[2] != e or labels.dtype != dtype:
            raise ValueError(
                f"f returned e = {labels.shape[2]}, {labels.dtype}, after e = {e}, {dtype}: "
                "it must keep the shape and dtype of its outputs"
            )

    def _ask_twice(self, x: NDArray[Any], labels: NDArray[Any]) -> float:
        """How far a second answer to one question is from the first, relative to it; root mean
        squares. Above zero, labels carry noise."""
        again, first = (one.astype(np.float64) for one in (self._box(x), labels))
        size = float(np.sqrt(np.mean(first**2))) or 1.0
        return float(np.sqrt(np.mean((again - first) ** 2))) / size


class View:
    """Chosen examples of another source, ascending: rows of a block are picked when it is read.

    Blocks that hold none of them are left out, and never read. Memory: eight bytes an example.
    """

    def __init__(self, source: ExampleSource, chosen: NDArray[np.int64]) -> None:
        home = np.searchsorted(source.starts, chosen, side="right") - 1
        blocks, first = np.unique(home, return_index=True)
        self._source, self._chosen, self.blocks = source, chosen, blocks.tolist()
        self.starts = [*first.tolist(), len(chosen)]
        self.shape, self.y_dtype = source.shape, source.y_dtype
        self.has_lengths = source.has_lengths

    def block(self, index: int) -> ExampleBlock:
        return frozen(self._source.block(self.blocks[index]).rows(self._rows(index)))

    def lengths(self, index: int) -> NDArray[np.int64]:
        return self._source.lengths(self.blocks[index])[self._rows(index)]

    def _rows(self, index: int) -> NDArray[np.int64]:
        chosen = self._chosen[self.starts[index] : self.starts[index + 1]]
        return chosen - self._source.starts[self.blocks[index]]


class Multiplied:
    """Examples of a source with every token x as (x - origin) M, M (d, f), a block at a time;
    padding is zero."""

    def __init__(
        self,
        source: ExampleSource,
        matrix: NDArray[np.float64],
        origin: NDArray[np.float64] | None = None,
    ) -> None:
        self._source, self._matrix, self._origin = source, matrix, origin
        self.starts, self.y_dtype = source.starts, source.y_dtype
        self.shape = (source.shape[0], matrix.shape[1], source.shape[2])
        self.has_lengths = source.has_lengths

    def block(self, index: int) -> ExampleBlock:
        block = self._source.block(index)
        x = block.x.astype(np.float64)
        if self._origin is not None:
            padding = np.arange(x.shape[1]) >= block.lengths[:, None]
            x = x - self._origin
            x[padding] = 0.0
        return frozen(block._replace(x=x @ self._matrix))

    def lengths(self, index: int) -> NDArray[np.int64]:
        return self._source.lengths(index)


class WithoutResidual:
    """Examples of a source with the tokens taken off the labels, y - x, a block at a time.

    In double precision; where labels have two bytes in single, whose rounding is far below theirs.
    """

    def __init__(self, source: ExampleSource) -> None:
        self._source = source
        self.starts, self.shape = source.starts, source.shape
        self.has_lengths = source.has_lengths
        narrow = source.y_dtype.itemsize == 2 and not np.issubdtype(source.y_dtype, np.integer)
        self.y_dtype = np.dtype(np.float32 if narrow else np.float64)

    def block(self, index: int) -> ExampleBlock:
        block = self._source.block(index)
        return block._replace(y=block.y.astype(self.y_dtype) - block.x.astype(self.y_dtype))

    def lengths(self, index: int) -> NDArray[np.int64]:
        return self._source.lengths(index)

    @property
    def box(self) -> Box | None:
        asked = self._source.box if isinstance(self._source, DrawnSource) else None
        return None if asked is None else asked.behind(lambda x: asked(x) - x.astype(np.float64))


class Kept:
    """The blocks of another source, held in memory once read."""

    def __init__(self, source: ExampleSource) -> None:
        self._source = source
        self._blocks: dict[int, ExampleBlock] = {}
        self.starts, self.shape, self.y_dtype = source.starts, source.shape, source.y_dtype
        self.has_lengths = source.has_lengths

    def block(self, index: int) -> ExampleBlock:
        if index not in self._blocks:
            self._blocks[index] = self._source.block(index)
        return self._blocks[index]

    def lengths(self, index: int) -> NDArray[np.int64]:
        if index in self._blocks:
            return self._blocks[index].lengths
        return self._source.lengths(index)


class Shares:
    """Blocks that belong to processes: one is read by its owner alone, and brought to all.

    Owners ascend with the blocks, so that the examples of a process are consecutive. All processes
    must read the same blocks in the same order; `mine` is what each may read by itself.
    """

    def __init__(self, source: ExampleSource, owners: list[int]) -> None:
        self._source, self._owners = source, owners
        self._lengths: dict[int, NDArray[np.int64]] = {}
        self.starts, self.shape, self.y_dtype = source.starts, source.shape, source.y_dtype
        self.has_lengths = source.has_lengths
        of_blocks = np.searchsorted(owners, np.arange(devices.n_processes() + 1))
        self.bounds = np.array(source.starts)[of_blocks]  # a process's first example, and the end

    @property
    def in_memory(self) -> bool:
        return isinstance(self._source, Kept)

    def block(self, index: int) -> ExampleBlock:
        owner = self._owners[index]
        mine = self._source.block(index) if owner == devices.process_index() else None
        return frozen(ExampleBlock(*devices.broadcast_from_owner(owner, mine)))

    def lengths(self, index: int) -> NDArray[np.int64]:
        if not self.has_lengths:
            return self._source.lengths(index)
        if index not in self._lengths:
            owner = self._owners[index]
            mine = [self._source.lengths(index)] if owner == devices.process_index() else None
            self._lengths[index] = devices.broadcast_from_owner(owner, mine)[0]
        return self._lengths[index]

    def over(self, change: Callable[[ExampleSource], ExampleSource]) -> "Shares":
        """The same shares of a changed source."""
        return Shares(change(self._source), self._owners)

    def view(self, chosen: NDArray[np.int64], *, keep: bool = False) -> "Shares":
        view = View(self._source, chosen)
        owners = [self._owners[block] for block in view.blocks]
        return Shares(Kept(view) if keep else view, owners)

    def multiplied(
        self, matrix: NDArray[np.float64], origin: NDArray[np.float64] | None = None
    ) -> "Shares":
        """Each process multiplies its own."""
        source: ExampleSource = Multiplied(self._source, matrix, origin)
        return Shares(Kept(source) if self.in_memory else source, self._owners)

    def mine(self) -> ExampleSource:
        """What this process owns; it may be nothing."""
        first, end = self.bounds[devices.process_index() :][:2]
        return View(self._source, np.arange(first, end))


def share_blocks(source: ExampleSource) -> ExampleSource:
    """Blocks dealt out to processes, as equal in examples as blocks allow; one keeps them all."""
    if devices.n_processes() == 1:
        return source
    middles = (np.array(source.starts[1:]) + source.starts[:-1]) / 2
    owners = middles * devices.n_processes() // source.starts[-1]
    return Shares(source, owners.astype(int).tolist())


def view_source(source: ExampleSource, chosen: NDArray[np.int64]) -> ExampleSource:
    return source.view(chosen) if isinstance(source, Shares) else View(source, chosen)


def check_examples(x: ArrayLike, y: ArrayLike, lengths: ArrayLike | None) -> ExampleBlock:
    tokens, sizes = check_inputs(x, None, lengths)
    labels = check_array("Y", y, 3, "(examples, tokens, outputs)", narrow=True)
    if labels.shape[:2] != tokens.shape[:2] or labels.shape[2] == 0:
        n, k, _ = tokens.shape
        raise ValueError(
            f"Y has shape {labels.shape}: expected ({n}, {k}, e) to match X of shape {tokens.shape}"
        )
    return frozen(ExampleBlock(tokens, labels, sizes))


def frozen(block: ExampleBlock) -> ExampleBlock:
    """Read-only views: whoever gets a chunk cannot change the examples."""
    views = [array.view() for array in block]
    for view in views:
        view.setflags(write=False)
    return ExampleBlock(*views)


def join_blocks(blocks: list[ExampleBlock]) -> ExampleBlock:
    if len(blocks) == 1:
        return blocks[0]
    return frozen(ExampleBlock(*(np.concatenate(arrays) for arrays in zip(*blocks, strict=True))))
