"""Inverses without LAPACK."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mhalearn as mha
from mhalearn._runtime.programs import float64
from mhalearn.layer.batches import in_one_chunk
from mhalearn.layer.inverse import invert
from mhalearn.layer.open_heads import OpenHeads
from mhalearn.layer.relaxed import Relaxed
from mhalearn.solvers.scaled_problem import make_problem

PLAIN = mha.Architecture(4, 1, head_dim=2, causal=True)
ROTARY = mha.Architecture(4, 1, head_dim=2, causal=True, rope=mha.Rope())


@pytest.mark.parametrize("shape", [(1, 1), (8, 8), (3, 2, 5, 5), (0, 4, 4), (2, 64, 64)])
def test_inverses_are_those_of_numpy(shape):
    matrices = np.random.default_rng(0).standard_normal(shape)
    with float64():
        found = np.asarray(jax.jit(invert)(jnp.asarray(matrices)))
    expected = np.linalg.inv(matrices)
    assert np.abs(found - expected).max(initial=0) <= 1e-10 * np.abs(expected).max(initial=0)


def test_zeros_on_the_diagonal_are_pivoted_away():
    matrix = np.array([[0.0, 2.0, 0.0], [0.0, 0.0, -4.0], [0.5, 0.0, 0.0]])
    with float64():
        assert np.array_equal(np.asarray(invert(jnp.asarray(matrix))), np.linalg.inv(matrix))


def test_a_singular_matrix_has_no_finite_inverse():
    with float64():
        assert not np.isfinite(np.asarray(invert(jnp.ones((2, 2))))).any()


def test_derivatives_are_those_of_differences():
    rng = np.random.default_rng(1)
    matrix, along = rng.standard_normal((2, 3, 6, 6))
    with float64():
        _, found = jax.jvp(invert, (jnp.asarray(matrix),), (jnp.asarray(along),))
        pulled = jax.vjp(invert, jnp.asarray(matrix))[1](jnp.asarray(along))[0]
    expected = -np.linalg.inv(matrix) @ along @ np.linalg.inv(matrix)
    assert np.allclose(found, expected, rtol=1e-10, atol=1e-10 * np.abs(expected).max())
    assert np.isclose(np.vdot(pulled, along), np.vdot(along, expected), rtol=1e-10)


@pytest.mark.parametrize(
    "kind", [Relaxed(ROTARY), OpenHeads(PLAIN, tokens=3)], ids=["rotary", "open"]
)
def test_programs_of_turned_heads_call_no_lapack(kind):
    """Batches of it may wait for ever (`layer.inverse`)."""
    x = np.random.default_rng(2).standard_normal((2, 3, 4))
    with float64():
        problem = make_problem(mha.Examples(x, x), kind)
        chunk = in_one_chunk(problem.data, 1)
        params = {name: jnp.ones(shape) for name, shape in kind.shapes().items()}
        program = jax.make_jaxpr(jax.jacrev(lambda params: kind.outputs(params, chunk)))(params)
    called = set(re.findall(r"= (\w+)", str(program)))
    assert "dot_general" in called
    assert not {"lu", "triangular_solve"} & called
