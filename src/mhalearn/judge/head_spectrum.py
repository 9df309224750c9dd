"""How well data determine projected heads: the lower end of the spectrum of their J^T J.

The gauge of projected heads is large (an invertible matrix between values and outputs, a complex
number a frequency), and in the null space of J^T J wherever one looks. How large it is
`Architecture` says; what is beyond it is open.
"""

from __future__ import annotations

import math

import numpy as np
import scipy.linalg

from mhalearn._runtime.programs import in_float64
from mhalearn._runtime.threads import one_lapack_thread
from mhalearn._runtime.types import Float64
from mhalearn.data import Examples
from mhalearn.judge.spectrum import NULL, Parameters, Spectrum, count_null
from mhalearn.layer.base import Layer
from mhalearn.layer.projected import Projected
from mhalearn.run.watch import Watch
from mhalearn.solvers.head_normal_matrix import head_normal_matrix
from mhalearn.solvers.scaled_problem import make_problem

# Times the counting limit of examples that stand for all: those that are left out only add.
_ENOUGH = 8.0
# Parameters up to which the whole spectrum is computed.
_WHOLE = 1536
# Beyond, eigenvalues above the gauge that are, and iterations for them.
_BEYOND, _ITERATIONS = 24, 3


@in_float64
def measure_heads(layer: Layer, examples: Examples, watch: Watch | None) -> Spectrum:
    """The spectrum of J^T J in all parameters, the gauge left out.

    Of many parameters only the lower end, and the largest eigenvalue: deviations are then bounds,
    by the least eigenvalue that is not of the gauge.
    Cost: that of `head_normal_matrix` and, for p parameters, O(p^3); of many the third part of it.
    Trust: numerical rank is evidence of local identifiability, not a proof of it.
    """
    kind = layer.parametrisation
    assert isinstance(kind, Projected)
    limit = examples.counting_limit(kind.architecture)
    part = examples.sample(math.ceil(_ENOUGH * limit), seed=0) if limit < math.inf else examples
    problem = make_problem(part, kind)
    at = kind.from_layer(layer, problem.units)
    size, gauge = kind.size(), kind.size() - kind.count()
    if watch is not None:
        watch.begin(f"normal matrix of {size} parameters")
    matrix = head_normal_matrix(at, problem, watch=watch)
    if watch is not None:
        watch.begin(f"eigenvalues of {size} parameters")
    with one_lapack_thread():
        least = 1e-18 * max(float(np.trace(matrix)), 1e-300)
        root = 1 / np.sqrt(np.maximum(np.diag(matrix), least))
        matrix *= root[:, None] * root
        if size <= _WHOLE:
            values, null, spread = _whole(matrix, gauge)
        else:
            values, null, spread = _lower_end(matrix, gauge)
    deviations = root * np.sqrt(spread * problem.rows / examples.rows)
    factors = kind.unit_factors(problem.units)
    named: dict[str, Float64] = {}
    begun = 0
    for name in sorted(at):
        entries = deviations[begun : begun + np.size(at[name])].reshape(np.shape(at[name]))
        named[name] = entries * factors.get(name, 1.0)
        begun += entries.size
    return Spectrum(values, np.zeros(0), null, Parameters(named), problem.units.x_scale)


def _whole(matrix: Float64, gauge: int) -> tuple[Float64, int, Float64]:
    """Eigenvalues beyond the gauge, open directions, and the variance of each parameter."""
    values, basis = scipy.linalg.eigh(matrix, check_finite=False)
    null = count_null(values)
    variance = np.sum(basis[:, null:] ** 2 / values[null:], axis=1)
    if null > gauge:  # a parameter that an open direction moves may be anything
        moved = np.sum(basis[:, :null] ** 2, axis=1)
        variance = np.where(moved > 1e-8, np.inf, variance)
    return values[gauge:], max(0, null - gauge), variance


def _lower_end(matrix: Float64, gauge: int) -> tuple[Float64, int, Float64]:
    """The same by subspace iteration with the inverse; the variance as a bound."""
    size = len(matrix)
    count = min(size, gauge + _BEYOND)
    norm = _largest(matrix)
    shifted = matrix.copy()
    shifted[np.diag_indices(size)] += NULL * norm
    factor = scipy.linalg.cho_factor(shifted, lower=True, overwrite_a=True, check_finite=False)
    basis = np.random.default_rng(0).standard_normal((size, count))
    for _ in range(_ITERATIONS):
        basis = scipy.linalg.cho_solve(factor, np.linalg.qr(basis).Q, check_finite=False)
    basis = np.linalg.qr(basis).Q
    values = scipy.linalg.eigvalsh(basis.T @ matrix @ basis)
    null = int(np.sum(values < NULL * norm))
    if null == count:  # more is open than was looked at
        values = scipy.linalg.eigvalsh(matrix)
        null = count_null(values)
    if null > gauge:
        return np.append(values[gauge:], norm), null - gauge, np.full(size, np.inf)
    return np.append(values[gauge:], norm), 0, np.full(size, 1 / values[null])


def _largest(matrix: Float64) -> float:
    """The largest eigenvalue, from below, by power iteration; its diagonal is one."""
    vector = np.random.default_rng(1).standard_normal(len(matrix))
    for _ in range(8):
        vector = matrix @ (vector / np.linalg.norm(vector))
    return float(np.linalg.norm(vector))
