"""A small transformer trained on the same text: next-word prediction, d = 64, 4 heads, 3 layers.

Pre-norm, learned positions, GELU, Adam. It trains in a minute or two on two cores; the weights are
kept under build/ and are made anew where they are missing.
"""

from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import load_file, save_file

from benchmarks.recorded.recording import Recording, pad, split_tokens
from benchmarks.recorded.sentences import read_sentences
from mhalearn import AttentionLayer

D, HEADS, LAYERS, WORDS, LONGEST, SHORTEST = 64, 4, 3, 2000, 48, 8
STEPS, BATCH, RATE = 1500, 32, 3e-3
KEPT = Path(__file__).parents[2] / "build" / "small_transformer"
Params = dict[str, Any]


def record_small(layer: int, fit: int, other: int, seed: int = 0) -> tuple[Recording, Recording]:
    """The attention block of a layer on sentences of so many tokens, and on others.

    The model was trained on these sentences too, which changes nothing: what is learned here is its
    layer, not the language.
    """
    params = trained(seed)
    numbers, lengths = word_sequences()
    truth, found = _layer_of(params, layer), []
    for which in split_tokens(lengths, fit, other):
        k = int(lengths[which].max())
        with jax.enable_x64(True):
            wide = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), params)
            run = jax.jit(partial(_run, layer=layer))
            x, y = map(np.asarray, run(wide, numbers[which, :k]))
        found.append(Recording(x, y, lengths[which], truth, D // HEADS))
    return found[0], found[1]


@cache
def trained(seed: int = 0) -> Params:
    path = KEPT / f"seed{seed}.safetensors"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(_train(seed), path)
    return load_file(path)


@cache
def word_sequences() -> tuple[Any, Any]:
    """Words by their numbers, 1 for rare ones and 0 for what pads."""
    sentences = [sentence.lower().replace(".", " .").split() for sentence in read_sentences()]
    common = Counter(word for words in sentences for word in words).most_common(WORDS - 2)
    numbers = {word: 2 + place for place, (word, _) in enumerate(common)}
    coded = [[numbers.get(word, 1) for word in words] for words in sentences]
    return pad([words for words in coded if len(words) >= SHORTEST], LONGEST)


def _init(seed: int) -> Params:
    rng = np.random.default_rng([seed, 0x5A11])

    def normal(*shape: int, size: float) -> Any:
        return (size * rng.standard_normal(shape)).astype(np.float32)

    params = {"words": normal(WORDS, D, size=0.1), "places": normal(LONGEST, D, size=0.1)}
    for at in range(LAYERS):
        parts = {"q": (D, D), "k": (D, D), "v": (D, D), "o": (D, D), "up": (D, 4 * D)}
        for part, shape in (parts | {"down": (4 * D, D)}).items():
            params[f"{at}.{part}"] = normal(*shape, size=shape[0] ** -0.5)
            params[f"{at}.{part}.bias"] = np.zeros(shape[1], np.float32)
        for norm in ("norm1", "norm2"):
            params[f"{at}.{norm}.gain"] = np.ones(D, np.float32)
            params[f"{at}.{norm}.bias"] = np.zeros(D, np.float32)
    params["norm.gain"], params["norm.bias"] = np.ones(D, np.float32), np.zeros(D, np.float32)
    return params


def _norm(x: Any, params: Params, name: str) -> Any:
    centred = x - x.mean(axis=-1, keepdims=True)
    size = jnp.sqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + 1e-5)
    return centred / size * params[f"{name}.gain"] + params[f"{name}.bias"]


def _linear(x: Any, params: Params, name: str) -> Any:
    return x @ params[name] + params[f"{name}.bias"]


def _attend(x: Any, params: Params, at: int) -> Any:
    n, k, _ = x.shape
    q, key, v = (_linear(x, params, f"{at}.{p}").reshape(n, k, HEADS, -1) for p in "qkv")
    scores = jnp.einsum("nrmh,njmh->nmrj", q, key) / (D // HEADS) ** 0.5
    p = jax.nn.softmax(jnp.where(jnp.tri(k, dtype=bool), scores, -jnp.inf))
    return _linear(jnp.einsum("nmrj,njmh->nrmh", p, v).reshape(n, k, D), params, f"{at}.o")


def _run(params: Params, numbers: Any, layer: int | None = None) -> Any:
    """Input and output of a layer's attention block; without one, scores of the next word."""
    x = params["words"][numbers] + params["places"][: numbers.shape[1]]
    for at in range(LAYERS):
        given = _norm(x, params, f"{at}.norm1")
        mixed = _attend(given, params, at)
        if at == layer:
            return given, mixed
        x = x + mixed
        inner = jax.nn.gelu(_linear(_norm(x, params, f"{at}.norm2"), params, f"{at}.up"))
        x = x + _linear(inner, params, f"{at}.down")
    return _norm(x, params, "norm") @ params["words"].T


def _train(seed: int) -> Params:
    return train_words(_init(seed), _run, "small transformer", STEPS)[0]


def train_words(
    params: Params,
    run: Callable[[Params, Any], Any],
    name: str,
    steps: int,
    rate: float = RATE,
) -> tuple[Params, list[float]]:
    """Adam on the prediction of the next word: the parameters, and the loss of every step.

    run: from parameters and numbers of words to scores of the next one. rate: its largest.
    """
    numbers, _ = word_sequences()
    adam = optax.adam(optax.warmup_cosine_decay_schedule(0.0, rate, 100, steps))

    def loss(params: Params, batch: Any) -> Any:
        said = optax.softmax_cross_entropy_with_integer_labels(
            run(params, batch)[:, :-1], batch[:, 1:]
        )
        counts = batch[:, 1:] > 0
        return jnp.sum(said * counts) / jnp.sum(counts)

    @jax.jit
    def step(params: Params, memory: Any, batch: Any) -> Any:
        value, slope = jax.value_and_grad(loss)(params, batch)
        updates, memory = adam.update(slope, memory)
        return optax.apply_updates(params, updates), memory, value

    memory, order, losses = adam.init(params), np.arange(steps * BATCH) % len(numbers), []
    for at in range(steps):
        params, memory, value = step(params, memory, numbers[order[at * BATCH :][:BATCH]])
        losses.append(float(value))
        if at % 250 == 0 or at == steps - 1:
            print(f"{name}, step {at}: loss {losses[-1]:.2f}", flush=True)
    return {name: np.asarray(leaf) for name, leaf in params.items()}, losses


def _layer_of(params: Params, at: int) -> AttentionLayer:
    """The attention block as Theta, W, v and c, in float64."""
    wide = {name: leaf.astype(np.float64) for name, leaf in params.items()}
    h = D // HEADS
    q, key, v = (wide[f"{at}.{part}"].reshape(D, HEADS, h).swapaxes(0, 1) for part in "qkv")
    out = wide[f"{at}.o"].reshape(HEADS, h, D)
    of_query = wide[f"{at}.q.bias"].reshape(HEADS, h)
    bias = wide[f"{at}.v.bias"] @ wide[f"{at}.o"] + wide[f"{at}.o.bias"]
    vector = np.einsum("mdh,mh->md", key, of_query) / h**0.5
    return AttentionLayer(q @ key.swapaxes(1, 2) / h**0.5, v @ out, vector, bias, causal=True)
