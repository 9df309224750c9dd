"""How badly conditioned the equations of a Gauss-Newton step are, near the true layer.

Conjugate gradients solve for one step from the true layer with its factors off by two per cent.
Their coefficients are those of a Lanczos matrix, whose extreme eigenvalues tell the condition
number of what they solved, of the directions that the residual has. They end at a residual of 1e-6
of the right side, or at 400 products. Loss after: of the step that they found, taken in full.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.recorded.recording import Recording
from mhalearn._runtime.programs import in_float64
from mhalearn.data import Examples
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.dense import Dense, DenseHeads
from mhalearn.layer.factored import Factored
from mhalearn.layer.span_coordinates import centred_coordinates
from mhalearn.layer.token_span import measure_span, read_tokens
from mhalearn.solvers.cg import CGResult
from mhalearn.solvers.gauss_newton import loss_of
from mhalearn.solvers.normal_equations import descent_direction, solve_normal_equations
from mhalearn.solvers.scaled_problem import Problem, make_problem
from mhalearn.solvers.variable_projection import solve_reduced_normal_equations

OFF, TOLERANCE, PRODUCTS, DAMPING = 0.02, 1e-6, 400, 1e-9


def measure_spectra(given: Recording) -> list[list[str]]:
    """Cells of a table: the equations, their unknowns, products, condition, and the loss after."""
    layer, d, e = given.layer, given.x.shape[2], given.y.shape[2]
    kind = Architecture(d, layer.n_heads, given.head_dim, e, bias=True, causal=layer.causal)
    examples = Examples(given.x, given.y, given.lengths)
    span = centred_coordinates(measure_span(read_tokens(examples)), kind)
    whitened, inside = examples.in_span(span), span.restrict(layer)
    return [
        _joint("all factors, tokens as they are", layer, make_problem(examples, Factored(kind))),
        _joint("all factors, whitened", inside, make_problem(whitened, Factored(span.reduced))),
        _reduced("W eliminated, whitened", inside, make_problem(whitened, Factored(span.reduced))),
    ]


def _off(layer: Any, problem: Problem) -> Any:
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: leaf * (1 + OFF * jnp.asarray(rng.standard_normal(leaf.shape))),
        problem.parametrisation.from_layer(layer, problem.units),
    )


@in_float64
def _joint(name: str, layer: Any, problem: Problem) -> list[str]:
    params = _off(layer, problem)

    @jax.jit
    def solve(params: Any, data: Any) -> Any:
        downhill, _ = descent_direction(problem.parametrisation, params, data)
        return solve_normal_equations(
            problem.parametrisation,
            params,
            data,
            downhill,
            damping=jnp.asarray(DAMPING * problem.energy),
            tolerance=jnp.asarray(TOLERANCE),
            max_steps=PRODUCTS,
            single=False,
        )

    found = solve(params, problem.data)
    after = loss_of(jax.tree.map(jnp.add, params, found.step), problem)
    return _row(name, problem.parametrisation.size(), found.search, after)


@in_float64
def _reduced(name: str, layer: Any, problem: Problem) -> list[str]:
    near = problem.to_layer(_off(layer, problem))
    kind = Dense(problem.architecture)
    dense = replace(problem, parametrisation=kind)

    @jax.jit
    def solve(params: DenseHeads, data: Any) -> Any:
        return solve_reduced_normal_equations(
            params.theta,
            kind.eliminate(params, data, jnp.asarray(0.0)),
            data,
            ridge=jnp.asarray(0.0),
            damping=jnp.asarray(DAMPING),
            tolerance=jnp.asarray(TOLERANCE),
            max_steps=PRODUCTS,
            head_dim=kind.architecture.head_dim,
        )

    start = kind.from_layer(near, problem.units)
    found = solve(start, problem.data)
    moved = kind.retract(start._replace(theta=start.theta + found.step))
    fit = jax.jit(partial(kind.eliminate, ridge=jnp.asarray(0.0)))(moved, dense.data)
    unknowns = kind.architecture.count_by_kind().attention
    return _row(name, unknowns, found.search, float(fit.loss) / problem.energy)


def _row(name: str, unknowns: int, search: CGResult, after: float) -> list[str]:
    products = int(search.num_steps)
    told = str(products) if bool(search.converged) else f"more than {products}"
    return [name, str(unknowns), told, f"{_condition(search):.1e}", f"{after:.1e}"]


def _condition(search: CGResult) -> float:
    """Of the Lanczos matrix that conjugate gradients have made."""
    n = int(search.num_steps)
    alphas, betas = (np.asarray(part[:n], np.float64) for part in (search.alphas, search.betas))
    diagonal = 1 / alphas + np.concatenate([[0.0], betas[:-1] / alphas[:-1]])
    beside = np.sqrt(betas[:-1]) / alphas[:-1]
    values = np.linalg.eigvalsh(np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1))
    return float(values[-1] / values[0])
