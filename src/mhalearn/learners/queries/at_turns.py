"""Sequences whose tokens lie where heads turn, along a line: few tell as much of heads that write
alike."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.types import Float64

# Logits by which heads must differ at a turn, those by which places differ from turns, and the
# share of gaps between turns that may be smaller than what tells heads apart.
_DIFFERENT, _JITTER, _MOST = 6.0, 1.0, 0.3
# Of so many y the one is asked about that needs the smallest tokens.
CANDIDATES = 4
# Calls over unknowns.
SLACK = 1.4


class Alike(NamedTuple):
    """Heads that only their turns tell apart. calls: as many at turns tell all of them."""

    theta: Float64  # (m, d, d)
    calls: int

    def draw(self, n: int, k: int, rng: np.random.Generator) -> Float64:
        return draw_at_turns(self.theta, n, k, rng)


def rank_of_images(images: Float64) -> int:
    """Dimensions that heads together write to of one token, from what each writes (m, e)."""
    values = np.linalg.svd(images, compute_uv=False)
    return int(np.sum(values > 1e-9 * values[0]))


def count_at_turns(m: int, d: int, k: int, rank: int) -> int:
    """Calls at turns that tell all of Theta. A row there is sure of all heads but those that turn,
    and tells of these one number for each dimension they write to, however many outputs there are.
    """
    return int(np.ceil(SLACK * m * d * d / (k * rank))) + 2


def place_at_turns(
    p: Float64, s: Float64, k: int, rng: np.random.Generator
) -> tuple[Float64, Float64]:
    """Distances rho (calls,) and places t (calls, k) of tokens rho y + t v: where heads turn.

    p, s: y Theta_i v and v Theta_i v, (calls, m). Far enough out for most heads to turn without
    their neighbours.
    """
    turns, slopes = -p / s, np.abs(s)
    count, m = turns.shape
    order = np.argsort(rng.random((count, m)), axis=1)[:, np.arange(k) % m]
    if m > 1:
        ordered = np.sort(turns, axis=1)
        reach = ordered[:, -1] - ordered[:, 0]
        gap = np.quantile(np.diff(ordered, axis=1), _MOST, axis=1)
    else:
        reach = gap = np.maximum(np.abs(turns[:, 0]), 1e-3)
    rho = np.sqrt(_DIFFERENT / (np.median(slopes, axis=1) * gap * reach))
    slope = np.take_along_axis(slopes, order, axis=1) * (rho**2 * reach)[:, None]
    t = np.take_along_axis(turns, order, axis=1) + _JITTER * rng.standard_normal((count, k)) / slope
    return rho, rho[:, None] * t


def choose_small(rho: Float64, t: Float64, count: int) -> NDArray[np.intp]:
    """Of equally many candidates for each of `count` calls the one with the smallest tokens."""
    far = np.maximum(rho, np.abs(t).max(axis=1)).reshape(count, -1)
    chosen: NDArray[np.intp] = np.argmin(far, axis=1) + far.shape[1] * np.arange(count)
    return chosen


def draw_at_turns(theta: Float64, count: int, k: int, rng: np.random.Generator) -> Float64:
    """Random sequences (count, k, d) that tell heads (m, d, d) apart, whatever they write: along a
    random direction at their turns, and moved off it by as much as changes logits by about one."""
    m, d, _ = theta.shape
    if count == 0:
        return np.zeros((0, k, d))
    y, v = rng.standard_normal((2, CANDIDATES * count, d))
    keys = np.einsum("mde,ce->cmd", theta, v)
    p, s = np.einsum("cmd,cd->cm", keys, y), np.einsum("cmd,cd->cm", keys, v)
    rho, t = place_at_turns(p, s, k, rng)
    best = choose_small(rho, t, count)
    y, v, rho, t = y[best], v[best], rho[best], t[best]
    size = float(np.linalg.norm(theta)) / np.sqrt(m)
    far = np.maximum(rho, np.abs(t).max(axis=1))
    noise = rng.standard_normal((count, k, d)) * (np.sqrt(d) / (size * far))[:, None, None]
    tokens: Float64 = (rho[:, None] * y)[:, None] + t[..., None] * v[:, None] + noise
    return tokens
