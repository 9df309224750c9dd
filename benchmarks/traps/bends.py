"""Ways to bend a layer's attention or outputs into no layer's, each with a strength.

At strength zero each is the plain layer; `draw` chooses the rest once, so that a box of another
strength differs in nothing else.
"""

from collections.abc import Callable

import numpy as np

from benchmarks.traps.boxes import Array, Box, Weigh, forward, logits_of, mix, rms, softmax
from benchmarks.traps.draw import Draw, Layer, plain

Bend = Callable[[Draw, Layer], Callable[[float], Box]]


def of_attention(weigh: Callable[[float, int, Array], Array]) -> Bend:
    """Weights that are another function of strength, tokens and logits than the softmax."""

    def bend(d: Draw, layer: Layer) -> Callable[[float], Box]:
        def box(strength: float) -> Box:
            bent: Weigh = lambda logits: weigh(strength, logits.shape[-1], logits)  # noqa: E731
            return lambda x: forward(layer, x, weigh=bent)

        return box

    return bend


def of_outputs(change: Callable[[Draw, Layer], Callable[[Array, Array], Array]]) -> Bend:
    """Outputs y plus strength times a function of inputs and outputs."""

    def bend(d: Draw, layer: Layer) -> Callable[[float], Box]:
        added, unbent = change(d, layer), plain(layer)
        return lambda strength: lambda x: unbent(x) + strength * added(x, unbent(x))

    return bend


def soft_cap(strength: float, k: int, logits: Array) -> Array:
    """The cap is the inverse of the strength."""
    return softmax(np.tanh(strength * logits) / strength)


def distance_bias(strength: float, k: int, logits: Array) -> Array:
    return softmax(logits - strength * np.abs(np.arange(k)[:, None] - np.arange(k)))


def sink(strength: float, k: int, logits: Array) -> Array:
    """One more token to attend to, of value zero."""
    top = np.maximum(logits.max(axis=-1, keepdims=True), 0.0)
    weights = np.exp(logits - top)
    return weights / (strength * np.exp(-top) + weights.sum(axis=-1, keepdims=True))


def position_temperature(strength: float, k: int, logits: Array) -> Array:
    return softmax(logits * (1 + strength * np.arange(k)[:, None]))


def head_temperatures(strength: float, k: int, logits: Array) -> Array:
    """Heads grow sharper and softer along the positions, in turn."""
    signs = 1.0 - 2.0 * (np.arange(logits.shape[1]) % 2)
    return softmax(logits * (1 + strength * signs[:, None, None] * np.arange(k)[:, None]))


def turned(x: Array, angle: float) -> Array:
    """The plane of the first two features, turned by the position times an angle."""
    angles, y = angle * np.arange(x.shape[1]), x.copy()
    y[..., 0] = np.cos(angles) * x[..., 0] - np.sin(angles) * x[..., 1]
    y[..., 1] = np.sin(angles) * x[..., 0] + np.cos(angles) * x[..., 1]
    return y


def rotation(d: Draw, layer: Layer) -> Callable[[float], Box]:
    def box(strength: float) -> Box:
        return lambda x: mix(layer, softmax(logits_of(layer, x, keys=turned(x, strength))), x)

    return box


def hashed_sign(d: Draw, layer: Layer) -> Callable[[Array, Array], Array]:
    """A sign a row that follows from its token, and changes with its seventh digit."""
    u = 1e7 * d.normal(d.d)
    return lambda x, y: y * np.where(np.sin(x @ u) > 0, 1.0, -1.0)[..., None]


def waves(d: Draw, layer: Layer) -> Callable[[Array, Array], Array]:
    inner = d.pick(10.0, 50.0) * d.normal(d.d, layer.w.shape[2])
    return lambda x, y: np.sin(x @ inner)


def one_more_head(d: Draw, layer: Layer) -> Callable[[Array, Array], Array]:
    other = d.layer(n_heads=1)
    return lambda x, y: forward(other, x)


def another_layer(d: Draw, layer: Layer) -> Callable[[Array, Array], Array]:
    other = d.layer()
    return lambda x, y: forward(other, x) - y


def gate(d: Draw, layer: Layer) -> Callable[[Array, Array], Array]:
    """Rows are scaled by a sigmoid of their token, at strength one between zero and two."""
    u = d.normal(d.d, layer.w.shape[2])
    return lambda x, y: y * np.tanh(x @ u / 2)


def network(d: Draw, layer: Layer) -> Callable[[Array, Array], Array]:
    added = d.network()
    return lambda x, y: added(x)


def by_position(d: Draw, layer: Layer) -> Callable[[Array, Array], Array]:
    return lambda x, y: y * np.linspace(-1.0, 1.0, x.shape[1])[:, None]


BENDS: dict[str, Bend] = {
    "soft cap": of_attention(soft_cap),
    "distance bias": of_attention(distance_bias),
    "sink": of_attention(sink),
    "rotation": rotation,
    "temperature by position": of_attention(position_temperature),
    "temperature by position and head": of_attention(head_temperatures),
    "hashed sign": of_outputs(hashed_sign),
    "fast waves": of_outputs(waves),
    "one more head": of_outputs(one_more_head),
    "two layers mixed": of_outputs(another_layer),
    "gate": of_outputs(gate),
    "cubic outputs": of_outputs(lambda d, layer: lambda x, y: y**3),
    "outputs by position": of_outputs(by_position),
    "network of the token": of_outputs(network),
}
# These are layers with more heads than the plain one: the number must be asked for.
MORE_HEADS = ("one more head", "two layers mixed")


def tuned(box: Callable[[float], Box], x: Array, relative: float) -> Box:
    """The box whose labels are off those of the plain layer by as much, root mean square."""
    unbent = box(1e-300)(x)
    low, high = -14.0, 3.0  # powers of ten, between which the deviation grows
    for _ in range(30):
        middle = (low + high) / 2
        off = rms(box(10**middle)(x) - unbent) / rms(unbent)
        low, high = (middle, high) if off < relative else (low, middle)
    return box(10**low)
