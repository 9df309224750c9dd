"""What an audit goes by: sequences, labels, and how exact a right box would be on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mhalearn._runtime.arrays import to_numpy, widen_bfloat16
from mhalearn._runtime.precision import Precision, find_precision
from mhalearn._runtime.types import Float64
from mhalearn._runtime.validation import check_count
from mhalearn.auditing.forward import Forward
from mhalearn.auditing.precision import PRECISIONS, error_floor, error_floors
from mhalearn.auditing.reading import Reading
from mhalearn.auditing.trial import Hypothesis, Trial
from mhalearn.data import Examples
from mhalearn.data.inputs import sample_inputs
from mhalearn.layer.base import Layer

# Sequences that are used at most, and rows on which edits are searched.
_MOST_SEQUENCES, _ROWS = 256, 384


@dataclass(frozen=True)
class Evidence:
    """Sequences and labels.

    precision: the format that the box is taken to compute in. floors: relative errors up to which
    boxes of each format are right. floor: that of this box.
    """

    forward: Forward
    y: Float64
    precision: str
    floors: dict[str, float]
    floor: float

    def floor_of(self, hypothesis: Hypothesis, claimed: Reading) -> float:
        """That of a box which does what a hypothesis says: sharper attention rounds more."""
        wide = self.precision == "float64"
        reading = hypothesis.classes(claimed)[0][0]
        own = error_floor(reading, self.forward, "float32" if wide else self.precision)
        return max(self.floor, own)

    @property
    def padded(self) -> bool:
        return not bool(self.forward.rows.all() and self.forward.keys.all())

    def outputs(self, hypothesis: Hypothesis, claimed: Reading) -> Float64:
        """(n, k, e), by what a hypothesis says."""
        classes = hypothesis.classes(claimed)
        if len(classes) == 1:
            return self.forward.outputs(classes[0][0])
        found = sum(self.forward.outputs(reading, heads) for reading, heads in classes)
        return self.forward.with_beside(classes[0][0], np.asarray(found))

    def residual(self, hypothesis: Hypothesis, claimed: Reading) -> Float64:
        rows = self.forward.rows[..., None]
        return np.where(rows, self.y - self.outputs(hypothesis, claimed), 0.0)

    def error(self, residual: Float64) -> float:
        """Relative root mean square."""
        labels = self.y[self.forward.rows]
        size = float(np.sum(labels**2)) or 1.0
        return float(np.sqrt(np.sum(residual**2) / size))

    def trial(self, seed: int) -> Trial:
        """A few sequences, on which many edits are tried."""
        n, k = self.forward.x.shape[:2]
        count = min(n, max(2, _ROWS // k))
        chosen = np.unique(np.linspace(0, n - 1, count).astype(int))
        return Trial(self.forward.some(chosen), self.y[chosen], seed)


def ask(
    box_or_examples: Examples | Callable[[Any], Any],
    layer: Layer,
    n: int,
    k: int,
    inputs: str,
    seed: int,
) -> Examples:
    """Examples as they are, or answers of a box; sizes must be those of the layer.

    A box of cross-attention is a function of two arrays, the tokens and those of the memory.
    """
    if isinstance(box_or_examples, Examples):
        found = box_or_examples
    elif callable(box_or_examples):
        count, tokens = min(check_count("n", n), _MOST_SEQUENCES), check_count("k", k)
        memory = layer.architecture.memory
        if memory is None:
            found = Examples.from_callable(
                box_or_examples, inputs, n=count, k=tokens, d=layer.d, seed=seed
            )
        else:
            drawn = [
                np.asarray(sample_inputs(inputs, count, tokens, width, seed=seed + at))
                for at, width in enumerate((layer.d, memory))
            ]
            found = Examples(drawn[0], to_numpy(box_or_examples(*drawn)), memory=drawn[1])
    else:
        raise ValueError(
            f"cannot audit a {type(box_or_examples).__name__}: pass Examples, or a function from X "
            "to Y"
        )
    expected = layer.architecture.memory or 0
    if found.columns.memory != expected:
        raise ValueError(
            f"the examples have a second sequence of {found.columns.memory} features, the claimed "
            f"layer takes keys from one of {expected}: pass Examples(..., memory=...)"
        )
    if (found.d, found.out_dim) != (layer.d, layer.out_dim):
        raise ValueError(
            f"the examples have {found.d} features and {found.out_dim} outputs, the claimed layer "
            f"{layer.d} and {layer.out_dim}"
        )
    return found


def gather(examples: Examples, claimed: Reading, precision: str | None) -> Evidence:
    """Evidence of at most 256 sequences; precision: of the box, or None to go by its labels."""
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r}: pass one of {', '.join(PRECISIONS)}")
    if examples.n > _MOST_SEQUENCES:
        examples = examples.subset(slice(_MOST_SEQUENCES))
    x, y, lengths = examples.arrays()
    tokens, memory, marks = examples.columns.split(np.asarray(widen_bfloat16(x), np.float64))
    if memory is None:
        forward = Forward(tokens, np.asarray(lengths), positions=marks)
    else:
        there = np.ones(memory.shape[:2], bool) if marks is None else marks > 0
        forward = Forward(tokens, np.asarray(lengths), memory=memory, memory_rows=there)
    labels = np.asarray(widen_bfloat16(y), np.float64)
    seen = labels[forward.rows]
    rounded = find_precision(lambda: [seen])
    floors = error_floors(claimed, forward)
    name = precision or rounded.name
    # A box of double precision may well have been given weights and tokens of single.
    floor = floors["float32" if name == "float64" and precision is None else name]
    return Evidence(forward, labels, name, floors, floor + _step(rounded, seen))


def _step(rounded: Precision, labels: Float64) -> float:
    """What rounding to a grid, or to few bits that no format has, leaves beside."""
    if rounded.name != "float64" or not rounded.is_coarse:
        return 0.0
    size = float(np.sqrt(np.mean(labels**2))) or 1.0
    return float(np.sqrt(np.mean(rounded.steps(labels) ** 2))) / size
