"""The student of Adam and L-BFGS: its random start and its loss."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from mhalearn._runtime.programs import in_float64
from mhalearn._runtime.seeds import Stream, generator
from mhalearn._runtime.types import Array
from mhalearn.layer.batches import Chunk, merge_chunks, sum_over_chunks
from mhalearn.layer.dense import Dense, DenseHeads
from mhalearn.layer.factored import Factors
from mhalearn.layer.parametrisation import Parametrisation, Params
from mhalearn.solvers.normal_equations import squared_residual
from mhalearn.solvers.scaled_problem import Problem

# Doubles a gradient may hold at once: 128 MiB.
_WORKSPACE = 2**24
_LEAST_EXAMPLES = 64  # in a mini-batch, whatever the workspace

# Norm of a random Theta_i, in units where a token's feature has unit size. From 0.1 to 2 Adam did
# equally well at ten times the counting limit, and 6 lost heads; in six runs at three times the
# limit 0.3 succeeded more often than 1 and 3, which is thin evidence.
_THETA_NORM = 0.3


def student_rng(seed: int, *place: int) -> np.random.Generator:
    return generator(seed, Stream.BASELINES, *place)


def random_student(problem: Problem, rng: np.random.Generator) -> Params:
    """A random start: Theta_i of norm 0.3, and W_i such that outputs are as large as labels."""
    a = problem.architecture
    m, q, d, e = a.heads, a.query_dim, a.d, a.outputs
    theta, w = _THETA_NORM / d, 1 / math.sqrt(m * d)  # sizes of an entry

    def draw(size: float, *shape: int) -> Array:
        return jnp.asarray(size * rng.standard_normal(shape))

    if isinstance(problem.parametrisation, Dense):
        return DenseHeads(draw(theta, m, q, d), draw(w, m * d + a.bias, e))
    h, r = a.qk_rank, a.ov_rank
    attention, projection = math.sqrt(theta / math.sqrt(h)), math.sqrt(w / math.sqrt(r))
    return Factors(
        query=draw(attention, m, q, h),
        key=draw(attention, m, d, h),
        value=draw(projection, m, d, r),
        out=draw(projection, m, r, e),
        bias=draw(w, int(a.bias), e),
    )


@in_float64
def batches(problem: Problem) -> Chunk:
    """The problem's examples cut for gradients, which need less room than normal equations."""
    data: Chunk = jax.tree.map(jnp.asarray, problem.data)
    if data.weight.shape[0] == 1:
        return data
    n_heads = problem.architecture.heads
    if problem.devices > 1:
        return merge_chunks(data, n_heads, problem.devices)
    k, d = problem.k, problem.d
    n = math.prod(data.weight.shape[:2])
    flat = jax.tree.map(lambda leaf: leaf.reshape(n, *leaf.shape[2:]), data)
    most = max(_LEAST_EXAMPLES, _WORKSPACE // (k * n_heads * (3 * k + 4 * d)))
    count = -(-n // most)
    size = -(-n // count)
    missing = size * count - n

    def cut(leaf: Array) -> Array:
        # Repeats of the last example, not zeros: a softmax needs a key. Their weight is zero.
        padded = jnp.concatenate([leaf, jnp.repeat(leaf[-1:], missing, axis=0)])
        return padded.reshape(count, size, *leaf.shape[1:])

    counts = jnp.arange(size * count).reshape(count, size, 1) < n
    cuts: Chunk = jax.tree.map(cut, flat)
    return cuts._replace(weight=jnp.where(counts, cuts.weight, 0.0))


def value_and_gradient(
    kind: Parametrisation, student: Params, data: Chunk, energy: Array
) -> tuple[Array, Params]:
    """Relative squared error and its gradient. Memory: one chunk's, forward and back."""

    def squared(student: Params, chunk: Chunk) -> Array:
        labels = chunk.labels * chunk.weight[..., None]
        return jnp.sum((labels - kind.outputs(student, chunk)) ** 2) / energy

    return sum_over_chunks(lambda chunk: jax.value_and_grad(squared)(student, chunk), data)


@partial(jax.jit, static_argnums=0)
def relative_loss(kind: Parametrisation, student: Params, data: Chunk, energy: Array) -> Array:
    return squared_residual(kind, student, data) / energy
