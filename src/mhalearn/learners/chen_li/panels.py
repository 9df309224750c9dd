"""What a panel of a figure shows: curves, or named numbers."""

from dataclasses import dataclass
from typing import Literal

from mhalearn._runtime.types import Float64


@dataclass(frozen=True)
class Curve:
    """Points that are joined, or, as `dots`, are not; unnamed where it is the only one."""

    name: str
    x: Float64
    y: Float64
    dots: bool = False


@dataclass(frozen=True)
class Lines:
    """Curves over one axis. level: a dashed horizontal line, with its name; divide: a vertical one;
    top: where an axis that begins at zero ends."""

    title: str
    axis: str
    curves: tuple[Curve, ...]
    log: Literal["", "y", "xy"] = ""
    level: float | None = None
    level_name: str = ""
    divide: float | None = None
    top: float | None = None


@dataclass(frozen=True)
class Named:
    """Numbers with a name and a series each: a dot in the row of its name. level: a dashed line."""

    title: str
    entries: tuple[tuple[str, str, float], ...]
    log: bool = False
    from_zero: bool = False
    level: float | None = None

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for name, _, _ in self.entries))

    @property
    def series(self) -> list[str]:
        return list(dict.fromkeys(series for _, series, _ in self.entries))


Panel = Lines | Named
