"""Any kind of attention: Adam from random starts, then Gauss-Newton; held-out examples choose."""

import jax
import jax.numpy as jnp
import numpy as np

from mhalearn._runtime.programs import in_float64
from mhalearn._runtime.seeds import Stream, generator
from mhalearn._runtime.types import Array
from mhalearn.data import Examples
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.base import ParametrisedLayer
from mhalearn.learners.newton.model_selection import ModelSelection, split_for_selection
from mhalearn.run.outcome import Candidate, Outcome
from mhalearn.run.run import Run
from mhalearn.solvers.first_order import FirstOrderOptions, Schedule, anneal, cosine_rates
from mhalearn.solvers.polish import minimise
from mhalearn.solvers.scaled_problem import make_problem

# Starts side by side, and Adam's steps, of each round; of the starts so many best are polished.
_ROUNDS = ((4, 1000), (4, 4000), (8, 12_000))
_POLISHED = 2
# Adam's first rate, and the strength of the penalty on all squares at both ends.
_RATE, _FIRST, _LAST = 0.03, 1e-3, 1e-7


@in_float64
def learn_parametrised(
    examples: Examples, architecture: Architecture, exact: float, run: Run
) -> Candidate:
    """Rounds of starts, each more patient, until one explains held-out examples exactly.

    Cost: a forward and a backward pass over the examples a step and start, and some hundred a step
    of Gauss-Newton. Trust: a heuristic; nothing of the attention's structure is used.
    """
    kind = architecture.parametrisation()
    train, select = split_for_selection(examples, architecture, run.seed)
    problem = make_problem(train, kind)
    selection = ModelSelection(problem, select, run)
    for number, (starts, steps) in enumerate(_ROUNDS):
        name = f"round {number + 1}"
        if not run.checkpoint.begun(name) and (selection.loss < exact or run.is_over()):
            break
        rng = generator(run.seed, Stream.PARAMETRISED_STARTS, number)
        drawn = [kind.init(rng) for _ in range(starts)]
        params = jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(x) for x in leaves]), *drawn)
        schedule = Schedule(cosine_rates(_RATE, steps), np.geomspace(_FIRST, _LAST, steps))
        weights = jax.tree.map(lambda _: 1.0, params)
        with run.checkpoint.within(name):
            options = FirstOrderOptions(block=250)
            walk = anneal(params, problem, run, schedule, options, stage=name, weights=weights)
            order = np.argsort(np.nan_to_num(np.asarray(walk.loss), nan=np.inf))
            for start in order[:_POLISHED].tolist():

                def pick(leaf: Array, start: int = start) -> Array:
                    return leaf[start]

                one = jax.tree.map(pick, walk.params)
                found = minimise(one, problem, run, stage=f"{name}, descent {start + 1}")
                if np.isfinite(found.loss):
                    selection.offer(problem.to_layer(found.params))
                if selection.loss < exact or run.is_over():
                    break
        run.checkpoint.record(name, 1, now=True)
    if selection.layer is None:
        selection.offer(ParametrisedLayer(kind, kind.init(np.random.default_rng(run.seed))))
        return selection.candidate(Outcome.TIME_LIMIT if run.is_over() else Outcome.NONFINITE)
    late = run.is_over() and selection.loss >= exact
    return selection.candidate(Outcome.TIME_LIMIT if late else Outcome.FITTED)
