"""Write docs/solver.md from what the studies of the exact solver measured."""

import sys
from collections import Counter, defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

import numpy as np

from benchmarks import DOCS
from benchmarks.ledger import read_runs
from benchmarks.peers.race import has_arrived, standings
from benchmarks.studies.frontier import good
from benchmarks.studies.hard_cases import is_exact
from benchmarks.studies.noise import best_settings, mean
from benchmarks.studies.speed import RACES, SMALL, small_medians

OUT = DOCS / "solver.md"

INTRO = """# The exact solver, measured

Written by `benchmarks/pages/write_solver.py` from the JSON in `benchmarks/results`; no figure here
is typed by hand. Records were made while the solver grew, the oldest (on a GPU, and some of the
lines with an open head count) by versions that searched less well; each names its machine, and the
newer ones their commit. Cores were shared, so times are upper bounds and near a limit also a cause
of failure.

**How it works** (`src/mhalearn/learners/newton`). W is eliminated by linear least squares, Theta
descends by damped Gauss-Newton steps: direct ones while there are few unknowns, by preconditioned
conjugate gradients beyond that. Starts come in rounds, each more patient. The first is a few steps
under a fading ridge, in single precision and on a part of the examples where there are plenty;
generic layers fall to it, by steps that are solved for loosely. Near the counting limit the ridge
fades over thousands of short first-order steps (`annealing.py`), and starts trade heads while a
weak ridge is still on (`head_exchange.py`). Many heads of known low rank are learned by their
factors instead (`factored.py`). Polish is the same descent to rounding; the certificate then
recomputes everything from the layer alone.

## How close to the counting limit

A teacher counts when every parameter is right to 1e-6 before and 1e-10 after polish. Nothing is
known about it but the number of heads; scales are estimated; at most sixteen starts and five
minutes. Peers have as many starts as they can begin in thirty seconds, on one teacher a line; that
their layers are often exact once they are polished too, by this solver's descent, is the fifth
column. Ratio: examples over the counting limit, after rounding up. The last lines are six heads on
eight features with one output a token, from at most 1,525 output scalars: what the best algorithm
that may choose its queries needs.

| case (m,d,k) | ratio | method | recovered | exact after polish | worst error | seconds, median |
|---|---|---|---|---|---|---|
"""

LIMITS = """
"Without slides" is the solver before annealing was slow: only long steps and traded heads, on a
GPU. Sharp attention (scale 6) is what fails near the limit, with eight heads always so far.
"""

SPEED = """
## How fast

![Time to a training error of 1e-20, and how it grows](images/speed.svg)

Seconds to a relative squared error of 1e-20 at the method's best setting, compilation apart; a
failure counts as the time limit. One core a run, three teachers unless the row says fewer. Dense
least squares is not run where its Jacobian is too large. Compilation: of the first fit of a shape,
which a persistent cache saves the next process.

| case | method | reached | seconds, median | times slower | compilation |
|---|---|---|---|---|---|
"""

SMALL_SPEED = """
The same beside L-BFGS of SciPy, optax and PyTorch alone, on later commits: by seconds of the
process on all its cores, and by those of the clock. Rows of e796dd1 are of two cores that did
nothing else; all others are of a machine that did much else, those of ddd108c of one core. Medians;
every teacher was learned by all methods in turn. Times slower: by process.

| case | method | reached | process s | clock s | times slower | commit |
|---|---|---|---|---|---|---|
"""

NEW_PROCESS = """
A small layer, certificate included, in a new process, by the clock from its start; and the next
layer of that shape in the same process. Filled: the compilation cache holds what an earlier process
compiled, as it does for the commands. Rows of d0d3c50 shared two cores with much other work, so
that the clock says little there.

| case | cache | layers | first fit, median s | its process s | second, median s | commit |
|---|---|---|---|---|---|---|
"""

HARD = """
## Hard cases

Eight times the counting limit of examples, four times on the generic lines (`hard_lines.py`).
Exact: to 1e-10 for the solver, to 1e-6 for its peers, which have ten seconds and one teacher. Head
count: how often it was right when it was left open, and how often too large.

| line | exact | worst | head count right | too large | peers, exact |
|---|---|---|---|---|---|
"""

