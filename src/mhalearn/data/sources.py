"""Where examples live: blocks read one by one, in memory, or a choice of another source's."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mhalearn._runtime import devices
from mhalearn._runtime.validation import check_array, check_inputs
from mhalearn.data.box import Box


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
        asked: Box | None = getattr(self._source, "box", None)
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
