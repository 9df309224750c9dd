"""How exactly labels can be met: their own precision, and that of computing a layer."""

from typing import NamedTuple

import numpy as np

from mhalearn.data import Examples

# Relative root-mean-square residual that rounding alone explains: sixteen units in the last place
# of the labels (black boxes compute in their labels' precision, not only round to it), and what
# computing a layer with logits of some hundred in double precision loses.
_LABEL_ULPS = 16
_COMPUTED = 1e-12


class Precision(NamedTuple):
    name: str
    unit: float  # the last place of a label: rounding moves it by at most half of that
    floor: float  # relative residual at which labels of this precision are met exactly


def label_precision(examples: Examples) -> Precision:
    """Float16 or float32 labels are known by their values, however wide they are stored.

    Quantised labels (integers, a fixed number of binary places) fit into float16 too, but they were
    not rounded in proportion to their size: no precision is granted to them beyond double.
    Cost: one pass over the labels, three if they fit into float16; a chunk if they are stored as
    precisely as they are.
    """
    candidates = ["float16", "float32"]
    for _, y, _ in examples.chunks(4096):
        with np.errstate(over="ignore"):
            candidates = [name for name in candidates if np.array_equal(y.astype(name), y)]
        if not candidates or candidates == [y.dtype.name]:
            break
    name = candidates[0] if candidates else "float64"
    if name == "float16" and _on_a_grid(examples):
        name = "float64"
    unit = float(np.finfo(name).eps)
    return Precision(name, unit, _LABEL_ULPS * unit + _COMPUTED)


def _on_a_grid(examples: Examples) -> bool:
    """Whether all labels are multiples of float16's spacing at their root mean square.

    Rounding to float16 leaves small labels between those multiples; whatever else fits into float16
    has its whole step as large as that.
    """
    squares = [np.sum(y.astype(np.float64) ** 2) for _, y, _ in examples.chunks(4096)]
    size = float(np.sqrt(sum(squares) / (examples.n * examples.k * examples.out_dim)))
    step = float(np.finfo("float16").eps) * 2.0 ** np.floor(np.log2(size)) if size > 0 else 1.0
    return all(
        np.array_equal(y, np.round(y.astype(np.float64) / step) * step)
        for _, y, _ in examples.chunks(4096)
    )
