"""Heads whose kind is open: what some heads have and others have not, as numbers to be learned.

A class that holds many kinds of attention at once, each at a point that is easily read. Keys are
turned from one position to the next by R = (I - G)^-1 (I + G), the Cayley transform: G is zero
without rotary positions, and else has the eigenvalues +-i tan(w_f / 2). A weight by distance
multiplies exp(logit): one everywhere for heads that see all alike, zero from a window on,
exp(-slope distance) for ALiBi, any numbers for T5. A sink adds its weight to the softmax's
denominator, zero without. A bend u = 1/c^2 caps logits at c, zero without. All these points are
inside the class, not on its rim, so that Gauss-Newton converges to each as fast as to any other
(`kind_reading` then says which it was).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from mhalearn._runtime.programs import in_float64
from mhalearn._runtime.types import Array, Float, Float64
from mhalearn.layer.base import Layer, ParametrisedLayer
from mhalearn.layer.batches import Chunk
from mhalearn.layer.inverse import invert
from mhalearn.layer.parametrisation import Params
from mhalearn.layer.projected import Projected, Projections, Sides

if TYPE_CHECKING:
    from mhalearn.layer.units import Units

# Squared logits over the squared cap below which a series is as exact as the hyperbolic tangent.
_NEAR_ZERO = 1e-3
# What students start with: of a sink its logit, a bend, and entries of G.
_START_SINK, _START_BEND, _START_SPIN = -2.0, 1e-2, 0.05
# A student's weights by distance and sinks are exponentials of at most this.
_MOST = 20.0


@dataclass(frozen=True)
class OpenHeads(Projected):
    """`Projected` of heads that share nothing, with "spin" G (m, h, h), "reach" (m, distances),
    "sink_weight" (m,) and "bend" (1,).

    tokens: of the longest sequence. Without a causal mask distances have a sign, and those of later
        tokens come first. A row's own token has the weight one.
    student: as a first descent wants it, which nothing may leave: R is a rotation, and weights
        are exponentials of their parameters. Otherwise these count by their absolute values.
    """

    tokens: int = 2
    student: bool = False

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        a = self.architecture
        distances = (self.tokens - 1) * (1 if a.causal else 2)
        return dict(super().shapes()) | {
            "spin": (a.heads, a.qk_rank, a.qk_rank),
            "reach": (a.heads, distances),
            "sink_weight": (a.heads,),
            "bend": (1,),
        }

    @in_float64
    def init(self, rng: np.random.Generator) -> Projections:
        """Projections as elsewhere, hardly turned, all distances alike: those of a student."""
        found, shapes = dict(super().init(rng)), self.shapes()
        found["spin"] = jnp.asarray(_START_SPIN * rng.standard_normal(shapes["spin"]))
        found["reach"] = jnp.zeros(shapes["reach"])
        found["sink_weight"] = jnp.full(shapes["sink_weight"], _START_SINK)
        found["bend"] = jnp.full(1, _START_BEND)
        return found

    def graduate(self, params: Params) -> dict[str, Float64]:
        """A student's parameters as those of the class without its limits."""
        found = {name: np.array(leaf, np.float64) for name, leaf in params.items()}
        found["spin"] = (found["spin"] - found["spin"].swapaxes(1, 2)) / 2
        for name in ("reach", "sink_weight"):
            found[name] = np.exp(np.clip(found[name], -_MOST, _MOST))
        return found

    def to_layer(self, params: Projections, units: Units) -> Layer:  # type: ignore[override]
        """A layer to look at: its heads are of no kind that has a name."""
        factors = self.unit_factors(units)
        found = {name: np.asarray(leaf) * factors.get(name, 1.0) for name, leaf in params.items()}
        return ParametrisedLayer(self, found)

    def _turned(self, params: Projections, sides: Sides, chunk: Chunk) -> Sides:
        spin, k = params["spin"], sides.query.shape[1]
        if self.student:
            spin = (spin - jnp.swapaxes(spin, 1, 2)) / 2
        turn, back = _cayley(spin), _cayley(-spin)
        # Queries meet R^(s - r) k_s as (R^-r)^T q_r.
        query = jnp.einsum("brmh,rmhi->brmi", sides.query, _powers(back, turn, k))
        key = jnp.einsum("bsmh,smih->bsmi", sides.key, _powers(turn, back, k))
        return sides._replace(query=query, key=key)

    def _weights(
        self, params: Projections, scores: Float[Array, "b k m j"], chunk: Chunk
    ) -> Float[Array, "b k m j"]:
        logits = _cap(scores * self.architecture.qk_rank**-0.5, jnp.abs(params["bend"][0]))
        seen = chunk.allowed[:, :, None]
        top = jnp.max(jnp.where(seen, logits, -jnp.inf), axis=-1, keepdims=True)
        top = jax.lax.stop_gradient(top)
        raised = jnp.where(seen, jnp.exp(jnp.where(seen, logits - top, 0.0)), 0.0)
        raised = raised * self._reach(params, scores.shape[1])
        sink = self._positive(params["sink_weight"])[:, None] * jnp.exp(-top)
        return raised / (jnp.sum(raised, axis=-1, keepdims=True) + sink)

    def _positive(self, leaf: Array) -> Array:
        return jnp.exp(jnp.clip(leaf, -_MOST, _MOST)) if self.student else jnp.abs(leaf)

    def _reach(self, params: Projections, k: int) -> Float[Array, "k m k"]:
        """Weights by distance."""
        reach, farthest = self._positive(params["reach"]), self.tokens - 1
        own = jnp.ones((len(reach), 1), reach.dtype)
        after = jnp.ones_like(reach) if self.architecture.causal else reach[:, :farthest]
        before = reach if self.architecture.causal else reach[:, farthest:]
        table = jnp.concatenate([after, own, before], axis=1)
        index = np.arange(k)
        return jnp.moveaxis(table[:, index[:, None] - index + farthest], 0, 1)


def _cayley(spin: Float[Array, "m h h"]) -> Array:
    eye = jnp.eye(spin.shape[-1], dtype=spin.dtype)
    return invert(eye - spin) @ (eye + spin)


def turns(spin: Float64) -> Float64:
    """The matrices that turn keys by one position, (m, h, h)."""
    eye = np.eye(spin.shape[-1])
    return np.asarray(np.linalg.solve(eye - spin, eye + spin), np.float64)


def _powers(turn: Float[Array, "m h h"], back: Float[Array, "m h h"], k: int) -> Array:
    """R^(s - k/2) for s = 0 .. k - 1: from the middle both ways, so that none grows far."""
    powers = [jnp.broadcast_to(jnp.eye(turn.shape[-1], dtype=turn.dtype), turn.shape)]
    for _ in range(k // 2):
        powers.insert(0, powers[0] @ back)
    while len(powers) < k:
        powers.append(powers[-1] @ turn)
    return jnp.stack(powers[:k])


def _cap(logits: Array, bend: Array) -> Array:
    """c tanh(logits / c) with c = bend^-1/2, smooth through bend = 0."""
    squared = bend * logits**2
    small = squared < _NEAR_ZERO
    root = jnp.sqrt(jnp.where(small, 1.0, squared))
    z = jnp.where(small, squared, 0.0)
    series = 1 - z / 3 + 2 * z**2 / 15 - 17 * z**3 / 315 + 62 * z**4 / 2835
    return logits * jnp.where(small, series, jnp.tanh(root) / root)
