"""L-BFGS on all parameters at once, from several random starts."""

from functools import partial

import jax
import jax.numpy as jnp
import optax

from mhalearn._runtime.types import Array
from mhalearn.data import Examples
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.batches import Chunk
from mhalearn.learners.baselines.descent import Descent, DescentTask, Walk, descend_in_blocks
from mhalearn.learners.baselines.starts import best_of_starts
from mhalearn.learners.baselines.student import Student, value_and_gradient
from mhalearn.learners.options import LbfgsOptions
from mhalearn.run.outcome import Candidate
from mhalearn.run.run import Run

_DEFAULTS = LbfgsOptions()
# A block of steps that takes off less than this part of the loss has come to rounding, or to the
# bottom of what cannot be fitted exactly.
_LEAST_GAIN = 1e-6


def learn(
    examples: Examples,
    architecture: Architecture,
    run: Run,
    options: LbfgsOptions = _DEFAULTS,
) -> Candidate:
    """Fit a layer with optax's L-BFGS and its line search.

    Each step sees all examples. A start ends after its steps, at its goal, or when progress ends.
    (SciPy's L-BFGS-B took about twice the time for layers of d = 8, where calling Python once an
    evaluation shows, and about the same for d = 16.)
    Cost: a little over three forward passes a step. Trust: a heuristic.
    """
    memory, goal = options.memory, options.goal

    def descend(task: DescentTask, student: Student, start: int) -> Descent:
        return descend_in_blocks(
            task,
            lambda walk, until: _advance(
                walk, until, jnp.asarray(goal), task.data, task.energy, memory
            ),
            student,
            optax.lbfgs(memory_size=memory).init(student),
            stage="lbfgs",
            start=start,
            steps=options.steps,
            goal=goal,
            least_gain=_LEAST_GAIN,
        )

    return best_of_starts(descend, examples, architecture, run, options.starts)


@partial(jax.jit, static_argnames=("memory",))
def _advance(
    walk: Walk, until: Array, goal: Array, data: Chunk, energy: Array, memory: int
) -> Walk:
    optimiser = optax.lbfgs(memory_size=memory)

    @jax.custom_vjp
    def objective(student: Student) -> Array:
        return value_and_gradient(student, data, energy)[0]

    # Differentiated chunk by chunk: optax would differentiate through the sum and keep all of them.
    def with_gradient(student: Student) -> tuple[Array, Student]:
        return value_and_gradient(student, data, energy)

    def scaled(gradient: Student, factor: Array) -> tuple[Student]:
        return (jax.tree.map(lambda leaf: factor * leaf, gradient),)

    objective.defvjp(with_gradient, scaled)
    value_and_grad = optax.value_and_grad_from_state(objective)

    def going(walk: Walk) -> Array:
        return (walk.step < until) & (walk.loss > goal)

    def advance(walk: Walk) -> Walk:
        loss, slope = value_and_grad(walk.student, state=walk.memory)
        updates, found = optimiser.update(
            slope, walk.memory, walk.student, value=loss, grad=slope, value_fn=objective
        )
        return Walk(optax.apply_updates(walk.student, updates), found, walk.step + 1, loss)

    return jax.lax.while_loop(going, advance, walk)
