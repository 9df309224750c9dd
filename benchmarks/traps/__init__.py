"""Data made to mislead, drawn from a name and a seed, and what is true about them."""

from benchmarks.traps.coarse_labels import COARSE
from benchmarks.traps.draw import SHAPES, Draw, Make, Trap
from benchmarks.traps.exact import EXACT
from benchmarks.traps.families import FAMILIES
from benchmarks.traps.leaks import LEAKS
from benchmarks.traps.marred import MARRED
from benchmarks.traps.narrow import NARROW, WIDE_TRAPS
from benchmarks.traps.no_layer import NO_LAYER
from benchmarks.traps.plain import PLAIN

SMALL: dict[str, Make] = EXACT | FAMILIES | LEAKS | NO_LAYER | COARSE | MARRED | NARROW
TRAPS: dict[str, Make] = SMALL | PLAIN | WIDE_TRAPS

__all__ = ["PLAIN", "SHAPES", "SMALL", "TRAPS", "WIDE_TRAPS", "Draw", "Trap"]
