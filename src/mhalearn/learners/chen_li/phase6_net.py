"""Phase 6: candidates for the heads in the span, W by least squares, choice on held-out ones."""

import itertools
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from mhalearn._runtime.devices import replicate
from mhalearn._runtime.programs import in_float64
from mhalearn._runtime.seeds import Stream, generator
from mhalearn._runtime.types import Array, Float, Float64
from mhalearn.layer.attention import fit_projections, forward
from mhalearn.layer.batches import Chunk, sum_over_chunks
from mhalearn.layer.layer import AttentionLayer
from mhalearn.learners.chen_li.body_shape import BodyShape
from mhalearn.learners.options import ChenLiOptions
from mhalearn.run.run import Run
from mhalearn.solvers.gauss_newton import best_layer, has_converged, init_dense, take_step
from mhalearn.solvers.scaled_problem import Problem

_DEFAULTS = ChenLiOptions()


@dataclass(frozen=True)
class NetResult:
    """The best candidate, and every candidate's relative error on held-out examples."""

    layer: AttentionLayer
    error: float  # of the layer
    candidates: Float64  # of all candidates, ascending


@jax.jit
def _held_out_errors(
    theta: Float[Array, "s m d d"], fit: Chunk, held: Chunk
) -> tuple[Float[Array, " s"], Float[Array, "s p e"]]:
    energy = jnp.sum((held.labels * held.weight[..., None]) ** 2)

    def one(candidate: Array) -> tuple[Array, Array]:
        w = fit_projections(candidate, fit, jnp.zeros(())).w

        def squared(chunk: Chunk) -> Array:
            labels = chunk.labels * chunk.weight[..., None]
            return jnp.sum((labels - forward(candidate, w, chunk)) ** 2)

        return sum_over_chunks(squared, held) / energy, w

    return jax.lax.map(one, theta)


@in_float64
def literal_net(
    shape: BodyShape, fit: Problem, held: Problem, *, radius: float, spacing: float
) -> NetResult:
    """The epsilon-net over pairs of points of the span, for two heads.

    Points are the grid of the given spacing in the disc of the given radius, both in units of the
    proxy's norm; every unordered pair of points is a candidate, W its least squares.
    Source: phase 6 of Chen & Li. Cost: (radius / spacing)^4 least squares.
    Trust: proved to contain a good candidate once radius and spacing are large and small enough.
    """
    if len(shape.wide) != 1:
        raise ValueError("the literal net is for two heads: use search_net for more")
    if not (radius > 0 and spacing > 0):
        raise ValueError(f"radius={radius}, spacing={spacing}: pass positive numbers")
    norm = float(np.linalg.norm(shape.proxy))
    ticks = np.arange(-np.floor(radius / spacing), np.floor(radius / spacing) + 1) * spacing
    grid = [c for c in itertools.product(ticks, ticks) if c[0] ** 2 + c[1] ** 2 <= radius**2]
    if len(grid) < 2:
        raise ValueError(f"radius={radius}, spacing={spacing}: one point; pass a smaller spacing")
    points = norm * np.einsum("cs,sab->cab", np.array(grid), shape.span)
    pairs = np.array(list(itertools.combinations(range(len(points)), 2)))
    units = fit.units.x_scale**2
    errors, best = np.zeros(len(pairs)), (np.inf, points[:2], np.zeros(0))
    for start in range(0, len(pairs), 512):
        theta = points[pairs[start : start + 512]] * units
        part, w = _held_out_errors(jnp.asarray(theta), fit.data, held.data)
        part = np.nan_to_num(np.asarray(part), nan=np.inf)
        errors[start : start + 512] = part
        place = int(np.argmin(part))
        if float(part[place]) < best[0]:
            best = (float(part[place]), theta[place], np.asarray(w[place]))
    return NetResult(fit.layer(best[1], best[2]), best[0], np.sort(errors))


@in_float64
def search_net(
    shape: BodyShape,
    coarse: Problem,
    fine: Problem,
    held: Problem,
    run: Run,
    *,
    n_starts: int = _DEFAULTS.net_starts,
    most_steps: int = _DEFAULTS.net_steps,
) -> NetResult:
    """A coarse random net, each point refined in its m^2 coefficients with W eliminated.

    Heads start at the proxy plus a random offset along the wide directions; Gauss-Newton steps stay
    in the span. All starts descend on the few coarse examples, the choice falls on held-out ones,
    and the chosen start descends on the fine ones.
    Source: stands in for phase 6's net of (1/eps)^(m^2) points. Trust: a heuristic; the errors of
    all starts are reported, and agree where the span is good.
    """
    theta = _offsets(shape, n_starts, run.seed) * coarse.units.x_scale**2
    theta = _descend_in_span(theta, shape, coarse, run, "coarse", most_steps)
    errors, _ = replicate(_held_out_errors(jnp.asarray(theta), coarse.data, held.data))
    errors = np.nan_to_num(np.asarray(errors), nan=np.inf)
    chosen = theta[int(np.argmin(errors))][None] * (fine.units.x_scale / coarse.units.x_scale) ** 2
    chosen = _descend_in_span(chosen, shape, fine, run, "fine", most_steps)
    error, w = replicate(_held_out_errors(jnp.asarray(chosen), fine.data, held.data))
    layer = fine.layer(chosen[0], np.asarray(w[0]))
    return NetResult(layer, float(error[0]), np.sort(errors))


def _offsets(shape: BodyShape, n_starts: int, seed: int) -> Float64:
    """Heads around the proxy, centred on it, at distances of its own size."""
    m = len(shape.wide) + 1
    rng = generator(seed, Stream.NET)
    size = np.linalg.norm(shape.proxy) * np.exp(0.3 * rng.normal(size=(n_starts, 1, 1)))
    offsets = rng.normal(size=(n_starts, m, m - 1))
    offsets = size * (offsets - offsets.mean(axis=1, keepdims=True))
    return shape.proxy + np.einsum("smw,wab->smab", offsets, shape.wide)


def _descend_in_span(
    theta: Float64, shape: BodyShape, problem: Problem, run: Run, name: str, most_steps: int
) -> Float64:
    span = jnp.asarray(shape.span)
    state = init_dense(theta, problem)
    begun, state = run.checkpoint.recall(name, like=(0, state)) or (0, state)
    for step in range(begun, most_steps):
        if step and (has_converged(state).all() or run.is_over()):
            break
        state = take_step(state, problem, span=span)
        run.checkpoint.record(name, (step + 1, state))
        lowest = float(np.nanmin(np.asarray(state.loss)))
        run.emit("phase 6: net", step, lowest, at_hand=partial(best_layer, state, problem))
    return np.asarray(state.params.theta)
