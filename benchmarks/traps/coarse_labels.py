"""No layer, by a few units in the last place of coarse labels: where it is easiest to be fooled."""

from benchmarks.traps.bends import BENDS, Bend, tuned
from benchmarks.traps.boxes import UNITS
from benchmarks.traps.draw import Draw, Make, N, Trap, from_box

PRECISIONS = ("float32", "float16", "bfloat16")


def within_a_few_units(bend: Bend) -> Make:
    def trap(d: Draw) -> Trap:
        precision = d.pick(*PRECISIONS)
        layer, x = d.layer(scale=2.0), d.inputs(n=d.pick(N, N, 500, 1500))
        box = tuned(bend(d, layer), x, d.size(0.5, 30.0) * UNITS[precision])
        return from_box(d, box, x, d.m, precision)

    return trap


COARSE: dict[str, Make] = {
    f"coarse labels, {name}": within_a_few_units(bend) for name, bend in BENDS.items()
}
