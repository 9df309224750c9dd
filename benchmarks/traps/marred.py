"""Labels of a layer that were marred: whoever still finds it to 1e-6 says nothing false."""

from collections.abc import Callable

import numpy as np

from benchmarks.traps.boxes import Array, forward, rms
from benchmarks.traps.draw import Draw, Make, N, Trap


def marred(mar: Callable[[Draw, Array], Array], noisy: bool = False) -> Make:
    def trap(d: Draw) -> Trap:
        truth, x = d.layer(), d.inputs()
        y = d.rounded(mar(d, forward(truth, x)))
        return Trap(x, y, truth, d.asked(), noisy=noisy)

    return trap


def with_noise(draw: Callable[[Draw, Array], Array], gaussian: bool = False) -> Make:
    """Noise of size one, drawn with the labels at hand, times 1e-3 to 0.1 of their size."""

    def trap(d: Draw) -> Trap:
        truth, x = d.layer(scale=2.0), d.inputs(n=d.pick(N, 300))
        y = forward(truth, x)
        y = y + d.size(1e-3, 1e-1) * rms(y) * draw(d, y)
        return Trap(x, y, truth, d.m, noisy=True, gaussian=gaussian)

    return trap


def quantised(d: Draw) -> Trap:
    """A step for all labels, rather than one in proportion to each."""
    truth, x, step = d.layer(), d.inputs(), d.pick(10.0, 2.0) ** -int(d.rng.integers(1, 8))
    y = forward(truth, x)
    coarse = d.rounded(np.round(y / step) * step)
    return Trap(x, coarse, truth, d.asked(), unit=step / rms(y))


def fewer_bits(d: Draw) -> Trap:
    truth, x, bits = d.layer(), d.inputs(), int(d.rng.integers(3, 22))
    mantissa, exponent = np.frexp(forward(truth, x))
    y = np.ldexp(np.round(mantissa * 2**bits) / 2**bits, exponent)
    return Trap(x, y, truth, d.asked(), unit=2.0 ** (1 - bits))


def corrupted(d: Draw, y: Array) -> Array:
    """An entry, a row or an example is off, in one place or in a few."""
    by = d.size(1e-6, 10.0) * rms(y)
    for example in d.rng.integers(0, N, d.pick(1, 1, 3, 8)):
        y[(example, *d.pick((1, 0), (1,), ()))] += by
    return y


def exchanged(d: Draw, y: Array) -> Array:
    y[[3, 40]] = y[[40, 3]]
    return y


MARRED: dict[str, Make] = {
    "noise": marred(lambda d, y: y + d.size(1e-13, 1e-1) * rms(y) * d.normal(*y.shape), noisy=True),
    "gaussian noise": with_noise(lambda d, y: d.normal(*y.shape), gaussian=True),
    "laplace noise": with_noise(lambda d, y: d.rng.laplace(size=y.shape) / 2**0.5),
    "uniform noise": with_noise(lambda d, y: d.rng.uniform(-(3**0.5), 3**0.5, y.shape)),
    "multiplicative noise": with_noise(lambda d, y: y / rms(y) * d.normal(*y.shape)),
    "quantised labels": quantised,
    "fewer bits": fewer_bits,
    "corrupted labels": marred(corrupted),
    "two labels exchanged": marred(exchanged),
}
