"""Heads from roughly known writers: W without attention, then attention row by row, then Theta.

Descent finds what heads write long before it finds a sharp head's attention. While rows have more
outputs than patterns can explain, the rest is three problems without softmax in them: W by variable
projection over patterns, patterns by least squares, and each Theta by a regression of log-odds.
"""

import numpy as np

from mhalearn._runtime.programs import in_float64
from mhalearn.data import Examples
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.base import Layer
from mhalearn.layer.factored import Factored, Factors, merge_heads
from mhalearn.layer.layer import AttentionLayer
from mhalearn.run.run import Run
from mhalearn.solvers.damping import NOTHING_LEFT, ROUNDING
from mhalearn.solvers.free_patterns import (
    Sequences,
    Writers,
    Written,
    decode,
    longest,
    make_sequences,
    project_patterns,
)
from mhalearn.solvers.gauss_newton import loss_of
from mhalearn.solvers.scaled_problem import Problem, make_problem
from mhalearn.solvers.score_regression import (
    HALVES,
    LAST_HALVES,
    Readers,
    choose_by_head,
    measure_logits,
    regress_logits,
    spectral_start,
)

# Heads closer than the first, against their own size, or than the second, against the largest of
# all, are the same, and those that are smaller than the second are none.
ALIKE, SAME = 0.4, 0.05
# Of the squares of a head's logits: more, and its regression is tried from another start.
_STALLED = 1e-4
# The share of examples that must be short.
_MOST = 0.9
# Of the loss before: a projection that leaves more has not found W, and its patterns are none.
_LITTLE = 1e-3
# Of what is left of the logits, at each finer weight: a step that gains less is the last.
_IDLE = 0.3


def is_decodable(examples: Examples, architecture: Architecture) -> bool:
    """Whether most examples are short enough for their patterns to be told from their outputs."""
    _, _, lengths = examples.arrays()
    short = lengths <= longest(architecture.heads, architecture.outputs, architecture.ov_rank)
    return bool(np.mean(short) >= _MOST)


@in_float64
def decode_heads(
    heads: Factors, examples: Examples, problem: Problem, run: Run, *, stage: str
) -> tuple[Factors, float]:
    """The decoded heads and their loss where they fit better than the given ones, which else come
    back. Heads that turn out to be parts of one are merged, and decoded again.

    Cost: some ten steps of some tens of forward passes. Trust: a heuristic, from W within half of
    their size; whether it ended well is seen in the loss.
    """
    before = loss_of(heads, problem)
    best, best_loss = heads, before
    found: Factors | None = heads
    while found is not None and not run.is_over():
        heads, n_heads = found, len(found.value)
        sequences = _sequences(examples, problem, n_heads)
        if sequences is None:
            break
        start = Writers(heads.value, heads.out, heads.bias)
        written = project_patterns(start, sequences, run, stage=f"{stage}, projections")
        if written.loss > _LITTLE * before:
            break
        bias = problem.architecture.bias
        readers = _readers(written, sequences, heads, bias, run, f"{stage}, log-odds")
        sequences = _sequences(examples, problem, n_heads, only_patterns=True) or sequences
        readers = _refine(readers, written.writers, sequences, bias, run, f"{stage}, log-odds")
        decoded = Factors(*readers, *written.writers)
        loss = loss_of(decoded, problem)
        run.emit(stage, loss=loss, detail=f"{n_heads} heads decoded, {best_loss:.1e} before")
        if loss < best_loss or loss < NOTHING_LEFT:
            best, best_loss = decoded, loss
        merged = merge_heads(decoded, ALIKE, SAME)
        found = merged if len(merged.value) < n_heads else None
    return best, best_loss


@in_float64
def refine_attention(
    layer: Layer, examples: Examples, architecture: Architecture, run: Run
) -> Layer:
    """The layer with each Theta by the log-odds of all examples, where that fits them better.

    Cost: some steps of some tens of forward passes.
    """
    assert isinstance(layer, AttentionLayer)
    problem = make_problem(examples, Factored(architecture.with_heads(layer.n_heads)))
    heads = problem.parametrisation.from_layer(layer, problem.units)
    sequences = _sequences(examples, problem, layer.n_heads, only_patterns=True)
    before = loss_of(heads, problem)
    if sequences is None or before < ROUNDING:
        return layer
    writers, readers = Writers(heads.value, heads.out, heads.bias), Readers(heads.query, heads.key)
    readers = _refine(readers, writers, sequences, architecture.bias, run, "log-odds of all")
    refined = Factors(*readers, *writers)
    return problem.to_layer(refined) if loss_of(refined, problem) < before else layer


def _sequences(
    examples: Examples, problem: Problem, n_heads: int, *, only_patterns: bool = False
) -> Sequences | None:
    tokens, labels, lengths = examples.arrays()
    return make_sequences(
        np.asarray(tokens, np.float64) / problem.units.x_scale,
        np.asarray(labels, np.float64) / problem.units.y_scale,
        lengths,
        heads=n_heads,
        rank=problem.architecture.ov_rank,
        causal=problem.architecture.causal,
        only_patterns=only_patterns,
    )


def _readers(
    written: Written, sequences: Sequences, heads: Factors, bias: bool, run: Run, stage: str
) -> Readers:
    """Theta of each head, from where its logits say, else from where descent left it."""
    first, *finer = HALVES
    measured = measure_logits(written.decoded, sequences, bias, first)
    start = spectral_start(measured, heads.query.shape[-1])
    found, left = regress_logits(start, measured, run, stage=stage)
    if np.any(left > _STALLED):
        start = Readers(heads.query, heads.key)
        other, less = regress_logits(start, measured, run, stage=f"{stage}, again")
        found = choose_by_head(less < left, other, found)
    for half in finer:
        measured = measure_logits(written.decoded, sequences, bias, half)
        found, _ = regress_logits(found, measured, run, stage=stage, idle_gain=_IDLE)
    return found


def _refine(
    readers: Readers, writers: Writers, sequences: Sequences, bias: bool, run: Run, stage: str
) -> Readers:
    """By the logits of all sequences, each counted by its precision: W needs fewer than Theta."""
    decoded = decode(writers, sequences, only_patterns=True)
    for half in LAST_HALVES:
        measured = measure_logits(decoded, sequences, bias, half)
        readers, _ = regress_logits(readers, measured, run, stage=stage, idle_gain=_IDLE)
    return readers
