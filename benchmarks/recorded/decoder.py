"""A small decoder with rotary positions, trained on text: d = 96, 6 heads of 16 that share 2 keys.

    python benchmarks/recorded/decoder.py       train it; keep one layer and some of its inputs

Three layers as Llama has them: RMS norms before, rotary queries and keys, grouped keys and values,
no biases, a gated perceptron; next-word prediction on the sentences of `sentences.py`, Adam. It
trains in some ten minutes on one busy core. The attention of its second layer, rounded to half
precision, and its inputs on a few sentences are what docs/rotary.md is about.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.recorded.small import WORDS, train_words, word_sequences
from mhalearn import Architecture, Examples, ProjectedLayer, Rope

D, HEADS, GROUPS, WIDTH, LAYERS, HIDDEN = 96, 6, 2, 16, 3, 256
STEPS, EPSILON = 1500, 1e-5
ROPE = Rope(base=10000.0)
KEPT = Path(__file__).parents[1] / "results"
LAYER, SENTENCES, LONGEST = 1, 24, 32
Params = dict[str, Any]


def _init(seed: int) -> Params:
    rng = np.random.default_rng([seed, 0xDEC0])
    shapes: dict[str, tuple[int, ...]] = {"words": (WORDS, D)}
    for at in range(LAYERS):
        shapes |= {f"{at}.query": (HEADS, D, WIDTH), f"{at}.out": (HEADS, WIDTH, D)}
        shapes |= {f"{at}.{side}": (GROUPS, D, WIDTH) for side in ("key", "value")}
        shapes |= {f"{at}.gate": (D, HIDDEN), f"{at}.up": (D, HIDDEN), f"{at}.down": (HIDDEN, D)}
    params: Params = {}
    for name, shape in shapes.items():
        inputs = HEADS * WIDTH if name.endswith("out") else shape[-2]
        size = 0.1 if name == "words" else inputs**-0.5
        params[name] = (size * rng.standard_normal(shape)).astype(np.float32)
    gains = [f"{at}.{norm}" for at in range(LAYERS) for norm in ("norm1", "norm2")]
    return params | {name: np.ones(D, np.float32) for name in (*gains, "norm")}


def _norm(x: Any, gain: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + EPSILON) * gain


def _attend(x: Any, params: Params, at: int) -> Any:
    n, k, _ = x.shape
    places = jnp.broadcast_to(jnp.arange(k, dtype=x.dtype), (n, k))
    query, key, value = (
        jnp.einsum("nkd,mdh->nkmh", x, params[f"{at}.{side}"]) for side in ("query", "key", "value")
    )
    query, key = (ROPE.rotate(side, places, jnp.full(n, k)) for side in (query, key))
    key, value = (jnp.repeat(side, HEADS // GROUPS, axis=2) for side in (key, value))
    scores = jnp.einsum("nrmh,njmh->nmrj", query, key) / WIDTH**0.5
    p = jax.nn.softmax(jnp.where(jnp.tri(k, dtype=bool), scores, -jnp.inf))
    return jnp.einsum("nmrj,njmh,mhe->nre", p, value, params[f"{at}.out"])


def _run(params: Params, numbers: Any, layer: int | None = None) -> Any:
    """Input and output of a layer's attention; without one, scores of the next word."""
    x = params["words"][numbers]
    for at in range(LAYERS):
        given = _norm(x, params[f"{at}.norm1"])
        mixed = _attend(given, params, at)
        if at == layer:
            return given, mixed
        x = x + mixed
        inner = _norm(x, params[f"{at}.norm2"])
        x = (
            x
            + (jax.nn.silu(inner @ params[f"{at}.gate"]) * (inner @ params[f"{at}.up"]))
            @ params[f"{at}.down"]
        )
    return _norm(x, params["norm"]) @ params["words"].T


def train(seed: int = 0) -> tuple[Params, float]:
    """The parameters, and the loss of the last hundred steps."""
    params, losses = train_words(_init(seed), _run, "small decoder", STEPS)
    return params, float(np.mean(losses[-100:]))


def keep(params: Params, loss: float, folder: Path = KEPT) -> None:
    """One layer and its inputs on a few sentences, as files of a layer and of examples."""
    a = Architecture(D, HEADS, WIDTH, causal=True, kv_heads=GROUPS, rope=ROPE)
    halves = {
        side: params[f"{LAYER}.{side}"].astype(np.float16)
        for side in ("query", "key", "value", "out")
    }
    said = {"trained": f"{STEPS} steps of Adam, loss {loss:.2f}", "layer": str(LAYER)}
    layer = ProjectedLayer(a, halves, metadata=said)
    layer.save(folder / "decoder_layer.safetensors")
    numbers, lengths = word_sequences()
    long = np.flatnonzero(lengths >= LONGEST)
    chosen = numbers[long[:: max(1, len(long) // SENTENCES)][:SENTENCES], :LONGEST]
    x, _ = jax.jit(partial(_run, layer=LAYER))(params, chosen)
    x = np.asarray(x, np.float16)
    examples = Examples(x, layer(x).astype(np.float16), metadata={"sentences": SENTENCES})
    examples.save(folder / "decoder_text.safetensors")


if __name__ == "__main__":
    keep(*train())
