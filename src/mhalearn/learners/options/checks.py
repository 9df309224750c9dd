"""What the numbers of a record of options may be."""

from __future__ import annotations

import math
import operator
from typing import Any


def check_counts(options: Any, *names: str, least: int = 1) -> None:
    for name in names:
        for value in _entries(options, name):
            try:
                count = operator.index(value)
            except TypeError:
                count = least - 1
            if count < least or isinstance(value, bool):
                raise ValueError(f"{name}={value!r}: pass an integer of at least {least}")


def check_positive(options: Any, *names: str, least: float | None = None) -> None:
    """Finite numbers above 0 or, with `least`, of at least that."""
    said = "a number above 0" if least is None else f"a number of at least {least:g}"
    for name in names:
        for value in _entries(options, name):
            try:
                known = math.isfinite(value) and not isinstance(value, bool)
            except TypeError:
                known = False
            if not (known and (value > 0 if least is None else value >= least)):
                raise ValueError(f"{name}={value!r}: pass {said}")


def _entries(options: Any, name: str) -> tuple[Any, ...]:
    """The value itself, or those of a tuple, which has as many as the default has."""
    value, usual = getattr(options, name), type(options).__dataclass_fields__[name].default
    if isinstance(usual, tuple):
        if not (isinstance(value, tuple) and len(value) == len(usual)):
            raise ValueError(f"{name}={value!r}: pass a tuple of {len(usual)} numbers")
        return value
    return (value,)
