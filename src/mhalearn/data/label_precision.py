"""How exactly labels can be met: how coarsely they were rounded, and what computing loses."""

from collections.abc import Iterator

import numpy as np

from mhalearn._runtime.precision import DOUBLE, Precision, find_precision
from mhalearn._runtime.types import Float64
from mhalearn.data import Examples

__all__ = ["DOUBLE", "Precision", "label_precision"]

# Labels at a time: of double precision, no more than these are looked at.
_AT_ONCE = 2**18


def label_precision(examples: Examples) -> Precision:
    """The precision of the labels, padding left out; see `find_precision`."""

    size = min(4096, max(1, _AT_ONCE // (examples.k * examples.out_dim)))

    def read() -> Iterator[Float64]:
        for _, y, lengths in examples.chunks(size):
            yield y.astype(np.float64)[np.arange(examples.k) < lengths[:, None]]

    return find_precision(read)
