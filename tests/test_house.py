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


def seconds_to_import() -> float:
    done = subprocess.run([sys.executable, "-c", TIMED], capture_output=True, text=True, check=True)
    return float(done.stdout)


def test_import_is_quick_beyond_jax() -> None:
    """In processor time, and once in three: a busy machine makes cold caches, too."""
    assert any(seconds_to_import() < 0.5 for _ in range(3))


def test_every_public_name_exists_and_is_documented() -> None:
    for name in mhalearn.__all__:
        assert getattr(mhalearn, name).__doc__, name


def test_citation_and_changelog_know_the_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"\nversion: {project['version']}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {project['version']}" in (ROOT / "CHANGELOG.md").read_text()