NOISE = """
## Noise

Ten times the counting limit of examples, Gaussian noise of the given level relative to the labels.
Squared error over the Cramer-Rao bound, share of parameters inside their 95 % interval, and the
noise estimated over the noise there was.

| (m,d,k) | level | draws | error / bound | covered | noise / sigma | outcomes |
|---|---|---|---|---|---|---|
"""

SAFE = """
## Never fooled

Fits of at most 20 seconds on data made to mislead (`traps/`), judged by code of its own
(`trap_judge.py`). RECOVERED is false unless the layer is the true one to what the labels' rounding
allows; many traps are drawn so faint, or in float16, that now and then a layer does meet the labels
to their last place, and then it is true. A reason is false where it asserts noise, or gives
intervals for it, and the labels hold none. Where a family of layers fits (due), NOT_IDENTIFIED or
TOO_FEW_EXAMPLES is to be said; where it is not, the fit ended above rounding. Dimensions are
compared wherever one was stated and the judge could tell. REFUSED: units beyond double precision.

| trap | fits | outcomes | false RECOVERED | false reasons | family said / due | dimension right |
|---|---|---|---|---|---|---|
"""

PLAIN = """
Whoever never says RECOVERED is not fooled either: plain layers with ample examples, by the
precision of their labels, and by boxes that compute in that precision.

| labels | heads | inputs | size | fits | outcomes |
|---|---|---|---|---|---|
"""


def grouped(rows: list[dict], *names: str) -> dict[tuple, list[dict]]:
    groups = defaultdict(list)
    for row in rows:
        groups[tuple(row[name] for name in names)].append(row)
    return groups


def seconds(rows: list[dict]) -> float:
    return float(np.median([row.get("seconds", np.nan) for row in rows]))


def shown(error: float | None) -> str:
    return "-" if error is None else f"{error:.0e}"


def frontier_rows(rows: list[dict]) -> str:
    text = ""
    groups = grouped(rows, "case", "ratio", "method")
    for (case, ratio, method), mine in sorted(groups.items(), key=lambda item: item[0][:2]):
        worst = max((row["polished_error"] for row in mine if good(row)), default=None)
        polished = sum((row.get("polished_error") or 1.0) <= 1e-10 for row in mine)
        where = " (GPU)" if all(row.get("device", "cpu") != "cpu" for row in mine) else ""
        near = f"{ratio:.3f}" if ratio else "-"
        text += f"| {case} | {near} | {method}{where} | {sum(map(good, mine))}/{len(mine)} | "
        text += f"{polished}/{len(mine)} | {shown(worst)} | {seconds(mine):.3g} |\n"
    return text


def speed_rows(rows: list[dict]) -> str:
    text = ""
    for case, *_ in RACES:
        best = standings([r for r in rows if r["part"] == "race" and r["case"] == str(case)])
        for method, standing in best.items():
            if all("crashed" in row for row in standing.rows):
                text += f"| {case} | {method} | not run | - | - | - |\n"
                continue
            reached = sum(map(has_arrived, standing.rows))
            text += f"| {case} | {method} | {reached}/{len(standing.rows)} | {standing.median:.2g} "
            text += f"| {standing.median / best['newton'].median:.3g} | "
            text += f"{standing.compiling:.1f} |\n"
    return text


def small_speed_rows(rows: list[dict]) -> str:
    text = ""
    for case, *_ in SMALL:
        every = [row for row in rows if row["part"] == "lbfgs" and row["case"] == str(case)]
        for (code,), mine in grouped(every, "code").items():
            medians = small_medians(mine)
            for (name, setting), (arrived, of, worked, clock) in medians.items():
                slower = worked / medians["newton", ""][2]
                text += f"| {case} | {setting or name} | {arrived}/{of} | {worked:.2g} | "
                text += f"{clock:.2g} | {slower:.3g} | {code} |\n"
    return text


def new_process_rows(rows: list[dict]) -> str:
    text = ""
    timed = [row for row in rows if row["part"] in ("cold", "warm") and "code" in row]
    for (case, part, code), mine in grouped(timed, "case", "part", "code").items():
        first, processor, second = (
            np.median([row[name] for row in mine])
            for name in ("first_seconds", "first_processor_seconds", "second_seconds")
        )
        cache = "filled" if part == "warm" else "none"
        text += f"| {case} | {cache} | {len(mine)} | {first:.2f} | {processor:.2f} | "
        text += f"{second:.2g} | {code} |\n"
    return text


