"""Projected heads whose positions are numbers to be learned: a wider class, easier to search.

Rotation by slow frequencies is hardly seen in short sequences, so that dimensions of one frequency
turn into those of another along curved valleys, on which descent crawls. Where each group's keys
are turned from position to position by a matrix of their own, R^s k_s, every basis of the queries
and keys is as good as any other, and the valleys are gone. What was learned is then read: the
eigenvalues of R are exp(+-i w_f), and its eigenvectors the dimensions of each frequency. Likewise
slopes by distance (ALiBi), which tell heads their places, are learned and then put in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import linear_sum_assignment

from mhalearn._runtime.programs import in_float64
from mhalearn._runtime.types import Array, Float, Float64
from mhalearn.layer.batches import Chunk
from mhalearn.layer.parametrisation import Params
from mhalearn.layer.position_bias import Alibi
from mhalearn.layer.projected import Projected, Projections, _positions


@dataclass(frozen=True)
class Relaxed(Projected):
    """`Projected`, with a matrix "turn" (g, h, h) in place of rotations, where no norm fixes the
    basis, and a number "slope" (m,) in place of each head's slope.

    frees: whether anything is relaxed; where tokens bring their positions, nothing is."""

    frees: bool = True

    @property
    def frees_rotation(self) -> bool:
        """Whether rotations are by one matrix a position, whatever the length of a sequence."""
        rope, norm = self.architecture.rope, self.architecture.norm
        if rope is None or norm is not None or self.architecture.latent is not None:
            return False
        if not self.frees:
            return False
        scaling = rope._scaling
        size = rope.rotated(self.architecture.qk_rank)
        return scaling is None or scaling.stretched(rope.base, size, jnp.ones(1)) is None

    @property
    def frees_slopes(self) -> bool:
        return self.frees and isinstance(self.architecture.distance_bias, Alibi)

    @property
    def frees_any(self) -> bool:
        return self.frees_rotation or self.frees_slopes

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        a = self.architecture
        shapes = dict(super().shapes())
        if self.frees_rotation:
            shapes["turn"] = (a.groups, a.qk_rank, a.qk_rank)
        if self.frees_slopes:
            shapes["slope"] = (a.heads,)
        return shapes

    @in_float64
    def relax(self, params: Params, slopes: Float64 | None = None) -> Projections:
        """The same function in the wider class; slopes: to start from, the architecture's own
        unless given."""
        a = self.architecture
        found = {name: jnp.asarray(leaf) for name, leaf in params.items()}
        if self.frees_rotation:
            found["turn"] = jnp.asarray(np.tile(self._rotation(), (a.groups, 1, 1)))
        if self.frees_slopes:
            assert isinstance(a.distance_bias, Alibi)
            found["slope"] = jnp.asarray(
                a.distance_bias.slopes(a.heads) if slopes is None else slopes
            )
        return found

    def read(self, params: Params) -> dict[str, Float64]:
        """The nearest parameters of `Projected`: of a matrix that turns keys, the eigenvectors by
        the frequencies that eigenvalues are next to; of heads, the order of their slopes.

        Trust: exact where the wider class has led to a layer of the narrower one.
        """
        found = {name: np.array(leaf, np.float64) for name, leaf in params.items()}
        turn, slope = found.pop("turn", None), found.pop("slope", None)
        if turn is not None:
            for g in range(self.architecture.groups):
                self._straighten(found, turn[g], g)
        if slope is not None:
            self._order_by_slope(found, slope)
        return found

    def _rotation(self) -> Float64:
        """By one position: (h, h)."""
        rope, h = self.architecture.rope, self.architecture.qk_rank
        assert rope is not None
        real, imaginary = rope.pairs(h)
        angles, turn = rope.frequencies(h), np.eye(h)
        turn[real, real] = turn[imaginary, imaginary] = np.cos(angles)
        turn[real, imaginary], turn[imaginary, real] = -np.sin(angles), np.sin(angles)
        return turn

    def _straighten(self, params: dict[str, Float64], turn: Float64, g: int) -> None:
        """Bring one group into the basis in which its turn is a rotation by the frequencies."""
        a = self.architecture
        assert a.rope is not None
        h, real_imaginary = a.qk_rank, a.rope.pairs(a.qk_rank)
        values, vectors = np.linalg.eig(turn)
        wanted = np.exp(1j * a.rope.frequencies(h))
        # An eigenvalue of modulus one and its conjugate make one pair of dimensions.
        _, chosen = linear_sum_assignment(np.abs(wanted[:, None] - values[None]))
        basis = np.zeros((h, h))
        basis[:, real_imaginary[0]] = vectors[:, chosen].real
        basis[:, real_imaginary[1]] = -vectors[:, chosen].imag
        rotated = a.rope.rotated(h)
        if rotated < h:  # what is not turned: next to one, of those that are left
            left = np.setdiff1d(np.arange(h), chosen)
            still = left[np.argsort(np.abs(values[left] - 1))[: h - rotated]]
            both = np.concatenate([vectors[:, still].real, vectors[:, still].imag], axis=1)
            basis[:, rotated:] = np.linalg.svd(both)[0][:, : h - rotated]
        if np.linalg.matrix_rank(basis) < h:
            return
        inverse = np.linalg.inv(basis).T
        each = a.heads // a.groups
        heads = slice(g * each, (g + 1) * each)
        for name, which, change in (("query", heads, basis), ("key", slice(g, g + 1), inverse)):
            for leaf in (name, f"{name}_bias"):
                if leaf in params:
                    params[leaf][which] = params[leaf][which] @ change

    def _order_by_slope(self, params: dict[str, Float64], slope: Float64) -> None:
        """Heads to the places that have slopes next to theirs."""
        a = self.architecture
        bias = a.distance_bias
        assert isinstance(bias, Alibi)
        if a.groups != a.heads:
            return
        known = np.log(bias.slopes(a.heads))
        found = np.log(np.maximum(slope, 0.1 * np.exp(known.min())))
        _, order = linear_sum_assignment((known[:, None] - found[None]) ** 2)
        for name in (
            "query",
            "key",
            "value",
            "out",
            "query_bias",
            "key_bias",
            "value_bias",
            "sink",
        ):
            if name in params:
                params[name] = params[name][order]

    def _rotate(
        self, params: Projections, side: str, vectors: Float[Array, "b k m h"], chunk: Chunk
    ) -> Float[Array, "b k m h"]:
        if "turn" not in params:
            return super()._rotate(params, side, vectors, chunk)
        assert self.architecture.rope is not None
        powers = _powers(params["turn"], vectors.shape[1], inverse=side == "query")
        size = self.architecture.rope.magnitude
        grouped = vectors.reshape(*vectors.shape[:2], powers.shape[1], -1, vectors.shape[-1])
        # Queries meet R^(s - r) k_s as (R^-r)^T q_r.
        along = "brgnh,rghi->brgni" if side == "query" else "brgnh,rgih->brgni"
        return size * jnp.einsum(along, grouped, powers).reshape(vectors.shape)

    def _distance_bias(self, params: Projections, chunk: Chunk) -> Float[Array, "b k m k"]:
        if "slope" not in params:
            return super()._distance_bias(params, chunk)
        positions = _positions(chunk)
        distance = jnp.abs(positions[:, None, :] - positions[:, :, None])
        return -distance[:, :, None] * params["slope"][:, None]


def _powers(turn: Float[Array, "g h h"], k: int, *, inverse: bool) -> Float[Array, "k g h h"]:
    """R^(s - k/2) for s = 0 .. k - 1, or the inverses of these: from the middle both ways, so that
    none grows far where R is no rotation."""
    back = jnp.linalg.inv(turn)
    turn, back = (back, turn) if inverse else (turn, back)
    identity = jnp.broadcast_to(jnp.eye(turn.shape[-1], dtype=turn.dtype), turn.shape)

    def chain(by: Array, count: int) -> Array:
        def step(last: Array, _: None) -> tuple[Array, Array]:
            return last @ by, last

        return jax.lax.scan(step, identity, None, length=count)[1]

    middle = k // 2
    return jnp.concatenate([chain(back, middle + 1)[:0:-1], chain(turn, k - middle)])
