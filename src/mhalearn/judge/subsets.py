"""The examples of a run by what they are for: train, select, certify.

`select` is the learner's own: it takes it from `train` to choose among starts.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.seeds import Stream, generator
from mhalearn.data import Examples
from mhalearn.data.input_information import Information
from mhalearn.layer.architecture import Architecture

# What is left to train on, over the counting limit, for examples to be spared.
_SPARED = 1.5
# One in so many groups of equal inputs certifies, and this many at most.
_SHARE, _MOST = 8, 1024


class Subsets(NamedTuple):
    """Of the working set, which is all examples or a random sample in memory, two parts."""

    every: Examples
    working_set: Examples
    train: Examples
    certify: Examples | None  # None where none can be spared
    certify_groups: NDArray[np.int64] | None = None  # equal where examples ask the same

    @property
    def has_more(self) -> bool:
        """Whether there are examples beside the working set."""
        return self.working_set.n < self.every.n


def split_to_certify(
    every: Examples,
    working_set: Examples,
    architecture: Architecture,
    information: Information,
    seed: int,
) -> Subsets:
    """Keep an eighth of the examples to certify with, if the rest still determines the layer.

    information: of the working set. Which ones is random: files are often sorted. Groups of equal
    inputs stay together: repeated inputs are neither more equations nor a test of a fit.
    """
    limit = working_set.counting_limit(architecture.with_heads(architecture.n_heads or 1))
    groups = int(information.group_of.max()) + 1
    count = min(max(2, groups // _SHARE), _MOST)
    if groups - count < _SPARED * limit:
        return Subsets(every, working_set, working_set, None)
    order = generator(seed, Stream.CERTIFY_SPLIT).permutation(groups)
    chosen = np.isin(information.group_of, order[:count])
    train, certify = working_set.subset(~chosen), working_set.subset(chosen)
    return Subsets(every, working_set, train, certify, information.group_of[chosen])
