"""Heads from roughly known writers: W without attention, then attention row by row, then Theta.

Descent finds what heads write long before it finds a sharp head's attention. While rows have more
outputs than patterns can explain, the rest is three problems without softmax in them: W by variable
projection over patterns, patterns by least squares, and each Theta by a regression of log-odds.
"""

import numpy as np

from mhalearn._runtime.programs import in_float64
from mhalearn.data import Examples
from mhalearn.layer.factored import Factors
from mhalearn.run.run import Run
from mhalearn.solvers.free_patterns import Writers, make_sequences, project_patterns
from mhalearn.solvers.gauss_newton import loss_of
from mhalearn.solvers.scaled_problem import Problem
from mhalearn.solvers.score_regression import measure_logits, regress_logits


@in_float64
def decode_heads(
    heads: Factors, examples: Examples, problem: Problem, run: Run, *, stage: str
) -> tuple[Factors, float]:
    """The decoded heads and their loss, where they fit better than the given ones, which else come
    back.

    Cost: some ten steps of some tens of forward passes. Trust: a heuristic, from W within half of
    their size; whether it ended well is seen in the loss.
    """
    before = loss_of(heads, problem)
    a, units = problem.architecture, problem.units
    tokens, labels, lengths = examples.arrays()
    sequences = make_sequences(
        np.asarray(tokens, np.float64) / units.x_scale,
        np.asarray(labels, np.float64) / units.y_scale,
        lengths,
        heads=len(heads.value),
        rank=a.ov_rank,
        causal=a.causal,
    )
    if sequences is None:
        return heads, before
    written = project_patterns(
        Writers(heads.value, heads.out, heads.bias), sequences, run, stage=f"{stage}, projections"
    )
    measured = measure_logits(written.decoded, sequences, a.bias)
    readers, _ = regress_logits(measured, a.qk_rank, run, stage=f"{stage}, log-odds")
    decoded = Factors(*readers, *written.writers)
    after = loss_of(decoded, problem)
    run.emit(stage, loss=after, detail=f"decoded, {before:.1e} before")
    return (decoded, after) if after < before else (heads, before)
