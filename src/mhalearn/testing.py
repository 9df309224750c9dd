"""For tests of a port: an assertion whose failure names the fault."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mhalearn.auditing.audit import audit
from mhalearn.auditing.result import Audit
from mhalearn.data import Examples
from mhalearn.layer.base import Layer


def assert_same_attention(
    claimed: Layer | str | Path | Mapping[str, Any],
    box: Examples | Callable[[Any], Any],
    **options: Any,
) -> Audit:
    """Fail with the findings of `mhalearn.audit` unless a box computes what a layer does.

    claimed, box and options: as in `mhalearn.audit`. Returns the audit where it is ok.
    """
    __tracebackhide__ = True  # pytest shows the caller's line instead
    found = audit(claimed, box, **options)
    if not found.ok:
        raise AssertionError(str(found))
    return found
