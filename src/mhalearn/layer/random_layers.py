"""Random layers worth learning: attention neither flat nor saturated on +-1 and Gaussian tokens."""

import math

import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.seeds import Stream, generator
from mhalearn._runtime.validation import check_count, is_number
from mhalearn.layer.layer import AttentionLayer


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
) -> AttentionLayer:
    """A layer with independent Gaussian heads.

    theta: ||Theta_i||_F = scale exactly. Trained heads have 2 to 12; the default is their low end.
    w: entries N(0, 1/d). out_dim: columns of w, d unless given.
    rank: Theta_i and W_i are products of Gaussian factors with this inner dimension, as in a layer
        with heads of that width; norms as above (for w: the mean square of an entry is 1/d).
    key_vector: v_i with entries N(0, scale^2 / d^2), the size of one row of Theta_i; with a rank,
        in the row space of Theta_i, where a query bias puts it.
    out_bias: c with entries N(0, 1/d).
    Theta and w of a seed are the same with and without key_vector, out_bias and causal.
    """
    n_heads, d = check_count("n_heads", n_heads), check_count("d", d)
    e = d if out_dim is None else check_count("out_dim", out_dim)
    if rank is not None and check_count("rank", rank) > d:
        raise ValueError(f"rank={rank}: a {d} x {d} matrix has rank at most {d}")
    if not (is_number(scale) and 0 < scale < math.inf):
        raise ValueError(f"scale={scale!r}: pass a positive number, such as 2.0")
    rng = generator(seed, Stream.TEACHER)
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


def _gaussian(
    rng: np.random.Generator, count: int, rows: int, columns: int, rank: int | None
) -> NDArray[np.float64]:
    """Matrices whose entries have mean square one: dense, or of the given rank."""
    if rank is None:
        return rng.standard_normal((count, rows, columns))
    left = rng.standard_normal((count, rows, rank))
    return left @ rng.standard_normal((count, rank, columns)) / math.sqrt(rank)
