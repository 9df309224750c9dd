"""What a fault is: a change of a reading, the heads it may concern, the words for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mhalearn.auditing.reading import Reading


@dataclass(frozen=True)
class Dial:
    """A number that a fault leaves open, and that is fitted.

    make: the edit with another number. grid: where the search begins, ascending.
    claimed: what it should be; None where nothing was claimed.
    """

    name: str
    value: float
    grid: tuple[float, ...]
    make: Callable[[float], Edit]
    claimed: float | None = None
    whole: bool = False

    def neighbours(self) -> tuple[float, float]:
        """Between which numbers of the grid it lies."""
        below = [one for one in self.grid if one < self.value]
        above = [one for one in self.grid if one > self.value]
        return (below[-1] if below else self.value, above[0] if above else self.value)


@dataclass(frozen=True)
class Edit:
    """One change of a reading, to be tried.

    said: a clause without the numbers of the trial. by_head: whether some heads may have it while
    others have not. dial: the number it was made with, where one is fitted. flips: it rounds, so
    that what lies between two steps may come out otherwise in a box. control: what it does beside,
    which a right box does too, and which must not count for it.
    """

    fault: str
    said: str
    change: Callable[[Reading], Reading]
    by_head: bool = True
    dial: Dial | None = None
    flips: bool = False
    control: Callable[[Reading], Reading] | None = None


@dataclass(frozen=True)
class Context:
    """What edits may depend on beside the reading.

    suspects: heads by how much of the residual lies in their outputs, the most first.
    precision: the format the box is taken to compute in. padded: whether lengths differ.
    """

    suspects: tuple[int, ...]
    precision: str
    padded: bool
    tokens: int


Edits = Callable[[Reading, Context], Iterable[Edit]]


@dataclass(frozen=True)
class Fault:
    """One entry of the catalogue.

    seen: public issues it was seen in, as owner/repository#number; empty where none is on record.
    """

    name: str
    family: str
    seen: tuple[str, ...]
    edits: Edits
    words: str  # for the table of the catalogue


def tell_apart(value: float, claimed: float) -> tuple[str, str]:
    """Two numbers with as many digits as it takes to see that they differ."""
    for digits in range(4, 13):
        said = f"{value:.{digits}g}", f"{claimed:.{digits}g}"
        if said[0] != said[1]:
            break
    return said


def dialled(
    fault: str,
    name: str,
    grid: Iterable[float],
    said: Callable[[float], str],
    change: Callable[[Reading, float], Reading],
    *,
    claimed: float | None = None,
    whole: bool = False,
    by_head: bool = True,
) -> Iterable[Edit]:
    """Edits with a number that is fitted, one for each number of the grid."""
    numbers = tuple(sorted(set(grid)))

    def make(value: float) -> Edit:
        dial = Dial(name, value, numbers, make, claimed, whole)
        return Edit(fault, said(value), lambda r: change(r, value), by_head, dial)

    return (make(value) for value in numbers if value != claimed)
