"""Each feature in units of its own size, so that no test depends on the units a user chose.

Tokens x become x / s, feature by feature, Theta becomes S Theta S and W becomes S W: the same
outputs, and the same directions left open. Sizes are powers of two, which round nothing.
"""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from mhalearn._runtime.devices import replicate
from mhalearn._runtime.types import Float64
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.units import Units
from mhalearn.solvers.scaled_problem import Problem


def measure_feature_sizes(problem: Problem) -> Float64:
    """The root mean square of each feature, to the nearest power of two, in the user's units.

    A feature that is always zero keeps the size that all have: nothing shows its parameters.
    """
    data = problem.data
    squares = replicate(jnp.sum((data.tokens * data.weight[..., None]) ** 2, axis=(0, 1, 2)))
    sizes = np.sqrt(np.asarray(squares) / problem.rows)
    exponents = np.round(np.log2(np.where(sizes > 0, sizes, 1.0)))
    return np.asarray(problem.units.x_scale * 2.0**exponents, np.float64)


def layer_in_feature_units(layer: AttentionLayer, sizes: Float64) -> AttentionLayer:
    vector = layer.key_vector
    return layer.replace(
        theta=layer.theta * np.outer(sizes, sizes),
        w=layer.w * sizes[:, None],
        key_vector=None if vector is None else vector * sizes,
    )


def problem_in_feature_units(problem: Problem, sizes: Float64) -> Problem:
    """Tokens by feature; labels stay in solver units."""
    factors = problem.units.x_scale / sizes
    of_queries = np.append(factors, np.ones(problem.query_dim - problem.d))
    data = problem.data._replace(
        tokens=problem.data.tokens * factors, queries=problem.data.queries * of_queries
    )
    return replace(problem, data=data, units=Units(1.0, problem.units.y_scale))
