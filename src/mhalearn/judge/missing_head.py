"""Would one more head explain what a layer leaves? Examples it was not fitted to tell."""

from typing import NamedTuple

import numpy as np

from mhalearn._runtime.programs import in_float64
from mhalearn._runtime.seeds import Stream, generator
from mhalearn._runtime.types import Float64
from mhalearn.data import Examples
from mhalearn.judge.residuals import Residuals, measure_residuals
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.base import Layer
from mhalearn.layer.dense import Dense
from mhalearn.layer.factored import Factored
from mhalearn.layer.layer import AttentionLayer, join_heads
from mhalearn.run.run import Run
from mhalearn.solvers.gauss_newton import best_layer, has_converged, init_dense, take_step
from mhalearn.solvers.polish import minimise
from mhalearn.solvers.scaled_problem import make_problem

# Heads tried in turn, and their steps.
_PROBE_STARTS, _PROBE_STEPS = 4, 25
# Of many narrow heads fewer are tried, on so many times the counting limit of examples.
_FACTORED_STARTS, _PROBE_RATIO = 2, 8.0
# Held-out examples it takes to judge whether a head is missing.
PROBE_HELD = 8


class OneMoreHead(NamedTuple):
    """gain: share of the held-out error that the head removes; 0 if that is not significant."""

    gain: float
    layer: Layer


@in_float64
def one_more_head(
    layer: AttentionLayer,
    fitted: Examples,
    held: Examples,
    architecture: Architecture,
    run: Run,
    *,
    residuals: Residuals | None = None,
) -> OneMoreHead | None:
    """The layer with one more head, and the share of the held-out error that it removes.

    The head is added to the layer and all of it descends, of many narrow heads only the new one;
    examples are paired, and a gain counts at four standard errors, or where it removes half of the
    error. None where the examples could not determine one more head.
    residuals: of the layer on `held`, where they are known.
    """
    more = architecture.with_heads(layer.n_heads + 1)
    if not more.prefers_factors:
        more = more.with_any_rank()
    limit = fitted.counting_limit(more)
    if held.n < PROBE_HELD or fitted.n < 1.5 * limit:
        return None
    rng = generator(run.seed, Stream.MISSING_HEAD)
    probe = _add_factored if more.prefers_factors else _add_dense
    larger = probe(layer, fitted, more, run, rng)
    residuals = residuals or measure_residuals(layer, held)
    after = measure_residuals(larger, held, residuals.labels).squared
    return OneMoreHead(measure_gain(residuals.squared, after), larger)


def measure_gain(before: Float64, after: Float64) -> float:
    """The share of squared errors of held-out examples that is gone; 0 where it may be chance."""
    gains = before - after
    error = float(np.std(gains, ddof=1)) / np.sqrt(len(gains))
    # Few examples of very different sizes have a large standard error; noise is never halved.
    beyond_chance = gains.mean() > 4 * error or gains.mean() > 0.5 * before.mean()
    significant = beyond_chance and gains.mean() > 0.03 * before.mean()
    return float(gains.mean() / before.mean()) if significant else 0.0


def _add_dense(
    layer: AttentionLayer,
    fitted: Examples,
    more: Architecture,
    run: Run,
    rng: np.random.Generator,
) -> AttentionLayer:
    """The best layer that several heads of any rank, added in turn, lead to."""
    problem = make_problem(fitted, Dense(more))
    added = rng.normal(size=(_PROBE_STARTS, 1, problem.query_dim, problem.d))
    added *= rng.uniform(1.0, 4.0, size=(_PROBE_STARTS, 1, 1, 1)) / np.linalg.norm(
        added, axis=(2, 3), keepdims=True
    )
    known = np.broadcast_to(problem.theta(layer), (_PROBE_STARTS, *problem.theta(layer).shape))
    state = init_dense(np.concatenate([known, added], axis=1), problem)
    for step in range(_PROBE_STEPS):
        state = take_step(state, problem)
        run.emit("missing-head test", step, float(np.nanmin(np.asarray(state.loss))))
        if has_converged(state).all() or run.is_over():
            break
    found: AttentionLayer = best_layer(state, problem)
    return found


def _add_factored(
    layer: AttentionLayer,
    fitted: Examples,
    more: Architecture,
    run: Run,
    rng: np.random.Generator,
) -> AttentionLayer:
    """The layer with a head that was fitted to what it leaves, in units of that: the others stay.

    It is given no more examples than polish takes.
    """
    part = fitted.sample(int(np.ceil(_PROBE_RATIO * fitted.counting_limit(more))), seed=0)
    x, y, lengths = part.arrays()
    left = Examples(x, y - layer(x, lengths), lengths if part.has_lengths else None)
    alone = make_problem(left, Factored(more.with_heads(1)))
    starts = [
        minimise(
            alone.parametrisation.init(rng),
            alone,
            run,
            stage="missing-head test",
            max_steps=_PROBE_STEPS,
        )
        for _ in range(_FACTORED_STARTS)
    ]
    best = min(starts, key=lambda start: start.loss)
    return join_heads(layer, alone.to_layer(best.params))
