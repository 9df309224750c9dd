"""How layers are written as numbers that can be moved.

A kind of attention is one class with `shapes` and `forward`: everything else has a default by
automatic differentiation. The kinds of this package override what pays.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from mhalearn._runtime.programs import in_float64
from mhalearn._runtime.seeds import Stream, generator
from mhalearn._runtime.types import Array, Float
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.batches import Chunk, make_chunk

if TYPE_CHECKING:
    from mhalearn.layer.base import Layer
    from mhalearn.layer.units import Units

# A tree of arrays; for a kind of attention of one's own, a dictionary by the names of `shapes`.
Params = Any

# A singular value this far below the largest is none, where the generic rank is measured.
_RANK = 1e-9


class Parametrisation(ABC):
    """Layers of an architecture as trees of arrays.

    Subclasses are frozen dataclasses with a field `architecture`, so that compiled programs can
    depend on them. Products are those of the Jacobian of `forward` in the parameters.
    """

    architecture: Architecture
    # Whether tokens and labels may be rescaled under it; see `layer.units`.
    scales = False

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes of the parameters. The next to last axis is taken for the inputs'."""
        raise TypeError(f"{type(self).__name__} says no shapes: define `shapes`, or `init`")

    @abstractmethod
    def forward(self, params: Params, chunk: Chunk) -> Float[Array, "b k e"]:
        """Outputs on a chunk: of `chunk.tokens`, where `chunk.allowed` says which keys are seen."""

    def outputs(self, params: Params, chunk: Chunk) -> Float[Array, "b k e"]:
        """`forward`, with zeros where rows do not count."""
        return self.forward(params, chunk) * chunk.weight[..., None]

    def init(self, rng: np.random.Generator) -> Params:
        """A random start: entries of mean square one over the inputs they meet."""
        return {
            name: rng.standard_normal(shape) / math.sqrt(shape[-2] if len(shape) > 1 else 1)
            for name, shape in self.shapes().items()
        }

    def linearise(self, params: Params, chunk: Chunk) -> Any:
        """What products at one point can share; nothing by default."""
        return None

    def jvp(self, params: Params, at: Any, chunk: Chunk, step: Params) -> Float[Array, "b k e"]:
        """The change of the outputs along a step; `at` is what `linearise` made."""
        change: Array = jax.jvp(partial(self.outputs, chunk=chunk), (params,), (step,))[1]
        return change

    def vjp(self, params: Params, at: Any, chunk: Chunk, change: Float[Array, "b k e"]) -> Params:
        """The transpose of `jvp`."""
        return jax.linear_transpose(partial(self.jvp, params, at, chunk), params)(change)[0]

    def retract(self, params: Params) -> Params:
        """The nearest parameters of this class, after a step along its tangent space."""
        return params

    def steady(self, params: Params) -> Params:
        """The same after a step of Adam, whose steps are as long where gradients are noise."""
        return params

    def penalties(self, params: Params, theta: Any, w: Any) -> Params:
        """What a penalty multiplies the squares of each leaf by: by default none."""
        return jax.tree.map(lambda _: jnp.zeros(()), params)

    def straightened(self) -> Parametrisation:
        """The same layers by numbers fit for derivatives: where some are redundant but straighten a
        direction that is bent or faint in the others, with those."""
        return self

    def invariants(self, params: Params) -> Params:
        """What a layer determines of its parameters: by default all of them."""
        return params

    def term_sizes(self, params: Params, chunk: Chunk) -> Float[Array, "b k e"]:
        """Sizes of the terms that outputs are sums of, which tell how far rounding may go."""
        return jnp.abs(self.outputs(params, chunk))

    def to_layer(self, params: Params, units: Units) -> Layer:
        """The layer that parameters stand for, in the user's units."""
        from mhalearn.layer.base import ParametrisedLayer

        return ParametrisedLayer(self, jax.tree.map(np.asarray, params))

    def from_layer(self, layer: Layer, units: Units) -> Params:
        """Parameters of a layer."""
        return layer.params

    def size(self) -> int:
        """Numbers that are moved, the gauge counted in."""
        return sum(np.size(leaf) for leaf in jax.tree.leaves(self.init(np.random.default_rng(0))))

    def count(self) -> int:
        """Unknowns of a layer, the gauge left out: by default the generic rank of the Jacobian.

        Trust: measured at a random point, on random inputs; what is open there is open everywhere.
        """
        return _generic_rank(self)


@cache
@in_float64
def _generic_rank(parametrisation: Parametrisation) -> int:
    """Rank of the Jacobian at random parameters, on inputs that are more than enough."""
    architecture, size = parametrisation.architecture, parametrisation.size()
    rng = generator(0, Stream.GENERIC_RANK)
    k = 6
    n = 2 + math.ceil(3 * size / (k * architecture.outputs))
    chunk = make_chunk(
        rng.standard_normal((n, k, architecture.d)),
        np.full(n, k),
        key_vector=architecture.bias,
        out_bias=architecture.bias,
        causal=architecture.causal,
    )
    chunk = jax.tree.map(jnp.asarray, chunk)
    flat, unflatten = ravel_pytree(jax.tree.map(jnp.asarray, parametrisation.init(rng)))
    jacobian = jax.jit(
        jax.jacfwd(lambda flat: parametrisation.outputs(unflatten(flat), chunk).ravel())
    )
    values = np.linalg.svd(np.asarray(jacobian(flat)), compute_uv=False)
    return int(np.sum(values > _RANK * values[0]))
