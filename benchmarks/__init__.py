"""Measurements: studies, the peers they are made beside, and the pages written from their results.

A script finds this package by putting the folder above it on `sys.path`, and so runs as it is:
python benchmarks/studies/NAME.py
"""

from pathlib import Path

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parents[1] / "docs"
