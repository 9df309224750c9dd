"""How far outputs of a block that are computed in double precision are from its own."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from mhalearn._runtime.programs import compiled, in_float64, in_single
from mhalearn._runtime.types import Array, Float
from mhalearn.data import Examples
from mhalearn.layer.batches import Chunk
from mhalearn.layer.block.block import Block
from mhalearn.layer.parametrisation import Parametrisation, Params

# Digits of float64's mantissa over float32's.
_DIGITS = 29
# Examples that are looked at.
_SOME = 256
# Naive loops and torch's module left up to 3.2 times as much as this way of computing.
MARGIN = 8.0


@in_float64
def computing_error(block: Block, examples: Examples) -> float:
    """Root mean square error of outputs, relative to theirs, that computing in doubles leaves.

    Single precision stands in: what it loses, over 2^29, is about what doubles lose.
    Cost: a pass over some examples in either precision.
    Trust: of this way of computing; boxes that order their sums otherwise are off by about as much.
    """
    x, _, lengths = examples.subset(slice(0, _SOME)).arrays()
    sums = np.sum([found for _, found in block.over_chunks(_losses, x, lengths)], axis=0)
    return math.sqrt(sums[0] / (sums[1] or 1.0)) * 2.0**-_DIGITS


@partial(compiled, static_argnums=0)
def _losses(parametrisation: Parametrisation, params: Params, chunk: Chunk) -> Float[Array, " 2"]:
    """Squares of what single precision loses, and of outputs."""
    exact = parametrisation.outputs(params, chunk)
    with jax.default_matmul_precision("highest"):  # of tensor cores, too
        coarse = parametrisation.outputs(*in_single((params, chunk)))
    return jnp.stack([jnp.sum((coarse - exact) ** 2), jnp.sum(exact**2)])
