"""Write the tables of docs/positions.md from what three studies of decoders' heads measured."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

from benchmarks import DOCS
from benchmarks.ledger import Record, read_runs
from benchmarks.pages.prose import reflow
from benchmarks.studies import auto_kinds, decoder_traps, decoders

OUT = DOCS / "positions.md"
HEADING = "\n## Measured\n"

MEASURED = """
Written by `benchmarks/pages/write_positions.py` from `benchmarks/results/decoders.json`
(`benchmarks/studies/decoders.py`, which says what each column is), `auto_kinds.json` and
`decoder_traps.json`. Four causal heads of 8 dimensions, d = 32, 16 Gaussian tokens, 20 times the
counting limit of examples; made while others used the machine, hence seconds of the processor, with
compilation, most of which the first fit of a kind does. Each record names the state of the code
that made it. Adam is not measured where the last column is empty, and else on one seed or a few.

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


def main() -> None:
    runs, traps = read_runs("decoders"), read_runs("decoder_traps")
    prose = OUT.read_text().split(HEADING)[0]
    fits = table([decoders.COLUMNS, *decoders.summarise(runs)])
    fooled = table([decoder_traps.COLUMNS, *decoder_traps.summarise(traps)])
    counted = reflow(TRAPS.format(fits=len(traps)))
    found = table([auto_kinds.COLUMNS, *auto_kinds.summarise(read_runs("auto_kinds"))])
    parts = (reflow(MEASURED), fits, list_failures(runs), "\n", reflow(FOUND), found)
    OUT.write_text(f"{prose}{HEADING}\n{''.join(parts)}\n{counted}{fooled}")


if __name__ == "__main__":
    main()
