"""Fewer heads where they explain as much: the canonical form of a fitted layer."""

import math

from mhalearn.data import Examples
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.layer import AttentionLayer
from mhalearn.run.run import Run
from mhalearn.solvers.polish import polish_on

# Surplus heads converge slowly to copies of another head or to W = 0, so they are looked for
# generously first; polish decides whether the smaller layer still explains the examples.
_TOLERANCES = (1e-1, 1e-2, 1e-4, 1e-6, 1e-8)


def reduce_heads(
    layer: AttentionLayer,
    loss: float,
    examples: Examples,
    architecture: Architecture,
    run: Run,
) -> tuple[AttentionLayer, float]:
    """The smallest canonical form that fits the examples as well as the layer does.

    Trust: numerical. A merged layer is kept if, polished, it fits to rounding, or if its loss is
    larger by no more than its missing parameters explain (Akaike's criterion).
    """
    tried = {layer.n_heads}
    scalars = examples.rows * examples.out_dim
    unknowns = architecture.with_heads(layer.n_heads).count()
    for tolerance in _TOLERANCES:
        smaller = layer.canonical(tolerance=tolerance)
        if smaller.n_heads == layer.n_heads:  # nor do tighter tolerances merge any
            break
        if smaller.n_heads in tried:
            continue
        tried.add(smaller.n_heads)
        smaller, smaller_loss, _ = polish_on(examples, smaller, architecture, run)
        missing = unknowns - architecture.with_heads(smaller.n_heads).count()
        if smaller_loss <= max(loss * math.exp(2 * missing / scalars), 1e-22):
            run.emit(
                "reduction",
                loss=smaller_loss,
                detail=f"{smaller.n_heads} of {layer.n_heads} heads explain as much",
            )
            return smaller, smaller_loss
    return layer.canonical(tolerance=0.0), loss
