"""Which kind of heads examples show: open heads are learned, read, and polished as what they are.

One search in a class that holds many kinds (`layer.open_heads`) in place of one search a kind. What
is read is tried on examples that chose nothing yet, and returned only where it explains them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mhalearn._runtime.seeds import Stream, generator
from mhalearn.data import Examples
from mhalearn.data.label_precision import label_precision
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.base import Layer
from mhalearn.layer.distinct_heads import fill_with_heads, keep_distinct_heads
from mhalearn.layer.key_sharing import share_keys
from mhalearn.layer.kind_reading import Reading, read_kind
from mhalearn.layer.open_heads import OpenHeads
from mhalearn.layer.parametrisation import Params
from mhalearn.layer.projected import Projected
from mhalearn.learners.newton.model_selection import split_for_selection
from mhalearn.learners.newton.projected import FoundKind
from mhalearn.learners.newton.student import anneal_student, compare_patterns, on_device
from mhalearn.run.outcome import Candidate, Outcome
from mhalearn.run.run import Run
from mhalearn.solvers.dense_normal_equations import descend_densely
from mhalearn.solvers.head_steps import MAX_PARAMETERS, Descended, descend_with_normal_matrix
from mhalearn.solvers.polish import Minimum, polish_on, relative_error
from mhalearn.solvers.scaled_problem import Problem, make_problem

# Parameters up to which a kind is looked for unasked, and the normal matrix of all of them formed
# at every step; larger layers take minutes.
_FEW_PARAMETERS = 1200
# Steps of larger ones at most.
_MOST_STEPS = 100
# Attempts, the steps of the first, and surplus heads.
_ATTEMPTS, _STEPS, _SURPLUS = 2, 1500, 2
# Heads whose patterns differ by less are one; a W this far below the largest is none.
_ALIKE, _SMALL = 0.1, 0.05
# Numbers are read to so many times the root of the loss, and never nearer or farther than this.
_TIMES, _NEAREST, _FARTHEST = 100.0, 1e-7, 0.03
# Share of the labels' squares that what is read may leave, to be polished.
_READABLE = 1e-3
# A fit that leaves less may have met noise and no more; heads of a Theta and a W are fitted by
# another search, which ends in the layer more surely. Another kind must leave so much less.
_STRUCTURED, _STRUCTURED_PLAIN, _FAR = 1e-6, 1e-4, 1e-2


def can_be_open(architecture: Architecture, examples: Examples) -> str | None:
    """Why the kind of heads cannot be looked for; None where it can."""
    a = architecture
    if a.attention is not None or a.norm is not None or a.latent is not None:
        return "only of softmax heads without norms and latents"
    if a.memory is not None or not examples.columns.is_plain:
        return "only where tokens are of one sequence, at positions 0 to k - 1"
    if a.n_heads is None or a.head_dim is None:
        return "only where n_heads and head_dim are given"
    size = _count_open(a, examples)
    if size > MAX_PARAMETERS:
        return f"only of layers of at most {MAX_PARAMETERS} parameters; these have {size}"
    return None


def _count_open(a: Architecture, examples: Examples) -> int:
    return OpenHeads(opened(a), tokens=examples.k).size()


def opened(a: Architecture) -> Architecture:
    """The class with nothing said of its kind but the mask, biases and sizes."""
    return Architecture(
        a.d, a.n_heads, a.head_dim, a.out_dim, a.bias, a.causal, value_dim=a.value_dim
    )


def find_kind(
    examples: Examples,
    architecture: Architecture,
    run: Run,
    exact: float,
    *,
    groups: tuple[int, ...] = (),
) -> FoundKind | None:
    """The kind of heads that explains examples best, or None where none was read.

    groups: numbers of sets of keys and values that are tried, the first that fits is taken; none:
    sharing is not looked at.
    Cost: that of a student's descent, and some ten to hundred normal matrices of all parameters,
    of large layers about as many of each head's.
    Trust: a heuristic; the loss is measured on held-out examples.
    """
    if can_be_open(architecture, examples) is not None:
        return None
    a = opened(architecture)
    train, select = split_for_selection(examples, a, run.seed)
    problem = make_problem(train, OpenHeads(a, tokens=examples.k))
    best: FoundKind | None = None
    for attempt in range(_ATTEMPTS):
        if run.is_over() or (best is not None and best.loss < exact):
            break
        with run.checkpoint.within(f"open heads {attempt + 1}"):
            reading = _learn_open(problem, architecture, run, attempt)
        if reading is None:
            continue
        for shared in _share(reading, groups):  # the fewest sets of keys first
            found = _polish(shared, problem, train, select, run)
            if best is None or found.loss < best.loss:
                best = found
            if found.loss < exact:
                break
    return best


def fill_fields(
    examples: Examples, architecture: Architecture, fields: frozenset[str], run: Run, exact: float
) -> tuple[Architecture, Candidate | None] | None:
    """The class with some fields as examples show them, and its layer; None where no kind explains
    them. There is no layer yet where the other fields are not what examples show."""
    exact = max(exact, label_precision(examples).floor ** 2)
    groups: tuple[int, ...] = ()
    if "kv_heads" in fields:
        groups = _list_groups(architecture)
    elif architecture.kv_heads is not None:
        groups = (architecture.kv_heads,)
    found = find_kind(examples, architecture, run, exact, groups=groups)
    if found is None:
        return None
    seen = found.layer.architecture
    filled = replace(architecture, **{name: getattr(seen, name) for name in fields})
    if filled != seen:
        return filled, None
    outcome = Outcome.TIME_LIMIT if run.is_over() and found.loss >= exact else Outcome.FITTED
    return filled, Candidate(found.layer, outcome, loss=found.loss)


def _list_groups(architecture: Architecture) -> tuple[int, ...]:
    """Numbers of sets of keys and values that heads may share, but for one each."""
    m = architecture.heads
    return tuple(g for g in range(1, m) if m % g == 0)


def look_for_kind(
    examples: Examples, architecture: Architecture, run: Run, exact: float, loss: float
) -> FoundKind | None:
    """A kind that explains far more than a fit of the class asked for, which leaves `loss`.

    It may be that very class, of which the fit has missed the layer.
    """
    least = _STRUCTURED_PLAIN if architecture.is_plain else _STRUCTURED
    if not loss >= max(exact, least) or run.is_over():
        return None
    if can_be_open(architecture, examples) or _count_open(architecture, examples) > _FEW_PARAMETERS:
        return None
    groups = () if architecture.kv_heads is None else _list_groups(architecture)
    found = find_kind(examples, architecture, run, exact, groups=groups)
    return found if found is not None and found.loss < max(exact, _FAR * loss) else None


def _learn_open(problem: Problem, asked: Architecture, run: Run, attempt: int) -> Reading | None:
    """A student with surplus heads, what is distinct of it, its descent, and what that shows."""
    a, stage = problem.architecture, f"open heads {attempt + 1}"
    rng = generator(run.seed, Stream.OPEN_STARTS, attempt)
    kind = problem.parametrisation
    assert isinstance(kind, OpenHeads)
    wider = replace(a, n_heads=a.heads + _SURPLUS * (attempt + 1))
    student = replace(kind, architecture=wider, student=True)
    start = student.init(rng)
    steps = _STEPS * (attempt + 1)
    place = replace(problem, parametrisation=student)
    params, _ = anneal_student(start, place, run, steps, rng, stage)
    if run.is_over() or not all(np.isfinite(leaf).all() for leaf in params.values()):
        return None
    patterns = compare_patterns(student, params, problem)
    heads = keep_distinct_heads(wider, params, patterns, alike=_ALIKE, small=_SMALL, most=a.heads)
    heads = fill_with_heads(
        heads, {name: np.asarray(leaf) for name, leaf in start.items()}, a.heads
    )
    ended = _descend(student.graduate(heads.params), problem, run, f"{stage}, descent")
    if not ended.loss < _READABLE:
        return None
    tolerance = float(np.clip(_TIMES * ended.loss**0.5, _NEAREST, _FARTHEST))
    reading = read_kind(ended.params, kind, tolerance, asked)
    said = "no kind" if reading is None else ", ".join(reading.architecture.extras()) or "plain"
    run.emit(stage, loss=ended.loss, detail=f"open heads were read as {said}")
    return reading


def _descend(params: Params, problem: Problem, run: Run, stage: str) -> Minimum | Descended:
    """With the normal matrix of all examples at every step, or of a part of them now and then."""
    if problem.parametrisation.size() <= _FEW_PARAMETERS:
        return descend_densely(params, problem, run, stage=stage)
    return descend_with_normal_matrix(params, problem, run, stage=stage, max_steps=_MOST_STEPS)


def _share(reading: Reading, groups: tuple[int, ...]) -> list[Reading]:
    """What was read, with as few sets of keys and values as asked; without sharing last."""
    found = [
        share_keys(reading.architecture, reading.params, count, 1e-2)
        for count in groups
        if count < reading.architecture.heads
    ]
    return [Reading(*one) for one in found if one is not None] + [reading]


def _polish(
    reading: Reading, problem: Problem, train: Examples, select: Examples, run: Run
) -> FoundKind:
    """The layer of a kind, after steps in its class, and what it leaves of held-out examples."""
    a = reading.architecture
    held = a if not a.is_plain else replace(a, logit_scale=a.qk_rank**-0.5)
    projected = Projected(held).to_layer(on_device(reading.params), problem.units)
    layer: Layer = projected.to_attention_layer() if a.is_plain else projected
    layer = polish_on(train, layer, a, run).layer
    return FoundKind(layer, relative_error(layer, select))
