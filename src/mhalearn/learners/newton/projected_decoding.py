"""Projected heads from roughly known writers, as plain heads are decoded (`decoding`).

What heads write, and the patterns of the first rows, say nothing of how attention is made: the same
two problems find them for heads that are rotated, capped, biased by distance or normalised. Logs of
patterns are then differences of the kind's own scores (`solvers.pattern_mixing`). Which heads share
values is read off what they write, and keys are shared in the end, when each head has found its
own: a student's surplus groups hold parts of several.

A sink is a token of zeros before all others, which every row sees; a window, as long as it is not
full, nothing.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from mhalearn._runtime.programs import in_float64
from mhalearn._runtime.seeds import Stream, generator
from mhalearn._runtime.types import Array, Float64
from mhalearn.data import Examples
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.distinct_heads import (
    Heads,
    join_groups,
    keep_distinct_heads,
    own_groups,
    split_by_group,
)
from mhalearn.layer.parametrisation import Params
from mhalearn.layer.projected import Projected
from mhalearn.layer.relaxed import Relaxed
from mhalearn.layer.shared_projections import group_by_values, share_keys, share_values
from mhalearn.run.run import Run
from mhalearn.solvers.free_patterns import Sequences, Writers, make_sequences, project_patterns
from mhalearn.solvers.gauss_newton import loss_of
from mhalearn.solvers.pattern_mixing import MIXED, Attended, regress_groups
from mhalearn.solvers.scaled_problem import Problem
from mhalearn.solvers.score_regression import HALVES, LAST_HALVES, choose_by_head

# Of the squares of a group's logits: more, and its regression is tried from other starts, of so
# many times the size that heads have at first.
_STALLED, _STARTS = 1e-4, (0.3,)
# Of the labels: a projection that leaves more has not found W, and its patterns are none.
_FOUND = 1e-12
# Standard deviations at which entries count half, one after the other: while patterns are mixed,
# small ones say little.
_WEIGHTS = HALVES[1:]
# Heads whose patterns differ by less are one, where more of them are left than there should be.
_ALIKE = (0.1, 0.2, 0.4)
# Parameters that say what heads write.
_WRITERS = ("value", "out", "value_bias", "out_bias")


class DecodedHeads(NamedTuple):
    """Parameters of `Relaxed`, and their loss."""

    params: Params
    loss: float


def may_decode(kind: Relaxed, problem: Problem) -> bool:
    """Whether rows show the patterns of such heads, whose scores are those of each group alone."""
    a = kind.architecture
    alone = a.latent is None and not (a.norm is not None and a.norm.across_heads)
    known = a.rope is None or kind.frees_rotation
    prefix = a.causal or a.window is None
    plain = a.memory is None and problem.data.positions is None and problem.devices == 1
    return known and prefix and plain and alone and kind.frees


@in_float64
def decode_student(
    student: Relaxed,
    params: Mapping[str, Float64],
    patterns: Float64,
    examples: Examples,
    problem: Problem,
    run: Run,
    *,
    small: float,
    stage: str,
) -> DecodedHeads | None:
    """As many heads as the class of `problem` has; None: what they write was not found.

    patterns: (n, k, m, k), of the student on some examples.
    Cost: some tens of steps of some tens of forward passes. Trust: a heuristic, from W within half
    of their size; whether it ended well is seen in the loss.
    """
    a = problem.architecture
    heads = _distinct(student, params, patterns, a.heads, small)
    run.emit(stage, detail=f"{heads.architecture.heads} of {student.architecture.heads} to decode")
    alone, sequences = replace(a, kv_heads=None), make_rows(examples, problem)
    if heads.architecture.heads < a.heads or sequences is None:
        return None
    start = writers_of(alone, heads.params)
    written = project_patterns(start, sequences, run, stage=f"{stage}, projections")
    if written.loss > _FOUND or run.is_over():
        return None
    order = group_by_values(np.asarray(written.writers.value), a.groups)
    if order is None:
        return None
    value, out, bias = written.writers
    writers = Writers(*share_values(value, out, order, a.groups), bias)
    ordered = {
        name: leaf[order] for name, leaf in split_by_group(_readers(heads.params), alone).items()
    }
    readers = split_by_group(join_groups(ordered), a)
    mixed = np.full(a.groups, MIXED)
    found = _read(Attended(readers, writers, mixed), sequences, problem, run, f"{stage}, log-odds")
    params = join_groups(share_keys(found.readers)) | _written(a, found.writers)
    kind = Relaxed(a)
    found = found._replace(readers=split_by_group(_readers(params), a))
    sequences = make_rows(examples, problem, only_patterns=True) or sequences
    shared = _group_kind(a, shared=True)
    for half in LAST_HALVES:
        found, _ = regress_groups(
            found, sequences, shared, a, half, run, stage=f"{stage}, shared log-odds"
        )
    decoded = join_groups(found.readers) | _written(a, found.writers)
    loss = loss_of(decoded, replace(problem, parametrisation=kind))
    run.emit(stage, loss=loss, detail=f"{a.heads} heads decoded")
    return DecodedHeads(decoded, loss)


def _distinct(
    student: Relaxed,
    params: Mapping[str, Float64],
    patterns: Float64,
    most: int,
    small: float,
) -> Heads:
    """Heads one by one, those that attend alike made one: the more loosely, the more there are."""
    own = own_groups(student.architecture, params)
    for alike in _ALIKE:
        heads = keep_distinct_heads(*own, patterns, alike=alike, small=small, most=None)
        if heads.architecture.heads <= most:
            return heads
    return keep_distinct_heads(*own, patterns, alike=alike, small=small, most=most)


def make_rows(
    examples: Examples, problem: Problem, *, only_patterns: bool = False
) -> Sequences | None:
    """With a sink as the first token, and where values have biases a feature that it lacks."""
    a = problem.architecture
    tokens, labels, lengths = examples.arrays()
    tokens = np.asarray(tokens, np.float64) / problem.units.x_scale
    labels = np.asarray(labels, np.float64) / problem.units.y_scale
    if a.sinks:
        if a.bias:
            tokens = np.concatenate([tokens, np.ones((*tokens.shape[:2], 1))], axis=2)
        tokens, labels = (np.pad(part, ((0, 0), (1, 0), (0, 0))) for part in (tokens, labels))
    return make_sequences(
        tokens,
        labels,
        lengths + a.sinks,
        heads=a.heads,
        rank=a.ov_rank,
        causal=a.causal,
        first=None if a.window is None else a.window + a.sinks,
        sink=a.sinks,
        only_patterns=only_patterns,
    )


def writers_of(a: Architecture, params: Mapping[str, Any]) -> Writers:
    """Values' biases are rows of values where there is a sink, which has none, and else a part of
    the bias of outputs."""
    value, out = (jnp.asarray(params[name]) for name in ("value", "out"))
    if not a.bias:
        return Writers(value, out, jnp.zeros((0, a.outputs)))
    bias, of_values = (jnp.asarray(params[name]) for name in ("out_bias", "value_bias"))
    if a.sinks:
        value = jnp.concatenate([value, of_values[:, None]], axis=1)
    else:
        shared = jnp.repeat(of_values, len(out) // len(value), axis=0)
        bias = bias + jnp.einsum("mh,mhe->e", shared, out)
    return Writers(value, out, bias[None])


def _written(a: Architecture, writers: Writers) -> dict[str, Array]:
    """The parameters that `writers_of` reads."""
    found = {"value": writers.value[:, : a.d], "out": writers.out}
    if a.bias:
        none = jnp.zeros((len(writers.value), a.values))
        found["value_bias"] = writers.value[:, a.d] if a.sinks else none
        found["out_bias"] = writers.bias[0]
    return found


def _readers(params: Mapping[str, Any]) -> dict[str, Array]:
    return {name: jnp.asarray(leaf) for name, leaf in params.items() if name not in _WRITERS}


def _group_kind(a: Architecture, *, shared: bool) -> Relaxed:
    """Of the heads of one group, which share keys or have their own."""
    each = a.heads // a.groups
    return Relaxed(replace(a, n_heads=each, kv_heads=1 if shared and each > 1 else None))


def _read(start: Attended, data: Sequences, problem: Problem, run: Run, stage: str) -> Attended:
    """Queries and keys of each head, from where descent left them, else from small random ones."""
    first, *finer = _WEIGHTS
    a = problem.architecture
    kind = _group_kind(a, shared=False)
    found, left = regress_groups(start, data, kind, a, first, run, stage=stage)
    for number, size in enumerate(_STARTS):
        if not np.any(left > _STALLED):
            break
        other = start._replace(readers=_random_readers(a, size, run.seed, number))
        other, less = regress_groups(other, data, kind, a, first, run, stage=f"{stage}, again")
        better, left = less < left, np.minimum(less, left)
        heads = np.repeat(better, a.heads // a.groups)
        out = choose_by_head(heads, other.writers.out, found.writers.out)
        readers = choose_by_head(better, other.readers, found.readers)
        mixed = np.where(better, other.mixed, found.mixed)
        found = Attended(readers, found.writers._replace(out=out), mixed)
    for half in finer:
        found, _ = regress_groups(found, data, kind, a, half, run, stage=stage)
    return found


def _random_readers(a: Architecture, size: float, seed: int, number: int) -> dict[str, Array]:
    alone = replace(a, kv_heads=None)
    params = Relaxed(alone).relax(
        Projected(alone).init(generator(seed, Stream.PROJECTED_STARTS, number))
    )
    small = {name: size * params[name] for name in ("query", "key")}
    return split_by_group(_readers({**params, **small}), a)
