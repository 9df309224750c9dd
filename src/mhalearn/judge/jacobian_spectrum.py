"""How well data determine a layer: the spectrum of its Jacobian, and its error bars."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jax.flatten_util import ravel_pytree

from mhalearn._runtime.devices import replicate
from mhalearn._runtime.programs import compiled, in_float64
from mhalearn._runtime.threads import one_lapack_thread
from mhalearn._runtime.types import Array, Float, Float64
from mhalearn.data import Examples
from mhalearn.judge.dense_spectrum import decompose_dense, in_user_units
from mhalearn.judge.head_spectrum import measure_heads
from mhalearn.judge.spectrum import Parameters, Spectrum, count_null
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.base import Layer
from mhalearn.layer.batches import Chunk, in_one_chunk
from mhalearn.layer.dense import Dense, DenseHeads
from mhalearn.layer.factored import Factored
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.parametrisation import Parametrisation, Params
from mhalearn.run.watch import Watch
from mhalearn.solvers.head_normal_matrix import has_separate_heads
from mhalearn.solvers.head_steps import MAX_PARAMETERS
from mhalearn.solvers.scaled_problem import Problem, make_problem
from mhalearn.solvers.variable_projection import DENSE_LIMIT

# Times the counting limit of examples that stand for all, where nothing is eliminated.
_ENOUGH = 32.0
# Doubles that a piece of the Jacobian and its intermediates may hold: 64 MiB.
_WORKSPACE = 2**23
# Pieces between two looks at the clock.
_PIECES = 8


@in_float64
def measure_spectrum(
    layer: Layer,
    examples: Examples,
    architecture: Architecture | None = None,
    *,
    watch: Watch | None = None,
) -> Spectrum | None:
    """The spectrum of a layer's Jacobian on the given inputs; None where it is too large.

    architecture: the class of layers considered, that of the layer unless given. Heads of low rank
    are looked at by their factors, others as whole matrices with W eliminated.
    watch: told what is done; OutOfTime where that ends it.
    Labels are not looked at. Cost: of whole matrices that of `decompose_dense`; otherwise as many
    forward passes as there are parameters, over at most 32 times the counting limit of examples,
    and their number cubed.
    Trust: numerical rank is evidence of local identifiability, not a proof of it.
    """
    kind = layer.parametrisation.straightened()
    if isinstance(layer, AttentionLayer):
        architecture = (architecture or layer.architecture).with_heads(layer.n_heads)
        kind = architecture.parametrisation()
    if has_separate_heads(kind) and kind.size() <= MAX_PARAMETERS:
        return measure_heads(layer, examples, watch)
    if not isinstance(kind, Dense) and kind.size() <= DENSE_LIMIT:
        part = examples.sample(math.ceil(_ENOUGH * _limit(examples, kind)), seed=0)
        problem = make_problem(part, kind)
        at = kind.from_layer(layer, problem.units)
        if not isinstance(kind, Factored) or kind.has_full_rank(at, layer, problem.units):
            return _decompose_jointly(at, problem, examples.rows, watch)
    if not isinstance(layer, AttentionLayer):
        return None
    # Where nothing is open among all layers, nothing is among those of a rank.
    everything = kind.architecture.with_any_rank()
    if everything.heads * everything.query_dim * everything.d > DENSE_LIMIT:
        return None
    return decompose_dense(layer, make_problem(examples, Dense(everything)), watch)


def _limit(examples: Examples, kind: Parametrisation) -> float:
    """The counting limit; of a kind of attention that is not known, all unknowns over scalars."""
    if isinstance(kind, Factored):
        return examples.counting_limit(kind.architecture)
    return kind.count() / (float(np.mean(examples.lengths)) * examples.out_dim)


def _decompose_jointly(at: Params, problem: Problem, rows: int, watch: Watch | None) -> Spectrum:
    """The spectrum of J^T J in all parameters, scaled to as many rows of examples.

    The gauge is in its null space wherever one looks, and the parametrisation's count says how much
    of it is gauge; what is beyond is open.
    """
    kind, at = problem.parametrisation, jax.tree.map(jnp.asarray, at)
    size = kind.size()
    if watch is not None:
        watch.begin(f"normal matrix of {size} parameters")
    gram = _sum_gram(at, _cut(problem, size), kind, watch)
    gauge = size - kind.count()
    if watch is not None:
        watch.begin(f"eigenvalues and covariance of {size} parameters")
    with one_lapack_thread():
        root = 1 / np.sqrt(np.maximum(np.diag(gram), 1e-18 * max(float(np.trace(gram)), 1e-300)))
        values, basis = scipy.linalg.eigh(root[:, None] * gram * root)
    null = count_null(values)
    half = root[:, None] * (basis[:, null:] / np.sqrt(values[null:]))
    # Of a null space that is gauge and nothing else, no direction is open.
    unseen = basis[:, : null if null > gauge else 0]
    deviations = _deviations(half, root[:, None] * unseen, at, problem)
    scaled = {
        name: array * math.sqrt(problem.rows / rows) for name, array in deviations.arrays.items()
    }
    open_count, token_size = max(0, null - gauge), problem.units.x_scale
    return Spectrum(values[gauge:], np.zeros(0), open_count, Parameters(scaled), token_size)


def _cut(problem: Problem, size: int) -> Chunk:
    """The examples in pieces so small that the Jacobian of one fits into the workspace."""
    data = in_one_chunk(problem.data, problem.devices)
    n, k, e = data.labels.shape
    heads = problem.architecture.n_heads or 1
    held = size * k * (e + heads * (k + 4 * problem.architecture.qk_rank))
    count = -(-n * held // _WORKSPACE)
    piece = -(-n // count)
    missing = piece * count - n

    def cut(leaf: Array) -> Array:
        # Repeats of the last example, not zeros: a softmax needs a key. Their weight is zero.
        padded = jnp.concatenate([leaf, jnp.repeat(leaf[-1:], missing, axis=0)])
        return padded.reshape(-(-len(padded) // piece), piece, *leaf.shape[1:])

    cuts: Chunk = jax.tree.map(cut, data)
    counts = jnp.arange(cuts.weight.shape[0] * piece).reshape(-1, piece, 1) < n
    return cuts._replace(weight=jnp.where(counts, cuts.weight, 0.0))


def _sum_gram(at: Params, data: Chunk, kind: Parametrisation, watch: Watch | None) -> Float64:
    """J^T J, piece by piece, so that it can be ended in between."""
    of = data.tokens.shape[0]
    size = kind.size()
    gram = jnp.zeros((size, size))
    for done in range(0, of, _PIECES):
        gram = _add_gram(gram, at, data, done, min(done + _PIECES, of), kind)
        if watch is not None and of > _PIECES:
            gram.block_until_ready()  # or the clock would not see the work
            watch(min(done + _PIECES, of), of)
    return np.asarray(replicate(gram))


@partial(compiled, static_argnums=5)
def _add_gram(
    gram: Float[Array, "p p"],
    at: Params,
    data: Chunk,
    first: Array | int,
    last: Array | int,
    kind: Parametrisation,
) -> Float[Array, "p p"]:
    """Of the pieces from the first to the last."""
    flat, unflatten = ravel_pytree(at)

    def add(i: Array, gram: Array) -> Array:
        chunk: Chunk = jax.tree.map(lambda leaf: leaf[i], data)
        there = kind.linearise(at, chunk)
        push = jax.vmap(lambda step: kind.jvp(at, there, chunk, unflatten(step)).ravel())
        rows = push(jnp.eye(flat.size))
        return gram + rows @ rows.T

    return jax.lax.fori_loop(first, last, add, gram)


@partial(compiled, static_argnums=2)
def _squared_changes(at: Params, directions: Float[Array, "r p"], kind: Parametrisation) -> Params:
    """Of what the parameters determine, along each direction, squared and summed."""
    unflatten = ravel_pytree(at)[1]

    def add(sums: Params, direction: Array) -> tuple[Params, None]:
        change = jax.jvp(kind.invariants, (at,), (unflatten(direction),))[1]
        return jax.tree.map(lambda total, leaf: total + leaf**2, sums, change), None

    zeros = jax.tree.map(jnp.zeros_like, kind.invariants(at))
    return jax.lax.scan(add, zeros, directions)[0]


def _deviations(
    half: Float64, open_directions: Float64, at: Params, problem: Problem
) -> Parameters:
    """Standard deviations of what the parameters determine, (J^T J)^+ = half half^T."""

    def spread(directions: Float64) -> Params:
        found = _squared_changes(at, jnp.asarray(directions.T), problem.parametrisation)
        return jax.tree.map(np.asarray, found)

    def deviate(variance: Float64, reach: Float64) -> Float64:
        # The gauge moves nothing that is determined, but for rounding.
        scale = max(float(variance.max()), 1e-300)
        return np.where(reach > 1e-10 * max(float(reach.max()), scale), np.inf, np.sqrt(variance))

    variances = spread(half)
    reach = jax.tree.map(np.zeros_like, variances)
    if open_directions.size:
        reach = spread(open_directions)
    found = jax.tree.map(deviate, variances, reach)
    if isinstance(found, DenseHeads):
        by_query = np.asarray(found.theta).transpose(1, 0, 2)
        return in_user_units(by_query, np.asarray(found.w), problem)
    return Parameters(dict(found))
