"""How coarsely numbers were rounded, known by their values, and what computing with them loses."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.types import Float64

# Relative root-mean-square residual below which labels may be met exactly, in units in their last
# place: black boxes compute in their labels' precision, not only round to it. Whether a residual
# below it is rounding is asked once more, by `judge.computing_error` and what follows it.
_LABEL_ULPS = 16
# What computing a layer with logits of some hundred in double precision loses.
_COMPUTED = 1e-12
_DOUBLE_BITS = 53
# Significant bits and the lowest binary place of each format, the coarsest first.
_FORMATS = {"bfloat16": (8, -133), "float16": (11, -24), "float32": (24, -149)}
# Decimal places that labels may have been rounded to.
_DECIMALS = range(10)
# A step is clear that is so many times that of the format.
_CLEARLY = 8.0


class Precision(NamedTuple):
    """How labels were rounded. Rounding moves a label by at most half of its step."""

    name: str  # of the format they were rounded to in proportion to their size; float64 if none
    unit: float  # the last place of a label of size one
    floor: float  # relative residual at which labels of this precision are met exactly
    bits: int = _DOUBLE_BITS  # significant bits that the labels have
    grid: float = 0.0  # all labels are multiples of this; 0: of no step that matters

    @property
    def is_coarse(self) -> bool:
        """Whether labels were rounded by more than double precision does."""
        return self.bits < _DOUBLE_BITS or self.grid > 0

    def steps(self, labels: NDArray[Any]) -> Float64:
        """From each label to the next one that could be stored."""
        exponent = np.frexp(labels.astype(np.float64))[1]
        return np.maximum(np.ldexp(1.0, exponent - self.bits), self.grid)

    def describe(self) -> str:
        """In words that follow "labels ..."."""
        if self.name != "float64":
            return f"of {self.name}"
        if self.grid > 0:
            return f"that are multiples of {self.grid:.6g}"
        return f"of {self.bits} significant bits" if self.is_coarse else "of float64"


def find_precision(read: Callable[[], Iterable[Float64]]) -> Precision:
    """Coarse numbers are known by their values, however wide they are stored.

    read: begins a pass over the numbers, an array at a time.
    float32, float16 and bfloat16 round in proportion to a number's size, and residuals of such
    labels have a floor. Quantised numbers (integers, hundredths, a fixed number of binary places or
    of significant bits) are recognised too, but no precision is granted to them beyond double:
    their floor is that of float64. Cost: one pass over the numbers, two where they are of float32
    or coarser, an array or two if they are of double precision.
    """
    bits, lowest, squares, count = 0, 2000, 0.0, 0
    decimals = list(_DECIMALS)
    for labels in read():
        here, place = _significant_bits(labels)
        bits, lowest = max(bits, here), min(lowest, place)
        decimals = [places for places in decimals if _has_decimals(labels, places)]
        squares, count = squares + float(np.sum(labels**2)), count + labels.size
        if bits > _FORMATS["float32"][0] and not decimals:
            return _precision("float64")
    size = float(np.sqrt(squares / count)) if count else 0.0
    if size == 0.0:
        return _precision("float64")
    # A fixed step as large as the format's own at the typical label is not that of the format,
    # which rounds small labels more finely.
    grid = 2.0**lowest
    step = _decimal_step(read, bits, size) if bits <= _FORMATS["float32"][0] else 0.0
    if step > 0:  # rounded twice: to a decimal place, and to a format
        return _precision("float64")._replace(grid=step)
    if bits <= _FORMATS["float32"][0] and grid < 2.0 ** (np.floor(np.log2(size)) + 1 - bits):
        for name, (most, least) in _FORMATS.items():
            if bits == most and lowest >= least:
                return _precision(name)
        return _precision("float64")._replace(bits=bits)
    if decimals and 10.0 ** -decimals[0] > grid:
        grid = 10.0 ** -decimals[0]
    return _precision("float64")._replace(grid=grid)


def _precision(name: str) -> Precision:
    bits = _FORMATS[name][0] if name in _FORMATS else _DOUBLE_BITS
    unit = 2.0 ** (1 - bits)
    return Precision(name, unit, _LABEL_ULPS * unit + _COMPUTED, bits)


# No rounding is granted beyond that of double precision.
DOUBLE = _precision("float64")


def _significant_bits(labels: Float64) -> tuple[int, int]:
    """The most significant bits that a label has, and the lowest binary place that one has."""
    mantissa, exponent = np.frexp(np.abs(labels[labels != 0]))
    if mantissa.size == 0:
        return 0, 2000
    integer = np.ldexp(mantissa, _DOUBLE_BITS).astype(np.int64)
    zeros = np.frexp((integer & -integer).astype(np.float64))[1] - 1
    return int(_DOUBLE_BITS - zeros.min()), int(np.min(exponent - _DOUBLE_BITS + zeros))


def _has_decimals(labels: Float64, places: int, bits: int = _DOUBLE_BITS - 1) -> bool:
    """Whether all labels, stored with so many bits, have no more than so many decimal places."""
    scaled = labels * 10.0**places
    whole = np.round(scaled)
    return bool(np.all(np.abs(scaled - whole) <= 2.0 ** (1 - bits) * np.abs(whole)))


def _decimal_step(read: Callable[[], Iterable[Float64]], bits: int, size: float) -> float:
    """The decimal step that labels of a coarse format are multiples of, but for its rounding; 0
    where there is none that the format would not hide."""
    places = [p for p in _DECIMALS if 10.0**-p > _CLEARLY * 2.0 ** (1 - bits) * size]
    for labels in read():
        places = [p for p in places if _has_decimals(labels, p, bits)]
        if not places:
            break
    return 10.0 ** -places[0] if places else 0.0
