"""Importing the package costs little, and the package says who it is."""

import subprocess
import sys
import tomllib

from blocks import ROOT

import mhalearn

TIMED = """
import time
import jax
began = time.process_time()
import mhalearn
print(time.process_time() - began)
"""


def test_import_is_quick_beyond_jax() -> None:
    done = subprocess.run([sys.executable, "-c", TIMED], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 0.5


def test_every_public_name_exists_and_is_documented() -> None:
    for name in mhalearn.__all__:
        assert getattr(mhalearn, name).__doc__, name


def test_citation_and_changelog_know_the_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"\nversion: {project['version']}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {project['version']}" in (ROOT / "CHANGELOG.md").read_text()
