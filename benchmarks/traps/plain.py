"""Plain layers, in every precision, law of inputs and size: a judge that never says RECOVERED
would not be fooled either, so they are counted beside the traps."""

from typing import Any

from benchmarks.traps.boxes import UNITS, forward, stored
from benchmarks.traps.draw import Draw, Make, Trap

LAWS = ("boolean", "gaussian", "uniform", "few values", "correlated tokens")
# Heads, features, tokens, examples.
DENSE = {"small": (2, 4, 4, 96), "larger": (3, 6, 5, 240)}
NARROW = {"small": (2, 6, 4, 120), "larger": (3, 8, 5, 240)}
RANK = 2


def plain_layer(precision: str, law: str, size: str, rank: int | None) -> Make:
    kind = "dense" if rank is None else "narrow"
    cell = {"precision": precision, "inputs": law, "size": size, "heads": kind}
    settings: dict[str, Any] = {} if rank is None else {"head_dim": rank}

    def trap(d: Draw) -> Trap:
        d.m, d.d, d.k, n = (DENSE if rank is None else NARROW)[size]
        truth, x = d.layer(scale=2.0, rank=rank), d.inputs_of(law, n=n)
        y = stored(precision, forward(truth, x))
        y = y.astype(float) if d.seed % 2 else y  # labels are often kept wider than they are
        return Trap(x, y, truth, d.m, settings, unit=UNITS[precision], cell=cell)

    return trap


def named(heads: str, laws: tuple[str, ...], rank: int | None) -> dict[str, Make]:
    return {
        f"plain {heads}, {precision}, {law}, {size}": plain_layer(precision, law, size, rank)
        for size in DENSE
        for precision in UNITS
        for law in laws
    }


PLAIN: dict[str, Make] = named("dense", LAWS, None) | named("narrow", LAWS[:2], RANK)
