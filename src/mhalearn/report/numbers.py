"""Numbers as the report writes them."""

import math
import re
from typing import SupportsFloat

RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(quantity: SupportsFloat | None) -> str:
    """A number as text shows it: 0.25, 12, 3.1×10⁻¹⁵."""
    value = math.nan if quantity is None else float(quantity)
    if math.isnan(value):
        return "\N{EN DASH}"
    if math.isinf(value):
        return "\N{INFINITY}" if value > 0 else "\N{MINUS SIGN}\N{INFINITY}"
    if value == int(value) and abs(value) < 1e6:
        return str(int(value)).replace("-", "\N{MINUS SIGN}")
    if 1e-2 <= abs(value) < 1e5:
        return f"{value:{'.3g' if abs(value) < 1e3 else '.0f'}}".replace("-", "\N{MINUS SIGN}")
    return typeset(f"{value:.1e}".replace("-", "\N{MINUS SIGN}", int(value < 0)))


def typeset(text: str) -> str:
    """A sentence with its 3.1e-15 written as 3.1×10⁻¹⁵."""

    def power(match: re.Match[str]) -> str:
        return f"{match[1]}\N{MULTIPLICATION SIGN}10{str(int(match[2])).translate(RAISED)}"

    return re.sub(r"(?<![\w.])(\d+(?:\.\d+)?)e([+-]?\d+)(?![\w.]*\w)", power, text)


def short(value: float) -> str:
    """A number as a tick shows it: 0.25, 12, 3.1e-15."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if 1e-2 <= abs(value) < 1e4:
        return f"{value:{'.3g' if abs(value) < 1e3 else '.0f'}}"
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
