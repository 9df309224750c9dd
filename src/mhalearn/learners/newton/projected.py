"""Heads as decoders have them: Adam on a student with surplus heads, then Gauss-Newton.

As for many narrow heads (`factored`), a penalty on the projections starts where it keeps all heads
at zero and fades. What is left of the student descends in a wider class, in which positions are
numbers to be learned (`layer.relaxed`), and is read back from it. Large heads are decoded from the
student where rows allow it (`projected_decoding`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np

from mhalearn._runtime.seeds import Stream, generator
from mhalearn._runtime.types import Float64
from mhalearn.data import Examples
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.base import Layer
from mhalearn.layer.distinct_heads import Heads, fill_with_heads, keep_distinct_heads
from mhalearn.layer.parametrisation import Params
from mhalearn.layer.position_bias import Alibi
from mhalearn.layer.projected import Projected
from mhalearn.layer.relaxed import Relaxed
from mhalearn.learners.newton.model_selection import ModelSelection, split_for_selection
from mhalearn.learners.newton.projected_decoding import decode_student, may_decode
from mhalearn.learners.newton.student import (
    BLOCK,
    STEPS,
    anneal_student,
    compare_patterns,
    on_device,
)
from mhalearn.run.outcome import Candidate, Outcome
from mhalearn.run.run import Run
from mhalearn.solvers.damping import ROUNDING
from mhalearn.solvers.gauss_newton import JOINT, has_converged, init_state, loss_of, take_step
from mhalearn.solvers.head_steps import descend_with_normal_matrix, may_form_normal_matrix
from mhalearn.solvers.polish import minimise
from mhalearn.solvers.scaled_problem import Problem, make_problem

# Features up to which so many steps do; more need as many times more.
_WIDTH = 96
# Of the heads that are kept, rounds of as many steps at most, while the loss is above this and each
# leaves no more than such a share of it.
_ROUNDS, _SETTLED, _PAYS = 3, 1e-4, 0.5
# A large student that leaves more than this share of the labels is not worth polish before others,
# more patient ones, were tried: each has as many times more steps as the square of its number.
_PROMISING = 1e-2
# A student that leaves more than this share of the labels has not found what heads write; and
# layers of fewer parameters are found as fast by descent.
_ROUGH, _DECODED = 0.3, 2**15
# Attempts at most; two that end this near each other have found the same minimum.
_ATTEMPTS, _SAME = 4, 0.1
# Heads whose patterns differ by less are one; a W this far below the largest is none.
_ALIKE, _SMALL = 0.1, 0.05
# Steps in a wider class at most; the loss below which it has found the layer, and steps that leave
# more than the last share of it are slow.
_WIDER_STEPS, _READABLE, _LITTLE = 40, 1e-6, 0.5
# The loss from which on epsilons are freed: before, they would take up what else is wrong.
_NEAR = 1e-8


class FoundKind(NamedTuple):
    """A layer of the kind that was found, and its relative squared error on held-out examples."""

    layer: Layer
    loss: float


def learn_projected(
    examples: Examples,
    architecture: Architecture,
    exact: float,
    run: Run,
    look: Callable[[float], FoundKind | None] = lambda loss: None,
) -> Candidate:
    """Attempts, each with more surplus heads and more patience, until one explains held-out
    examples exactly.

    look: asked after the first that does not, with what it leaves, for a kind that explains more;
    other attempts are spared where that is another kind than asked for.
    Cost: a forward and a backward pass over a batch a step of Adam; some hundred passes over the
    examples a step of Gauss-Newton. Trust: a heuristic.
    """
    guess = architecture.with_heads(architecture.n_heads or architecture.usual_heads())
    train, select = split_for_selection(examples, guess, run.seed)
    problem = make_problem(train, Projected(guess))
    selection = ModelSelection(problem, select, run)
    most = None if architecture.n_heads is None else guess.groups
    instead: Layer | None = None
    for attempt in range(_ATTEMPTS):
        name = f"attempt {attempt + 1}"
        if not run.checkpoint.begun(name) and (selection.loss < exact or run.is_over()):
            break
        before = selection.loss
        with run.checkpoint.within(name):
            layer = learn_once(problem, train, run, most=most, attempt=attempt)
            if layer is not None:
                selection.offer(layer)
        if (1 - _SAME) * before < selection.loss < before:
            break
        run.checkpoint.record(name, 1, now=True)
        found = look(selection.loss) if attempt == 0 and selection.loss >= exact else None
        if found is not None and found.layer.architecture == guess:
            selection.offer(found.layer)
        elif found is not None:
            instead = found.layer
            break
    if selection.layer is None:
        start = Projected(guess).init(np.random.default_rng(run.seed))
        selection.offer(problem.to_layer(start))
        return selection.candidate(Outcome.TIME_LIMIT if run.is_over() else Outcome.NONFINITE)
    late = run.is_over() and selection.loss >= exact
    candidate = selection.candidate(Outcome.TIME_LIMIT if late else Outcome.FITTED)
    return replace(candidate, instead=instead)


def learn_once(
    problem: Problem, examples: Examples, run: Run, *, most: int | None, attempt: int
) -> Layer | None:
    """A student, its descent, what is distinct of it, and that polished; None: it diverged.

    examples: those of the problem. most: groups of heads to keep at most, None where their number
    is open.
    """
    stage, rng = f"attempt {attempt + 1}", generator(run.seed, Stream.PROJECTED_STARTS, attempt)
    asked = problem.architecture
    each, surplus = asked.heads // asked.groups, max(2, asked.groups // 4) * (attempt + 1)
    groups = asked.groups + surplus
    wider = replace(asked, n_heads=groups * each, kv_heads=groups if each > 1 else None)
    kind = Relaxed(wider, frees=problem.data.positions is None)
    start = kind.relax(Projected(wider).init(rng), slopes=_spread_slopes(asked, wider.heads))
    large = not may_form_normal_matrix(problem)
    patience = max(1.0, asked.d / _WIDTH) * (attempt + 1) ** (2 if large else 1)
    steps = round(STEPS * patience / BLOCK) * BLOCK
    student, loss = anneal_student(
        start, replace(problem, parametrisation=kind), run, steps, rng, stage
    )
    if not all(np.isfinite(leaf).all() for leaf in student.values()):
        return None
    patterns = compare_patterns(kind, student, problem)
    near = large and most is not None and loss < _ROUGH
    if near and Projected(asked).size() > _DECODED and may_decode(kind, problem):
        decoded = decode_student(
            kind, student, patterns, examples, problem, run, small=_SMALL, stage=stage
        )
        if decoded is not None and decoded.loss < ROUNDING:
            return read_heads(decoded.params, Relaxed(asked), problem, run, stage)
        if decoded is not None and decoded.loss < _READABLE:
            params = {name: np.asarray(leaf) for name, leaf in decoded.params.items()}
            return polish_heads(Heads(asked, params), problem, run, stage)
    heads = keep_distinct_heads(wider, student, patterns, alike=_ALIKE, small=_SMALL, most=most)
    run.emit(stage, detail=f"{heads.architecture.heads} of {wider.heads} heads are distinct")
    if most is not None:
        heads = fill_with_heads(
            heads, {name: np.asarray(leaf) for name, leaf in start.items()}, most
        )
    if large and loss > _PROMISING and attempt < _ATTEMPTS - 1:
        return Relaxed(heads.architecture, frees=kind.frees).to_layer(
            on_device(heads.params), problem.units
        )
    if not large:
        heads = settle_heads(heads, problem, run, rng, stage)
    layer = polish_heads(heads, problem, run, stage)
    return layer if most is not None else drop_surplus(layer, problem, run, stage)


def settle_heads(
    heads: Heads, problem: Problem, run: Run, rng: np.random.Generator, stage: str
) -> Heads:
    """More of Adam, now on the heads that were kept, while it pays.

    What pruning changed, and sharp heads whose logits still grow, take Gauss-Newton some tens of
    damped steps, each of which costs as much as a thousand of these.
    """
    kind = Relaxed(heads.architecture, frees=problem.data.positions is None)
    wide = replace(problem, parametrisation=kind)
    params: Params = kind.relax(heads.params)
    loss = loss_of(params, wide)
    for number in range(_ROUNDS):
        if not loss > _SETTLED or run.is_over():
            break
        name = f"{stage}, kept heads {number + 1}"
        found, _ = anneal_student(params, wide, run, STEPS, rng, name, penalised=False)
        before, after = loss, loss_of(on_device(found), wide)
        if not after < before:
            break
        params, loss = on_device(found), after
        if after > _PAYS * before:
            break
    return heads._replace(params={name: np.asarray(leaf) for name, leaf in params.items()})


def drop_surplus(layer: Layer, problem: Problem, run: Run, stage: str) -> Layer:
    """Of a layer with more heads than examples ask for, one without those that became idle or
    copies on the way down; the layer itself where the rest leaves more."""
    kind = Projected(layer.architecture)
    params = kind.from_layer(layer, problem.units)
    loss = loss_of(on_device(params), replace(problem, parametrisation=kind))
    heads = keep_distinct_heads(
        layer.architecture,
        params,
        compare_patterns(kind, params, problem),
        alike=_ALIKE,
        small=_SMALL,
        most=None,
    )
    if heads.architecture.heads == layer.architecture.heads:
        return layer
    run.emit(stage, detail=f"{heads.architecture.heads} of these are distinct")
    fewer = polish_heads(heads, problem, run, f"{stage}, distinct heads")
    kind = Projected(fewer.architecture)
    left = loss_of(
        on_device(kind.from_layer(fewer, problem.units)), replace(problem, parametrisation=kind)
    )
    return fewer if left <= max(loss, ROUNDING) else layer


def polish_heads(heads: Heads, problem: Problem, run: Run, stage: str) -> Layer:
    """Descend in wider classes, read what they learned, and descend in the class that was asked
    for where that is not exact."""
    kind = Relaxed(heads.architecture, frees=problem.data.positions is None)
    params: Params = heads.params
    if kind.frees_any:
        wide, sized = replace(problem, parametrisation=kind), replace(kind, frees_sizes=True)
        params, loss, stalled = descend_wider(
            kind.relax(params), wide, run, f"{stage}, wider class"
        )
        name, enough = f"{stage}, weak directions", _NEAR if sized.sized() else ROUNDING
        if loss >= enough and (stalled or loss < _READABLE):
            params, loss = finish(params, wide, run, name, enough=enough)
        if sized.sized() and ROUNDING <= loss < _NEAR:
            kind, wide = sized, replace(problem, parametrisation=sized)
            params, _ = finish(kind.relax(params), wide, run, f"{stage}, sizes")
    return read_heads(params, kind, problem, run, stage)


def read_heads(params: Params, kind: Relaxed, problem: Problem, run: Run, stage: str) -> Layer:
    """What wider classes learned as a layer of the class asked for, descended there where that is
    not exact."""
    narrow = replace(problem, parametrisation=Projected(kind.architecture))
    params, name = on_device(kind.read(params) if kind.frees_any else params), f"{stage}, polish"
    loss = loss_of(params, narrow)
    if ROUNDING <= loss < _READABLE and kind.frees_any:  # that reading has left
        params, _ = finish(params, narrow, run, name)
    elif not loss < ROUNDING:
        params = minimise(params, narrow, run, stage=name).params
    layer: Layer = narrow.to_layer(params)
    return layer


def descend_wider(
    params: Params, problem: Problem, run: Run, stage: str
) -> tuple[Params, float, bool]:
    """Gauss-Newton to rounding, or until steps gain little; the loss; and whether that was because
    conjugate gradients did not solve for them, and J^T J can help."""
    kind = problem.parametrisation
    assert isinstance(kind, Relaxed)
    enough = _NEAR if replace(kind, frees_sizes=True).sized() else 0.0
    helps = may_form_normal_matrix(problem)
    if helps and kind.frees_norm:  # with gains of one to eight they never do
        return dict(params), loss_of(params, problem), True
    state = init_state(jax.tree.map(lambda leaf: np.asarray(leaf)[None], params))
    loss, stalled = float("inf"), False
    for step in range(_WIDER_STEPS):
        before = loss
        state = take_step(state, problem, JOINT)
        loss = float(state.loss[0])
        run.emit(stage, step, loss)
        if loss < ROUNDING and loss < before / 2:
            continue  # what is badly conditioned gains even there, and polish would cost more
        slow = loss > _LITTLE * before
        stalled = slow and helps and loss < _PROMISING and not state.solved[0]
        end = stalled or (slow and loss < _READABLE) or loss < enough
        if end or has_converged(state).all() or run.is_over():
            break
    return {name: np.asarray(leaf)[0] for name, leaf in state.params.items()}, loss, stalled


def finish(
    params: Params, problem: Problem, run: Run, stage: str, *, enough: float = ROUNDING
) -> tuple[Params, float]:
    """By steps that begin with J^T J, where it can be formed, until the loss is enough: biases that
    meet slow rotations, and epsilons, are hardly seen beside the rest."""
    if may_form_normal_matrix(problem):
        ended = descend_with_normal_matrix(params, problem, run, stage=stage, enough=enough)
        return ended.params, ended.loss
    found = minimise(on_device(params), problem, run, stage=stage)
    return found.params, found.loss


def _spread_slopes(asked: Architecture, heads: int) -> Float64 | None:
    """For so many heads, over the range of those asked for."""
    if not isinstance(asked.distance_bias, Alibi):
        return None
    known = np.sort(np.log(asked.distance_bias.slopes(asked.heads)))
    places = np.linspace(0, len(known) - 1, heads)
    return np.exp(np.interp(places, np.arange(len(known)), known))
