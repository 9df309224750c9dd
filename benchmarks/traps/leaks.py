"""Examples that say nothing new: as many equations as unknowns, or training ones in disguise."""

from collections.abc import Callable

import numpy as np

from benchmarks.traps.boxes import Array, forward, rms
from benchmarks.traps.draw import Draw, Layer, Make, N, Trap, plain
from benchmarks.traps.families import reordered


def square_system(d: Draw) -> tuple[Array, Array, Layer]:
    """As many equations as unknowns: labels off the layer are fitted exactly."""
    widths = range(1, min(d.d, d.m * (d.k - 1)) + 1)
    fitting = [e for e in widths if d.m * d.d * (d.d + e) % (d.k * e) == 0]
    layer = d.layer(out_dim=max(fitting, default=1))
    x = d.inputs(n=d.m * d.d * (d.d + layer.w.shape[2]) // (d.k * layer.w.shape[2]))
    y = forward(layer, x)
    return x, y + d.size(1e-5, 1e-2) * rms(y) * d.normal(*y.shape), layer


def mirror_images(d: Draw) -> Trap:
    """A layer without biases is odd: the example (-X, -Y) says what (X, Y) says."""
    x, y, layer = square_system(d)
    x, y = np.concatenate([x, -x]), np.concatenate([y, -y])
    return Trap(x, y, None, d.m, start=layer, noisy=True)


def near_copies(d: Draw) -> Trap:
    x, y, layer = square_system(d)
    x = np.concatenate([x + 1e-14 * d.normal(*x.shape) for _ in range(6)])
    return Trap(x, np.concatenate([y] * 6), None, d.m, start=layer, noisy=True)


def few_tell(d: Draw) -> Trap:
    """Most examples have one token k times; the few others have arbitrary attention."""
    d.d, d.k = d.pick((6, 4), (6, 3), (4, 2))
    x, telling = d.inputs(), d.d**2 // (d.k * (d.k - 1))
    x[telling:] = x[telling:, :1]
    p = d.rng.dirichlet(np.full(d.k, 3.0), (N, d.k))
    order = d.rng.permutation(N)
    y = (p @ x @ d.normal(d.d, d.d))[order]
    return Trap(x[order], y, None, d.asked(1), noisy=True)


def certified_on(disguise: Callable[[Draw, Array, Array], tuple[Array, Array]]) -> Make:
    """A layer that interpolates noise, to be certified on its training examples in disguise."""

    def trap(d: Draw) -> Trap:
        x, y, layer = square_system(d)
        again = disguise(d, x, y)
        return Trap(
            x, y, None, d.m, start=layer, noisy=True, box=plain(layer), fresh=d.fresh(), again=again
        )

    return trap


def orders(d: Draw, x: Array, y: Array) -> tuple[Array, Array]:
    """One other order of the tokens of each example, or many."""
    both = np.concatenate([np.concatenate([x, y], axis=2)] * d.pick(1, 10, 60))
    both = reordered(d, both)
    return both[..., : x.shape[2]], both[..., x.shape[2] :]


def copies(d: Draw, x: Array, y: Array) -> tuple[Array, Array]:
    x = np.concatenate([x] * d.pick(1, 5))
    return x + d.size(1e-15, 1e-12) * d.normal(*x.shape), np.resize(y, (len(x), *y.shape[1:]))


LEAKS: dict[str, Make] = {
    "mirror images": mirror_images,
    "near copies": near_copies,
    "few examples tell": few_tell,
    "certified on reorderings": certified_on(orders),
    "certified on sign flips": certified_on(lambda d, x, y: (-x, -y)),
    "certified on near copies": certified_on(copies),
    "certified on flipped reorderings": certified_on(lambda d, x, y: orders(d, -x, -y)),
}
