"""Slow annealing: first-order steps down a ridge that fades over thousands of them.

Where examples are scarce, which heads take shape is decided while the ridge is still strong, and a
few dozen long steps decide badly. Adam's short ones follow the minimum as it moves.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

from mhalearn._runtime.devices import replicate
from mhalearn._runtime.programs import in_float64
from mhalearn._runtime.types import Array, Float
from mhalearn.layer.attention import forward
from mhalearn.layer.batches import Chunk, in_one_chunk
from mhalearn.learners.newton.continuation import ridge_at
from mhalearn.learners.newton.starts import Scales
from mhalearn.run.run import Run
from mhalearn.solvers.gauss_newton import Ridge
from mhalearn.solvers.scaled_problem import Problem

# Strengths g of the ridge at both ends, and the rate: a tenth of a head's size. Large rates shake
# starts out of poor minima as long as the ridge keeps all of them shallow.
FIRST_STRENGTH, LAST_STRENGTH = 30.0, 1e-2
_RATE = 0.1
_BLOCK = 500  # steps between two looks at the clock
_ADAM = optax.scale_by_adam()


class Walk(NamedTuple):
    """A start on its way: what Adam moves, its memory, and the last training loss."""

    moving: tuple[Float[Array, "m q d"], Float[Array, "p e"]]
    memory: optax.OptState
    loss: Float[Array, ""]


@in_float64
def anneal_first_order(
    theta: NDArray[np.float64],
    problem: Problem,
    run: Run,
    scales: Scales,
    steps: int,
    *,
    stage: str,
) -> NDArray[np.float64]:
    """Attention matrices (s, m, q, d) annealed from strength FIRST to LAST.

    Cost: a forward and a backward pass over the examples a step and start.
    Trust: a heuristic.
    """
    s, m = theta.shape[:2]
    data = in_one_chunk(problem.data, problem.devices)
    w = jnp.zeros((s, m * problem.d + problem.bias, problem.out_dim))
    moving = (jnp.asarray(theta), w)
    walk = Walk(moving, jax.vmap(_ADAM.init)(moving), jnp.ones(s))
    ridge = ridge_at(1.0, scales, problem)
    strengths = np.geomspace(FIRST_STRENGTH, LAST_STRENGTH, steps)
    one_by_one = jax.default_backend() == "cpu"
    first, walk = run.checkpoint.recall(stage, like=(0, walk)) or (0, walk)
    for begun in range(first, steps, _BLOCK):
        block = jnp.asarray(strengths[begun : begun + _BLOCK])
        walk = replicate(_advance(walk, data, problem.energy, ridge, block, one_by_one))
        run.checkpoint.record(stage, (begun + len(block), walk))
        losses = np.asarray(walk.loss)
        best = np.argmin(np.nan_to_num(losses, nan=np.inf))
        at_hand = partial(problem.layer, *(np.asarray(part)[best] for part in walk.moving))
        run.emit(stage, begun + len(block), float(np.nanmin(losses)), at_hand=at_hand)
        if run.is_over():
            break
    return np.asarray(walk.moving[0])


@partial(jax.jit, static_argnames="one_by_one")
def _advance(
    walk: Walk, data: Chunk, energy: Array, ridge: Ridge, strengths: Array, one_by_one: bool
) -> Walk:
    def objective(moving: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
        wrong = (forward(*moving, data) - data.labels) * data.weight[..., None]
        loss = jnp.sum(wrong**2) / energy
        theta, w = moving
        return loss + g * (ridge.theta * jnp.sum(theta**2) + ridge.w * jnp.sum(w**2)), loss

    def step(walk: Walk, g: Array) -> tuple[Walk, None]:
        slope, loss = jax.grad(objective, has_aux=True)(walk.moving, g)
        updates, memory = _ADAM.update(slope, walk.memory)
        moving = jax.tree.map(lambda a, u: a - _RATE * u, walk.moving, updates)
        return Walk(moving, memory, loss), None

    def one(walk: Walk) -> Walk:
        return jax.lax.scan(step, walk, strengths)[0]

    return jax.lax.map(one, walk) if one_by_one else jax.vmap(one)(walk)
