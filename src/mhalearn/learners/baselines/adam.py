"""Adam on all parameters at once, from several random starts: the common way to fit a layer."""

import math

import jax
import numpy as np

from mhalearn.data import Examples
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.parametrisation import Params
from mhalearn.learners.baselines.descent import Descent, DescentTask
from mhalearn.learners.baselines.starts import best_of_starts
from mhalearn.learners.baselines.student import student_rng
from mhalearn.learners.options import AdamOptions
from mhalearn.run.outcome import Candidate
from mhalearn.run.run import Run
from mhalearn.solvers.first_order import FirstOrderOptions, Schedule, anneal, cosine_rates

_DEFAULTS = AdamOptions()


def learn_adam(
    examples: Examples,
    architecture: Architecture,
    run: Run,
    options: AdamOptions = _DEFAULTS,
) -> Candidate:
    """Fit a layer with Adam, the learning rate falling to zero along a half cosine.

    Each step sees all examples, or random ones of them, where a gradient over all would need more
    than 128 MiB.
    Cost: about three forward passes over a batch a step. Trust: a heuristic.
    """

    def descend(task: DescentTask, student: Params, start: int) -> Descent:
        return _descend(task, student, start, options)

    return best_of_starts(descend, examples, architecture, run, options.starts)


def _descend(task: DescentTask, student: Params, start: int, options: AdamOptions) -> Descent:
    chunks, size = task.data.weight.shape[:2]
    end = Descent(student, task.loss(student), True)

    def tell(params: Params, loss: float) -> None:
        nonlocal end
        latest = task.loss(params)
        if math.isfinite(latest):
            end = Descent(params, latest, True)
            task.keep(params, latest)

    steps = options.steps
    walk = anneal(
        jax.tree.map(lambda leaf: leaf[None], student),
        task.problem,
        task.run,
        Schedule(cosine_rates(options.learning_rate, steps), np.zeros(steps)),
        FirstOrderOptions(
            block=task.block,
            batch=None if chunks == 1 else size,
            eps=1e-16,  # the usual one would stop progress once gradients are small
            goal=options.goal,
        ),
        stage="adam",
        rng=student_rng(task.run.seed, 3, start),
        tell=tell,
        start=start,
    )
    return end._replace(finite=bool(np.isfinite(walk.loss).all()))
