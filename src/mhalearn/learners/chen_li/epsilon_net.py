"""Phase 6 as the paper states it: a net over all m-tuples of the span, W by least squares, and a
validation set that chooses, with the statement that its size allows.

Ours: the radius and the spacing of the net, and the Gram matrices between the means of all points,
from which each tuple's least squares and its error follow without another look at the examples.
"""

import itertools
import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.programs import in_float64
from mhalearn._runtime.types import Array, Float, Float64, Int
from mhalearn.layer.attention import attend
from mhalearn.layer.batches import Chunk, sum_over_chunks
from mhalearn.layer.layer import AttentionLayer
from mhalearn.learners.chen_li.span import Span
from mhalearn.solvers.scaled_problem import Problem

# Tuples solved at once, and most of them: more would outlast all other phases.
_AT_ONCE, _MOST = 1024, 4_000_000
# Parts in which the Gram matrix is made, each from its own diagonal on.
_SLABS = 8


@dataclass(frozen=True)
class Generalisation:
    """With probability 1 - delta over the draw of the validation examples the chosen candidate's
    expected error is at most `bound`, where an example's error is |y - F|^2 over the mean |y|^2,
    and counts as `clip` where it is more.

    Source: the empirical Bernstein bound (Maurer and Pontil, 2009), for all candidates at once.
    Trust: proved for independent examples of which none was used to make the candidates.
    """

    error: float
    bound: float
    delta: float
    candidates: int
    examples: int
    clip: float


def net_points(span: Span, radius: float, spacing: float) -> Float64:
    """The grid of the given spacing in the ball of the given radius, both in units of the proxy's
    norm, in the coordinates of the span: (p, m, d, d) summed to (p, d, d)."""
    if not (radius > 0 and spacing > 0):
        raise ValueError(f"radius={radius}, spacing={spacing}: pass positive numbers")
    reach = math.floor(radius / spacing)
    ticks = np.arange(-reach, reach + 1) * spacing
    grid = np.array(list(itertools.product(ticks, repeat=span.n_heads)))
    grid = grid[np.sum(grid**2, axis=1) <= radius**2]
    if len(grid) < span.n_heads:
        raise ValueError(
            f"radius={radius}, spacing={spacing}: {len(grid)} points; pass a smaller spacing"
        )
    norm = float(np.linalg.norm(span.proxy))
    return norm * np.einsum("cs,sab->cab", grid, span.basis)


