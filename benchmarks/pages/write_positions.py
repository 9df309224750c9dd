"""Write the tables of docs/positions.md from what four studies of decoders' heads measured."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

import mhalearn as mha
from benchmarks import DOCS
from benchmarks.ledger import Record, read_runs
from benchmarks.pages.prose import reflow
from benchmarks.studies import auto_kinds, decoder_traps, decoders, grouping

OUT = DOCS / "positions.md"
HEADING = "\n## Measured\n"

MEASURED = """
Written by `benchmarks/pages/write_positions.py` from `benchmarks/results/decoders.json`
(`benchmarks/studies/decoders.py`, which says what each column is), `grouping.json`,
`auto_kinds.json` and `decoder_traps.json`. Four causal heads of 8 dimensions, d = 32, 16 Gaussian
tokens, 20 times the counting limit of examples; made while others used the machine, hence seconds
of the processor, with compilation, most of which the first fit of a kind does. Each record names
the state of the code that made it. Adam is measured on as many seeds as the last column says.

"""
SHARED = """
What sharing saves (`benchmarks/studies/grouping.py`): four causal rotary heads of 4 dimensions,
d = 16, 12 Gaussian tokens, that share one set of keys and values, learned as such (`kv_heads`) and
as heads with keys and values of their own, which is right too and has {more} times as many
unknowns. Examples over the counting limit of the former; {limit:.0f} s of the clock a fit, on a
machine that others used.

"""
FOUND = """
All of rope, window, kv_heads, softcap, sinks and position_bias as `"auto"` at the size of the first
table (`benchmarks/studies/auto_kinds.py`). Right are all six, a base to 1e-6, and the layer.

"""
TRAPS = """
Each kind's labels fitted as each kind, in small (d = 8, two heads of 4, 6 tokens, 64 examples;
`benchmarks/studies/decoder_traps.py`): {fits} fits so far. RECOVERED is false where the layer does
not make the labels of fresh inputs to 1e-9. A kind is named right where the reason asks for just
the settings that the labels were made with; in the other fits the reason names no kind.

"""


def table(rows: list[tuple[str, ...] | list[str]]) -> str:
    head, *rest = ("| " + " | ".join(row) + " |\n" for row in rows)
    return head + "|---" * len(rows[0]) + "|\n" + "".join(rest)


def list_failures(runs: list[Record]) -> str:
    """A sentence for each fit that was not exact."""
    said = [
        f"Not exact: {run['variant']}, seed {run['seed']}: {run['outcome']}, off by "
        f"{run['error']:.0e}, after {run['seconds']:.0f} s of the clock, of which it had the "
        f"processor for {run['processor_seconds']:.0f}.\n"
        for run in runs
        if run["method"] == "newton" and not decoders.is_exact(run)
    ]
    return "\n" + reflow("".join(said)) if said else ""


def list_missed(runs: list[Record]) -> str:
    """A sentence for each layer that was not found with its kind."""
    said = []
    for run in runs:
        if auto_kinds.is_right(run):
            continue
        wrong = [name for name in auto_kinds.FIELDS if name not in run["right"]]
        what = f"wrong in {', '.join(wrong)}" if wrong else "its kind found"
        off = "another number of heads" if run["error"] is None else f"off by {run['error']:.0e}"
        said.append(f"{run['kind']}, seed {run['seed']}: {run['outcome']}, {what}, {off}")
    return "\n" + reflow(f"Not so: {'; '.join(said)}.\n") if said else ""


def count_more() -> str:
    """Unknowns of heads with their own keys, over those of heads that share one set."""
    sizes = (grouping.D, grouping.HEADS, grouping.HEAD_DIM)
    own, shared = (
        mha.Architecture(*sizes, causal=True, rope=grouping.ROPE, kv_heads=groups).count()
        for groups in (None, 1)
    )
    return f"{own / shared:.1f}"


def main() -> None:
    runs, traps = read_runs("decoders"), read_runs("decoder_traps")
    prose = OUT.read_text().split(HEADING)[0]
    fits = table([decoders.COLUMNS, *decoders.summarise(runs)])
    fooled = table([decoder_traps.COLUMNS, *decoder_traps.summarise(traps)])
    counted = reflow(TRAPS.format(fits=len(traps)))
    kinds = read_runs("auto_kinds")
    found = table([auto_kinds.COLUMNS, *auto_kinds.summarise(kinds)]) + list_missed(kinds)
    shared = table([grouping.COLUMNS, *grouping.summarise(read_runs("grouping"))])
    saved = reflow(SHARED.format(more=count_more(), limit=grouping.LIMIT))
    parts = (reflow(MEASURED), fits, list_failures(runs), "\n", saved, shared, "\n")
    last = f"{reflow(FOUND)}{found}\n{counted}{fooled}"
    OUT.write_text(f"{prose}{HEADING}\n{''.join(parts)}{last}")


if __name__ == "__main__":
    main()
