"""Write the tables of docs/positions.md from what decoders.py and decoder_traps.py measured."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

from benchmarks import DOCS
from benchmarks.ledger import read_runs
from benchmarks.pages.prose import reflow
from benchmarks.studies import decoder_traps, decoders

OUT = DOCS / "positions.md"
HEADING = "\n## Measured\n"

MEASURED = """
Written by `benchmarks/pages/write_positions.py` from `benchmarks/results/decoders.json`
(`benchmarks/studies/decoders.py`, which says what each column is) and `decoder_traps.json`. Four
causal heads of 8 dimensions, d = 32, 16 Gaussian tokens, 20 times the counting limit of examples;
made while others used the machine, hence seconds of the processor, with compilation. Each record
names the state of the code that made it. Where fewer than ten seeds stand, the others are not
measured yet, and nor is Adam where the last column is empty. QK-norm is of code that still formed
J^T J of the wider class on CPUs, where others of its fits never ended; as it is now, none of this
size was followed to its end.

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


def main() -> None:
    runs, traps = read_runs("decoders"), read_runs("decoder_traps")
    prose = OUT.read_text().split(HEADING)[0]
    fits = table([decoders.COLUMNS, *decoders.summarise(runs)])
    fooled = table([decoder_traps.COLUMNS, *decoder_traps.summarise(traps)])
    counted = reflow(TRAPS.format(fits=len(traps)))
    OUT.write_text(f"{prose}{HEADING}\n{reflow(MEASURED)}{fits}\n{counted}{fooled}")


if __name__ == "__main__":
    main()
