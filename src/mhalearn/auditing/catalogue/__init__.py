"""Faults of ports that an audit knows, each with the public issues it was seen in."""

from collections.abc import Iterator

from mhalearn.auditing.catalogue import heads, layouts, masks, norms, paths, rotary, rounding, scale
from mhalearn.auditing.fault import Context, Edit, Fault
from mhalearn.auditing.reading import Reading

FAULTS: tuple[Fault, ...] = (
    *scale.FAULTS,
    *masks.FAULTS,
    *rotary.FAULTS,
    *norms.FAULTS,
    *heads.FAULTS,
    *layouts.FAULTS,
    *paths.FAULTS,
    *rounding.FAULTS,
)


def list_edits(reading: Reading, context: Context) -> Iterator[Edit]:
    """Every change that may be tried on a reading."""
    for fault in FAULTS:
        yield from fault.edits(reading, context)
