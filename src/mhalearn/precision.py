"""How exactly labels can be met: their own precision, and that of computing a layer."""

from typing import NamedTuple

import numpy as np

from mhalearn.examples import Examples

# Relative root-mean-square residual that rounding alone explains: sixteen units in the last place
# of the labels (black boxes compute in their labels' precision, not only round to it), and what
# computing a layer with logits of some hundred in double precision loses.
_LABEL_ULPS = 16
_COMPUTED = 1e-12


class Precision(NamedTuple):
    name: str
    floor: float  # relative residual at which labels of this precision are met exactly


def label_precision(examples: Examples) -> Precision:
    """Float16 or float32 labels are known by their dtype, or by their values if stored wider.

    Cost: one pass over the labels.
    """
    candidates = ["float16", "float32"]
    for _, y, _ in examples.chunks(4096):
        with np.errstate(over="ignore"):
            candidates = [name for name in candidates if np.array_equal(y.astype(name), y)]
        if not candidates:
            break
    name = candidates[0] if candidates else "float64"
    return Precision(name, float(_LABEL_ULPS * np.finfo(name).eps + _COMPUTED))
