"""The preconditioner of equations in all factors, beside the explicit normal matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from oracles import narrow_layer

from mhalearn import sample_inputs
from mhalearn._runtime.programs import float64
from mhalearn.data import Examples
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.factored import Factored, Factors
from mhalearn.solvers.factor_preconditioner import precondition_factors
from mhalearn.solvers.scaled_problem import make_problem

M, D, H = 3, 7, 2
LAYER = narrow_layer(M, D, H, bias=True)


@pytest.fixture(scope="module")
def normal():
    """J^T J in all factors, the preconditioner, and the factors."""
    x = sample_inputs("gaussian", 64, 5, D, seed=1)
    with float64():
        problem = make_problem(Examples(x, LAYER(x)), Factored(Architecture(D, M, H, bias=True)))
        kind = problem.parametrisation
        at = kind.from_layer(LAYER, problem.units)
        # Singular values that differ: where the preconditioner is needed.
        at = at._replace(value=at.value * jnp.array([1.0, 0.1]), key=at.key * jnp.array([3, 0.1]))
        flat, unflatten = ravel_pytree(at)
        chunk = jax.tree.map(lambda leaf: leaf[0], problem.data)
        jacobian = jax.jacfwd(lambda flat: kind.outputs(unflatten(flat), chunk).ravel())
        rows = np.asarray(jacobian(flat))
        found = precondition_factors(kind, at, problem.data)
        solve = found.prepare()
        inverse = jax.vmap(lambda step: ravel_pytree(solve(unflatten(step)))[0])
        return rows.T @ rows, np.asarray(inverse(jnp.eye(flat.size))), at


def places(at: Factors, name: str, head: int | None = None):
    """Where the parameters of a factor, of one head or all, lie in a flat step."""
    with float64():
        marked = jax.tree.map(jnp.zeros_like, at)
        mark = jnp.ones_like if head is None else lambda leaf: jnp.zeros_like(leaf).at[head].set(1)
        marked = marked._replace(**{name: mark(getattr(at, name))})
        return np.flatnonzero(np.asarray(ravel_pytree(marked)[0]))


def test_values_and_outputs_have_their_own_blocks_exactly(normal):
    matrix, inverse, at = normal
    outputs = np.concatenate([places(at, "out"), places(at, "bias")])
    for chosen in [outputs, *(places(at, "value", head) for head in range(M))]:
        block = np.ix_(chosen, chosen)
        np.testing.assert_allclose(inverse[block] @ matrix[block], np.eye(len(chosen)), atol=3e-3)


def test_it_takes_most_of_the_condition_away(normal):
    """Of what is no gauge."""
    matrix, inverse, _ = normal
    gauge = 2 * M * H**2

    def condition(values):
        values = np.sort(values)[gauge:]
        return values[-1] / values[0]

    before = condition(np.linalg.eigvalsh(matrix))
    root = np.linalg.cholesky((inverse + inverse.T) / 2)
    after = condition(np.linalg.eigvalsh(root.T @ matrix @ root))
    assert after < 1e-2 * before
    assert after < 1e3


def test_the_inverse_is_symmetric_and_positive_where_heads_are_zero():
    x = sample_inputs("gaussian", 16, 4, D, seed=2)
    with float64():
        problem = make_problem(Examples(x, LAYER(x)), Factored(Architecture(D, M, H, bias=True)))
        at = jax.tree.map(jnp.zeros_like, problem.parametrisation.from_layer(LAYER, problem.units))
        found = precondition_factors(problem.parametrisation, at, problem.data)
        flat, unflatten = ravel_pytree(at)
        solve = found.prepare()
        inverse = jax.vmap(lambda step: ravel_pytree(solve(unflatten(step)))[0])
        matrix = np.asarray(inverse(jnp.eye(flat.size)))
    np.testing.assert_allclose(matrix, matrix.T, rtol=1e-5, atol=1e-5 * np.abs(matrix).max())
    assert np.linalg.eigvalsh(matrix)[0] > 0
