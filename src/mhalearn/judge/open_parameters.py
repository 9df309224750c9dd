"""What tokens that do not span the features leave open of a layer, in numbers and in words."""

from dataclasses import dataclass
from typing import Any, overload

from mhalearn._runtime.types import Float64
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.span_coordinates import Heads, SpanCoordinates


@dataclass(frozen=True)
class OpenParameters:
    """The affine span of the tokens, and what no input in it can show.

    dimension: of the span; features: of a token. normals (features - dimension, features): an
    orthonormal basis of the directions that are not spanned. n_open: numbers of the layer that are
    open, of n_parameters; the layer returned has those of least norm. words: what they are, one
    sentence a kind. coordinates: in which that was found.
    """

    dimension: int
    features: int
    normals: Float64
    n_open: int
    n_parameters: int
    words: tuple[str, ...]
    coordinates: SpanCoordinates | None = None

    @overload
    def on_span(self, layer: AttentionLayer) -> AttentionLayer: ...
    @overload
    def on_span(self, layer: Heads) -> Heads: ...
    def on_span(self, layer: Heads) -> Heads:
        """The same function on the span, with the open numbers of least norm; the layer itself
        where the coordinates are not known."""
        if self.coordinates is None:
            return layer
        return self.coordinates.lift(self.coordinates.restrict(layer))

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; the basis, which may be large, stays with the object."""
        return {
            "dimension": self.dimension,
            "features": self.features,
            "open_parameters": self.n_open,
            "parameters": self.n_parameters,
            "open": list(self.words),
        }

    def __repr__(self) -> str:
        return (
            f"OpenParameters(dimension={self.dimension}, features={self.features}, "
            f"n_open={self.n_open}, n_parameters={self.n_parameters})"
        )

    def say_recovered(self, reason: str) -> str:
        """The reason of a layer that is recovered there."""
        return (
            f"recovered on {self._describe()}; {self.n_open} of {self.n_parameters} parameters are "
            f"not determined by such inputs, and set to least norm: {reason}"
        )

    def say_considered(self, reason: str) -> str:
        """Any other reason."""
        return f"{reason} (on {self._describe()})"

    def _describe(self) -> str:
        return f"the affine span of the tokens: {self.dimension} of {self.features} dimensions"


def describe_open(coordinates: SpanCoordinates, n_heads: int) -> OpenParameters | None:
    """None where tokens span the features, and nothing is open."""
    if not coordinates.leaves_open:
        return None
    span = coordinates.span
    given = coordinates.given.with_heads(n_heads)
    return OpenParameters(
        dimension=span.rank,
        features=span.d,
        normals=span.normals,
        n_open=coordinates.count_open(n_heads),
        n_parameters=given.count(),
        words=tuple(_words(coordinates, n_heads)),
        coordinates=coordinates,
    )


def _words(coordinates: SpanCoordinates, n_heads: int) -> list[str]:
    """Kinds of open parameters, each with its number. Letters are those of docs/trust.md."""
    given, reduced = (
        a.with_heads(n_heads).count_by_kind() for a in (coordinates.given, coordinates.reduced)
    )
    attention = (given.attention - reduced.attention) // n_heads
    rest = coordinates.count_open(n_heads) - attention * n_heads
    of_each = "" if n_heads == 1 else " of each head"
    normal = "a direction n that is not spanned"
    if coordinates.constant is not None:
        theta = (
            f"Theta{of_each}: {attention} numbers, its action on {normal}; n . x is constant on "
            "the span, so that Theta + u n^T, whatever u is, has the same attention"
        )
        w = (
            f"W: {rest} numbers in all, rows along {normal}, of which the labels show the sum "
            "over the heads"
        )
    else:
        also = " and v" if coordinates.given.bias else ""
        theta = f"Theta{also}{of_each}: {attention} numbers, the action on {normal}"
        w = f"W: {rest} numbers in all, rows along {normal}"
        if coordinates.given.bias and not coordinates.span.through_zero:
            theta += ", of which v takes what is constant"
            w += ", of which c takes what is constant"
    return [theta, w]
