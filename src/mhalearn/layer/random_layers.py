"""Random layers worth learning: attention neither flat nor saturated on +-1 and Gaussian tokens."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.seeds import Stream, generator
from mhalearn._runtime.validation import check_count, is_number
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.latent import Latent, unfold
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.position_bias import PositionBias
from mhalearn.layer.projected import Projected
from mhalearn.layer.projected_layer import ProjectedLayer
from mhalearn.layer.qk_norm import QKNorm
from mhalearn.layer.rope import Rope


def random_layer(
    n_heads: int = 3,
    d: int = 16,
    scale: float = 2.0,
    rank: int | None = None,
    out_dim: int | None = None,
    key_vector: bool = False,
    out_bias: bool = False,
    seed: int = 0,
    causal: bool = False,
    *,
    head_dim: int | None = None,
    kv_heads: int | None = None,
    rope: Rope | None = None,
    window: int | None = None,
    sinks: bool = False,
    softcap: float | int | None = None,
    qk_norm: QKNorm | bool | str = False,
    position_bias: PositionBias | str | None = None,
    logit_scale: float | int | None = None,
    value_dim: int | None = None,
    memory: int | None = None,
    latent: Latent | None = None,
) -> Any:
    """A layer with independent Gaussian heads.

    theta: ||Theta_i||_F = scale exactly. Trained heads have 2 to 12; the default is their low end.
    w: entries N(0, 1/d). out_dim: columns of w, d unless given.
    rank: Theta_i and W_i are products of Gaussian factors with this inner dimension, as in a layer
        with heads of that width; norms as above (for w: the mean square of an entry is 1/d).
    key_vector: v_i with entries N(0, scale^2 / d^2), the size of one row of Theta_i; with a rank,
        in the row space of Theta_i, where a query bias puts it.
    out_bias: c with entries N(0, 1/d).
    Theta and w of a seed are the same with and without key_vector, out_bias and causal.

    head_dim: another word for rank. What follows it is as in `Architecture`, and makes a
    `ProjectedLayer`: Gaussian projections, with head_dim dimensions, where Theta_i is what queries
    and keys make at distance zero, before norms; key_vector means biases of queries and keys,
    out_bias of values and outputs. Otherwise the layer is an `AttentionLayer`.
    """
    if head_dim is not None:
        if rank not in (None, head_dim):
            raise ValueError(f"rank={rank} and head_dim={head_dim} mean the same: leave one out")
        rank = head_dim
    n_heads, d = check_count("n_heads", n_heads), check_count("d", d)
    e = d if out_dim is None else check_count("out_dim", out_dim)
    if rank is not None and check_count("rank", rank) > d:
        raise ValueError(f"rank={rank}: a {d} x {d} matrix has rank at most {d}")
    if not (is_number(scale) and 0 < scale < math.inf):
        raise ValueError(f"scale={scale!r}: pass a positive number, such as 2.0")
    asked = Architecture(
        d,
        n_heads,
        rank,
        e,
        bias=key_vector or out_bias,
        causal=causal,
        kv_heads=kv_heads,
        rope=rope,
        window=window,
        sinks=sinks,
        softcap=softcap,
        qk_norm=qk_norm,
        position_bias=position_bias,
        logit_scale=logit_scale,
        value_dim=value_dim,
        memory=memory,
        latent=latent,
    )
    rng = generator(seed, Stream.TEACHER)
    if not asked.is_plain:
        left_out = [] if key_vector else ["query_bias", "key_bias"]
        left_out += [] if out_bias else ["value_bias", "out_bias"]
        return _projected(asked, float(scale), left_out, seed, rng)
    theta = _gaussian(rng, n_heads, d, d, rank)
    theta *= scale / np.linalg.norm(theta, axis=(1, 2), keepdims=True)
    w = _gaussian(rng, n_heads, d, e, rank) / math.sqrt(d)
    v = rng.standard_normal((n_heads, d)) * (scale / d)
    if rank is not None:  # a query bias meets the keys through the same factor as the queries
        v = np.einsum("md,mde->me", v, theta) * math.sqrt(d) / scale
    c = rng.standard_normal(e) / math.sqrt(d)
    recipe = (
        f"random_layer(n_heads={n_heads}, d={d}, scale={scale}, rank={rank}, out_dim={out_dim}, "
        f"key_vector={key_vector}, out_bias={out_bias}, seed={seed}, causal={causal})"
    )
    return AttentionLayer(
        theta,
        w,
        v if key_vector else None,
        c if out_bias else None,
        causal,
        metadata={"seed": str(seed), "teacher": recipe},
    )


def _projected(
    a: Architecture, scale: float, left_out: list[str], seed: int, rng: np.random.Generator
) -> ProjectedLayer:
    """Heads of Gaussian projections, with Theta_i of norm `scale` where queries meet keys."""
    shapes = Projected(a).shapes()
    params = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    each = a.heads // a.groups
    for name in ("latent", "query_latent"):
        if name in params:  # latents of unit size, whether they are normalised or not
            params[name] /= math.sqrt(len(params[name]))
        if f"{name}_gain" in params:
            params[f"{name}_gain"] = np.exp(0.3 * params[f"{name}_gain"])
    whole = params if a.latent is None else unfold(params, a.latent, a.heads)
    key = np.repeat(whole["key"], each, axis=0)
    factor = a.qk_rank**-0.5 if a.logit_scale is None else a.logit_scale
    norms = np.linalg.norm(whole["query"] @ key.swapaxes(1, 2), axis=(1, 2))
    params["query"] *= (scale / (factor * norms))[:, None, None]
    for name in ("query", "key"):
        if f"{name}_bias" in params:  # as a token's feature of size one half would do
            params[f"{name}_bias"] *= 0.5 * np.std(params[name])
        if f"{name}_gain" in params:  # logits of normalised heads are as large as gains make them
            params[f"{name}_gain"] = math.sqrt(scale) * np.exp(0.3 * params[f"{name}_gain"])
    params["value"] /= math.sqrt(params["value"].shape[1])
    params["out"] /= math.sqrt(a.values)
    for name in ("value_bias", "out_bias"):
        if name in params:
            params[name] /= math.sqrt(a.d)
    kept = {name: leaf for name, leaf in params.items() if name not in left_out}
    extras = ", ".join(f"{name}={getattr(a, name)!r}" for name in a.extras())
    recipe = f"random_layer(n_heads={a.n_heads}, d={a.d}, scale={scale}, head_dim={a.head_dim}, "
    recipe += f"out_dim={a.out_dim}, seed={seed}, causal={a.causal}, {extras})"
    return ProjectedLayer(a, kept, metadata={"seed": str(seed), "teacher": recipe})


def _gaussian(
    rng: np.random.Generator, count: int, rows: int, columns: int, rank: int | None
) -> NDArray[np.float64]:
    """Matrices whose entries have mean square one: dense, or of the given rank."""
    if rank is None:
        return rng.standard_normal((count, rows, columns))
    left = rng.standard_normal((count, rows, rank))
    return left @ rng.standard_normal((count, rank, columns)) / math.sqrt(rank)
