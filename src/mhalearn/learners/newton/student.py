"""A student of projected heads: Adam in single precision, under a penalty that may fade."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from mhalearn._runtime.programs import compiled, in_float64
from mhalearn._runtime.types import Array, Float, Float64
from mhalearn.layer.batches import Chunk, in_one_chunk
from mhalearn.layer.parametrisation import Params
from mhalearn.layer.projected import Projected
from mhalearn.learners.newton.factored import critical_penalty
from mhalearn.run.run import Run
from mhalearn.solvers.first_order import FirstOrderOptions, Schedule, anneal, cosine_rates
from mhalearn.solvers.scaled_problem import Problem

# Adam's rate times the root of d, the share of steps in which the penalty fades, and by how much.
_RATE, _FADING, _FADED = 0.08, 0.6, 1e-5
BLOCK, STEPS = 100, 1500
# Tokens a step; more keep an accelerator busy.
_BATCH_CPU, _BATCH = 2**10, 2**13
# Examples whose patterns are compared.
_COMPARED = 32
# Parameters that the penalty shrinks. Of a head's matrix between normalised queries and keys it
# would keep the logits small for long.
_SHRUNK = ("query", "key", "value", "out")


@in_float64
def anneal_student(
    params: Params,
    problem: Problem,
    run: Run,
    steps: int,
    rng: np.random.Generator,
    stage: str,
    *,
    penalised: bool = True,
) -> tuple[dict[str, Float64], float]:
    """Adam in single precision on random examples, while the penalty, if there is one, fades."""
    progress = np.arange(steps) / steps
    first = critical_penalty(problem) if penalised else 0.0
    strengths = np.where(progress < _FADING, first * _FADED ** (progress / _FADING), 0.0)
    tokens = _BATCH_CPU if jax.default_backend() == "cpu" else _BATCH
    batch = -(-tokens * problem.count_sequences() // problem.rows)
    walk = anneal(
        jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], params),
        problem,
        run,
        Schedule(cosine_rates(_RATE / problem.d**0.5, steps), strengths),
        FirstOrderOptions(block=BLOCK, batch=batch, single=True),
        stage=stage,
        weights={name: float(name in _SHRUNK) for name in params},
        rng=rng,
    )
    found = {name: np.asarray(leaf[0], np.float64) for name, leaf in walk.params.items()}
    return found, float(walk.loss[0])


@in_float64
def compare_patterns(kind: Projected, params: Params, problem: Problem) -> Float64:
    """What heads do on a few examples, zeros where rows pad: (n, k, m, k)."""
    data = in_one_chunk(problem.data, problem.devices)
    few = jax.tree.map(lambda leaf: leaf[:_COMPARED], data)
    return np.asarray(_attend(on_device(params), few, kind))


@partial(compiled, static_argnums=2)
def _attend(params: Params, chunk: Chunk, kind: Projected) -> Float[Array, "b k m j"]:
    return kind.attend(params, chunk).p * chunk.weight[:, :, None, None]


@in_float64
def on_device(params: Params) -> Params:
    return {name: jnp.asarray(leaf) for name, leaf in params.items()}
