"""Heads from roughly known writers: W without attention, then attention row by row, then Theta.

Descent finds what heads write long before it finds a sharp head's attention. While rows have more
outputs than patterns can explain, the rest is three problems without softmax in them: W by variable
projection over patterns, patterns by least squares, and each Theta by a regression of log-odds.
"""

import jax
import numpy as np

from mhalearn._runtime.programs import in_float64
from mhalearn.data import Examples
from mhalearn.layer.factored import Factors
from mhalearn.run.run import Run
from mhalearn.solvers.free_patterns import (
    Sequences,
    Writers,
    Written,
    make_sequences,
    project_patterns,
)
from mhalearn.solvers.gauss_newton import loss_of
from mhalearn.solvers.scaled_problem import Problem
from mhalearn.solvers.score_regression import (
    HALVES,
    Readers,
    measure_logits,
    regress_logits,
    spectral_start,
)

# Heads that write less, against the one that writes most, are none.
_NONE = 1e-6
# Of the label energy: a projection that leaves less has found W, whatever Theta does.
_FOUND = 1e-12
# Of the squares of a head's logits: more, and its regression is tried from another start.
_STALLED = 1e-4
# Steps at each finer weight of logits.
_FINER_STEPS = 8


@in_float64
def decode_heads(
    heads: Factors, examples: Examples, problem: Problem, run: Run, *, stage: str
) -> tuple[Factors, float]:
    """The decoded heads and their loss where they fit better than the given ones, which else come
    back.

    Cost: some ten steps of some tens of forward passes. Trust: a heuristic, from W within half of
    their size; whether it ended well is seen in the loss.
    """
    before = loss_of(heads, problem)
    a = problem.architecture
    sequences = _sequences(examples, problem, len(heads.value))
    if sequences is None:
        return heads, before
    start = Writers(heads.value, heads.out, heads.bias)
    written = project_patterns(start, sequences, run, stage=f"{stage}, projections")
    kept = _writing(written.writers)
    if not kept.all():
        fewer = jax.tree.map(lambda leaf: leaf[kept], written.writers)
        written = project_patterns(fewer, sequences, run, stage=f"{stage}, projections")
        heads = jax.tree.map(lambda leaf: leaf[kept], heads)
    readers = _readers(written, sequences, heads, a.bias, run, f"{stage}, log-odds")
    decoded = Factors(*readers, *written.writers)
    after = loss_of(decoded, problem)
    run.emit(stage, loss=after, detail=f"decoded, {before:.1e} before")
    return (decoded, after) if after < before or written.loss < _FOUND else (heads, before)


def _sequences(examples: Examples, problem: Problem, n_heads: int) -> Sequences | None:
    tokens, labels, lengths = examples.arrays()
    return make_sequences(
        np.asarray(tokens, np.float64) / problem.units.x_scale,
        np.asarray(labels, np.float64) / problem.units.y_scale,
        lengths,
        heads=n_heads,
        rank=problem.architecture.ov_rank,
        causal=problem.architecture.causal,
    )


def _writing(writers: Writers) -> np.ndarray:
    """Which heads write anything."""
    value, out = (np.asarray(part) for part in (writers.value, writers.out))
    sizes = np.array([np.linalg.norm(left @ right) for left, right in zip(value, out, strict=True)])
    return np.asarray(sizes > _NONE * sizes.max())


def _readers(
    written: Written, sequences: Sequences, heads: Factors, bias: bool, run: Run, stage: str
) -> Readers:
    """Theta of each head, from where its logits say, else from where descent left it."""
    first, *rest = (measure_logits(written.decoded, sequences, bias, half) for half in HALVES)
    start = spectral_start(first, heads.query.shape[-1])
    found, left = regress_logits(start, first, run, stage=stage)
    late = np.flatnonzero(left > _STALLED)
    if len(late):
        again = first._replace(logits=first.logits[late], worth=first.worth[late])
        other, less = regress_logits(
            Readers(heads.query[late], heads.key[late]), again, run, stage=f"{stage}, again"
        )
        better = less < left[late]
        found = jax.tree.map(
            lambda one, two: one.at[late[better]].set(two[better]), found, other
        )
    for finer in rest:
        found, _ = regress_logits(found, finer, run, stage=stage, max_steps=_FINER_STEPS)
    return found
