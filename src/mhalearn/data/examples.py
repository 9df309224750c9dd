"""Examples (X, F(X)): in memory, sharded on disk, or drawn on demand from a callable.

`Examples` is the same for all sources, and holds one block and one chunk at a time when it walks
over them.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mhalearn._runtime import devices
from mhalearn._runtime.arrays import widen_bfloat16
from mhalearn._runtime.seeds import Stream, generator
from mhalearn._runtime.validation import check_count
from mhalearn.data.beside import bring_beside
from mhalearn.data.box import Box
from mhalearn.data.datasets import read_dataset
from mhalearn.data.drawn import draw_examples
from mhalearn.data.example_sizes import ExampleSizes
from mhalearn.data.inputs import Sampler
from mhalearn.data.shards import check_metadata, write_file, write_shards
from mhalearn.data.sources import (
    ArraySource,
    ExampleBlock,
    ExampleSource,
    Multiplied,
    Shares,
    WithoutResidual,
    check_examples,
    join_blocks,
    view_source,
)
from mhalearn.data.survey import Survey, merge_surveys, survey_blocks
from mhalearn.data.walks import Indices, choose, cut_anew, is_ascending, survey_and_pick
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.span_coordinates import SpanCoordinates
from mhalearn.run.events import Event

# Entries of a view, X and Y together, up to which it is held in memory: 64 MiB of doubles.
_SMALL = 2**23
# Times the counting limit from which on more examples hardly make learning easier, and entries to
# which a working set is filled all the same: 16 MiB of doubles, of which a fit makes many copies.
_PLENTY, _WORKING = 64, 2**21


class Examples(ExampleSizes):
    """Labelled examples of a layer: X (n, k, d), Y (n, k, e), and lengths (n,) where they differ.

    X and Y keep their dtypes, bfloat16 too, in memory and in files. Rows past an example's length
    are padding: nobody looks at them.
    memory: (n, k', d'), the second sequence that keys and values of cross-attention are of, and
    memory_lengths (n,) where they differ. positions: (k,) or (n, k) position ids, where tokens do
    not stand at 0 to k - 1. Both become columns of the token array that `arrays` and `chunks`
    return, which layers take as it is (`columns`, `layer.token_columns`).
    metadata: anything JSON can hold; it travels with the files.
    """

    def __init__(
        self,
        X: ArrayLike,
        Y: ArrayLike,
        lengths: ArrayLike | None = None,
        *,
        memory: ArrayLike | None = None,
        memory_lengths: ArrayLike | None = None,
        positions: ArrayLike | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        said: dict[str, Any] = {}
        if memory is not None or positions is not None or memory_lengths is not None:
            X, Y, lengths, said = bring_beside(X, Y, lengths, memory, memory_lengths, positions)
        self._source: ExampleSource = ArraySource(
            check_examples(X, Y, lengths), lengths is not None
        )
        self._working_set: Examples | None = None
        self.metadata = check_metadata(metadata) | said

    @classmethod
    def _over(cls, source: ExampleSource, metadata: Mapping[str, Any]) -> "Examples":
        examples = cls.__new__(cls)
        examples._source, examples._working_set = source, None
        examples.metadata = check_metadata(metadata)
        return examples

    @classmethod
    def from_callable(
        cls,
        f: Callable[[Any], Any],
        inputs: str | Sampler = "boolean",
        *,
        n: int,
        k: int,
        d: int,
        seed: int = 0,
        noise: float = 0.0,
        progress: Callable[[Event], None] | None = None,
        keep: str | Path | None = None,
        one_by_one: bool = False,
    ) -> "Examples":
        """Examples of a black box f: (n, k, d) -> (n, k, e), drawn when they are used.

        f: a function of a NumPy array that returns a NumPy, JAX or PyTorch array, on any device; an
        AttentionLayer; or a PyTorch module in eval mode, called on its own device and in its own
        dtype (nn.MultiheadAttention as self-attention; see `interop.as_function`).
        inputs: as in `sample_inputs`, and the same inputs for the same seed. A function sees int8
        for "boolean".
        Every example is asked for once, when it is first used, in blocks; here two of them are, to
        learn e and the dtype, and one of the two once more, to learn whether f answers at random.
        Answers are held up to 64 MiB; without `keep`, those beyond are asked for again in every
        pass, which is for functions that cost nothing (an AttentionLayer is always computed anew).
        keep: a file that keeps the answers as they come. A call that fails (whatever it raises but
        a programming error) is made again three times, after 0.2, 1 and 5 seconds; then the run
        breaks, and another with the same file asks for none of the answers that are there.
        one_by_one: f takes one sequence (k, d) a call and returns (k, e).
        noise: standard deviation of Gaussian label noise, relative to the root mean square of the
        labels in the first block.
        progress: called with an Event after each block of labels, in every pass: its step is the
        number of examples labelled, of `data["of"]`. `terminal.Progress().on_event` draws it.
        """
        source = draw_examples(f, inputs, (n, k, d), seed, noise, progress, keep, one_by_one)
        name = inputs if isinstance(inputs, str) else getattr(inputs, "__name__", "sampler")
        return cls._over(source, {"inputs": name, "seed": int(seed), "noise": float(noise)})

    @classmethod
    def from_dataset(
        cls, dataset: Any, inputs: str, outputs: str, mask: str | None = None
    ) -> "Examples":
        """Examples from the rows of a dataset, each a sequence of its own length, in memory.

        dataset: a Hugging Face `datasets.Dataset`, a folder that its save_to_disk wrote (needs the
        extra mhalearn[datasets]), or any iterable of dicts.
        inputs, outputs: the columns with tokens (k, d) and labels (k, e) of a row; their dtypes are
        kept, those that the dataset declares.
        mask: the column that is one for tokens and zero for padding, on the left or on the right,
        which is left out.
        """
        x, y, lengths = read_dataset(dataset, inputs, outputs, mask)
        return cls(x, y, lengths if lengths.min() < x.shape[1] else None)

    @property
    def box(self) -> Box | None:
        """What labels are asked of, where it is a function that says nothing but the truth: None
        for examples in memory or files, and where noise is added to its answers."""
        box: Box | None = getattr(self._source, "box", None)
        return box

    @property
    def in_memory(self) -> bool:
        """Whether a pass over the examples reads or computes nothing."""
        if isinstance(self._source, Shares):
            return self._source.in_memory
        return isinstance(self._source, ArraySource)

    @property
    def bounds(self) -> NDArray[np.int64]:
        """The first example of each process, and their number: its own blocks', or equal parts."""
        if isinstance(self._source, Shares):
            return self._source.bounds
        count = devices.n_processes()
        return np.arange(count + 1) * self.n // count

    def mine(self) -> "Examples":
        """The part of this process, which may be empty; read without the others."""
        if isinstance(self._source, Shares):
            return Examples._over(self._source.mine(), self.metadata)
        first, end = self.bounds[devices.process_index() :][:2]
        if (first, end) == (0, self.n):
            return self
        return Examples._over(view_source(self._source, np.arange(first, end)), self.metadata)

    def chunks(self, size: int) -> Iterator[ExampleBlock]:
        """All examples in order, `size` at a time (the last chunk may be smaller): X, Y, lengths.

        bfloat16 comes as float32, to compute with. Memory: one chunk and one block of the source.
        """
        size = check_count("size", size)
        return (
            block._replace(x=widen_bfloat16(block.x), y=widen_bfloat16(block.y))
            for block in self._chunks(size)
        )

    def _chunks(self, size: int) -> Iterator[ExampleBlock]:
        return cut_anew(self._source, size)

    def arrays(self) -> ExampleBlock:
        """X, Y and lengths of all examples, in memory, in their own dtypes."""
        k, d, e = self._source.shape
        none = ExampleBlock(
            np.zeros((0, k, d)), np.zeros((0, k, e), self.y_dtype), np.zeros(0, np.int64)
        )
        return next(self._chunks(max(1, self.n)), none)

    def _held(self, block: ExampleBlock) -> "Examples":
        """A block as examples in memory, with lengths where these have them."""
        lengths = block.lengths if self.has_lengths else None
        return Examples(block.x, block.y, lengths, metadata=self.metadata)

    def subset(self, indices: Indices) -> "Examples":
        """Some of the examples, in memory, in the order asked for: a slice, numbers, or a mask.

        Of examples that are not in memory, only the blocks that hold the chosen ones are read. Of
        those that many processes share, each holds its own, unless all take at most 64 MiB.
        """
        chosen = choose("subset", indices, self.n)
        ascending, place = chosen, None
        if not is_ascending(chosen):
            ascending, place = np.unique(chosen, return_inverse=True)
        small = len(chosen) * self._entries <= _SMALL
        if isinstance(self._source, Shares) and place is None and not small:
            return Examples._over(self._source.view(chosen, keep=True), self.metadata)
        block = Examples._over(view_source(self._source, ascending), {}).arrays()
        return self._held(block if place is None else block.rows(place))

    def view(self, indices: Indices) -> "Examples":
        """As `subset`, for ascending choices: many examples stay where they are until used.

        They are brought into memory at once if all are there, or if as doubles they take at most
        64 MiB: reading them again and again would cost more than holding them.
        """
        chosen = choose("view", indices, self.n)
        if not is_ascending(chosen):
            raise ValueError("view: choose each example once, in ascending order; or use subset")
        if self.in_memory or len(chosen) * self._entries <= _SMALL:
            return self.subset(chosen)
        return Examples._over(view_source(self._source, chosen), self.metadata)

    def multiplied(
        self, matrix: NDArray[np.float64], origin: NDArray[np.float64] | None = None
    ) -> "Examples":
        """The same examples with every token x as (x - origin) M, M (d, f), origin zero unless
        given: those not in memory stay where they are, and are multiplied as they are read."""
        if not self.columns.is_plain:
            raise ValueError("tokens with a memory or positions beside them cannot be multiplied")
        if isinstance(self._source, Shares):
            examples = Examples._over(self._source.multiplied(matrix, origin), self.metadata)
        else:
            examples = Examples._over(Multiplied(self._source, matrix, origin), self.metadata)
            if self.in_memory:
                examples = self._held(examples.arrays())
        if self._working_set is not None:
            examples._working_set = self._working_set.multiplied(matrix, origin)
        return examples

    def in_span(self, coordinates: SpanCoordinates) -> "Examples":
        """The same examples with tokens in coordinates of their span."""
        return self.multiplied(coordinates.coordinates, coordinates.origin)

    def without_residual(self) -> "Examples":
        """The same examples with tokens taken off their labels, Y - X, of a layer beside which a
        residual path lies; those that are not in memory stay where they are."""
        if self.d != self.out_dim:
            raise ValueError(
                f"a residual path y = x + F(x) has outputs as wide as tokens; these have d = "
                f"{self.d} and e = {self.out_dim}"
            )
        source = self._source
        if isinstance(source, Shares):
            return Examples._over(source.over(WithoutResidual), self.metadata)
        examples = Examples._over(WithoutResidual(source), self.metadata)
        return self._held(examples.arrays()) if self.in_memory else examples

    def survey(self) -> Survey:
        """Hashes and largest entries of all examples, in one pass."""
        if not isinstance(self._source, Shares):
            return survey_blocks(self._chunks(1024), self.n)
        mine = self.mine()
        return merge_surveys(survey_blocks(mine._chunks(1024), mine.n))

    @property
    def working_set(self) -> "Examples":
        """Random ones of the examples, in memory, where some were chosen; or all of them."""
        return self if self._working_set is None else self._working_set

    def with_working_set(self, chosen: "Examples") -> "Examples":
        """The same examples, with this working set."""
        examples = Examples._over(self._source, self.metadata)
        examples._working_set = chosen
        return examples

    def working_set_size(self, architecture: Architecture) -> int:
        """How many of the examples a learner needs in memory at most: its working set.

        All of them, or 64 times the counting limit, or as many as take 16 MiB as doubles if that is
        more.
        """
        limit = self.counting_limit(architecture)
        return int(min(self.n, max(_PLENTY * limit, _WORKING // self._entries)))

    def sample(self, count: int, seed: int) -> "Examples":
        """Random examples, in random order, in memory; all of them, as they are, if no more.

        Cost: one pass. What is first in a file is often not like the rest of it.
        """
        return self if count >= self.n else self.survey_and_sample(count, seed)[1]

    def survey_and_sample(self, count: int, seed: int) -> tuple[Survey, "Examples"]:
        """`survey`, and `count` random examples, in one pass.

        Processes that share the examples read their own, and all hold the same `count`.
        """
        rng = generator(seed, Stream.WORKING_SET)
        chosen = np.sort(rng.choice(self.n, count, replace=False, shuffle=False))
        place = rng.permutation(count)
        if isinstance(self._source, Shares):
            cuts, here = np.searchsorted(chosen, self.bounds), devices.process_index()
            own = chosen[slice(*cuts[here:][:2])] - self.bounds[here]
            part = self.mine()
            survey, mine = survey_and_pick(part._chunks(1024), part.n, own, np.arange(len(own)))
            survey = merge_surveys(survey)
            owners = np.flatnonzero(np.diff(cuts)).tolist()
            parts = [
                ExampleBlock(*devices.broadcast_from_owner(owner, mine if owner == here else None))
                for owner in owners
            ]
            block = join_blocks(parts).rows(np.argsort(place))
        else:
            survey, block = survey_and_pick(self._chunks(1024), self.n, chosen, place)
        return survey, self._held(block)

    def hashes(self) -> NDArray[np.uint64]:
        """A 64-bit hash of each example's values; see `Survey`."""
        return self.survey().hashes

    def save(self, path: str | Path, *, shard_size: int | None = None) -> None:
        """Write the examples to a .safetensors or .npz file, atomically, or to a folder of shards.

        shard_size: examples in a shard; the path is then a new folder, complete once its index.json
        is there, and `load_examples` reads it one shard at a time. Memory: a shard with shard_size,
        all examples without.
        """
        if shard_size is not None:
            blocks = self._chunks(check_count("shard_size", shard_size))
            write_shards(path, blocks, self.metadata, self.has_lengths)
        else:
            write_file(path, self.arrays, self.has_lengths, self.metadata)