@partial(jax.jit, static_argnames="at_once")
def _gram_matrices(
    points: Float[Array, "p d d"], data: Chunk, at_once: int
) -> tuple[Float[Array, "f f"], Float[Array, "f e"], Float[Array, ""]]:
    """Inner products of all points' means, and of these with the labels; the labels' energy.

    Of the first only those of a point with itself and with later ones: the others are the same.
    """
    groups = points.reshape(-1, at_once, *points.shape[1:])
    width = points.shape[0] * points.shape[1]
    edges = [width * slab // _SLABS for slab in range(_SLABS + 1)]

    def moments(chunk: Chunk) -> tuple[list[Array], Array, Array]:
        labels = chunk.labels * chunk.weight[..., None]
        means = jax.lax.map(lambda group: attend(group, chunk).means, groups)  # (g, b, k, a, d)
        rows = chunk.weight.size
        long = jnp.moveaxis(means, 0, 2).reshape(rows, -1) * chunk.weight.reshape(rows, 1)
        flat = labels.reshape(rows, -1)
        slabs = [long[:, a:b].T @ long[:, a:] for a, b in itertools.pairwise(edges)]
        return slabs, long.T @ flat, jnp.sum(flat**2)

    slabs, onto, energy = sum_over_chunks(moments, data)
    return (
        jnp.concatenate([jnp.pad(s, ((0, 0), (width - s.shape[1], 0))) for s in slabs]),
        onto,
        energy,
    )


@partial(jax.jit, static_argnames="d")
def _tuple_errors(
    tuples: Int[Array, "t m"],
    fit: tuple[Array, Array, Array],
    held: tuple[Array, Array, Array],
    d: int,
) -> Float[Array, " t"]:
    def columns(one: Array) -> Array:
        return (one[:, None] * d + jnp.arange(d)).reshape(-1)

    def error(one: Array) -> Array:
        chosen = columns(one)
        gram = _mirrored(fit[0][chosen[:, None], chosen])
        floor = 1e-10 * jnp.trace(gram) / len(chosen)
        w = jax.scipy.linalg.solve(
            gram + floor * jnp.eye(len(chosen)), fit[1][chosen], assume_a="pos"
        )
        shown = _mirrored(held[0][chosen[:, None], chosen])
        return held[2] - 2 * jnp.sum(w * held[1][chosen]) + jnp.sum(w * (shown @ w))

    return jax.lax.map(error, tuples, batch_size=64) / held[2]


def _mirrored(upper: Array) -> Array:
    """The symmetric matrix of which the upper triangle is given."""
    return jnp.triu(upper) + jnp.triu(upper, 1).T


@in_float64
def literal_net(
    span: Span, fit: Problem, held: Problem, *, radius: float, spacing: float
) -> tuple[AttentionLayer, float, Float64]:
    """The best of all m-tuples of net points on held-out examples; its error; all errors, sorted.

    Source: phase 6 of Chen & Li. Cost: with p points, O(rows p^2 d^2) for the Gram matrices and
    O(p^m (m d)^3) for the tuples. Memory: O(p^2 d^2).
    Trust: by continuity it contains a good candidate once the span is near the heads', the radius
    large and the spacing small enough; how large and small is not known before.
    """
    points = net_points(span, radius, spacing)
    m, d, count = span.n_heads, points.shape[1], len(points)
    if math.comb(count, m) > _MOST:
        raise ValueError(
            f"radius={radius}, spacing={spacing}: {math.comb(count, m)} tuples of {m} points; pass "
            "a larger spacing"
        )
    at_once = 8
    padded = np.concatenate([points, np.zeros((-count % at_once, d, d))])
    theta = jnp.asarray(padded * fit.units.x_scale**2)
    gram, shown = (_gram_matrices(theta, problem.data, at_once) for problem in (fit, held))
    tuples: NDArray[np.int64] = np.array(list(itertools.combinations(range(count), m)))
    errors = np.zeros(len(tuples))
    for start in range(0, len(tuples), _AT_ONCE):
        part = tuples[start : start + _AT_ONCE]
        filled = np.concatenate([part, np.zeros((_AT_ONCE - len(part), m), np.int64)])
        found = np.asarray(_tuple_errors(jnp.asarray(filled), gram, shown, d))
        errors[start : start + len(part)] = found[: len(part)]
    errors = np.nan_to_num(errors, nan=np.inf)
    best = tuples[int(np.argmin(errors))]
    columns = (best[:, None] * d + np.arange(d)).reshape(-1)
    normal = np.asarray(_mirrored(gram[0][columns[:, None], columns]))
    right = np.asarray(gram[1])[columns]
    w = np.linalg.lstsq(normal, right, rcond=1e-12)[0]
    layer = fit.layer(np.asarray(theta)[best], w.astype(np.float64))
    return layer, float(errors.min()), np.sort(errors)


def bound_error(
    errors: Float64, candidates: int, delta: float, clip: float = 1.0
) -> Generalisation:
    """What the errors of validation examples say about all inputs, for any of some candidates.

    errors: of each example, over the mean squared label.
    """
    n = len(errors)
    clipped = np.minimum(errors, clip) / clip
    log = math.log(2 * candidates / delta)
    variance = float(np.var(clipped, ddof=1)) if n > 1 else 0.25
    bound = (
        float(clipped.mean()) + math.sqrt(2 * variance * log / n) + 7 * log / (3 * max(n - 1, 1))
    )
    return Generalisation(
        error=float(errors.mean()),
        bound=clip * min(bound, 1.0),
        delta=delta,
        candidates=candidates,
        examples=n,
        clip=clip,
    )
