"""Eight layers to audit, two of them trained, and tokens: drawn, or recorded from text."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mhalearn as mha
from benchmarks import RESULTS
from benchmarks.recorded.small import HEADS, record_small, trained
from mhalearn.interop.factors import WeightFactors
from mhalearn.layer.qk_norm import QKNorm

D, DRAWN, TOKENS = 64, 32, 24  # features of the small transformer, of drawn layers; tokens
_ROTARY = {"d": DRAWN, "n_heads": 4, "head_dim": 8, "causal": True}
_BIASES = {"key_vector": True, "out_bias": True}
_MADE: dict[str, dict[str, Any]] = {
    "Llama-like, YaRN": _ROTARY
    | {
        "kv_heads": 2,
        "rope": mha.Rope(
            scaling={
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 512,
            }
        ),
    },
    "gpt-oss-like": _ROTARY
    | _BIASES
    | {"kv_heads": 2, "rope": mha.Rope(fraction=0.5), "sinks": True, "window": 7},
    "Gemma-like": _ROTARY
    | {"rope": mha.Rope(layout="interleaved"), "qk_norm": QKNorm(epsilon=1e-6), "softcap": 4.0},
    "ALiBi encoder": _ROTARY | _BIASES | {"position_bias": "alibi", "causal": False},
    "T5-like": _ROTARY | {"position_bias": "t5", "causal": False, "logit_scale": 1.0},
    "DeepSeek-like": _ROTARY | {"rope": mha.Rope(fraction=0.5), "latent": mha.Latent(12)},
}
NAMES = (*_MADE, "trained", "trained decoder")


@cache
def layer(name: str, seed: int = 1) -> Any:
    """A layer by its name; the trained ones are of small transformers."""
    if name == "trained decoder":
        return mha.load_layer(RESULTS / "decoder_layer.safetensors")
    return _trained() if name == "trained" else mha.random_layer(seed=seed, **_MADE[name])


def _trained() -> Any:
    """With its own weights and biases, as a port would hold them."""
    wide = {name: leaf.astype(np.float64) for name, leaf in trained(0).items()}
    h = D // HEADS
    sides = dict(zip(("query", "key", "value"), "qkv", strict=True))
    weights = {
        side: wide[f"1.{letter}"].reshape(D, HEADS, h).transpose(1, 2, 0)
        for side, letter in sides.items()
    }
    weights |= {
        f"{side}_bias": wide[f"1.{letter}.bias"].reshape(HEADS, h) for side, letter in sides.items()
    }
    out = {"out": wide["1.o"].reshape(HEADS, h, D), "out_bias": wide["1.o.bias"]}
    return WeightFactors(**weights, **out).to_layer(causal=True)


@cache
def _recording() -> Any:
    return record_small(1, 6000, 100)[0]


@cache
def tokens(name: str, kind: str, n: int, seed: int = 0) -> NDArray[Any]:
    """(n, k, d): drawn, or what goes into a trained layer on sentences long enough; of its features
    the first ones, for layers that have fewer."""
    if kind == "random":
        return np.random.default_rng(seed).standard_normal((n, TOKENS, layer(name).d))
    if name == "trained decoder":
        x = np.asarray(mha.load_examples(RESULTS / "decoder_text.safetensors").arrays()[0])
        chosen = np.random.default_rng(seed).permutation(len(x))[:n]
        return np.asarray(x[chosen, :TOKENS], np.float64)
    recorded = _recording()
    long = recorded.x[recorded.lengths >= 16][:, :16]
    chosen = np.random.default_rng(seed).permutation(len(long))[:n]
    return np.asarray(long[chosen, :, : layer(name).d], np.float64)
