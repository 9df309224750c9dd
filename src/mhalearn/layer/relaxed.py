"""Projected heads of a wider class, in which what holds descent up is numbers to be learned.

Rotation by slow frequencies is hardly seen in short sequences, so that dimensions of one frequency
turn into those of another along curved valleys, on which descent crawls. Where each group's keys
are turned from position to position by a matrix of their own, R^s k_s, every basis of the queries
and keys is as good as any other, and the valleys are gone. Slopes by distance (ALiBi) tell heads
their places, and gains after a norm tell dimensions theirs, the same for all heads: a head that
learns in other places can only get there over a ridge. So slopes are learned, and each head has a
matrix of its own between normalised queries and keys. And a norm's epsilon shows the size of what
it divides, as one over its square and hardly at all: with an epsilon of its own for each, its size
is a gauge. What was learned is then read (`relaxed_reading`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from mhalearn._runtime.programs import in_float64
from mhalearn._runtime.types import Array, Float, Float64
from mhalearn.layer.batches import Chunk
from mhalearn.layer.inverse import invert
from mhalearn.layer.parametrisation import Params
from mhalearn.layer.position_bias import Alibi
from mhalearn.layer.projected import Projected, Projections, Sides, _positions
from mhalearn.layer.relaxed_reading import (
    order_by_slope,
    read_norms,
    read_sizes,
    rotation,
    rotations,
    straighten,
    straighten_shared,
    unit_sizes,
)

if TYPE_CHECKING:
    from mhalearn.layer.base import Layer
    from mhalearn.layer.projected_layer import ProjectedLayer
    from mhalearn.layer.units import Units


@dataclass(frozen=True)
class Relaxed(Projected):
    """`Projected`, with a matrix "turn" (g, h, h) in place of rotations, or "rotary_turn" (1, r, r)
    of the r dimensions that all heads share beside a latent, "meet" (m, h, h) in place
    of gains after a norm, and a number "slope" (m,) in place of each head's slope.

    frees: whether anything is relaxed; where tokens bring their positions, nothing is.
    frees_sizes: and each norm has an epsilon of its own: "query_epsilon" (m,), "key_epsilon" (g,),
        "latent_epsilon" and "query_latent_epsilon". For steps that solve for them: any other
        descent moves them too far."""

    frees: bool = True
    frees_sizes: bool = False

    @property
    def frees_rotation(self) -> bool:
        """Whether rotations are by one matrix a position, whatever the length of a sequence."""
        a = self.architecture
        common = a.norm is not None and (a.norm.across_heads or a.latent is not None)
        if a.rope is None or common or not self.frees:
            return False
        scaling, size = a.rope._scaling, a.rope.rotated(a.qk_rank)
        return scaling is None or scaling.stretched(a.rope.base, size, jnp.ones(1)) is None

    @property
    def frees_norm(self) -> bool:
        """Whether each head has a matrix of its own in place of gains."""
        a = self.architecture
        own = a.norm is not None and not a.norm.across_heads and a.latent is None
        return own and self.frees and (a.rope is None or self.frees_rotation)

    @property
    def frees_slopes(self) -> bool:
        return self.frees and isinstance(self.architecture.distance_bias, Alibi)

    @property
    def frees_any(self) -> bool:
        """Whether it is a wider class at all, or would be with sizes."""
        sizes = replace(self, frees_sizes=True).sized()
        return self.frees_rotation or self.frees_norm or self.frees_slopes or bool(sizes)

    def sized(self) -> dict[str, float]:
        """What is normalised with an epsilon of its own, and the epsilon it should have."""
        a, found = self.architecture, {}
        if not self.frees_sizes:
            return {}
        if a.norm is not None and not a.norm.across_heads and a.norm.epsilon > 0:
            found = dict.fromkeys(("query", "key"), float(a.norm.epsilon))
        if a.latent is not None and a.latent.norm and a.latent.epsilon > 0:
            found["latent"] = float(a.latent.epsilon)
            if a.latent.query_rank is not None:
                found["query_latent"] = float(a.latent.epsilon)
        return found

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        a = self.architecture
        shapes = dict(super().shapes())
        if self.frees_rotation and a.latent is not None:
            shapes["rotary_turn"] = (1, a.rotated, a.rotated)
        elif self.frees_rotation:
            shapes["turn"] = (a.groups, a.qk_rank, a.qk_rank)
        if self.frees_norm:
            shapes = {name: shape for name, shape in shapes.items() if "_gain" not in name}
            shapes["meet"] = (a.heads, a.qk_rank, a.qk_rank)
        if self.frees_slopes:
            shapes["slope"] = (a.heads,)
        of = {"query": (a.heads,), "key": (a.groups,)}
        return shapes | {f"{name}_epsilon": of.get(name, ()) for name in self.sized()}

    @in_float64
    def relax(self, params: Params, slopes: Float64 | None = None) -> Projections:
        """The same function in the wider class; slopes: to start from, the architecture's own
        unless given. What is relaxed already stays."""
        a = self.architecture
        found = {name: np.array(leaf, np.float64) for name, leaf in params.items()}
        name = "turn" if a.latent is None else "rotary_turn"
        if self.frees_rotation and name not in found:
            groups, size = self.shapes()[name][:2]
            found[name] = np.tile(rotation(rotations(a), size), (groups, 1, 1))
        if self.frees_norm and "meet" not in found:
            ours, theirs = (found.pop(f"{side}_gain", np.ones(1)) for side in ("query", "key"))
            both = ours * theirs * np.ones(a.qk_rank)
            found["meet"] = np.tile(np.diag(both), (a.heads, 1, 1))
            if "turn" in found:  # keys have no gains of their own
                found["turn"] = found["turn"] * (theirs / theirs[:, None])
        if self.frees_slopes and "slope" not in found:
            assert isinstance(a.distance_bias, Alibi)
            found["slope"] = a.distance_bias.slopes(a.heads) if slopes is None else slopes
        unit_sizes(found, self.sized())
        return {name: jnp.asarray(leaf) for name, leaf in found.items()}

    def read(self, params: Params) -> dict[str, Float64]:
        """The nearest parameters of `Projected`.

        Trust: exact where the wider class has led to a layer of the narrower one.
        """
        found = {name: np.array(leaf, np.float64) for name, leaf in params.items()}
        read_sizes(found, self.sized())
        turn, slope = found.pop("turn", None), found.pop("slope", None)
        if "meet" in found:
            read_norms(self.architecture, found, turn)
        elif turn is not None:
            straighten(self.architecture, found, turn)
        if "rotary_turn" in found:
            straighten_shared(self.architecture, found, found.pop("rotary_turn")[0])
        if slope is not None:
            order_by_slope(self.architecture, found, slope)
        return found

    def steady(self, params: Projections) -> Projections:
        """With orthogonal turns, where queries and keys may take any basis.

        Without heads to turn, Adam moves a turn by noise alone, and in some hundred steps next to a
        singular one, whose inverse is not finite. A step of Newton and Schulz leads back.
        """
        if self.architecture.norm is not None:  # what is normalised takes no other basis
            return params
        turns = {name: params[name] for name in ("turn", "rotary_turn") if name in params}
        return params | {name: _orthogonalise(turn) for name, turn in turns.items()}

    @in_float64
    def to_layer(self, params: Projections, units: Units) -> ProjectedLayer:
        read = {name: jnp.asarray(leaf) for name, leaf in self.read(params).items()}
        return Projected(self.architecture).to_layer(read, units)

    def from_layer(self, layer: Layer, units: Units) -> Params:
        return self.relax(Projected(self.architecture).from_layer(layer, units))

    def _turned(self, params: Projections, sides: Sides, chunk: Chunk) -> Sides:
        norm = self.architecture.norm
        if norm is None or not ("meet" in params or "query_epsilon" in params):
            return super()._turned(params, sides, chunk)
        query, key = (
            norm(vectors, params.get(f"{side}_gain"), params.get(f"{side}_epsilon"))
            for side, vectors in (("query", sides.query), ("key", sides.key))
        )
        if "meet" in params:
            query = jnp.einsum("brmh,mhi->brmi", query, params["meet"])
        if self.architecture.rope is not None:
            query = self._rotate(params, "query", query, chunk)
            key = self._rotate(params, "key", key, chunk)
        return sides._replace(query=query, key=key)

    def _rotate(
        self, params: Projections, side: str, vectors: Float[Array, "b k m h"], chunk: Chunk
    ) -> Float[Array, "b k m h"]:
        turn = params.get("turn", params.get("rotary_turn"))
        if turn is None:
            return super()._rotate(params, side, vectors, chunk)
        assert self.architecture.rope is not None
        powers = _powers(turn, vectors.shape[1], inverse=side == "query")
        (groups, h), first = powers.shape[1:3], vectors[..., : turn.shape[-1]]
        grouped = first.reshape(*first.shape[:2], groups, -1, h)
        # Queries meet R^(s - r) k_s as (R^-r)^T q_r.
        along = "brgnh,rghi->brgni" if side == "query" else "brgnh,rgih->brgni"
        turned = self.architecture.rope.magnitude * jnp.einsum(along, grouped, powers)
        return jnp.concatenate([turned.reshape(first.shape), vectors[..., h:]], axis=-1)

    def _distance_bias(self, params: Projections, chunk: Chunk) -> Float[Array, "b k m k"]:
        if "slope" not in params:
            return super()._distance_bias(params, chunk)
        positions = _positions(chunk)
        distance = jnp.abs(positions[:, None, :] - positions[:, :, None])
        return -distance[:, :, None] * params["slope"][:, None]


def _orthogonalise(turn: Float[Array, "g h h"]) -> Float[Array, "g h h"]:
    gram = jnp.einsum("gab,gac->gbc", turn, turn)
    return 1.5 * turn - 0.5 * turn @ gram


def _powers(turn: Float[Array, "g h h"], k: int, *, inverse: bool) -> Float[Array, "k g h h"]:
    """R^(s - k/2) for s = 0 .. k - 1, or the inverses of these: from the middle both ways, so that
    none grows far where R is no rotation."""
    back = invert(turn)
    turn, back = (back, turn) if inverse else (turn, back)
    identity = jnp.broadcast_to(jnp.eye(turn.shape[-1], dtype=turn.dtype), turn.shape)

    def chain(by: Array, count: int) -> Array:
        """By^0 .. by^(count - 1), twice as many with each product."""
        powers = identity[None]
        while len(powers) < count:
            powers, by = jnp.concatenate([powers, powers @ by]), by @ by
        return powers[:count]

    middle = k // 2
    return jnp.concatenate([chain(back, middle + 1)[:0:-1], chain(turn, k - middle)])
