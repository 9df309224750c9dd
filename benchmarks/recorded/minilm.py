"""all-MiniLM-L6-v2 in float64: what each attention block gets and gives on sentences."""

from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from benchmarks.recorded.recording import Recording, pad, split_tokens
from benchmarks.recorded.sentences import read_sentences
from benchmarks.recorded.wordpiece import WordPiece
from mhalearn import from_huggingface

HEADS, SHORTEST, LONGEST, EPS = 12, 8, 64, 1e-12
AT_ONCE = 256  # sentences
Weights = dict[str, Any]


def record_minilm(model: Path, layer: int, fit: int, other: int) -> tuple[Recording, Recording]:
    """The attention block of a layer on sentences of so many tokens, and on others."""
    numbers, lengths = _sequences(model.parent / "vocab.txt", fit + other)
    truth, found = from_huggingface(model, layer), []
    for which in split_tokens(lengths, fit, other):
        k = int(lengths[which].max())
        x, y = _run(_weights(model), numbers[which, :k], lengths[which], layer)
        found.append(Recording(x, y, lengths[which], truth, x.shape[2] // HEADS))
    return found[0], found[1]


@cache
def _sequences(vocabulary: Path, tokens: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Enough sentences of 8 to 64 tokens for so many tokens in all."""
    tokenize, kept = WordPiece(vocabulary), []
    every = (tokenize(sentence) for sentence in read_sentences())
    usual = (numbers for numbers in every if SHORTEST <= len(numbers) <= LONGEST)
    for numbers in usual:
        kept.append(numbers)
        tokens -= len(numbers)
        if tokens < -2 * LONGEST:
            break
    return pad(kept, LONGEST)


@cache
def _weights(model: Path) -> Weights:
    return {name: tensor.astype(np.float64) for name, tensor in load_file(model).items()}


def _run(
    weights: Weights, numbers: NDArray[np.int64], lengths: NDArray[np.int64], layer: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Input and output of the layer's attention block, before the residual path and its norm."""
    parts = range(0, len(numbers), AT_ONCE)
    with jax.enable_x64(True):
        run = jax.jit(partial(_record, layer=layer))
        placed = jax.tree.map(jnp.asarray, weights)
        made = [run(placed, numbers[at : at + AT_ONCE], lengths[at : at + AT_ONCE]) for at in parts]
        x, y = (
            np.concatenate([np.asarray(each) for each in part]) for part in zip(*made, strict=True)
        )
    return x, y


def _record(weights: Weights, numbers: Any, lengths: Any, layer: int) -> tuple[Any, Any]:
    k = numbers.shape[1]
    seen = jnp.arange(k) < lengths[:, None]
    x = weights["embeddings.word_embeddings.weight"][numbers]
    x = x + weights["embeddings.position_embeddings.weight"][:k]
    x = x + weights["embeddings.token_type_embeddings.weight"][0]
    x = _norm(x, weights, "embeddings.LayerNorm")
    for at in range(layer + 1):
        name = f"encoder.layer.{at}"
        y = _attend(x, seen, weights, f"{name}.attention")
        if at < layer:
            h = _norm(x + y, weights, f"{name}.attention.output.LayerNorm")
            inner = _linear(h, weights, f"{name}.intermediate.dense")
            inner = jax.nn.gelu(inner, approximate=False)
            out = _linear(inner, weights, f"{name}.output.dense")
            x = _norm(h + out, weights, f"{name}.output.LayerNorm")
    return x, y


def _attend(x: Any, seen: Any, weights: Weights, name: str) -> Any:
    n, k, d = x.shape
    query, key, value = (
        _linear(x, weights, f"{name}.self.{part}").reshape(n, k, HEADS, -1).swapaxes(1, 2)
        for part in ("query", "key", "value")
    )
    scores = query @ key.swapaxes(2, 3) / np.sqrt(d // HEADS)
    p = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf), axis=-1)
    mixed = (p @ value).swapaxes(1, 2).reshape(n, k, d)
    return _linear(mixed, weights, f"{name}.output.dense")


def _linear(x: Any, weights: Weights, name: str) -> Any:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def _norm(x: Any, weights: Weights, name: str) -> Any:
    centred = x - x.mean(axis=-1, keepdims=True)
    size = jnp.sqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + EPS)
    return centred / size * weights[f"{name}.weight"] + weights[f"{name}.bias"]
