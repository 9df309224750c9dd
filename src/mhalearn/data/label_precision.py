"""How exactly labels can be met: how coarsely they were rounded, and what computing loses."""

from collections.abc import Iterator

import numpy as np

from mhalearn._runtime.precision import DOUBLE, Precision, find_precision
from mhalearn._runtime.types import Float64
from mhalearn.data import Examples

__all__ = ["DOUBLE", "Precision", "label_precision"]


def label_precision(examples: Examples) -> Precision:
    """The precision of the labels, padding left out; see `find_precision`."""

    def read() -> Iterator[Float64]:
        for _, y, lengths in examples.chunks(4096):
            yield y.astype(np.float64)[np.arange(examples.k) < lengths[:, None]]

    return find_precision(read)
