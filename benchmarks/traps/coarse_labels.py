"""No layer, by a few units in the last place of coarse labels: where it is easiest to be fooled."""

from dataclasses import replace

import numpy as np

from benchmarks.traps.bends import BENDS, tuned
from benchmarks.traps.boxes import UNITS, Array
from benchmarks.traps.draw import Draw, Make, N, Trap, from_box

PRECISIONS = ("float32", "float16", "bfloat16")


# To whoever does not know the function these are noise, unless tokens come again.
PSEUDORANDOM = ("hashed sign", "fast waves")


def within_a_few_units(name: str, rank: int | None = None) -> Make:
    """rank: of all heads, where they are narrow and their rank is told."""

    def trap(d: Draw) -> Trap:
        precision = d.pick(*PRECISIONS)
        layer, x = d.layer(scale=2.0, rank=rank), d.inputs(n=d.pick(N, N, 500, 1500))
        box = tuned(BENDS[name](d, layer), x, d.size(0.5, 30.0) * UNITS[precision])
        tokens = x.reshape(-1, d.d)
        distinct = len(np.unique(tokens, axis=0)) == len(tokens)
        noisy = distinct and name in PSEUDORANDOM
        settings = {} if rank is None else {"head_dim": rank}
        found = from_box(d, box, x, d.m, precision, noisy=noisy, settings=settings)
        return replace(found, y=found.y.astype(d.pick(found.y.dtype, "float64")))

    return trap


def rows_of_all_sizes(d: Draw) -> Trap:
    """One token of an example is huge, and the error of all others is small beside it.

    A search seldom gets there: the layer is given as a start.
    """
    layer, x = d.layer(scale=2.0), d.inputs_of("gaussian", n=d.pick(N, 500))
    size = d.size(1e1, 1e3)
    slope = d.size(0.1, 10.0) * size * UNITS["float32"]

    def grown(x: Array) -> Array:
        return np.concatenate([size * x[:, :1], x[:, 1:]], axis=1)

    box = BENDS["distance bias"](d, layer)(slope)
    trap = from_box(d, box, grown(x), d.m, "float32", start=layer)
    return replace(trap, fresh=lambda n: grown(d.fresh()(n)))


COARSE: dict[str, Make] = {f"coarse labels, {name}": within_a_few_units(name) for name in BENDS}
COARSE["coarse labels, rows of all sizes"] = rows_of_all_sizes
for _name in ("soft cap", "distance bias", "rotation", "one more head"):
    COARSE[f"narrow heads, coarse labels, {_name}"] = within_a_few_units(_name, rank=2)
