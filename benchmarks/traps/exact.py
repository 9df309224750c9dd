"""Labels of a layer, exact but for their precision: what is due is the layer itself."""

from collections.abc import Callable

import numpy as np

from benchmarks.traps.boxes import UNITS, Array, forward, forward_in, rms, round_to, stored
from benchmarks.traps.draw import Draw, Layer, Make, N, Trap, from_layer


def exact(layer: Callable[[Draw], Layer], inputs: Callable[[Draw], Array] = Draw.inputs) -> Make:
    return lambda d: from_layer(d, layer(d), inputs(d))


def of_law(law: str) -> Make:
    return exact(Draw.layer, lambda d: d.inputs_of(law))


def with_small_head(d: Draw, size: float) -> Layer:
    layer = d.layer(n_heads=d.m + 1)
    return layer.replace(w=layer.w * np.append(np.ones(d.m), size)[:, None, None])


def nearly_equal_heads(d: Draw) -> Layer:
    one, apart = d.layer(n_heads=1), d.size(1e-9, 1e-1) * d.normal(d.d, d.d)
    other = d.pick(one.w[0], d.normal(d.d, d.d))
    return Layer(np.stack([one.theta[0], one.theta[0] + apart]), np.stack([one.w[0], other]))


def own_temperatures(d: Draw) -> Layer:
    """A temperature a head scales its Theta, and leaves a plain layer."""
    layer = d.layer()
    return layer.replace(theta=layer.theta * d.rng.uniform(0.3, 3.0, (d.m, 1, 1)))


def weak_feature(d: Draw) -> Array:
    x = d.inputs()
    x[..., -1] *= d.size(1e-8, 1e-1)
    return x


def small_feature(d: Draw) -> Array:
    x = d.inputs()
    x[..., 0] *= 1e-2
    return x


def rounded_inputs(d: Draw) -> Array:
    return round_to(d.pick("float32", "float16"), d.inputs())


def nearly_equal_tokens(d: Draw) -> Array:
    x = d.inputs()
    return x[:, :1] + d.size(1e-6, 1e-1) * x


def lengths_vary(d: Draw) -> Trap:
    truth, x, lengths = d.layer(), d.inputs(), d.rng.integers(1, d.k + 1, N)
    return Trap(x, forward(truth, x, lengths), truth, d.asked(), lengths=lengths)


def other_units(d: Draw) -> Trap:
    size = d.pick(1e200, 1e-200, 1e30, 1e-30, 1e6, 1e-6)
    truth, x = d.layer(), d.inputs()
    return Trap(x, size * forward(truth, x), truth.replace(w=size * truth.w), d.asked())


def units_of_both(d: Draw) -> Trap:
    """Inputs and labels in units of their own, which a caller may be asked to change."""
    of_x, of_y = (d.pick(1.0, 10.0 ** d.rng.uniform(-150, 150)) for _ in range(2))
    truth, x = d.layer(), d.inputs()
    scaled = truth.replace(theta=truth.theta / of_x / of_x, w=truth.w * (of_y / of_x))
    return Trap(of_x * x, of_y * forward(truth, x), scaled, d.asked())


def around_the_limit(low: float, high: float) -> Make:
    def trap(d: Draw) -> Trap:
        truth, x = d.layer(), d.inputs()
        limit = truth.architecture.with_heads(d.m).counting_limit(x.shape[1])
        x = x[: max(1, int(d.rng.uniform(low, high) * limit))]
        return Trap(x, forward(truth, x), truth, d.m)

    return trap


def computed_in(precision: str) -> Make:
    """A box that computes in the precision of its labels errs by more than their rounding."""

    def trap(d: Draw) -> Trap:
        drawn = d.layer(scale=d.pick(1.0, 2.0))
        truth = drawn.replace(
            theta=round_to(precision, drawn.theta), w=round_to(precision, drawn.w)
        )
        x = round_to(precision, d.inputs_of(d.pick("boolean", "gaussian"), n=d.pick(N, 500)))
        y, made = stored(precision, forward_in(precision, truth, x)), forward(truth, x)
        # Rounding to a unit leaves a standard deviation of 1 / sqrt(12) of it.
        unit = max(UNITS[precision], 12**0.5 * rms(y - made) / rms(made))
        cell = {"precision": f"computed in {precision}", "inputs": "any", "size": "any"}
        return Trap(x, y, truth, d.m, unit=unit, cell=cell | {"heads": "dense"})

    return trap


EXACT: dict[str, Make] = {
    "a plain layer": exact(Draw.layer),
    "lengths vary": lengths_vary,
    "other units": other_units,
    "units of inputs and labels": units_of_both,
    "saturated attention": exact(lambda d: d.layer(scale=d.pick(15.0, 30.0, 60.0))),
    "faint attention": exact(lambda d: d.layer(scale=d.size(1e-9, 1e-1))),
    "a temperature a head": exact(own_temperatures),
    "a small head": exact(lambda d: with_small_head(d, d.size(1e-9, 1e-3))),
    "nearly equal heads": exact(nearly_equal_heads),
    "a weak feature": exact(Draw.layer, weak_feature),
    "a feature of 1e-2": exact(Draw.layer, small_feature),
    "nearly equal tokens": exact(Draw.layer, nearly_equal_tokens),
    "below the counting limit": around_the_limit(0.3, 1.0),
    "just above the counting limit": around_the_limit(1.0, 2.2),
    "cauchy inputs": of_law("cauchy"),
    "t2 inputs": of_law("t2"),
    "few distinct values": of_law("few values"),
    "correlated tokens": of_law("correlated tokens"),
    "a common token": of_law("a common token"),
    "rounded inputs": exact(Draw.layer, rounded_inputs),
    "computed in float32": computed_in("float32"),
    "computed in float16": computed_in("float16"),
    "computed in bfloat16": computed_in("bfloat16"),
}
