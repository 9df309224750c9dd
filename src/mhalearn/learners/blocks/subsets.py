"""Examples to descend on, and others to choose by."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mhalearn._runtime.seeds import Stream, generator
from mhalearn.data import Examples
from mhalearn.data.label_precision import label_precision
from mhalearn.layer.block.block import Block
from mhalearn.learners.blocks.padding import pad_neurons
from mhalearn.solvers.polish import relative_error

# Relative squared error on held-out examples that only an exact block has; of coarser labels than
# doubles it is that of rounding, whose square is at most a twelfth of a unit's.
_EXACT, _ROUNDED = 1e-22, 1 / 8
# Examples held out to choose by: a tenth, and no more than this.
_MOST_HELD = 256


class Subsets(NamedTuple):
    """Examples to descend on, others to choose by, and the error that only an exact block has."""

    train: Examples
    select: Examples
    exact: float

    def error(self, block: Block) -> float:
        """Relative and squared, on the examples to choose by."""
        return relative_error(pad_neurons(block), self.select)

    def is_met(self, block: Block) -> bool:
        return self.error(block) < self.exact

    def with_worst(self, chosen: Examples, block: Block) -> Examples:
        """Examples joined by as many others that a block fits worst."""
        errors = np.concatenate(
            [
                np.sum((block(x, lengths) - y) ** 2, axis=(1, 2))
                for x, y, lengths in self.train.chunks(1024)
            ]
        )
        worst = self.train.subset(np.sort(np.argsort(-errors)[: chosen.n])).arrays()
        joined = [np.concatenate(pair) for pair in zip(chosen.arrays(), worst, strict=True)]
        return Examples(*joined)


def exact_error(examples: Examples) -> float:
    """Relative squared error below which a block is exact, for labels of their precision."""
    return max(_EXACT, _ROUNDED * label_precision(examples).unit ** 2)


def split(examples: Examples, seed: int) -> Subsets:
    order = generator(seed, Stream.SELECT_SPLIT).permutation(examples.n)
    held = min(max(1, examples.n // 10), _MOST_HELD)
    return Subsets(
        examples.subset(np.sort(order[held:])),
        examples.subset(np.sort(order[:held])),
        exact_error(examples),
    )
