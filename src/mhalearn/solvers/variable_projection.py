"""The Gauss-Newton equations for Theta once W is eliminated: (S + damping) step = gradient.

With J the Jacobian in Theta, V the design matrix and G = V^T V + ridge its Gram matrix,

    S = J^T J - J^T V G^-1 V^T J          gradient = J^T (Y - F)

(Kaufman's form of variable projection; the gradient is exact). Theta is indexed as (q, m d): the
query side first, so that J^T J = sum_r x_r x_r^T (x) K_r with K_r = M_r M_r^T and M_r the stacked
C_i(r) W_i. `dense` forms S, for its spectrum or its factor; `matrix_free` applies it inside
conjugate gradients. Neither ever forms J.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mhalearn._runtime.programs import in_single
from mhalearn._runtime.types import Array, Float
from mhalearn.layer.attention import (
    LinearFit,
    Tangent,
    attend,
    covariance_products,
    design_matrix,
    jvp,
    key_side,
    residual,
    stacked_heads,
    tangent,
    vjp,
)
from mhalearn.layer.batches import Chunk, sum_over_chunks
from mhalearn.solvers.cg import conjugate_gradients
from mhalearn.solvers.normal_equations import Step


def query_first(theta: Float[Array, "m q d"]) -> Float[Array, "q md"]:
    m, q, d = theta.shape
    return theta.transpose(1, 0, 2).reshape(q, m * d)


def heads_first(flat: Float[Array, "q md"], n_heads: int) -> Float[Array, "m q d"]:
    q = flat.shape[0]
    return flat.reshape(q, n_heads, -1).transpose(1, 0, 2)


class ReducedNormal(NamedTuple):
    """The reduced normal matrix and what leads back from it to W."""

    schur: Float[Array, "qmd qmd"]
    coupling: Float[Array, "q md p e"]  # L^-1 V^T J with G = L L^T
    chol: Float[Array, "p p"]  # L


def reduced_normal_matrix(
    theta: Float[Array, "m q d"], fit: LinearFit, data: Chunk
) -> ReducedNormal:
    """Form the reduced normal matrix.

    Cost: O(n k (q m d)(m d)(q + e)) time for the sums and O((q m d)^2 p e) for the elimination;
    memory O((q m d)^2) beside a chunk.
    """
    square, cross = normal_moments(theta, fit.w, data)
    chol = jnp.linalg.cholesky(fit.gram)
    by_design = cross.transpose(2, 0, 1, 3)
    half = jax.scipy.linalg.solve_triangular(chol, by_design.reshape(len(chol), -1), lower=True)
    coupling = half.reshape(by_design.shape).transpose(1, 2, 0, 3)
    flat = coupling.reshape(len(square), -1)
    return ReducedNormal(square - flat @ flat.T, coupling, chol)


def normal_moments(
    theta: Float[Array, "m q d"], w: Float[Array, "p e"], data: Chunk
) -> tuple[Float[Array, "qmd qmd"], Float[Array, "q md p e"]]:
    """J^T J and J^T V, before anything is eliminated. Cost: O(n k (q m d)(m d)(q + e))."""
    m, q, d = theta.shape
    md, width = m * d, len(w)
    heads = stacked_heads(w, m, d)

    def moments(chunk: Chunk) -> tuple[Array, Array]:
        pattern = attend(theta, chunk)
        rows = chunk.weight.size
        x = chunk.queries.reshape(rows, q)
        v = design_matrix(pattern, chunk).reshape(rows, width)
        keys = covariance_products(pattern, heads, chunk).reshape(rows, md, -1)
        kernel = jnp.einsum("rie,rje->rij", keys, keys)
        outer = (x[:, :, None] * x[:, None, :]).reshape(rows, q * q)
        mixed = (x[:, :, None] * v[:, None, :]).reshape(rows, q * width)
        return outer.T @ kernel.reshape(rows, md * md), mixed.T @ keys.reshape(rows, -1)

    square, cross = sum_over_chunks(moments, data)
    full = square.reshape(q, q, md, md).transpose(0, 2, 1, 3).reshape(q * md, q * md)
    return full, cross.reshape(q, width, md, -1).transpose(0, 2, 1, 3)


def turn(matrix: Float[Array, "*c a b"]) -> Float[Array, "*c b a"]:
    """The transpose, laid out in memory: XLA's products on a CPU with any other take twice to eight
    times as long."""
    turned: Array = jax.lax.optimization_barrier(jnp.swapaxes(matrix, -1, -2))
    return turned


class Preconditioner(NamedTuple):
    """J^T J + shift ~ (second moment of the queries) (x) (sum of K_r), each shifted in proportion.

    What no Kronecker product sees is that a head resists being scaled, Theta_i to (1 + t) Theta_i,
    far less than other steps of that size; so those m directions have their own inverse added.
    """

    query_inverse: Float[Array, "q q"]
    key_inverse: Float[Array, "md md"]
    along: Float[Array, "q md"]  # Theta, in head-scaled coordinates
    along_values: Float[Array, " m"]  # |J Theta_i|^2, shifted
    head_scale: Float[Array, " m"]  # its mean diagonal in each head's block

    def solve(self, flat: Float[Array, "q md"]) -> Float[Array, "q md"]:
        """Apply the inverse, in head-scaled coordinates."""
        solved = self.query_inverse @ flat @ self.key_inverse
        values = self.along_values
        share = _by_head(self.along * flat, len(values)) / jnp.where(values > 0, values, jnp.inf)
        return solved + self.along * jnp.repeat(share, flat.shape[1] // len(values))


def _by_head(product: Float[Array, "q md"], n_heads: int) -> Float[Array, " m"]:
    return jnp.sum(product.reshape(product.shape[0], n_heads, -1), axis=(0, 2))


def _invert(matrix: Float[Array, "p p"], shift: Float[Array, ""]) -> Float[Array, "p p"]:
    """The inverse of what is at least semidefinite, with a shift that at least covers rounding."""
    eye = jnp.eye(len(matrix), dtype=matrix.dtype)
    floor = 8 * jnp.finfo(matrix.dtype).eps * jnp.trace(matrix)
    factor = jax.scipy.linalg.cho_factor(matrix + (shift + floor) * eye)
    return jax.scipy.linalg.cho_solve(factor, eye)


# Random combinations of a row's outputs, a dimension of the key side.
_PROBES = 8


def draw_signs(key: Array, shape: tuple[int, ...]) -> Array:
    """Signs that look random (the end of MurmurHash3): JAX's own take a second to compile.

    key: a number, or numbers that go with the shape.
    """
    bits = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    bits = bits ^ (key * jnp.uint32(0x9E3779B9))
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return 1 - 2 * ((bits >> 16) & 1).astype(jnp.int32)


def precondition(
    theta: Float[Array, "m q d"],
    data: Chunk,
    tangents: Tangent,
    shift: Float[Array, ""],
) -> Preconditioner:
    """Estimated from every row, each seen through random combinations of its outputs.

    Cost: O((m d)^3), and a part of that of `fit_projections`.
    """
    m, q, d = theta.shape
    e = data.labels.shape[-1]
    probes = min(e, -(-_PROBES * m * d // data.weight.size))
    salts = jnp.arange(data.weight.shape[0] * probes, dtype=jnp.uint32).reshape(-1, probes)

    def moments(part: tuple[Chunk, Tangent, Array]) -> tuple[Array, Array, Array]:
        chunk, at, salts = part
        thetas = jnp.einsum("brq,mqd->brmd", chunk.queries, theta)

        def seen(salt: Array) -> tuple[Array, Array]:
            if probes == e:  # as many as there are outputs: then one after the other, exactly
                mix = jnp.broadcast_to(jnp.sqrt(e) * jnp.eye(e)[salt % e], chunk.labels.shape)
            else:
                mix = draw_signs(salt, chunk.labels.shape)
            side = key_side(at, chunk, mix.astype(theta.dtype))
            flat = side.reshape(-1, m * d)
            return turn(flat) @ flat, jnp.sum(jnp.sum(thetas * side, axis=-1) ** 2, axis=(0, 1))

        kernel, along = jax.tree.map(lambda leaf: leaf.mean(axis=0), jax.lax.map(seen, salts))
        x = (chunk.queries * chunk.weight[..., None]).reshape(-1, q)
        return kernel, along, x.T @ x

    kernel, along, second = jax.tree.map(
        lambda leaf: leaf.sum(axis=0), jax.lax.map(moments, (data, tangents, salts))
    )
    second = second / jnp.maximum(jnp.sum(data.weight), 1.0)
    diagonal = jnp.diag(kernel).reshape(m, d).mean(axis=1) * jnp.trace(second) / q
    small = jnp.finfo(theta.dtype)
    head_scale = diagonal + 1e-12 * diagonal.max() + small.tiny
    root = jnp.repeat(jnp.sqrt(head_scale), d)
    kernel = kernel / (root[:, None] * root[None, :])
    along_theta = query_first(theta) * root
    return Preconditioner(
        _invert(second, shift * m * d / jnp.trace(kernel)),
        _invert(kernel, shift * q / jnp.trace(second)),
        along_theta,
        along + shift * _by_head(along_theta**2, m),
        head_scale,
    )


class FactoredNormal(NamedTuple):
    """The reduced normal matrix itself, in head-scaled coordinates, as a Cholesky factor."""

    factor: Float[Array, "qmd qmd"]

    def solve(self, flat: Float[Array, "q md"]) -> Float[Array, "q md"]:
        solved = jax.scipy.linalg.cho_solve((self.factor, True), flat.ravel())
        return solved.reshape(flat.shape)


def factor_normal_matrix(
    theta: Float[Array, "m q d"],
    fit: LinearFit,
    data: Chunk,
    root: Float[Array, " md"],
    ridge: Float[Array, ""],
    damping: Float[Array, ""],
) -> FactoredNormal:
    """Form and factor S + ridge + damping D. Cost: that of `dense`, and O((q m d)^3)."""
    q = theta.shape[1]
    scale = jnp.tile(root, q)
    schur = reduced_normal_matrix(theta, fit, data).schur
    schur = scale[:, None] * schur * scale[None, :] + jnp.diag(ridge * scale**2)
    floor = damping + 1e-13
    return FactoredNormal(jnp.linalg.cholesky(schur + floor * jnp.eye(schur.shape[0])))


class TangentProjection(NamedTuple):
    """The tangent space of rank-h matrices at Theta, head by head; everything when h is None."""

    left: Float[Array, "m q h"] | None
    right: Float[Array, "m d h"] | None

    def __call__(self, step: Float[Array, "m q d"]) -> Float[Array, "m q d"]:
        if self.left is None or self.right is None:
            return step
        along = self.left @ (self.left.mT @ step)
        rest = step - along
        return along + (rest @ self.right) @ self.right.mT


def tangent_projection(theta: Float[Array, "m q d"], head_dim: int | None) -> TangentProjection:
    if head_dim is None:
        return TangentProjection(None, None)
    u, _, vt = jnp.linalg.svd(theta, full_matrices=False)
    return TangentProjection(u[:, :, :head_dim], vt[:, :head_dim].mT)


class SpanProjection(NamedTuple):
    """Steps that keep every head in the span of orthonormal matrices."""

    basis: Float[Array, "s q d"]

    def __call__(self, step: Float[Array, "m q d"]) -> Float[Array, "m q d"]:
        return jnp.einsum("sqd,ms->mqd", self.basis, jnp.einsum("sqd,mqd->ms", self.basis, step))


def solve_reduced_normal_equations(
    theta: Float[Array, "m q d"],
    fit: LinearFit,
    data: Chunk,
    *,
    ridge: Float[Array, ""],
    damping: Float[Array, ""],
    tolerance: Float[Array, ""],
    max_steps: int,
    head_dim: int | None = None,
    span: Float[Array, "s q d"] | None = None,
    direct: bool = False,
    single: bool = False,
    known: tuple[Array | bool, Preconditioner] | None = None,
) -> Step:
    """Solve (S + ridge + damping D) step = J^T (Y - F) - ridge Theta by conjugate gradients.

    D is the preconditioner's mean diagonal in each head's block. With `head_dim` the step stays in
    the tangent space of heads of that rank, with `span` in that span. With `direct` the matrix is
    formed and its factor is the preconditioner.
    known: a preconditioner made nearby, and whether it is to be used instead of a new one.
    Cost: about four forward passes a CG step.
    """
    m, _, d = theta.shape
    heads = stacked_heads(fit.w, m, d)
    light = in_single if single else lambda tree: tree
    factor = jax.scipy.linalg.cho_factor(fit.gram)
    # Scaling a head by a number keeps its tangent space, so the projection commutes with `root`.
    project = tangent_projection(theta, head_dim) if span is None else SpanProjection(span)

    def inside(flat: Array) -> Array:
        return query_first(project(heads_first(flat, m)))

    def linearise(chunk: Chunk) -> tuple[Tangent, Array, Array]:
        pattern = attend(theta, chunk)
        at = tangent(pattern.p, heads, chunk)
        return at, design_matrix(pattern, chunk), vjp(at, chunk, residual(theta, fit.w, chunk))

    tangents, designs, pulls = jax.lax.map(linearise, data)
    down = pulls.sum(axis=0) - ridge * theta
    parts = light((data, tangents, designs))
    turned = turn(parts[2].reshape(len(designs), -1, designs.shape[-1]))

    def estimate() -> Preconditioner:
        return precondition(light(theta), parts[0], parts[1], light(damping + 1e-10))

    kronecker = estimate() if known is None else jax.lax.cond(known[0], lambda: known[1], estimate)
    root = jnp.repeat(1 / jnp.sqrt(kronecker.head_scale), d).astype(theta.dtype)

    def apply(flat: Array) -> Array:
        step = heads_first(flat * root, m)

        def outward(part: tuple[Chunk, Tangent, Array]) -> tuple[Array, Array]:
            chunk, at, across = part
            change = jvp(at, chunk, light(step))
            return change, across @ change.reshape(across.shape[1], -1)

        changes, shadows = jax.lax.map(outward, (*parts[:2], turned))
        shadow = shadows.sum(axis=0).astype(theta.dtype)
        absorbed = light(jax.scipy.linalg.cho_solve(factor, shadow))

        def inward(part: tuple[Chunk, Tangent, Array, Array]) -> Array:
            chunk, at, v, change = part
            return vjp(at, chunk, change - v @ absorbed)

        pulled = jax.lax.map(inward, (*parts, changes)).sum(axis=0).astype(theta.dtype)
        return inside(query_first(pulled + ridge * step) * root + damping * flat)

    inner = factor_normal_matrix(theta, fit, data, root, ridge, damping) if direct else kronecker

    def inverse(flat: Array) -> Array:
        return inside(inner.solve(light(flat)).astype(theta.dtype))

    scaled = inside(query_first(down) * root)
    found = conjugate_gradients(apply, inverse, scaled, tolerance, max_steps)
    flat = found.solution
    predicted = jnp.vdot(flat, scaled) + damping * jnp.vdot(flat, flat)
    return Step(heads_first(flat * root, m), predicted, found.converged, found, kronecker)


# Attention unknowns up to which the whole spectrum is computed (a dense matrix of 128 MiB).
DENSE_LIMIT = 4096