def hard_rows(rows: list[dict]) -> str:
    text = ""
    lines = grouped([row for row in rows if "left_out" not in row], "line")
    for (line,), mine in lines.items():
        of = {method: part for (method,), part in grouped(mine, "method").items()}
        solver, auto = of.pop("newton", []), of.pop("auto", [])
        errors = [row["error"] for row in (solver or auto) if is_exact(row)]
        right = sum(row.get("heads") == row.get("true_heads", -1) for row in auto)
        many = sum(row.get("heads", 0) > row.get("true_heads", np.inf) for row in auto)
        peers = ", ".join(
            f"{name} {sum(map(is_exact, part))}/{len(part)}" for name, part in of.items()
        )
        exact = f"{len(errors)}/{len(solver)}" if solver else "-"
        name = line.replace("|", "\\|")
        text += f"| {name} | {exact} | {shown(max(errors, default=None))} | "
        text += f"{right}/{len(auto)} | {many} | {peers or '-'} |\n"
    return text


def noise_rows(rows: list[dict]) -> str:
    text = ""
    for (shape, level, method), mine in best_settings(rows).items():
        if method != "newton":
            continue
        figures = [
            "{:.3f} ± {:.3f}".format(*mean(mine, n)) for n in ("ratio", "coverage", "noise_level")
        ]
        ends = ", ".join(f"{n} {name}" for name, n in Counter(r["outcome"] for r in mine).items())
        text += f"| {shape} | {level:g} | {len(mine)} | " + " | ".join(figures) + f" | {ends} |\n"
    return text


def safe_rows(rows: list[dict]) -> str:
    text = ""
    for (trap,), mine in grouped(rows, "trap").items():
        ends = Counter(row.get("outcome", "crashed") for row in mine).most_common()
        due = [row for row in mine if row.get("family")]
        said = sum(row["outcome"] in ("NOT_IDENTIFIED", "TOO_FEW_EXAMPLES") for row in due)
        stated = [row for row in mine if row.get("of_layer") is not None]
        right = sum(row["of_layer"] == row["stated"] for row in stated)
        text += f"| {trap} | {len(mine)} | {', '.join(f'{n} {name}' for name, n in ends)} | "
        false, words = (count(mine, name) for name in ("false", "false_words"))
        text += f"{false} | {words} | {said} / {len(due)} | {right} / {len(stated)} |\n"
    return text


def plain_rows(rows: list[dict]) -> str:
    text, names = "", ("precision", "heads", "inputs", "size")
    for cell, mine in grouped([row | row["cell"] for row in rows], *names).items():
        ends = Counter(row["outcome"] for row in mine).most_common()
        text += f"| {' | '.join(cell)} | {len(mine)} | "
        text += f"{', '.join(f'{n} {name}' for name, n in ends)} |\n"
    return text


def count(rows: list[dict], name: str) -> int:
    return sum(bool(row.get(name)) for row in rows)


def commits(rows: list[dict]) -> str:
    """Which ones, and how many rows each has."""
    found = Counter(row.get("commit", "unknown") for row in rows)
    return ", ".join(f"{name} ({n})" for name, n in found.items())


def main() -> None:
    traps = read_runs("fails_safely")
    false, words, crashed = (count(traps, name) for name in ("false", "false_words", "crashed"))
    OUT.write_text(
        INTRO
        + frontier_rows(read_runs("frontier"))
        + LIMITS
        + SPEED
        + speed_rows(read_runs("speed"))
        + SMALL_SPEED
        + small_speed_rows(read_runs("speed"))
        + NEW_PROCESS
        + new_process_rows(read_runs("first"))
        + HARD
        + hard_rows(read_runs("hard_cases"))
        + NOISE
        + noise_rows(read_runs("noise"))
        + SAFE
        + safe_rows([row for row in traps if "cell" not in row])
        + PLAIN
        + plain_rows([row for row in traps if "cell" in row])
        + f"\nIn all {len(traps)} fits, {false} false RECOVERED, {words} false reasons, "
        + f"{crashed} crashes, at commits {commits(traps)}.\n"
    )


if __name__ == "__main__":
    main()
