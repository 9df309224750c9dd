"""The starts of a run, and the choice among them by examples that were not used to fit."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict, Unpack

import jax.numpy as jnp
import numpy as np

from mhalearn.attention import in_float64
from mhalearn.baselines.descent import Descent, Run
from mhalearn.baselines.student import Student, batches, random_student, student_rng
from mhalearn.examples import Examples
from mhalearn.journal import from_arrays, to_arrays
from mhalearn.layer import AttentionLayer
from mhalearn.outcome import Outcome, Solution, Trace
from mhalearn.polish import relative_error
from mhalearn.problem import make_problem

_HELD_OUT = 8  # one example in so many chooses among the starts
ENOUGH = 1e-12  # held-out error (squared, relative) at which no further start is made
_LOST = 0.5  # held-out error above which nothing was learned


def hold_out(examples: Examples, seed: int, limit: float) -> tuple[Examples, Examples]:
    """Examples to fit and examples to choose by; the same ones where none can be spared.

    limit: examples below which no method could determine the layer.
    """
    order = student_rng(seed).permutation(examples.n)
    count = max(1, examples.n // _HELD_OUT)
    if examples.n - count < max(1, 1.5 * limit):
        return examples, examples
    return examples.subset(np.sort(order[count:])), examples.subset(np.sort(order[:count]))


class Candidate(NamedTuple):
    """A layer and its error on the examples held out."""

    layer: AttentionLayer
    error: float


class Asked(TypedDict):
    """What every learner is asked for."""

    n_heads: int
    bias: bool
    causal: bool
    head_dim: int | None
    seed: int
    trace: Trace


def prepare(examples: Examples, asked: Asked) -> tuple[Run, Examples]:
    """What all starts share, and the examples to choose by."""
    n_heads, bias = asked["n_heads"], asked["bias"]
    limit = examples.counting_limit(n_heads, bias, asked["head_dim"])
    training, held_out = hold_out(examples, asked["seed"], limit)
    problem = make_problem(training, n_heads, bias=bias, causal=asked["causal"])
    energy = jnp.asarray(problem.energy if problem.energy > 0 else 1.0)
    return Run(problem, batches(problem, n_heads), energy, asked["trace"]), held_out


@in_float64
def best_of_starts(
    descend: Callable[[Run, Student, int], Descent],
    examples: Examples,
    settings: dict[str, Any],
    *,
    starts: int,
    **asked: Unpack[Asked],
) -> Solution:
    """Descend from random starts one after the other; keep the best on held-out examples.

    No further start is made once one explains the held-out examples to 1e-12.
    """
    trace = asked["trace"]
    run, held_out = prepare(examples, asked)
    best: Candidate | None = None
    finite = False
    for start in range(starts):
        rng = student_rng(asked["seed"], 1, start)
        student = random_student(run.problem, asked["n_heads"], asked["head_dim"], rng)

        def work(student: Student = student, start: int = start) -> dict[str, Any]:
            end = descend(run, student, start)
            layer = run.layer(end.student)
            error = relative_error(layer, held_out)
            return to_arrays(layer) | {"error": error, "loss": end.loss, "finite": end.finite}

        needs = ("theta", "w", "causal", "error", "loss", "finite")
        end = trace.journal.once(f"start {start + 1}", work, needs)
        candidate = Candidate(from_arrays(end), end["error"])
        trace.keep(candidate.layer, end["loss"])
        trace.emit(
            "select", start, end["loss"], f"start {start + 1}", held_out_error=candidate.error
        )
        finite = finite or end["finite"]
        if best is None or candidate.error < best.error:
            best = candidate
        if best.error <= ENOUGH or trace.expired:
            break
    assert best is not None
    return conclude(best, finite, asked, settings | {"starts": starts})


def conclude(best: Candidate, finite: bool, asked: Asked, settings: dict[str, Any]) -> Solution:
    """The provisional outcome; whether a layer is recovered is not for a learner to say."""
    trace, short = asked["trace"], best.error > ENOUGH
    if short and trace.expired:
        outcome, reason = Outcome.TIME_LIMIT, f"held-out error {best.error:.1e} when time was up"
    elif short and not finite:
        outcome, reason = Outcome.NONFINITE, "every start diverged"
    elif not best.error <= _LOST:
        outcome, reason = Outcome.STUCK, f"held-out error {best.error:.1e} after every start"
    else:
        outcome, reason = Outcome.FITTED, f"held-out error {best.error:.1e}, not certified"
    shared = {name: value for name, value in asked.items() if name != "trace"}
    return Solution(best.layer, outcome, trace.events, reason, settings=shared | settings)
