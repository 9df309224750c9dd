"""A preconditioner for the normal equations in all parameters of projected heads.

A block of J^T J that belongs to one projection (rows of tokens' features, columns of a head's
dimensions) is taken for a Kronecker product, as for heads by their factors
(`factor_preconditioner`). Its two sides are not derived kind by kind: if s are random signs of the
outputs, G = J^T s has E[G G^T] and E[G^T G] in proportion to them. So whatever heads have beside
their projections is in it, and a wider class too. Biases are blocks of one row, of which every
example has its own G: where keys turn slowly, their biases are seen a millionth as well as the
rest, and conjugate gradients would find them last.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.devices import replicate
from mhalearn._runtime.programs import compiled, in_single
from mhalearn._runtime.threads import one_lapack_thread
from mhalearn._runtime.types import Array, Float64
from mhalearn.layer.batches import Chunk, sum_over_chunks
from mhalearn.layer.projected import Projected, Projections
from mhalearn.solvers.variable_projection import draw_signs

# Random combinations of all outputs of a chunk, over all chunks; fewer of each than this none.
_PROBES, _LEAST_PROBES = 64, 4
# What is added to either side, over its mean diagonal; and to that of biases.
_FLOOR, _BIAS_FLOOR, _TINY = 1e-2, 1e-7, 1e-30
# Biases in front of what heads mix, of each head or group.
_BIASES = ("query_bias", "key_bias", "value_bias")


class ProjectionPreconditioner(NamedTuple):
    """Inverses of the sides of each block, by the name of its projection: (r, r) and (g, c, c)."""

    left: dict[str, Any]
    right: dict[str, Any]

    def prepare(self) -> Callable[[Projections], Projections]:
        """The inverse of the approximation as a function. Cost: O(m h d (d + h)) a call."""

        def solve(step: Projections) -> Projections:
            solved = {}
            for name, block in _blocks(step).items():
                left, right = self.left[name] @ block, self.right[name]
                solved[name] = left * right if right.shape[-1] == 1 else left @ right
            return _unblock(solved, step)

        return solve


def precondition_projections(
    kind: Projected, params: Projections, data: Chunk, devices: int = 1, *, damping: float = 0.0
) -> ProjectionPreconditioner:
    """Of J^T J + damping at a point, in single precision.

    Cost: some twenty passes over the examples; O(d^3 + m h^3) to invert. Trust: an estimate from
    random signs, of no consequence but for the number of steps.
    """
    sums = _sum_moments(params, data, kind, devices)
    lefts, rights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), replicate(sums))
    left, right = {}, {}
    with one_lapack_thread():
        for name, matrix in lefts.items():
            rows, total = len(matrix), max(float(np.trace(matrix)), _TINY)
            left[name] = _invert(matrix * (rows / total), 0.0, _FLOOR)
            floor = _BIAS_FLOOR if name in _BIASES else _FLOOR
            right[name] = _invert(rights[name] / rows, damping, floor)
    return ProjectionPreconditioner(left, right)


@partial(compiled, static_argnums=(2, 3))
def _sum_moments(
    params: Projections, data: Chunk, kind: Projected, devices: int
) -> tuple[dict[str, Array], dict[str, Array]]:
    """E[G G^T], summed over heads, and E[G^T G] of each, of every block."""
    params, data = in_single(params), in_single(data)
    chunks, b, _ = data.weight.shape
    probes = max(_LEAST_PROBES, -(-_PROBES // chunks))
    salts = jnp.arange(chunks * b * probes, dtype=jnp.uint32).reshape(chunks, b, probes)

    def gather(part: tuple[Chunk, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
        chunk, salts = part
        b = len(chunk.labels)
        # Of each example its own biases, (b, 1, g, h), which broadcast as common ones do.
        wide = {
            name: jnp.broadcast_to(leaf, (b, 1, *leaf.shape)) if name in _BIASES else leaf
            for name, leaf in params.items()
        }
        pull = jax.vjp(partial(kind.outputs, chunk=chunk), wide)[1]

        def see(salt: Array) -> tuple[dict[str, Array], dict[str, Array]]:
            signs = draw_signs(salt[:, None, None], chunk.labels.shape)
            slopes = pull(signs.astype(chunk.labels.dtype) * chunk.weight[..., None])[0]
            blocks = _blocks({name: leaf for name, leaf in slopes.items() if name not in _BIASES})
            left = {name: jnp.einsum("grc,gqc->rq", one, one) for name, one in blocks.items()}
            right = {name: _columns(name, one) for name, one in blocks.items()}
            for name in _BIASES:
                if name in slopes:
                    right[name] = jnp.einsum("bngc,bngd->gcd", slopes[name], slopes[name])
                    left[name] = jnp.ones((1, 1), right[name].dtype)
            return left, right

        found: tuple[dict[str, Array], dict[str, Array]]
        found = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), jax.lax.map(see, salts.T))
        return found

    with jax.default_matmul_precision("highest"):
        found: tuple[dict[str, Array], dict[str, Array]]
        found = sum_over_chunks(gather, (data, salts), devices)
    return found


def _columns(name: str, block: Array) -> Array:
    """G^T G of each head; all outputs count alike: one number says what chance would blur."""
    if name == "out":
        return jnp.full((1, 1, 1), jnp.sum(block**2) / block.shape[-1])
    return jnp.einsum("grc,grd->gcd", block, block)


def _blocks(params: Projections) -> dict[str, Array]:
    """Parameters as matrices (g, rows, columns): output projections of all heads, and their bias,
    as one, biases of heads as single rows; what is no matrix as numbers side by side."""
    found = {}
    for name, leaf in params.items():
        if name == "out":
            rows = leaf.reshape(-1, leaf.shape[-1])
            bias = params.get("out_bias")
            found[name] = (rows if bias is None else jnp.concatenate([rows, bias[None]]))[None]
        elif name in _BIASES:
            found[name] = leaf[:, None]
        elif name != "out_bias":
            found[name] = leaf if leaf.ndim == 3 else leaf.reshape(-1, 1, 1)
    return found


def _unblock(blocks: dict[str, Array], like: Projections) -> Projections:
    found = dict(blocks)
    if "out_bias" in like:
        found["out"], found["out_bias"] = blocks["out"][0, :-1], blocks["out"][0, -1]
    return {name: found[name].reshape(leaf.shape) for name, leaf in like.items()}


def _invert(matrices: Float64, shift: float, floor: float) -> NDArray[np.float32]:
    """Of the matrices plus a shift and a floor."""
    size = matrices.shape[-1]
    least = floor * float(np.max(np.trace(matrices, axis1=-2, axis2=-1) / size)) + _TINY
    return np.linalg.inv(matrices + (least + shift) * np.eye(size)).astype(np.float32)
