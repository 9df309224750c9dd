"""Steps in NumPy, for small problems, against the compiled ones and an explicit Jacobian."""

import numpy as np
import pytest

import mhalearn as mha
from mhalearn.layer.dense import Dense
from mhalearn.learners.newton.starts import random_starts
from mhalearn.solvers import host_steps, scaled_problem
from mhalearn.solvers.gauss_newton import DIRECT, NO_RIDGE, Ridge, init_dense, take_step
from mhalearn.solvers.scaled_problem import Problem, make_problem

RIDGE = Ridge(1e-2, 2e-3)


def small_problem(bias: bool = False, causal: bool = False, padded: bool = False) -> Problem:
    vectors = {"key_vector": True, "out_bias": True} if bias else {}
    layer = mha.random_layer(n_heads=2, d=4, out_dim=3, seed=3, **vectors)
    layer = layer.replace(causal=causal)
    x = mha.sample_inputs("gaussian", 30, 5, 4, seed=4)
    lengths = np.arange(30) % 3 + 3 if padded else np.full(30, 5)
    examples = mha.Examples(x, layer(x, lengths), lengths)
    return make_problem(examples, Dense(examples.architecture(2, bias=bias, causal=causal)))


@pytest.mark.parametrize("kind", [{}, {"bias": True}, {"causal": True}, {"padded": True}])
def test_a_step_is_the_compiled_one(kind: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    problem, compiled = small_problem(**kind), small_problem(**kind)
    monkeypatch.setattr(host_steps, "_LOOSEST", 1e-6)
    monkeypatch.setattr(host_steps, "_CHORDS", 1)
    assert problem.on_host
    compiled.__dict__["on_host"] = False
    state = init_dense(random_starts(problem, 2, 0, 0), problem)
    # The two estimate what damping is relative to, in their own ways.
    state = state._replace(damping=np.full(2, 1e-9))
    one = take_step(state, problem, DIRECT, ridge=RIDGE)
    other = take_step(state, compiled, DIRECT, ridge=RIDGE)
    np.testing.assert_allclose(one.loss, other.loss, rtol=1e-3)
    for found, expected in zip(one.params, other.params, strict=True):
        scale = np.abs(np.asarray(expected)).max()
        np.testing.assert_allclose(found, expected, atol=1e-3 * scale)


def test_what_a_compiled_step_takes_over_from_the_last_changes_only_how_it_is_solved_for() -> None:
    problems = [small_problem() for _ in range(5)]
    for problem in problems:
        problem.__dict__["on_host"] = False
    remembering, *fresh = problems
    state = init_dense(random_starts(remembering, 2, 0, 0), remembering)
    following = alone = state._replace(damping=np.full(2, 1e-9))
    used = []
    for problem, ridge in zip(fresh, (RIDGE, RIDGE, NO_RIDGE, NO_RIDGE), strict=True):
        following = take_step(following, remembering, ridge=ridge)
        alone = take_step(alone, problem, ridge=ridge)
        # Equations are solved for to a tenth at first, and each way by itself.
        np.testing.assert_allclose(following.loss, alone.loss, rtol=0.5)
        used.append(remembering.last_step.uses)
    assert used == [1, 2, 1, 2]
    # At other parameters nothing is remembered, and W is eliminated anew.
    again = take_step(state, remembering, ridge=NO_RIDGE)
    first = take_step(state, small_problem(), ridge=NO_RIDGE)
    assert remembering.last_step.uses == 1
    np.testing.assert_allclose(again.loss, first.loss, rtol=0.5)


@pytest.mark.parametrize("kind", [{}, {"bias": True, "padded": True}])
def test_the_equations_are_those_of_an_explicit_jacobian(kind: dict[str, bool]) -> None:
    problem = small_problem(**kind)
    rows, ridge, damping = problem.host_rows, 0.3, 0.7
    theta = 2 * random_starts(problem, 1, 1, 0)[0]
    m, q, d = theta.shape
    here = host_steps.evaluate(theta, rows, ridge, 0.2)

    def outputs(flat: np.ndarray) -> np.ndarray:
        moved = flat.reshape(q, m, d).transpose(1, 0, 2)
        return (host_steps.attend_on_host(moved, rows)[1] @ here.w).ravel()

    at, h = theta.transpose(1, 0, 2).ravel(), 1e-6
    steps = h * np.eye(at.size)
    jacobian = np.stack([outputs(at + s) - outputs(at - s) for s in steps], axis=1) / (2 * h)
    v = here.design
    inner = np.eye(len(v)) - v @ np.linalg.solve(v.T @ v + 0.2 * np.eye(v.shape[1]), v.T)
    absorbing = np.kron(inner, np.eye(here.w.shape[1]))
    equations = host_steps.Equations(here, rows, ridge, damping)
    shift = np.tile(equations.shift, q)
    expected = jacobian.T @ absorbing @ jacobian + np.diag(shift)
    formed = np.stack([equations.apply(one.reshape(q, -1)).ravel() for one in np.eye(at.size)])
    np.testing.assert_allclose(formed, expected, atol=1e-5 * np.abs(expected).max())
    right = jacobian.T @ here.residual.ravel() - ridge * at
    np.testing.assert_allclose(equations.right.ravel(), right, atol=1e-5 * np.abs(right).max())
    for dtype, exact in ((np.float32, 1e-4), (np.float64, 1e-8)):
        factor = equations.factor(dtype)
        assert factor is not None
        solved = factor.solve(expected.dot(at).reshape(q, -1)).ravel()
        np.testing.assert_allclose(solved, at, atol=max(exact, 1e-4) * np.abs(at).max())


def test_fast_convergence_needs_one_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    plain = host_steps.Equations.factor
    monkeypatch.setattr(
        host_steps.Equations, "factor", lambda self, kind: made.append(kind) or plain(self, kind)
    )
    problem = small_problem()
    layer = mha.random_layer(n_heads=2, d=4, out_dim=3, seed=3)
    theta = problem.theta(layer)
    near = theta + 0.02 * random_starts(problem, 1, 2, 0)[0]
    end = host_steps.step_on_host(near, 1e-3, 0.0, problem.host_rows, problem.energy, (0.0, 0.0))
    assert end.point.squared / problem.energy < 1e-27
    assert len(made) == 1


def test_large_problems_are_left_to_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert small_problem().on_host
    monkeypatch.setattr(scaled_problem, "_FEW_UNKNOWNS", 31)
    assert not small_problem().on_host
