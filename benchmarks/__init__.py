"""Measurements: studies, the peers they are made beside, and the pages written from their results.

A script finds this package by putting the folder above it on `sys.path`, and so runs as it is:
python benchmarks/studies/NAME.py
"""

import os
import subprocess
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parents[1] / "docs"


def describe_code() -> str:
    """The commit the code is of, with a mark where it was changed; outside a repository what
    MHALEARN_COMMIT says."""
    asked = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("MHALEARN_COMMIT", "unknown")
