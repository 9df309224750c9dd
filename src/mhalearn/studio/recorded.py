"""Recorded runs, so that the page is never empty.

    python -m mhalearn.studio.recorded

records them again, after what a run tells has changed.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from mhalearn.studio.request import PRESETS

PAGE = Path(__file__).parent / "page"
RECORDED = PAGE / "recorded"
# Files, in the order the page lists them, and the settings they show.
_RUNS = {
    "1-three-heads.json": "Three heads",
    "2-phases.json": "The paper's phases",
    "3-ask.json": "Ask a box",
    "4-block.json": "A whole block",
}


def record(name: str) -> dict[str, Any]:
    """A run of these settings, with all it told."""
    from mhalearn.studio.worker import make_run  # brings the numerics, which the page needs not

    wish, told, began = PRESETS[name], list[dict[str, Any]](), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        make_run(wish, Path(folder) / "report.html", told.append, {}).learn()
    return {
        "title": f"Example, {name[0].lower()}{name[1:]}",
        "wish": dataclasses.asdict(wish),
        "state": told[-1]["outcome"],
        "seconds": round(time.monotonic() - began, 1),
        "messages": told,
    }


def main() -> None:
    RECORDED.mkdir(exist_ok=True)
    for file, name in _RUNS.items():
        (RECORDED / file).write_text(json.dumps(record(name), separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
