"""Examples drawn from a black box: inputs by a seed, labels asked for once."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime import devices
from mhalearn._runtime.seeds import Stream, generator
from mhalearn._runtime.validation import check_count, check_shape
from mhalearn.data.answers import Answers
from mhalearn.data.box import Box, BoxFailed
from mhalearn.data.inputs import Sampler, block_size, check_kind, draw_block
from mhalearn.data.sources import ExampleBlock, frozen
from mhalearn.run.events import Event


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


def draw_examples(
    f: Callable[[Any], Any],
    inputs: str | Sampler,
    shape: tuple[int, int, int],
    seed: int,
    noise: float,
    progress: Callable[[Event], None] | None,
    keep: str | Path | None,
    one_by_one: bool,
) -> DrawnSource:
    """What a caller wants drawn, checked; shape: n, k, d. The box is asked a first question."""
    check_kind(inputs)
    n, k, d = check_shape(*shape)
    check_count("seed", seed, least=0)
    if not callable(f):
        raise ValueError(f"f is a {type(f).__name__}: pass a callable from X to Y")
    if not (math.isfinite(noise) and noise >= 0):
        raise ValueError(f"noise={noise}: pass a number of at least 0")
    if progress is not None and not callable(progress):
        raise ValueError(
            f"progress={progress!r}: pass a function of an Event, "
            "such as mhalearn.report.terminal.Progress().on_event"
        )
    if keep is not None and devices.n_processes() > 1:
        raise ValueError("keep: one process alone can keep answers: leave it out")
    box = Box(f, one_by_one=bool(one_by_one))
    return DrawnSource(box, inputs, n, k, d, seed, noise, progress, keep)
