"""Faults of what goes past the heads: the residual path."""

from __future__ import annotations

from collections.abc import Iterable

from mhalearn.auditing.fault import Context, Edit, Fault
from mhalearn.auditing.reading import Reading


def _tokens_added(r: Reading, _: Context) -> Iterable[Edit]:
    if r.d == r.out_dim and not r.adds_tokens:
        said = "the outputs hold the tokens too: a residual path is added in the box"
        yield Edit("tokens-added", said, lambda q: q.with_(adds_tokens=True), by_head=False)


FAULTS = (
    Fault(
        "tokens-added",
        "path",
        ("nlpyang/hiersumm#28",),
        _tokens_added,
        "a residual path inside the box",
    ),
)
