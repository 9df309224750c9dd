"""Decoders with rotary positions, trained on text, of any shape.

    python benchmarks/recorded/decoder.py       train a small one; keep a layer and some inputs

Layers as Llama has them: RMS norms before, rotary queries and keys, grouped keys and values, with
biases or without, a gated perceptron; next-word prediction on the sentences of `sentences.py`,
Adam. The small one (d = 96, 6 heads of 16 that share 2 keys, 3 layers) trains in some ten minutes
on one busy core. The attention of its second layer, rounded to half precision, and its inputs on a
few sentences are what docs/rotary.md is about.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.recorded.small import RATE, WORDS, train_words, word_sequences
from mhalearn import Architecture, Examples, ProjectedLayer, Rope
from mhalearn.layer.projected import Projected

STEPS, EPSILON = 1500, 1e-5
KEPT = Path(__file__).parents[1] / "results"
LAYER, SENTENCES, LONGEST = 1, 24, 32
# Features from which on Adam takes smaller steps.
WIDTH = 96
Params = dict[str, Any]


class Shape(NamedTuple):
    """Of a decoder: its features, query heads, sets of keys and values, and their dimensions."""

    d: int
    heads: int
    groups: int
    width: int
    layers: int = 3
    hidden: int = 256
    bias: bool = False
    rope: Rope = Rope(base=10000.0)

    @property
    def attention(self) -> Architecture:
        shared = None if self.groups == self.heads else self.groups
        return Architecture(
            self.d,
            self.heads,
            self.width,
            causal=True,
            kv_heads=shared,
            rope=self.rope,
            bias=self.bias,
        )


SMALL = Shape(96, 6, 2, 16)


def _init(shape: Shape, seed: int) -> Params:
    rng = np.random.default_rng([seed, 0xDEC0])
    d, heads, width, hidden = shape.d, shape.heads, shape.width, shape.hidden
    shapes: dict[str, tuple[int, ...]] = {"words": (WORDS, d)}
    for at in range(shape.layers):
        shapes |= {f"{at}.query": (heads, d, width), f"{at}.out": (heads, width, d)}
        shapes |= {f"{at}.{side}": (shape.groups, d, width) for side in ("key", "value")}
        shapes |= {f"{at}.gate": (d, hidden), f"{at}.up": (d, hidden), f"{at}.down": (hidden, d)}
    params: Params = {}
    for name, sizes in shapes.items():
        inputs = heads * width if name.endswith("out") else sizes[-2]
        size = 0.1 if name == "words" else inputs**-0.5
        params[name] = (size * rng.standard_normal(sizes)).astype(np.float32)
    for at in range(shape.layers if shape.bias else 0):
        for side, count in (("query", heads), ("key", shape.groups), ("value", shape.groups)):
            params[f"{at}.{side}_bias"] = np.zeros((count, width), np.float32)
        params[f"{at}.out_bias"] = np.zeros(d, np.float32)
    gains = [f"{at}.{norm}" for at in range(shape.layers) for norm in ("norm1", "norm2")]
    return params | {name: np.ones(d, np.float32) for name in (*gains, "norm")}


def _norm(x: Any, gain: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + EPSILON) * gain


def _attend(x: Any, params: Params, at: int, shape: Shape) -> Any:
    n, k, _ = x.shape
    places = jnp.broadcast_to(jnp.arange(k, dtype=x.dtype), (n, k))

    def project(side: str) -> Any:
        made = jnp.einsum("nkd,mdh->nkmh", x, params[f"{at}.{side}"])
        return made + params[f"{at}.{side}_bias"] if shape.bias else made

    query, key, value = map(project, ("query", "key", "value"))
    query, key = (shape.rope.rotate(side, places, jnp.full(n, k)) for side in (query, key))
    key, value = (jnp.repeat(side, shape.heads // shape.groups, axis=2) for side in (key, value))
    scores = jnp.einsum("nrmh,njmh->nmrj", query, key) / shape.width**0.5
    p = jax.nn.softmax(jnp.where(jnp.tri(k, dtype=bool), scores, -jnp.inf))
    made = jnp.einsum("nmrj,njmh,mhe->nre", p, value, params[f"{at}.out"])
    return made + params[f"{at}.out_bias"] if shape.bias else made


def run(params: Params, numbers: Any, layer: int | None = None, *, shape: Shape) -> Any:
    """Input and output of a layer's attention; without one, scores of the next word."""
    x = params["words"][numbers]
    for at in range(shape.layers):
        given = _norm(x, params[f"{at}.norm1"])
        mixed = _attend(given, params, at, shape)
        if at == layer:
            return given, mixed
        x = x + mixed
        inner = _norm(x, params[f"{at}.norm2"])
        gated = jax.nn.silu(inner @ params[f"{at}.gate"]) * (inner @ params[f"{at}.up"])
        x = x + gated @ params[f"{at}.down"]
    return _norm(x, params["norm"]) @ params["words"].T


def train(shape: Shape = SMALL, steps: int = STEPS, seed: int = 0) -> tuple[Params, float]:
    """The parameters, and the loss of the last hundred steps."""
    made = partial(run, shape=shape)
    rate = RATE * min(1.0, WIDTH / shape.d) ** 0.5
    params, losses = train_words(_init(shape, seed), made, "decoder", steps, rate)
    return params, float(np.mean(losses[-100:]))


def layer_of(params: Params, at: int, shape: Shape, **metadata: str) -> ProjectedLayer:
    """The attention of a layer, rounded to half precision."""
    sides = Projected(shape.attention).shapes()
    halves = {side: params[f"{at}.{side}"].astype(np.float16) for side in sides}
    return ProjectedLayer(shape.attention, halves, metadata=metadata)


def inputs_of(params: Params, at: int, shape: Shape, count: int, longest: int = LONGEST) -> Any:
    """What a layer's attention is given, on so many sentences of `longest` words."""
    numbers, lengths = word_sequences()
    long = np.flatnonzero(lengths >= longest)
    chosen = numbers[long[:: max(1, len(long) // count)][:count], :longest]
    return np.asarray(jax.jit(partial(run, layer=at, shape=shape))(params, chosen)[0])


def running_text(count: int, longest: int = LONGEST) -> Any:
    """At most so many pieces of `longest` words of the sentences, one after the other."""
    numbers, lengths = word_sequences()
    words = numbers[np.arange(numbers.shape[1]) < lengths[:, None]]
    pieces = words[: len(words) // longest * longest].reshape(-1, longest)
    return pieces[:count]


def inputs_of_text(
    params: Params, at: int, shape: Shape, count: int, longest: int = LONGEST
) -> Any:
    """What a layer's attention is given on so much running text, a part after the other."""
    made = jax.jit(partial(run, layer=at, shape=shape))
    pieces, part = running_text(count, longest), 256
    found = [made(params, pieces[begun : begun + part])[0] for begun in range(0, len(pieces), part)]
    return np.concatenate([np.asarray(one) for one in found])


def keep(params: Params, loss: float, folder: Path = KEPT) -> None:
    """One layer and its inputs on a few sentences, as files of a layer and of examples."""
    said = {"trained": f"{STEPS} steps of Adam, loss {loss:.2f}", "layer": str(LAYER)}
    layer = layer_of(params, LAYER, SMALL, **said)
    layer.save(folder / "decoder_layer.safetensors")
    x = inputs_of(params, LAYER, SMALL, SENTENCES).astype(np.float16)
    examples = Examples(x, layer(x).astype(np.float16), metadata={"sentences": SENTENCES})
    examples.save(folder / "decoder_text.safetensors")


if __name__ == "__main__":
    keep(*train())
