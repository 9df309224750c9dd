"""The QK and OV circuits of projected heads, where logits depend on the distance of two tokens.

A query token x and a key token y that stands `distance` tokens before it have the logit

    x Theta(distance) y + b(distance),
    Theta(distance) = Theta_0 + sum_f Re( e^{i w_f distance} M_f ),

with one complex matrix M_f = alpha_f beta_f^H of rank one for each rotary frequency w_f, Theta_0 of
the dimensions that are not rotated, and b what ALiBi or T5 add.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from mhalearn._runtime.programs import float64
from mhalearn._runtime.types import Float64
from mhalearn.layer.latent import unfold
from mhalearn.layer.projected_layer import ProjectedLayer


class RotaryCircuit(NamedTuple):
    """Of all heads: M_f = left_f right_f^H by its factors, and the frequencies w_f."""

    frequencies: Float64  # (f,), angles a token
    left: NDArray[np.complex128]  # (m, f, d)
    right: NDArray[np.complex128]  # (m, f, d')

    def matrices(self, head: int) -> NDArray[np.complex128]:
        """M_f (f, d, d') of one head."""
        return self.left[head][:, :, None] * self.right[head].conj()[:, None, :]

    def sizes(self) -> Float64:
        """||M_f||_F (m, f): how much a head hears each frequency."""
        return np.linalg.norm(self.left, axis=2) * np.linalg.norm(self.right, axis=2)


def rotary_circuit(layer: ProjectedLayer) -> RotaryCircuit:
    """M_f of every head; a ValueError of a layer that is not rotated.

    Biases of queries and keys are left out. Under a norm of queries and keys these are the matrices
    before it, with its gains.
    Cost: a copy of the projections.
    """
    a = layer.architecture
    if a.rope is None:
        raise ValueError(
            "the layer has no rotary positions: its QK matrices are theta_at(layer, 0)"
        )
    query, key = _sides(layer)
    real, imaginary = a.rope.pairs(a.qk_rank)
    left, right = (
        (side[..., real] + 1j * side[..., imaginary]).swapaxes(1, 2) for side in (query, key)
    )
    sized = left * complex(_scale(layer) * a.rope.magnitude**2)
    return RotaryCircuit(a.rope.frequencies(a.qk_rank), sized, right)


def theta_at(layer: ProjectedLayer, distance: float | int) -> Float64:
    """Theta(distance) of every head, (m, d, d'): the QK matrix of two tokens so far apart, the key
    before the query. Of heads without rotary positions it is the same at all distances."""
    found = _still(layer)
    if layer.architecture.rope is not None:
        circuit = rotary_circuit(layer)
        turned = circuit.left * np.exp(1j * circuit.frequencies * distance)[:, None]
        found = found + np.einsum("mfd,mfe->mde", turned, circuit.right.conj()).real
    return np.asarray(found, np.float64)


def logit_by_distance(
    layer: ProjectedLayer, distances: ArrayLike, query: ArrayLike, key: ArrayLike
) -> Float64:
    """Logits (m, distances) of two given tokens (d,) and (d',), as they move apart."""
    places = np.asarray(distances, np.float64)
    x, y = np.asarray(query, np.float64), np.asarray(key, np.float64)
    found = np.einsum("d,mde,e->m", x, _still(layer), y)[:, None] + np.zeros(places.shape)
    if layer.architecture.rope is not None:
        circuit = rotary_circuit(layer)
        amplitudes = (circuit.left @ x) * (circuit.right.conj() @ y)
        turns = np.exp(1j * circuit.frequencies[:, None] * places)
        found = found + (amplitudes @ turns).real
    return found + bias_at(layer, places)


def match_by_distance(layer: ProjectedLayer, distances: ArrayLike) -> tuple[Float64, Float64]:
    """trace Theta(distance) + b(distance) - b(0), and ||Theta(distance)||_F, (m, distances).

    The mean logit of a token with itself, and the root mean square of those of two independent
    ones, of unit features. A number added to all biases changes no weight, and is left out.
    """
    places = np.asarray(distances, np.float64)
    thetas = [theta_at(layer, place) for place in places.tolist()]
    square = layer.d == layer.architecture.key_features
    traces = [np.trace(t, axis1=1, axis2=2) if square else np.zeros(len(t)) for t in thetas]
    sizes = [np.linalg.norm(t, axis=(1, 2)) for t in thetas]
    biases = bias_at(layer, places) - bias_at(layer, [0.0])
    return np.stack(traces, axis=1) + biases, np.stack(sizes, axis=1)


def bias_at(layer: ProjectedLayer, distances: ArrayLike) -> Float64:
    """What positions add to logits by themselves, (m, distances)."""
    a, places = layer.architecture, np.asarray(distances, np.float64)
    if a.distance_bias is None:
        return np.zeros((a.heads, places.size))
    with float64():
        table = layer.params.get("position_table")
        apart = -jnp.asarray(places).reshape(1, 1, -1)
        told: Any = None if table is None else jnp.asarray(table)
        return np.asarray(a.distance_bias(apart, told, a.heads))[0, 0]


def output_matrices(layer: ProjectedLayer) -> Float64:
    """W (m, d', e) of every head: what it writes of a token it looks at, value biases left out."""
    a = layer.architecture
    params = layer.params if a.latent is None else unfold(layer.params, a.latent, a.heads)
    return np.repeat(params["value"], a.heads // a.groups, axis=0) @ params["out"]


def mean_look_back(weights: ArrayLike) -> Float64:
    """How far back heads look, (m, k): the mean weight of attention at each distance.

    weights: patterns (n, m, k, k). Rows that see no token so far before them do not count.
    """
    patterns = np.asarray(weights, np.float64)
    k = patterns.shape[3]
    along = [
        np.diagonal(patterns, -apart, axis1=2, axis2=3).mean(axis=(0, 2)) for apart in range(k)
    ]
    return np.stack(along, axis=1)


def _sides(layer: ProjectedLayer) -> tuple[Float64, Float64]:
    """Queries and keys (m, d, h), a key for each head, with gains."""
    a, params = layer.architecture, layer.params
    if a.latent is not None:
        params = unfold(params, a.latent, a.heads)
    query, key = params["query"], params["key"]
    if a.norm is not None and a.norm.has_gains:
        gains = [params[f"{side}_gain"] for side in ("query", "key")]
        query, key = (
            side * (gain[:, None] if gain.ndim == 2 else gain)
            for side, gain in zip((query, key), gains, strict=True)
        )
    return query, np.repeat(key, a.heads // len(key), axis=0)


def _still(layer: ProjectedLayer) -> Float64:
    """Theta_0 of the dimensions that are not rotated."""
    query, key = _sides(layer)
    first = layer.architecture.rotated
    return _scale(layer) * query[..., first:] @ key[..., first:].swapaxes(1, 2)


def _scale(layer: ProjectedLayer) -> float:
    a = layer.architecture
    return a.qk_rank**-0.5 if a.logit_scale is None else a.logit_scale
