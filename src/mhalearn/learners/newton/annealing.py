"""Slow annealing: first-order steps down a ridge that fades over thousands of them.

Where examples are scarce, which heads take shape is decided while the ridge is still strong, and a
few dozen long steps decide badly. Adam's short ones follow the minimum as it moves.
"""

import jax.numpy as jnp
import numpy as np

from mhalearn._runtime.programs import in_float64
from mhalearn._runtime.types import Float64
from mhalearn.layer.dense import DenseHeads
from mhalearn.learners.newton.continuation import ridge_at
from mhalearn.learners.newton.starts import Scales
from mhalearn.run.run import Run
from mhalearn.solvers.first_order import FirstOrderOptions, Schedule, anneal
from mhalearn.solvers.scaled_problem import Problem

# Strengths g of the ridge at both ends, and the rate: a tenth of a head's size. Large rates shake
# starts out of poor minima as long as the ridge keeps all of them shallow.
FIRST_STRENGTH, LAST_STRENGTH = 30.0, 1e-2
_RATE = 0.1


@in_float64
def anneal_first_order(
    theta: Float64, problem: Problem, run: Run, scales: Scales, steps: int, *, stage: str
) -> Float64:
    """Attention matrices (s, m, q, d) annealed from FIRST_STRENGTH to LAST_STRENGTH.

    Cost: a forward and a backward pass over the examples a step and start.
    Trust: a heuristic.
    """
    s, m = theta.shape[:2]
    w = jnp.zeros((s, m * problem.d + problem.bias, problem.out_dim))
    strengths = np.geomspace(FIRST_STRENGTH, LAST_STRENGTH, steps)
    walk = anneal(
        DenseHeads(jnp.asarray(theta), w),
        problem,
        run,
        Schedule(np.full(steps, _RATE), strengths),
        FirstOrderOptions(),
        stage=stage,
        weights=DenseHeads(*ridge_at(1.0, scales, problem)),  # type: ignore[arg-type]
    )
    return np.asarray(walk.params.theta)
