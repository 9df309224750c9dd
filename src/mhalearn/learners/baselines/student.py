"""The student of Adam and L-BFGS: its random start, the layer it stands for, and its loss."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from mhalearn._runtime.seeds import Stream, generator
from mhalearn._runtime.types import Array, Float
from mhalearn.layer.attention import residual
from mhalearn.layer.batches import Chunk, merge_chunks, sum_over_chunks
from mhalearn.solvers.scaled_problem import Problem

# Parameters by name: w, and theta or its factors query and key; `expand` reads them.
Student = dict[str, Array]

# Doubles a gradient may hold at once: 128 MiB.
_WORKSPACE = 2**24
_LEAST_EXAMPLES = 64  # in a mini-batch, whatever the workspace

# Norm of a random Theta_i, in units where a token's feature has unit size. From 0.1 to 2 Adam did
# equally well at ten times the counting limit, and 6 lost heads; in six runs at three times the
# limit 0.3 succeeded more often than 1 and 3, which is thin evidence.
_THETA_NORM = 0.3


def student_rng(seed: int, *place: int) -> np.random.Generator:
    return generator(seed, Stream.BASELINES, *place)


def random_student(problem: Problem, rng: np.random.Generator) -> Student:
    """A random start: Theta_i of norm 0.3, and W_i such that outputs have the size of the labels.

    With `head_dim` = h, Theta_i = A_i B_i^T / sqrt(h), a key-side vector being one more row of A_i.
    """
    head_dim, m = problem.architecture.head_dim, problem.architecture.heads
    q, d, e = problem.query_dim, problem.d, problem.out_dim
    theta, w = _THETA_NORM / d, 1 / math.sqrt(m * d)  # sizes of an entry

    def draw(size: float, *shape: int) -> Array:
        return jnp.asarray(size * rng.standard_normal(shape))

    student: Student = {}
    if head_dim is None:
        student["theta"] = draw(theta, m, q, d)
    else:
        student["query"] = draw(math.sqrt(theta), m, q, head_dim)
        student["key"] = draw(math.sqrt(theta), m, d, head_dim)
    student["w"] = draw(w, m * d + problem.bias, e)
    return student


def expand(student: Student) -> tuple[Float[Array, "m q d"], Float[Array, "p e"]]:
    """The attention and the stacked projections a student stands for."""
    if "theta" in student:
        return student["theta"], student["w"]
    query, key = student["query"], student["key"]
    return jnp.einsum("mqh,mdh->mqd", query, key) / math.sqrt(key.shape[-1]), student["w"]


def batches(problem: Problem) -> Chunk:
    """The problem's examples cut for gradients, which need less room than normal equations."""
    if problem.data.weight.shape[0] == 1:
        return problem.data
    n_heads = problem.architecture.heads
    if problem.devices > 1:
        return merge_chunks(problem.data, n_heads, problem.devices)
    k, d = problem.k, problem.d
    n = math.prod(problem.data.weight.shape[:2])
    flat = jax.tree.map(lambda leaf: leaf.reshape(n, *leaf.shape[2:]), problem.data)
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


def value_and_gradient(student: Student, data: Chunk, energy: Array) -> tuple[Array, Student]:
    """Relative squared error and its gradient. Memory: one chunk's, forward and back."""

    def squared(student: Student, chunk: Chunk) -> Array:
        return jnp.sum(residual(*expand(student), chunk) ** 2) / energy

    return sum_over_chunks(lambda chunk: jax.value_and_grad(squared)(student, chunk), data)


@jax.jit
def relative_loss(student: Student, data: Chunk, energy: Array) -> Array:
    return sum_over_chunks(
        lambda chunk: jnp.sum(residual(*expand(student), chunk) ** 2) / energy, data
    )
