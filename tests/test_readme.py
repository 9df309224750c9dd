"""The README's code blocks, run as a reader would run them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```(python|bash)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.parametrize(("language", "code"), BLOCKS, ids=[language for language, _ in BLOCKS])
def test_block_runs(language: str, code: str, tmp_path: Path) -> None:
    scripts = Path(sys.executable).parent
    command = [sys.executable, "-c", code] if language == "python" else ["bash", "-ec", code]
    environment = os.environ | {
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "MHALEARN_CACHE_DIR": "",
    }
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        (tmp_path / ("layer" if language == "python" else "learned"))
        .with_suffix(".safetensors")
        .exists()
    )


def test_both_languages_are_shown() -> None:
    assert {language for language, _ in BLOCKS} == {"python", "bash"}


def test_links_and_pictures_exist() -> None:
    text = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert target.startswith("http") or (ROOT / target).exists(), target
