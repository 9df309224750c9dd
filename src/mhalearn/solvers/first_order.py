"""Adam for any parametrisation: blocks of compiled steps, and a look at the clock between them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

from mhalearn._runtime.devices import replicate
from mhalearn._runtime.programs import compiled, in_float64, in_single
from mhalearn._runtime.types import Array, Float, Float64
from mhalearn.layer.batches import Chunk, in_one_chunk, split_by_device
from mhalearn.layer.parametrisation import Parametrisation, Params
from mhalearn.run.checkpoint import generator_from, generator_words
from mhalearn.run.run import Run
from mhalearn.solvers.scaled_problem import Problem


class Walk(NamedTuple):
    """Starts on their way: every leaf has a leading axis of starts."""

    params: Params
    memory: optax.OptState
    loss: Float[Array, " s"]  # relative squared error of the examples that the last step saw


@dataclass(frozen=True)
class Schedule:
    """What changes from step to step: the learning rate, and the strength of the penalty."""

    rates: Float64
    strengths: Float64

    def __len__(self) -> int:
        return len(self.rates)

    def padded(self, block: int) -> "Schedule":
        """With steps of rate zero, which move nothing, to whole blocks: one compiled program."""
        missing = -len(self) % block
        return Schedule(np.pad(self.rates, (0, missing)), np.pad(self.strengths, (0, missing)))


def cosine_rates(top: float, steps: int) -> Float64:
    """A learning rate that falls to zero along a half cosine."""
    return top * 0.5 * (1 + np.cos(np.pi * np.arange(steps) / steps))


@dataclass(frozen=True)
class FirstOrderOptions:
    """block: steps between two looks at the clock. batch: examples a step sees, all unless given.
    single: in single precision. eps: Adam's, below which gradients no longer count.
    goal: relative squared error at which a start ends.
    """

    block: int = 500
    batch: int | None = None
    single: bool = False
    eps: float = 1e-8
    goal: float = 0.0


def anneal(
    params: Params,
    problem: Problem,
    run: Run,
    schedule: Schedule,
    options: FirstOrderOptions,
    *,
    stage: str,
    weights: Params | None = None,
    rng: np.random.Generator | None = None,
    tell: Callable[[Params, float], None] = lambda params, loss: None,
    mend: Callable[[Walk, int], Walk] = lambda walk, step: walk,
    **about: Any,
) -> Walk:
    """Descend from starts, every leaf with a leading axis of them, as the schedule says.

    The objective is the relative squared error plus the strength times the squares of the
    parameters, each times its entry in `weights`, a tree of numbers. rng: draws the examples of a
    batch; over many devices each draws from its own. tell: hears of the best start after a block.
    mend: changes the starts after a block that ends at a step.
    about: goes with every event.
    Cost: a forward and a backward pass over a batch a step and start.
    Trust: a heuristic.
    """
    data, there = draw_from(problem, options.single)
    params = jax.tree.map(jnp.asarray, params)
    if options.single:
        params = in_single(params)
    weights = jax.tree.map(lambda _: 0.0, params) if weights is None else weights
    adam = optax.scale_by_adam(eps=options.eps)
    walk = Walk(params, jax.vmap(adam.init)(params), _ones(params))
    mean_square = jnp.asarray((problem.energy or 1.0) / problem.rows, walk.loss.dtype)
    rng = np.random.default_rng(0) if rng is None else rng
    start = (0, walk, generator_words(rng))
    first, walk, words = run.checkpoint.recall(stage, like=start) or start
    rng = generator_from(words)
    one_by_one = jax.default_backend() == "cpu"
    static = (problem.parametrisation, options.eps, one_by_one)
    steps = min(options.block, len(schedule))
    padded = schedule.padded(steps)
    for begun in range(first, len(schedule), steps):
        now = slice(begun, begun + steps)
        chosen = None
        if options.batch is not None:
            chosen = jnp.asarray(_draw(there, steps, options.batch, rng))
        rates, strengths = jnp.asarray(padded.rates[now]), jnp.asarray(padded.strengths[now])
        walk = replicate(
            _advance(walk, data, mean_square, weights, chosen, rates, strengths, *static)
        )
        walk = mend(walk, begun + steps)
        run.checkpoint.record(stage, (begun + steps, walk, generator_words(rng)))
        losses = np.asarray(walk.loss, np.float64)
        best = int(np.argmin(np.nan_to_num(losses, nan=np.inf)))
        lowest = jax.tree.map(lambda leaf, best=best: leaf[best], walk.params)
        at_hand = partial(problem.to_layer, lowest)
        run.emit(stage, begun + steps, float(losses[best]), at_hand=at_hand, **about)
        tell(lowest, float(losses[best]))
        if run.is_over() or losses[best] <= options.goal or not np.isfinite(losses).any():
            break
    return walk


def _ones(params: Params) -> Array:
    leaf = jax.tree.leaves(params)[0]
    return jnp.ones(leaf.shape[0], leaf.dtype)


@partial(compiled, static_argnums=(7, 8, 9))
def _advance(
    walk: Walk,
    data: Chunk,
    mean_square: Array,
    weights: Params,
    chosen: Array | None,
    rates: Array,
    strengths: Array,
    parametrisation: Parametrisation,
    eps: float,
    one_by_one: bool,
) -> Walk:
    adam = optax.scale_by_adam(eps=eps)

    def objective(params: Params, chunk: Chunk, strength: Array) -> tuple[Array, Array]:
        labels = chunk.labels * chunk.weight[..., None]
        wrong = jnp.sum((parametrisation.outputs(params, chunk) - labels) ** 2)
        loss = wrong / (jnp.sum(chunk.weight) * mean_square)
        squares = jax.tree.map(lambda weight, leaf: weight * jnp.sum(leaf**2), weights, params)
        return loss + strength * sum(jax.tree.leaves(squares)), loss

    def step(walk: Walk, now: tuple[Array | None, Array, Array]) -> tuple[Walk, None]:
        chosen, rate, strength = now
        chunk = data if chosen is None else jax.tree.map(lambda leaf: _pick(leaf, chosen), data)
        slope, loss = jax.grad(objective, has_aux=True)(walk.params, chunk, strength)
        updates, memory = adam.update(slope, walk.memory)
        params = jax.tree.map(lambda a, u: a - (rate * u).astype(a.dtype), walk.params, updates)
        params = parametrisation.steady(params)
        return Walk(params, memory, loss.astype(walk.loss.dtype)), None

    def one(walk: Walk) -> Walk:
        return jax.lax.scan(step, walk, (chosen, rates, strengths))[0]

    return jax.lax.map(one, walk) if one_by_one else jax.vmap(one)(walk)


def draw_from(problem: Problem, single: bool) -> tuple[Chunk, list[NDArray[np.int64]]]:
    """All examples as one chunk, and which of them are no padding: of all, or of each device.

    Over many devices, in single precision, they are (devices, examples of each), and none of them
    moves.
    """
    if problem.devices == 1 or not single:
        data = in_one_chunk(problem.data, problem.devices)
        data = in_single(data) if single else data
        weight = np.asarray(replicate(data.weight))
        return data, [np.flatnonzero(weight.any(axis=1))]
    data = _spread_in_single(problem.data, problem.devices)
    weight = np.asarray(replicate(data.weight))
    return data, [np.flatnonzero(own.any(axis=1)) for own in weight]


@in_float64
def _spread_in_single(data: Chunk, devices: int) -> Chunk:
    def spread(data: Chunk) -> Chunk:
        spread: Chunk = split_by_device(in_one_chunk(in_single(data), devices), devices)
        return spread

    return jax.jit(spread)(data)


def _draw(
    there: list[NDArray[np.int64]], steps: int, batch: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Numbers of examples for a block of steps: (steps, batch), or (steps, devices, of each)."""
    batch = min(sum(map(len, there)), batch)
    if len(there) == 1:
        return there[0][rng.integers(0, len(there[0]), (steps, batch))]
    shape = (steps, -(-batch // len(there)))
    # A device without examples has padding, which weighs nothing.
    drawn = [rng.integers(0, max(1, len(own)), shape) for own in there]
    chosen = [own[rows] if len(own) else rows for own, rows in zip(there, drawn, strict=True)]
    return np.stack(chosen, axis=1)


def _pick(leaf: Array, chosen: Array) -> Array:
    """The chosen examples; of each device its own."""
    if chosen.ndim == 1:
        return leaf[chosen]
    picked: Any = jax.vmap(lambda own, rows: own[rows])(leaf, chosen)
    return picked.reshape(chosen.size, *picked.shape[2:])  # some leaves have no columns
