"""What error a right box leaves: none computes exactly, and one of bfloat16 is far from it."""

from __future__ import annotations

import numpy as np

from mhalearn.auditing.forward import Forward
from mhalearn.auditing.reading import Reading

PRECISIONS = ("float64", "float32", "float16", "bfloat16")
# Sequences on which it is measured.
_MOST = 8
# Times the measured error: sums inside a box are rounded too, in an order that is its own.
_ROOM = {"float64": 1.0, "float32": 6.0, "float16": 2.0, "bfloat16": 2.0}
# Double precision: a unit in the last place of logits of some hundred.
_DOUBLE = 1e-12


def error_floors(reading: Reading, forward: Forward) -> dict[str, float]:
    """The relative root-mean-square error up to which a box of each precision is right.

    Measured, not derived: the claimed layer is computed with every step rounded to the format, as a
    box would, and compared with itself.
    """
    return {name: error_floor(reading, forward, name) for name in PRECISIONS}


def error_floor(reading: Reading, forward: Forward, name: str) -> float:
    """That of one precision."""
    if name == "float64":
        return _DOUBLE
    few = slice(_MOST)
    exact = forward.some(few)
    truth = exact.outputs(reading)[exact.rows]
    size = float(np.sqrt(np.mean(truth**2))) or 1.0
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = forward.some(few, name).outputs(reading)[exact.rows]
    error = float(np.sqrt(np.mean((rounded - truth) ** 2))) / size
    return _ROOM[name] * error if np.isfinite(error) else 1.0


def finest(error: float, floors: dict[str, float]) -> str | None:
    """The finest precision at which a box with this error is right; None where it is at none."""
    return next((name for name in PRECISIONS if error <= floors[name]), None)
