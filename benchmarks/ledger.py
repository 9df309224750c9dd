"""Results on disk: a JSON file that keeps every run, failures and crashes included."""

import argparse
import json
import math
import os
import platform
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import optimistix
import scipy
from rich.console import Console

from benchmarks import RESULTS, describe_code

Record = dict[str, Any]
console = Console(width=150)


class Ledger:
    """One record a run, found again by what was run and on what.

    What was run comes first in a record, up to the machine; what was found follows.
    """

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        self.path = path
        self.machine, self.code = describe_machine(), describe_code()
        self.records: list[Record] = []
        if path.exists() and not fresh:
            self.records = json.loads(path.read_text())["runs"]

    def run(self, key: Record, measure: Callable[[], Record]) -> Record:
        """Measure, unless the record is there already, and write the file."""
        known = self.find(key)
        if known is not None:
            return known
        key = key | {"machine": self.machine}
        try:
            found = measure()
        except Exception as error:  # a crash is a result too
            found = {"crashed": f"{type(error).__name__}: {error}"[:300]}
        record = key | found | {"device": jax.devices()[0].device_kind, "code": self.code}
        self.records.append(record)
        self.write()
        return record

    def find(self, key: Record) -> Record | None:
        """The record of what was run on this machine, if there is one."""
        wanted = (key | {"machine": self.machine}).items()
        for record in self.records:
            if all(record.get(name) == value for name, value in wanted):
                return record
        return None

    def absorb(self, paths: Iterable[Path | str]) -> None:
        """Take over the records of other files; of runs made twice the one here stays."""
        known = {what_was_run(record) for record in self.records}
        for path in paths:
            for record in json.loads(Path(path).read_text())["runs"]:
                if what_was_run(record) not in known:
                    known.add(what_was_run(record))
                    self.records.append(record)
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps({"runs": self.records}, indent=1, allow_nan=False) + "\n")
        os.replace(part, self.path)


def read_runs(name: str) -> list[Record]:
    """What a study has measured."""
    return json.loads((RESULTS / f"{name}.json").read_text())["runs"]


def study(doc: str, name: str, seeds: str, methods: str) -> argparse.ArgumentParser:
    """What the command lines of all studies have in common."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--seeds", type=seed_range, default=seeds, help="start:stop")
    parser.add_argument("--methods", type=names, default=methods, help="names between commas")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json")
    parser.add_argument("--merge", nargs="+", default=[], help="take over runs made elsewhere")
    parser.add_argument("--table", action="store_true", help="run nothing")
    return parser


def seed_range(text: str) -> range:
    return range(*map(int, text.split(":")))


def names(text: str) -> list[str]:
    """Names between commas; a comma before a space belongs to a name."""
    return re.split(r",(?! )", text)


def opened(options: argparse.Namespace) -> tuple[Ledger, bool]:
    """The ledger asked for, and whether there is anything to run."""
    ledger = Ledger(options.out)
    if options.merge:
        ledger.absorb(options.merge)
    return ledger, not (options.merge or options.table)


def what_was_run(record: Record) -> str:
    names = list(record)
    return json.dumps([record[name] for name in names[: names.index("machine") + 1]])


def describe_machine() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"{cores} cores, {platform.machine()}, {jax.default_backend()}, Python "
        f"{platform.python_version()}, jax {jax.__version__}, numpy {np.__version__}, "
        f"scipy {scipy.__version__}, optax {optax.__version__}, optimistix {optimistix.__version__}"
    )


def finite(value: float) -> float | None:
    """JSON has no infinity."""
    return float(value) if math.isfinite(value) else None


def say_bar(text: str, held: bool) -> None:
    console.print(f"{'[green]holds' if held else '[red]MISSED'}[/]: {text}")
