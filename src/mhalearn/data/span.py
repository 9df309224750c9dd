"""The coordinates in which examples are learned from and judged: those of the span of tokens."""

from collections.abc import Iterator

from mhalearn._runtime.precision import Precision
from mhalearn._runtime.types import Float64
from mhalearn.data.examples import Examples
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.span_coordinates import SpanCoordinates, choose_coordinates
from mhalearn.layer.span_projections import may_change_coordinates
from mhalearn.layer.token_span import are_nearly_isotropic, measure_span, read_tokens


def find_coordinates(
    examples: Examples,
    architecture: Architecture,
    precision: Precision,
    *,
    others: Examples | None = None,
    whiten: bool = True,
) -> SpanCoordinates | None:
    """Coordinates of the span of all tokens, where those of the user will not do.

    examples: all, or a working set of `others`, whose tokens are asked only where these do not span
    the features. precision: of the labels. whiten: change coordinates too where tokens span the
    features, but unevenly. Cost: see `measure_span`; little where tokens are nearly isotropic.
    """
    if architecture.attention is not None or not examples.columns.is_plain:
        return None
    if not (architecture.is_plain or may_change_coordinates(architecture)):
        return None
    read = read_tokens(examples)
    if are_nearly_isotropic(read, examples.rows):
        return None
    span = measure_span(read, precision)
    if others is not None and not span.is_full:

        def read_both() -> Iterator[Float64]:
            yield from read_tokens(examples)()
            yield from read_tokens(others)()

        span = measure_span(read_both, precision)
    return choose_coordinates(span, architecture, whiten=whiten)
