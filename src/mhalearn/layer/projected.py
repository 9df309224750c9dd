"""Heads by their projections, as transformers hold them: queries, keys, values and outputs.

Logits of such heads may depend on positions, and keys and values may be shared; then no single
matrix Theta says what a head does. What is beside the projections (rotation, norm, bias by
distance, cap, window, sink) is one step each; keys and values may be of a second sequence, or be
read from a latent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mhalearn._runtime.programs import in_float64
from mhalearn._runtime.types import Array, Bool, Float
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.batches import Chunk
from mhalearn.layer.parametrisation import Parametrisation, Params

if TYPE_CHECKING:
    from mhalearn.layer.base import Layer
    from mhalearn.layer.projected_layer import ProjectedLayer
    from mhalearn.layer.units import Units

Projections = dict[str, Array]

# Parameters that a layer may be without; they then are zero.
OPTIONAL = ("query_bias", "key_bias", "value_bias", "out_bias")
# Linear maps of tokens, or of latents, whose rows are features.
PROJECTIONS = ("query", "key", "value", "latent", "query_latent", "rotary_key")


class Mixed(NamedTuple):
    """What heads make of a chunk, before their output projections."""

    p: Float[Array, "b k m j"]
    means: Float[Array, "b k m v"]  # of the values, by the weights
    values: Float[Array, "b j g v"]


class Sides(NamedTuple):
    """What projections make of a chunk."""

    query: Float[Array, "b k m h"]
    key: Float[Array, "b j g h"]
    value: Float[Array, "b j g v"]


@dataclass(frozen=True)
class Projected(Parametrisation):
    """Queries (m, d, h), keys (g, d, h), values (g, d, v) and outputs (m, v, e), and what the
    architecture has beside them. With a latent of r dimensions keys are (m, r, h - rotated) and
    values (m, r, v); with one of the queries, they are (m, r', h)."""

    architecture: Architecture
    scales = True

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        a = self.architecture
        m, g, d, h, v, e = a.heads, a.groups, a.d, a.qk_rank, a.values, a.outputs
        rows, source, still = d, a.key_features, h
        shapes: dict[str, tuple[int, ...]] = {}
        if a.latent is not None:
            shapes |= a.latent.shapes(d, source, a.rotated)
            rows, source, still = a.latent.query_rank or d, a.latent.rank, h - a.rotated
        shapes |= {"query": (m, rows, h), "key": (g, source, still), "value": (g, source, v)}
        shapes |= {"out": (m, v, e)}
        if a.bias:
            shapes |= {"query_bias": (m, h), "key_bias": (g, h), "value_bias": (g, v)}
            shapes |= {"out_bias": (e,)}
        if a.norm is not None and a.norm.has_gains:
            shapes["query_gain"] = a.norm.gain_shape(m, h)
            shapes["key_gain"] = a.norm.gain_shape(g, h)
        if a.sinks:
            shapes["sink"] = (m,)
        table = None if a.distance_bias is None else a.distance_bias.table_shape(m)
        if table is not None:
            shapes["position_table"] = table
        return shapes

    @in_float64
    def init(self, rng: np.random.Generator) -> Projections:
        """Logits and outputs of about unit size on tokens of unit size; gains near one."""
        a = self.architecture
        sizes = {"out": (a.heads * a.values) ** -0.5, "query_gain": 0.1, "key_gain": 0.1}
        drawn = {}
        for name, shape in self.shapes().items():
            size = shape[-2] ** -0.5 if name in PROJECTIONS else sizes.get(name, 0.3)
            drawn[name] = jnp.asarray(size * rng.standard_normal(shape))
        return {name: leaf + name.endswith("_gain") for name, leaf in drawn.items()}

    def forward(self, params: Projections, chunk: Chunk) -> Float[Array, "b k e"]:
        """Cost: O(b k m h (d + k + e))."""
        means = self.attend(params, chunk).means
        outputs = jnp.einsum("brmh,mhe->bre", means, params["out"])
        return outputs + params["out_bias"] if "out_bias" in params else outputs

    def attend(self, params: Projections, chunk: Chunk) -> Mixed:
        """Weights and mean values of every head."""
        sides = self._turned(params, self.project(params, chunk), chunk)
        b, k, m, _ = sides.query.shape
        j, groups = sides.key.shape[1:3]
        p = self._weights(params, _meet(sides), chunk)
        shared = p.reshape(b, k, groups, -1, j)
        means = jnp.einsum("brgnj,bjgh->brgnh", shared, sides.value)
        return Mixed(p, means.reshape(b, k, m, sides.value.shape[-1]), sides.value)

    def logits(self, params: Projections, chunk: Chunk) -> Float[Array, "b k m j"]:
        """Of every key for every query, seen or not; nothing of values is asked for."""
        a = self.architecture
        rows = a.key_features if a.latent is None else a.latent.rank
        none = {"value": jnp.zeros((a.groups, rows, 0), chunk.tokens.dtype)}
        asked = {name: leaf for name, leaf in params.items() if name != "value_bias"} | none
        sides = self._turned(params, self.project(asked, chunk), chunk)
        return self._logits(params, _meet(sides), chunk)

    def project(self, params: Projections, chunk: Chunk) -> Sides:
        """Queries of the tokens; keys and values of them, or of the memory, or of latents."""
        latent, source = self.architecture.latent, chunk.tokens
        if chunk.memory is not None:
            source = chunk.memory
        if latent is None:
            return Sides(
                _project(params, "query", chunk.tokens),
                _project(params, "key", source),
                _project(params, "value", source),
            )
        queries, narrow = chunk.tokens, latent.compress(source, params, "latent")
        if latent.query_rank is not None:
            queries = latent.compress(queries, params, "query_latent")
        keys = _project(params, "key", narrow)
        if "rotary_key" in params:
            shared = (source @ params["rotary_key"])[:, :, None]
            shared = jnp.broadcast_to(shared, (*keys.shape[:3], shared.shape[-1]))
            keys = jnp.concatenate([shared, keys], axis=-1)
        return Sides(_project(params, "query", queries), keys, _project(params, "value", narrow))

    def _turned(self, params: Projections, sides: Sides, chunk: Chunk) -> Sides:
        """Queries and keys normalised, then rotated, where the architecture has it."""
        a = self.architecture
        found = []
        for side, vectors in (("query", sides.query), ("key", sides.key)):
            if a.norm is not None:
                vectors = a.norm(vectors, params.get(f"{side}_gain"))
            found.append(vectors if a.rope is None else self._rotate(params, side, vectors, chunk))
        return sides._replace(query=found[0], key=found[1])

    def _rotate(
        self, params: Projections, side: str, vectors: Float[Array, "b k m h"], chunk: Chunk
    ) -> Float[Array, "b k m h"]:
        rope = self.architecture.rope
        assert rope is not None
        positions = _positions(chunk)
        last = jnp.max(jnp.where(chunk.weight > 0, positions, 0.0), axis=1)
        return rope.rotate(vectors, positions, last + 1.0)

    def _logits(
        self, params: Projections, scores: Float[Array, "b k m j"], chunk: Chunk
    ) -> Float[Array, "b k m j"]:
        """Scores scaled, capped and biased by distance."""
        a = self.architecture
        logits = scores * (a.qk_rank**-0.5 if a.logit_scale is None else a.logit_scale)
        if a.softcap is not None:
            logits = a.softcap * jnp.tanh(logits / a.softcap)
        if a.distance_bias is not None:
            logits = logits + self._distance_bias(params, chunk)
        return logits

    def _weights(
        self, params: Projections, scores: Float[Array, "b k m j"], chunk: Chunk
    ) -> Float[Array, "b k m j"]:
        """The softmax of logits, masked, beside a sink."""
        a = self.architecture
        logits = self._logits(params, scores, chunk)
        logits = jnp.where(_allowed(chunk, a.window)[:, :, None], logits, -jnp.inf)
        if not a.sinks:
            return jax.nn.softmax(logits, axis=-1)
        sinks = jnp.broadcast_to(params["sink"][:, None], (*logits.shape[:3], 1))
        return jax.nn.softmax(jnp.concatenate([logits, sinks], axis=-1), axis=-1)[..., :-1]

    def _distance_bias(self, params: Projections, chunk: Chunk) -> Float[Array, "b k m k"]:
        a = self.architecture
        assert a.distance_bias is not None
        positions = _positions(chunk)
        distance = positions[:, None, :] - positions[:, :, None]
        return a.distance_bias(distance, params.get("position_table"), a.heads)

    def term_sizes(self, params: Projections, chunk: Chunk) -> Float[Array, "b k e"]:
        p, _, values = self.attend(params, chunk)
        each = jnp.repeat(values, p.shape[2] // values.shape[2], axis=2)
        terms = jnp.abs(jnp.einsum("bjmh,mhe->bjme", each, params["out"]))
        sizes = jnp.einsum("brmj,bjme->bre", p, terms)
        return (sizes + jnp.abs(params.get("out_bias", 0.0))) * chunk.weight[..., None]

    def to_layer(self, params: Projections, units: Units) -> ProjectedLayer:
        from mhalearn.layer.projected_layer import ProjectedLayer

        factors = self.unit_factors(units)
        found = {name: np.asarray(leaf) * factors.get(name, 1.0) for name, leaf in params.items()}
        return ProjectedLayer(self.architecture, found)

    def from_layer(self, layer: Layer, units: Units) -> Params:
        """All parameters of the class: biases that the layer is without are zero."""
        factors = self.unit_factors(units)
        zeros = {name: np.zeros(shape) for name, shape in self.shapes().items()}
        return zeros | {name: leaf / factors.get(name, 1.0) for name, leaf in layer.params.items()}

    def unit_factors(self, units: Units) -> dict[str, float]:
        """What parameters in solver units are multiplied by in the user's, where not by one: those
        that meet tokens, and those that make labels."""
        latent, names = self.architecture.latent, ["query", "key", "value"]
        if latent is not None:
            first = "query" if latent.query_rank is None else "query_latent"
            names = [first, "latent", "rotary_key"]
        met = dict.fromkeys(names, 1 / units.x_scale)
        return met | dict.fromkeys(("out", "out_bias"), units.y_scale)

    def size(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes().values())

    def count(self) -> int:
        return self.architecture.count()


def _project(
    params: Projections, side: str, tokens: Float[Array, "b j d"]
) -> Float[Array, "b j g h"]:
    vectors = jnp.einsum("bjd,gdh->bjgh", tokens, params[side])
    bias = params.get(f"{side}_bias")
    return vectors if bias is None else vectors + bias


def _meet(sides: Sides) -> Float[Array, "b k m j"]:
    b, k, m, h = sides.query.shape
    j, groups = sides.key.shape[1:3]
    grouped = sides.query.reshape(b, k, groups, -1, h)
    return jnp.einsum("brgnh,bjgh->brgnj", grouped, sides.key).reshape(b, k, m, j)


def _positions(chunk: Chunk) -> Float[Array, "b k"]:
    if chunk.positions is not None:
        return chunk.positions
    return jnp.broadcast_to(jnp.arange(chunk.tokens.shape[1], dtype=float), chunk.weight.shape)


def _allowed(chunk: Chunk, window: int | None) -> Bool[Array, "b k j"]:
    """Keys that a query sees: those of the mask, at less than `window` tokens from it."""
    if window is None:
        return chunk.allowed
    index = jnp.arange(chunk.tokens.shape[1])
    return chunk.allowed & (jnp.abs(index[:, None] - index) < window)
