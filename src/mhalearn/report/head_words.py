"""What heads have beside a Theta and a W, in words."""

from __future__ import annotations

from mhalearn.layer.architecture import Architecture
from mhalearn.layer.base import Layer
from mhalearn.layer.projected_layer import ProjectedLayer
from mhalearn.report.numbers import number


def describe_extras(layer: Layer) -> list[str]:
    """Sentences about the heads of a layer that is held by projections; none of another."""
    if not isinstance(layer, ProjectedLayer):
        return []
    a = layer.architecture
    return [*_describe_logits(a), *_describe_sight(a), *_describe_sources(a)]


def _describe_logits(a: Architecture) -> list[str]:
    told = []
    if a.rope is None:
        told.append("Each head attends with Θ and projects with W.")
    else:
        told.append(
            "Queries and keys are rotated by their positions, so that Θ depends on the "
            f"distance of two tokens, by {a.rotated // 2} frequencies ({a.rotated} of {a.qk_rank} "
            f"dimensions, base {number(float(a.rope.base))}); Θ(0) is that of no distance. "
            "W projects."
        )
    if a.norm is not None:
        told.append("Queries and keys are normalised; Θ is what they make before that.")
    if a.distance_bias is not None:
        told.append(f"Logits have biases by distance ({a.distance_bias.name}).")
    if a.softcap is not None:
        told.append(f"Logits are capped at {number(a.softcap)}.")
    return told


def _describe_sight(a: Architecture) -> list[str]:
    told = []
    if a.window is not None:
        told.append(f"Tokens see none at a distance of {a.window} or more.")
    if a.sinks:
        told.append("A sink in every head takes a share of the attention.")
    return told


def _describe_sources(a: Architecture) -> list[str]:
    told = []
    if a.kv_heads is not None:
        told.append(f"{a.heads // a.groups} heads in a row share keys and values.")
    if a.memory is not None:
        told.append("Keys and values are of a second sequence.")
    if a.latent is not None:
        told.append(f"Keys and values are read from a latent of {a.latent.rank} dimensions.")
    return told
