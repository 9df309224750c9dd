"""The starts of a task, and the choice among them by examples that were not used to fit."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from mhalearn._runtime.programs import in_float64
from mhalearn.data import Examples
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.parametrisation import Parametrisation, Params
from mhalearn.learners.baselines.descent import Descent, DescentTask
from mhalearn.learners.baselines.student import batches, random_student, student_rng
from mhalearn.run.checkpoint import from_arrays, to_arrays
from mhalearn.run.outcome import Candidate, Outcome
from mhalearn.run.run import Run
from mhalearn.solvers.polish import relative_error
from mhalearn.solvers.scaled_problem import make_problem

_HELD_OUT = 8  # one example in so many chooses among the starts
EXACT_ENOUGH = 1e-12  # held-out error (squared, relative) at which no further start is made
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


class ScoredLayer(NamedTuple):
    """A layer and its error on the examples held out."""

    layer: AttentionLayer
    error: float


def prepare(examples: Examples, kind: Parametrisation, run: Run) -> tuple[DescentTask, Examples]:
    """What all starts share, and the examples to select by."""
    architecture = kind.architecture
    train, select = hold_out(examples, run.seed, examples.counting_limit(architecture))
    problem = make_problem(train, kind)
    energy = jnp.asarray(problem.energy if problem.energy > 0 else 1.0)
    return DescentTask(problem, batches(problem), energy, run), select


@in_float64
def best_of_starts(
    descend: Callable[[DescentTask, Params, int], Descent],
    examples: Examples,
    architecture: Architecture,
    run: Run,
    starts: int,
) -> Candidate:
    """Descend from random starts one after the other; keep the best on held-out examples.

    No further start is made once one explains the held-out examples to 1e-12.
    """
    task, held_out = prepare(examples, architecture.parametrisation(), run)
    best: ScoredLayer | None = None
    finite = False
    for start in range(starts):
        rng = student_rng(run.seed, 1, start)
        student = random_student(task.problem, rng)

        def work(student: Params = student, start: int = start) -> dict[str, Any]:
            end = descend(task, student, start)
            layer = task.problem.to_layer(end.student)
            error = relative_error(layer, held_out)
            return to_arrays(layer) | {"error": error, "loss": end.loss, "finite": end.finite}

        needs = ("theta", "w", "causal", "error", "loss", "finite")
        end = run.checkpoint.once(f"start {start + 1}", work, needs)
        candidate = ScoredLayer(from_arrays(end), end["error"])
        run.keep(candidate.layer, end["loss"])
        run.emit(
            "model selection",
            start,
            end["loss"],
            f"start {start + 1}",
            held_out_error=candidate.error,
        )
        finite = finite or end["finite"]
        if best is None or candidate.error < best.error:
            best = candidate
        if best.error <= EXACT_ENOUGH or run.is_over():
            break
    assert best is not None
    return conclude(best, finite, run)


def conclude(best: ScoredLayer, finite: bool, run: Run) -> Candidate:
    """The provisional outcome; whether a layer is recovered is not for a learner to say."""
    short = best.error > EXACT_ENOUGH
    if short and run.is_over():
        outcome, reason = Outcome.TIME_LIMIT, f"held-out error {best.error:.1e} when time was up"
    elif short and not finite:
        outcome, reason = Outcome.NONFINITE, "every start diverged"
    elif not best.error <= _LOST:
        outcome, reason = Outcome.STUCK, f"held-out error {best.error:.1e} after every start"
    else:
        outcome, reason = Outcome.FITTED, f"held-out error {best.error:.1e}, not certified"
    return Candidate(best.layer, outcome, reason, best.error)
