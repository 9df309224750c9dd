"""J^T J of projected heads as a matrix, from the Jacobian of each head's mean values.

Outputs are y = sum_i z_i O_i + c, where z_i (h numbers a row) depends on the parameters of one head
alone. So the Jacobian of a head is formed in h columns a row instead of e, by as many backward
passes an example as it has numbers z_i, and blocks of J^T J follow from O_i O_j^T. Parameters that
heads share are summed over them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from mhalearn._runtime.devices import replicate
from mhalearn._runtime.programs import in_float64
from mhalearn._runtime.types import Array, Float64
from mhalearn.layer.batches import Chunk, in_one_chunk
from mhalearn.layer.distinct_heads import params_of_head
from mhalearn.layer.open_heads import OpenHeads
from mhalearn.layer.parametrisation import Parametrisation, Params
from mhalearn.layer.position_bias import Alibi
from mhalearn.layer.projected import Projected
from mhalearn.layer.relaxed import Relaxed
from mhalearn.run.watch import Watch
from mhalearn.solvers.scaled_problem import Problem

# Doubles that the Jacobians of a piece of the examples may hold: 64 MiB.
_WORKSPACE = 2**23
# How the program that sums them is compiled: with one thread a product, which was the faster.
_ON_ONE_THREAD = {"xla_gpu_enable_triton_gemm": False, "xla_cpu_multi_thread_eigen": False}
# Parameters behind the heads' values.
_BEHIND = ("out", "out_bias")


def has_separate_heads(kind: Parametrisation) -> bool:
    """Whether the values of each head depend on its own parameters and shared ones alone."""
    if not isinstance(kind, Projected):
        return False
    norm = kind.architecture.norm
    return norm is None or not norm.across_heads


@in_float64
def head_normal_matrix(
    params: Params, problem: Problem, examples: int | None = None, watch: Watch | None = None
) -> Float64:
    """J^T J over the first so many examples, all unless given, in the order of `ravel_pytree`.

    Cost: k h backward passes an example and head; O(m^2 k h p^2) an example for p parameters a
    head. Memory: O(m^2 p^2) and a workspace.
    """
    kind = problem.parametrisation
    assert isinstance(kind, Projected)
    params = {name: jnp.asarray(leaf) for name, leaf in params.items()}
    a = kind.architecture
    places = _places(params)
    each = a.heads // a.groups
    heads = [params_of_head(_in_front(params), i, each) for i in range(a.heads)]
    where = [params_of_head(_in_front(places), i, each) for i in range(a.heads)]
    if isinstance(a.distance_bias, Alibi) and "slope" not in params:
        slopes = a.distance_bias.slopes(a.heads)
    else:
        slopes = None
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *heads)
    size = sum(int(np.prod(leaf.shape[1:])) for leaf in stacked.values())
    data = _cut(problem, size, examples)
    sums = _sum_blocks(kind, stacked, params["out"], slopes, data, watch)
    return _assemble(sums, params, places, [ravel_pytree(one)[0] for one in where])


def _places(params: Params) -> dict[str, Any]:
    """The place of each number in the flat vector of all."""
    flat, unflatten = ravel_pytree(params)
    numbers = unflatten(jnp.arange(flat.size, dtype=flat.dtype))
    return {name: np.asarray(leaf).astype(np.int64) for name, leaf in numbers.items()}


def _in_front(params: dict[str, Any]) -> dict[str, Any]:
    return {name: leaf for name, leaf in params.items() if name not in _BEHIND}


def _cut(problem: Problem, size: int, examples: int | None) -> Chunk:
    """The examples in pieces so small that the Jacobians of one fit into the workspace."""
    data = in_one_chunk(problem.data, problem.devices)
    a = problem.architecture
    n, k = data.weight.shape if examples is None else (examples, data.weight.shape[1])
    n = min(n, data.weight.shape[0])
    piece = max(1, min(n, _WORKSPACE // (2 * a.heads * k * a.qk_rank * size)))
    count = -(-n // piece)
    missing = count * piece - n

    def cut(leaf: Array) -> Array:
        leaf = leaf[:n]
        # Repeats of the last example, not zeros: a softmax needs a key. Their weight is zero.
        padded = jnp.concatenate([leaf, jnp.repeat(leaf[-1:], missing, axis=0)])
        return padded.reshape(count, piece, *leaf.shape[1:])

    cuts: Chunk = jax.tree.map(cut, data)
    counts = jnp.arange(count * piece).reshape(count, piece, 1) < n
    return cuts._replace(weight=jnp.where(counts, cuts.weight, 0.0))


def _sum_blocks(
    kind: Projected,
    heads: Params,
    out: Array,
    slopes: Float64 | None,
    data: Chunk,
    watch: Watch | None,
) -> Any:
    alone = replace(kind.architecture, n_heads=1, kv_heads=None)
    single = replace(kind, architecture=alone) if isinstance(kind, OpenHeads) else Relaxed(alone)
    m, h, _ = out.shape
    size = sum(int(np.prod(leaf.shape[1:])) for leaf in heads.values())
    width = m * h + 1
    sums: Any = (
        jnp.zeros((m * (m + 1) // 2, size, size)),
        jnp.zeros((m, width, h, size)),
        jnp.zeros((width, width)),
    )
    of = data.tokens.shape[0]
    for done in range(of):
        piece: Chunk = jax.tree.map(lambda leaf, i=done: leaf[i], data)
        sums = jax.block_until_ready(_add_blocks(sums, heads, out, slopes, piece, kind=single))
        if watch is not None and of > 1:
            watch(done + 1, of)
    return jax.tree.map(np.asarray, replicate(sums))


@partial(jax.jit, static_argnames="kind", compiler_options=_ON_ONE_THREAD)
def _add_blocks(
    sums: Any,
    heads: Params,
    out: Array,
    slopes: Array | None,
    piece: Chunk,
    *,
    kind: Projected,
) -> Any:
    """Of a piece: products of Jacobians of all pairs of heads, of Jacobians with values, and of
    values. A program for one piece serves any number of examples."""
    m = out.shape[0]
    pairs = jnp.asarray(np.stack(np.triu_indices(m)))
    products = jnp.einsum("mhe,nge->mnhg", out, out)

    z, jacobian = _jacobians(kind, heads, slopes, piece)  # (m, r, h), (m, r, h, p)

    def of_pair(pair: Array) -> Array:
        i, j = pair
        seen = jnp.einsum("hg,rgp->rhp", products[i, j], jacobian[j])
        return jnp.einsum("rhp,rhq->pq", jacobian[i], seen)

    between = jax.lax.map(of_pair, pairs.T)
    values = jnp.concatenate([jnp.moveaxis(z, 0, 1).reshape(z.shape[1], -1), _ones(piece)], 1)
    with_values = jnp.einsum("rv,mrhp->mvhp", values, jacobian)
    return jax.tree.map(jnp.add, sums, (between, with_values, values.T @ values))


def _ones(chunk: Chunk) -> Array:
    return chunk.weight.reshape(-1, 1)


def _jacobians(
    kind: Projected, heads: Params, slopes: Array | None, chunk: Chunk
) -> tuple[Array, Array]:
    """Values (m, rows, h) of each head, and their Jacobians (m, rows, h, p)."""
    of_slopes = None if slopes is None else slopes[:, None]

    def one(params: Params, slope: Array | None) -> tuple[Array, Array]:
        flat, unflatten = ravel_pytree(params)

        def values(flat: Array, example: Chunk) -> Array:
            own = unflatten(flat) | ({} if slope is None else {"slope": slope})
            alone = jax.tree.map(lambda leaf: leaf[None], example)
            return kind.attend(own, alone).means[0, :, 0] * example.weight[:, None]

        z = jax.vmap(values, (None, 0))(flat, chunk)
        return z, jax.vmap(jax.jacrev(values), (None, 0))(flat, chunk)

    z, jacobian = jax.vmap(one)(heads, of_slopes)
    m, b, k, h = z.shape
    return z.reshape(m, b * k, h), jacobian.reshape(m, b * k, h, -1)


def _assemble(sums: Any, params: Params, places: dict[str, Any], where: list[Any]) -> Float64:
    """All blocks in their places."""
    between, with_values, values = sums
    out = np.asarray(params["out"])
    m, h, e = out.shape
    flat = sum(leaf.size for leaf in places.values())
    matrix = np.zeros((flat, flat))
    index = [np.asarray(one).astype(np.int64) for one in where]
    for (i, j), block in zip(zip(*np.triu_indices(m), strict=True), between, strict=True):
        matrix[np.ix_(index[i], index[j])] += block
        if i != j:
            matrix[np.ix_(index[j], index[i])] += block.T
    # Columns behind the values: each number of z, and one, times each output.
    behind = places["out"].reshape(m * h, e)
    if "out_bias" in places:
        behind = np.concatenate([behind, places["out_bias"][None]])
    used = len(behind)
    for own, seen, o in zip(index, with_values, out, strict=True):
        cross = np.einsum("vhp,he->vep", seen[:used], o)
        rows = behind.ravel()
        matrix[np.ix_(rows, own)] += cross.reshape(-1, len(own))
        matrix[np.ix_(own, rows)] += cross.reshape(-1, len(own)).T
    for column in range(e):
        matrix[np.ix_(behind[:, column], behind[:, column])] += values[:used, :used]
    return matrix
