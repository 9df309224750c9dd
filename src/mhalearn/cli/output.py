"""What commands print: one JSON object, or a few lines for a reader."""

import contextlib
import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def print_json(facts: Mapping[str, Any]) -> None:
    write(json.dumps(strict(facts), allow_nan=False) + "\n")


def strict(value: Any) -> Any:
    """What JSON can hold: numbers that are not finite become null, arrays lists, paths text."""
    if isinstance(value, Mapping):
        return {str(name): strict(item) for name, item in value.items()}
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # NumPy arrays and scalars
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def print_verdict(name: str, reason: str, facts: Mapping[str, str]) -> None:
    from rich.text import Text

    style = "bold green" if name in ("RECOVERED", "RECOVERED_ON_SPAN") else "bold yellow"
    _show(Text.assemble((name, style), f"  {reason}"))
    print_facts(facts)


def say_certificate(certificate: Any) -> str:
    """What a certificate promises, and what would make it promise more."""
    from mhalearn.judge.tail_bound import say_needed

    found = certificate
    more = "" if found.refitted else say_needed(found.n_exceeding, found.tail_bound, found.delta)
    return " ".join(filter(None, [found.statement, more]))


def print_facts(facts: Mapping[str, str]) -> None:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in facts.items():
        grid.add_row(Text(name, "dim"), Text(value))
    _show(grid)


def print_table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    _show(table)


def say_heads(n: int) -> str:
    return f"{n} head{'s' * (n != 1)}"


def times(n: int, limit: float) -> str:
    return f"{n / limit:.1f} times the counting limit of {limit:.1f}"


def write(text: str) -> None:
    """Write to standard output. A reader that went away does not change how the command ended."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # What is left in the buffer goes nowhere, so that the interpreter's last flush is quiet.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show(renderable: Any) -> None:
    """Print with rich: styled and wrapped on a terminal, plain lines elsewhere."""
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 10_000)
    with console.capture() as captured:
        console.print(renderable)
    write("".join(line.rstrip() + "\n" for line in captured.get().splitlines()))
