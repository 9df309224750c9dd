"""Phase 6: candidates for the heads in the span, W by least squares, choice on held-out ones.

The paper's net over all m-tuples is in `epsilon_net.py`. Ours, here: a few random points of it,
each refined by Gauss-Newton steps that stay in the span.
"""

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
from mhalearn.learners.chen_li.epsilon_net import Generalisation
from mhalearn.learners.chen_li.span import Span
from mhalearn.learners.options import Constants
from mhalearn.run.run import Run
from mhalearn.solvers.gauss_newton import best_layer, has_converged, init_dense, take_step
from mhalearn.solvers.scaled_problem import Problem

_DEFAULTS = Constants()


@dataclass(frozen=True)
class NetResult:
    """The best candidate, and every candidate's relative error on held-out examples."""

    layer: AttentionLayer
    error: float  # of the layer
    candidates: Float64  # of all candidates, ascending
    generalisation: Generalisation | None = None  # what the validation set allows to say


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
def search_net(
    span: Span,
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
    theta = _offsets(span, n_starts, run.seed) * coarse.units.x_scale**2
    theta = _descend_in_span(theta, span, coarse, run, "coarse", most_steps)
    errors, _ = replicate(_held_out_errors(jnp.asarray(theta), coarse.data, held.data))
    errors = np.nan_to_num(np.asarray(errors), nan=np.inf)
    chosen = theta[int(np.argmin(errors))][None] * (fine.units.x_scale / coarse.units.x_scale) ** 2
    chosen = _descend_in_span(chosen, span, fine, run, "fine", most_steps)
    error, w = replicate(_held_out_errors(jnp.asarray(chosen), fine.data, held.data))
    layer = fine.layer(chosen[0], np.asarray(w[0]))
    return NetResult(layer, float(error[0]), np.sort(errors))


def _offsets(span: Span, n_starts: int, seed: int) -> Float64:
    """Heads around the proxy, centred on it, at distances of its own size."""
    m = span.n_heads
    rng = generator(seed, Stream.NET)
    size = np.linalg.norm(span.proxy) * np.exp(0.3 * rng.normal(size=(n_starts, 1, 1)))
    offsets = rng.normal(size=(n_starts, m, m - 1))
    offsets = size * (offsets - offsets.mean(axis=1, keepdims=True))
    return span.proxy + np.einsum("smw,wab->smab", offsets, span.wide)


def _descend_in_span(
    theta: Float64, span: Span, problem: Problem, run: Run, name: str, most_steps: int
) -> Float64:
    basis = jnp.asarray(span.basis)
    state = init_dense(theta, problem)
    begun, state = run.checkpoint.recall(name, like=(0, state)) or (0, state)
    for step in range(begun, most_steps):
        if step and (has_converged(state).all() or run.is_over()):
            break
        state = take_step(state, problem, span=basis)
        run.checkpoint.record(name, (step + 1, state))
        problem.last_step.forget()
        lowest = float(np.nanmin(np.asarray(state.loss)))
        run.emit("phase 6: net", step, lowest, at_hand=partial(best_layer, state, problem))
    return np.asarray(state.params.theta)
