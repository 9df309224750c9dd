"""Random blocks worth learning: neither part drowns the other."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mhalearn._runtime.seeds import Stream, generator
from mhalearn._runtime.types import Float64
from mhalearn._runtime.validation import check_count
from mhalearn.layer.block.activations import Activation
from mhalearn.layer.block.block import Block
from mhalearn.layer.block.feed_forward import FeedForward
from mhalearn.layer.block.norms import Norm
from mhalearn.layer.random_layers import random_layer


def random_block(
    n_heads: int,
    d: int,
    hidden: int,
    activation: str = "gelu",
    norm: str | None = "pre",
    head_dim: int | None = None,
    bias: bool = True,
    seed: int = 0,
    *,
    scale: float = 2.0,
    norm_kind: str = "layer",
    epsilon: float = 1e-5,
    **heads: Any,
) -> Block:
    """A block with independent Gaussian heads and neurons.

    Attention is `random_layer(n_heads, d, scale, head_dim=head_dim, **heads)`, with its outputs
    over sqrt(n_heads); entries of `up` and `gate` are N(0, 1/d), of `down` N(0, 1/hidden), biases
    N(0, 1/4) where `bias` says so; gains of norms are exp(0.3 g), their biases N(0, 0.09).
    activation: relu, gelu, gelu_tanh, silu, glu, reglu, geglu, geglu_tanh or swiglu.
    norm: None, "pre" or "post"; norm_kind: "layer" or "rms"; epsilon: of the norms.
    """
    check_count("hidden", hidden)
    attention = random_layer(
        n_heads,
        d,
        scale,
        head_dim=head_dim,
        key_vector=bias,
        out_bias=bias,
        seed=seed,
        **heads,
    )
    small = 1 / math.sqrt(n_heads)
    if hasattr(attention, "w"):
        attention = attention.replace(w=attention.w * small)
    else:
        params = dict(attention.params)
        attention = attention.replace(params=params | {"out": params["out"] * small})
    rng = generator(seed, Stream.TEACHER, 1)
    recipe = (
        f"random_block(n_heads={n_heads}, d={d}, hidden={hidden}, activation={activation!r}, "
        f"norm={norm!r}, head_dim={head_dim}, bias={bias}, seed={seed}, scale={scale}, "
        f"norm_kind={norm_kind!r}, epsilon={epsilon})"
    )
    ff = _feed_forward(rng, d, hidden, activation, bias)
    norms = None
    if norm is not None:
        norms = tuple(_norm(rng, d, norm_kind, epsilon, bias) for _ in range(2))
    return Block(
        attention,
        ff,
        norm,
        norms,  # type: ignore[arg-type]
        metadata={"seed": str(seed), "teacher": recipe},
    )


def _feed_forward(
    rng: np.random.Generator, d: int, hidden: int, activation: str, bias: bool
) -> FeedForward:
    def draw(*shape: int, size: float) -> Float64:
        return size * rng.standard_normal(shape)

    named: dict[str, Float64] = {
        "up": draw(d, hidden, size=d**-0.5),
        "down": draw(hidden, d, size=hidden**-0.5),
    }
    if bias:
        named |= {"up_bias": draw(hidden, size=0.5), "down_bias": draw(d, size=0.5)}
    if Activation(activation).is_gated:
        named["gate"] = draw(d, hidden, size=d**-0.5)
        if bias:
            named["gate_bias"] = draw(hidden, size=0.5)
    return FeedForward(**named, activation=activation)


def _norm(rng: np.random.Generator, d: int, kind: str, epsilon: float, bias: bool) -> Norm:
    gain, shift = np.exp(0.3 * rng.standard_normal(d)), 0.3 * rng.standard_normal(d)
    return Norm(gain, shift if bias and kind == "layer" else None, kind, epsilon)
