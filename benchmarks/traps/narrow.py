"""Heads of given rank: told too low or too high, and so wide a layer that factors are searched for.

The wide ones resume near the layer: what is asked is the verdict, and a search takes minutes.
"""

from collections.abc import Callable
from dataclasses import replace

from benchmarks.traps.boxes import UNITS, forward, rms, stored
from benchmarks.traps.draw import Draw, Layer, Make, Trap, from_box, plain

# The smallest layers of rank two that are learned by their factors.
WIDE = (2, 128, 4, 240)
RANK = 2


def told_rank(offset: int) -> Make:
    """Heads of rank two, and another rank told: one too high leaves the layer among the allowed."""

    def trap(d: Draw) -> Trap:
        d.d = max(5, d.d)
        truth, x = d.layer(rank=2), d.inputs()
        settings = {"head_dim": 2 + offset}
        if offset < 0:
            return from_box(d, plain(truth), x, d.m, settings=settings)
        return Trap(x, d.rounded(forward(truth, x)), truth, d.m, settings)

    return trap


def scaled_feature(d: Draw) -> Trap:
    """Narrow heads, one feature of 1e-2."""
    d.d = max(5, d.d)
    truth, x = d.layer(rank=2), d.inputs()
    x[..., 0] *= 1e-2
    return Trap(x, d.rounded(forward(truth, x)), truth, d.m, {"head_dim": 2})


def wide(change: Callable[[Draw, Trap], Trap] = lambda d, trap: trap) -> Make:
    def trap(d: Draw) -> Trap:
        d.m, d.d, d.k, n = WIDE
        truth, x = d.layer(scale=3.0, rank=RANK), d.inputs_of(d.pick("gaussian", "boolean"), n=n)
        start = truth.replace(w=truth.w * (1 + 1e-3 * d.normal(d.m, 1, 1)))
        precision = d.pick("float64", "float32")
        y = stored(precision, forward(truth, x))
        settings = {"head_dim": RANK, "max_seconds": 40.0}  # compilation alone takes ten
        found = Trap(x, y, truth, d.m, settings, start=start, unit=UNITS[precision])
        return change(d, found)

    return trap


def small_head_missing(d: Draw, trap: Trap) -> Trap:
    """One more head, of a few units in the last place up to a percent."""
    truth: Layer = trap.truth
    more = d.layer(n_heads=1, rank=RANK)
    size = d.size(2 * trap.last_place, 1e-2) if trap.unit > 1e-10 else d.size(1e-9, 1e-2)
    y = forward(truth, trap.x)
    by = size * rms(y) / rms(forward(more, trap.x))

    def box(x):
        return forward(truth, x) + by * forward(more, x)

    name = str(trap.y.dtype)
    made = from_box(d, box, trap.x, d.m, name, settings=trap.settings)
    return replace(made, start=trap.start)


def noisy(d: Draw, trap: Trap) -> Trap:
    y = trap.y + d.size(1e-3, 1e-1) * rms(trap.y) * d.normal(*trap.y.shape)
    return replace(trap, y=y, unit=0.0, noisy=True)


NARROW: dict[str, Make] = {
    "a rank of one less": told_rank(-1),
    "a rank of one more": told_rank(1),
    "narrow heads, a feature of 1e-2": scaled_feature,
}
WIDE_TRAPS: dict[str, Make] = {
    "wide layer of narrow heads": wide(),
    "wide layer, a small head missing": wide(small_head_missing),
    "wide layer, noise": wide(noisy),
}
