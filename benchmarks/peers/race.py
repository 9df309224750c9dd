"""Methods side by side on the same examples: seconds to the goal, compilation apart.

Seed by seed all methods run in turn, so whatever else the machine does falls on all of them. A
method that never arrives counts with the time limit. A run that compiled is made again and only the
time it spent compiling is kept; a run under a second is made three times and the fastest counts,
by seconds of the process where they are known.
The best setting of a method is chosen on the seeds it is reported for, which favours methods with
many settings.
"""

import statistics
from functools import partial
from typing import NamedTuple

import jax
from rich.table import Table

from benchmarks.cases import GOAL, Case, Method
from benchmarks.ledger import Ledger, Record, console

Entries = dict[str, dict[str, Method]]  # methods by name, their settings by name


class Compilation:
    """Seconds JAX has spent tracing, lowering and compiling."""

    def __init__(self) -> None:
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self.note)

    def note(self, event: str, seconds: float, **_: str | int) -> None:
        if event.startswith("/jax/core/compile/"):
            self.seconds += seconds


compilation = Compilation()
_SETTLED = 0.02  # seconds of compilation that do not spoil a run


def timed(method: Method, case: Case, seed: int, limit: float) -> Record:
    """The fastest of up to three runs that compiled nothing, and what compiling took before."""
    compiled, runs = 0.0, []
    for _ in range(5):
        before = compilation.seconds
        run = method(case, seed, limit)
        fresh = compilation.seconds - before
        compiled += fresh
        if fresh > _SETTLED * run.total:
            continue
        runs.append(run)
        if run.total >= 1 or len(runs) == 3:
            break
    best = min(runs or [run], key=lambda run: run.worked or run.total)
    return best.record() | ({"compile_seconds": compiled} if compiled > 0 else {})


def has_arrived(row: Record) -> bool:
    return row.get("reached") is not None


def seconds_of(row: Record) -> float:
    """What counts: the arrival at the goal; the limit for who never arrived."""
    return row["reached"] if has_arrived(row) else max(row["limit"], row.get("total", 0.0))


def race(
    ledger: Ledger, key: Record, case: Case, entries: Entries, seeds: range, limit: float
) -> list[Record]:
    """Run every method with every setting on every seed, as far as the ledger has not."""
    rows = []
    for seed in seeds:
        for name, settings in entries.items():
            for setting, method in settings.items():
                what = key | {"case": str(case), "method": name, "setting": setting}
                what |= {"limit": limit, "seed": seed}
                rows.append(ledger.run(what, partial(timed, method, case, seed, limit)))
    return rows


class Standing(NamedTuple):
    """How a method did with one setting."""

    method: str
    setting: str
    rows: list[Record]
    median: float
    compiling: float  # seconds, once


def standings(rows: list[Record]) -> dict[str, Standing]:
    """Every method's best setting by median time."""
    best: dict[str, Standing] = {}
    for name, setting in dict.fromkeys((row["method"], row["setting"]) for row in rows):
        same = [row for row in rows if row["method"] == name]
        mine = [row for row in same if row["setting"] == setting]
        # Settings may share a program, compiled by whichever came first.
        compiling = longestcompilation(mine) or longestcompilation(same)
        found = Standing(name, setting, mine, statistics.median(map(seconds_of, mine)), compiling)
        if name not in best or found.median < best[name].median:
            best[name] = found
    return best


def longestcompilation(rows: list[Record]) -> float:
    return max((row.get("compile_seconds", 0.0) for row in rows), default=0.0)


def print_race(rows: list[Record]) -> dict[str, float]:
    """A table of one case; returns how many times longer than the solver each method takes."""
    best = standings(rows)
    ratios = {name: standing.median / best["newton"].median for name, standing in best.items()}
    case, limit = rows[0]["case"], rows[0]["limit"]
    columns = "method", "best setting", "reached", "median s", "range", "starts", "worst error"
    title = f"Seconds to {GOAL:g}: {case}, limit {limit:g} s"
    table = Table(*columns, "compile s", "total s", "x newton", title=title)
    for name, standing in best.items():
        table.add_row(name, *describe(standing), f"{ratios[name]:.2f}")
    console.print(table)
    return ratios


def describe(best: Standing) -> tuple[str, ...]:
    crashes = [row["crashed"] for row in best.rows if "crashed" in row]
    if len(crashes) == len(best.rows):
        return crashes[0], f"0/{len(crashes)}", *["-"] * 6
    times = list(map(seconds_of, best.rows))
    starts = [row["starts"] for row in best.rows if "starts" in row]
    errors = [row["best"] for row in best.rows if row.get("best") is not None]
    return (
        best.setting,
        f"{sum(map(has_arrived, best.rows))}/{len(best.rows)}",
        f"{best.median:.3f}",
        f"{min(times):.3f}-{max(times):.3f}",
        f"{statistics.median(starts):g}",
        f"{max(errors):.1e}" if errors else "-",
        f"{best.compiling:.1f}",
        f"{best.median + best.compiling:.1f}",
    )
