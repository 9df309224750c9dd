"""Would one more head explain what projected heads leave? It is fitted to that alone."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from mhalearn._runtime.programs import in_float64
from mhalearn._runtime.seeds import Stream, generator
from mhalearn.data import Examples
from mhalearn.judge.missing_head import PROBE_HELD, OneMoreHead, measure_gain
from mhalearn.judge.residuals import Residuals, measure_residuals
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.base import Layer
from mhalearn.layer.position_bias import Alibi, T5Bias
from mhalearn.layer.projected import Projected
from mhalearn.layer.projected_layer import ProjectedLayer
from mhalearn.run.run import Run
from mhalearn.solvers.dense_normal_equations import descend_densely
from mhalearn.solvers.scaled_problem import make_problem

# Starts of the head, and their steps; parameters up to which it is looked for.
_STARTS, _STEPS, _MOST_PARAMETERS = 4, 30, 1200
# Times its own counting limit of examples that it is fitted to, at most.
_RATIO = 16.0


@in_float64
def one_more_projected_head(
    layer: ProjectedLayer,
    fitted: Examples,
    held: Examples,
    architecture: Architecture,
    run: Run,
    *,
    residuals: Residuals,
) -> OneMoreHead | None:
    """The share of the held-out error that one more head removes, as `one_more_head` has it.

    The head has keys and values of its own; where heads have ALiBi's slopes it has any biases by
    distance. None where the examples could not determine it, or where it is too large to look for.
    Cost: a few descents of a layer of one head. Trust: it may miss a head, and then finds no gain.
    """
    alone = _alone(architecture)
    kind = Projected(alone)
    more = replace(architecture.with_heads(layer.n_heads + 1), kv_heads=None)
    few = fitted.n < 1.5 * fitted.counting_limit(more)
    if held.n < PROBE_HELD or few or kind.size() > _MOST_PARAMETERS:
        return None
    left = _residual_examples(layer, fitted)
    part = left.sample(int(np.ceil(_RATIO * left.counting_limit(alone))), seed=0)
    problem = make_problem(part, kind)
    rng = generator(run.seed, Stream.MISSING_HEAD)
    found = []
    for _ in range(_STARTS):
        found.append(
            descend_densely(
                kind.init(rng), problem, run, stage="missing-head test", max_steps=_STEPS
            )
        )
        if run.is_over():
            break
    best = min(found, key=lambda one: one.loss)
    head: Layer = problem.to_layer(jax.tree.map(jnp.asarray, best.params))
    after = measure_residuals(head, _residual_examples(layer, held), residuals.labels).squared
    return OneMoreHead(measure_gain(residuals.squared, after), layer)


def _alone(architecture: Architecture) -> Architecture:
    """The class of one head; ALiBi would give it the slope of a layer's only one."""
    alone = replace(architecture.with_heads(1), kv_heads=None)
    if isinstance(alone.distance_bias, Alibi):
        alone = replace(alone, position_bias=T5Bias(bidirectional=not alone.causal))
    if alone.is_plain:  # where heads share keys and have nothing else: held by its projections yet
        alone = replace(alone, logit_scale=alone.qk_rank**-0.5)
    return alone


def _residual_examples(layer: Layer, examples: Examples) -> Examples:
    """The same inputs with what the layer leaves of their labels."""
    x, y, lengths = examples.arrays()
    left = np.where(
        (np.arange(examples.k) < lengths[:, None])[..., None], y - layer(x, lengths), 0.0
    )
    return Examples(x, left, lengths if examples.has_lengths else None)
