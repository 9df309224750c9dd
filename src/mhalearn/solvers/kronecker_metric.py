"""A metric for the parameters of many linear maps, in which J^T J is nearly the identity.

Of a matrix of parameters G_b is the gradient, on example b, of a random combination of outputs.
Then E vec(G) vec(G)^T is that matrix's block of J^T J, and its nearest Kronecker product about
E[G G^T] (x) E[G^T G], over the trace of either. Of what is no matrix the diagonal is taken.
A parametrisation says what its matrices are, by `to_matrices` and `from_matrices`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg

from mhalearn._runtime.devices import replicate
from mhalearn._runtime.programs import compiled, in_float64, on_device
from mhalearn._runtime.types import Array, Float, Float64
from mhalearn.layer.batches import Chunk
from mhalearn.layer.parametrisation import Params

# Gradients a dimension of the largest matrix.
_PROBES = 12
# What is added to the diagonal of a factor, over its mean.
_FLOOR = 1e-6
# Doubles that the gradients of a piece of the examples may hold.
_WORKSPACE = 2**23


@runtime_checkable
class HasMatrices(Protocol):
    """What a parametrisation must offer."""

    def outputs(self, params: Params, chunk: Chunk) -> Float[Array, "b k e"]: ...
    def to_matrices(self, params: Params) -> dict[str, Array]: ...
    def from_matrices(self, matrices: Mapping[str, Array]) -> Params: ...


class Metric(NamedTuple):
    """Factors H with H^T A H = 1 of both sides A of each matrix, and of diagonals."""

    sides: dict[str, tuple[Float[Array, "p p"], Float[Array, "q q"]]]
    scales: dict[str, Array]

    def to_step(self, flat: Mapping[str, Array]) -> dict[str, Array]:
        """From coordinates in which the metric is the identity to matrices of parameters."""
        found = {name: left @ flat[name] @ right.T for name, (left, right) in self.sides.items()}
        return found | {name: scale * flat[name] for name, scale in self.scales.items()}

    def to_slope(self, slope: Mapping[str, Array]) -> dict[str, Array]:
        """The transpose: of gradients."""
        found = {name: left.T @ slope[name] @ right for name, (left, right) in self.sides.items()}
        return found | {name: scale * slope[name] for name, scale in self.scales.items()}


@in_float64
def measure_metric(kind: Any, params: Params, examples: Chunk, seed: int = 0) -> Metric:
    """The metric at a point. examples: without a chunk axis.

    Cost: a dozen backward passes over as many rows as the largest matrix has dimensions, at least
    one over all examples, and a Cholesky factor of each side. Memory: a piece of the examples with
    a gradient each.
    Trust: a preconditioner; what it approximates is not relied upon.
    """
    shapes = jax.eval_shape(kind.to_matrices, params)
    size = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    largest = max([1, *(max(leaf.shape) for leaf in shapes.values() if leaf.ndim == 2)])
    n, k, _ = examples.labels.shape
    piece = max(1, min(n, on_device(_WORKSPACE) // size))
    wanted = min(n, max(1, -(-_PROBES * largest // k)))
    pieces, rounds = -(-wanted // piece), max(1, -(-_PROBES * largest // (n * k)))
    sums = _moments(params, examples, jax.random.key(seed), kind, piece, pieces, rounds)
    left, right, diagonal = jax.tree.map(np.asarray, replicate(sums))
    share = n / (rounds * min(n, pieces * piece))
    sides = {
        name: (_half(left[name] * share), _half(right[name] / max(np.trace(right[name]), 1e-300)))
        for name in left
    }
    largest_entry = max([1e-300, *(float(leaf.max(initial=0.0)) for leaf in diagonal.values())])
    scales = {
        name: (share * np.maximum(leaf, _FLOOR * largest_entry)) ** -0.5
        for name, leaf in diagonal.items()
    }
    made: Metric = jax.tree.map(jnp.asarray, Metric(sides, scales))  # type: ignore[arg-type]
    return made


def _half(matrix: Float64) -> Float64:
    """H with H^T (A + floor) H = 1."""
    size = len(matrix)
    floor = max(_FLOOR * float(np.trace(matrix)) / size, 1e-300)
    factor = scipy.linalg.cholesky(matrix + floor * np.eye(size), lower=True)
    inverse: Float64 = scipy.linalg.solve_triangular(factor, np.eye(size), lower=True)
    return inverse.T


@partial(compiled, static_argnums=(3, 4, 5, 6))
def _moments(
    params: Params,
    examples: Chunk,
    key: Array,
    kind: Any,
    piece: int,
    pieces: int,
    rounds: int,
) -> tuple[dict[str, Array], dict[str, Array], dict[str, Array]]:
    """Sums over examples and rounds of G G^T, G^T G, and the squares of what is no matrix."""
    n = examples.labels.shape[0]

    def gradient(example: Chunk, key: Array) -> dict[str, Array]:
        alone: Chunk = jax.tree.map(lambda leaf: leaf[None], example)
        outputs, pull = jax.vjp(partial(kind.outputs, chunk=alone), params)
        signs = jax.random.rademacher(key, outputs.shape, outputs.dtype)
        found: dict[str, Array] = kind.to_matrices(pull(signs)[0])
        return found

    def add(sums: Any, turn: Array) -> tuple[Any, None]:
        rows = (turn % pieces) * piece + jnp.arange(piece)
        inside = jnp.where(rows < n, 1.0, 0.0)
        chosen = jax.tree.map(lambda leaf: leaf[jnp.minimum(rows, n - 1)], examples)
        keys = jax.random.split(jax.random.fold_in(key, turn), piece)
        found = jax.vmap(gradient)(chosen, keys)
        found = {
            name: leaf * inside.reshape(-1, *[1] * (leaf.ndim - 1)) for name, leaf in found.items()
        }
        return jax.tree.map(jnp.add, sums, _squares(found)), None

    like = jax.eval_shape(kind.to_matrices, params)
    none = _squares({name: jnp.zeros((1, *leaf.shape)) for name, leaf in like.items()})
    return jax.lax.scan(add, none, jnp.arange(pieces * rounds))[0]


def _squares(found: Mapping[str, Array]) -> Any:
    left, right, diagonal = {}, {}, {}
    for name, leaf in found.items():
        if leaf.ndim == 3:
            left[name] = jnp.einsum("bpq,brq->pr", leaf, leaf)
            right[name] = jnp.einsum("bpq,bpr->qr", leaf, leaf)
        else:
            diagonal[name] = jnp.sum(leaf**2, axis=0)
    return left, right, diagonal


def in_metric(
    kind: HasMatrices, metric: Metric
) -> tuple[Callable[[Mapping[str, Array]], Params], Callable[[Params], dict[str, Array]]]:
    """Coordinates to steps of the parameters, and gradients to coordinates."""

    def step(flat: Mapping[str, Array]) -> Params:
        return kind.from_matrices(metric.to_step(flat))

    def slope(gradient: Params) -> dict[str, Array]:
        return metric.to_slope(kind.to_matrices(gradient))

    return step, slope
