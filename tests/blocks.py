"""Code blocks of a Markdown page, run as a reader would run them."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def find_blocks(page: Path) -> list[tuple[str, str]]:
    """The fenced blocks of a page that can be run, as (language, code)."""
    return re.findall(r"^```(python|bash)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def find_file(code: str) -> str | None:
    """The name of the file that a block is, where it begins with it as a comment."""
    named = re.match(r"# (\w+\.py)\n", code)
    return named and named[1]


def run_block(language: str, code: str, folder: Path) -> None:
    """Run a block in a process of its own; fails, with what it printed, if it does."""
    command = [sys.executable, "-c", code] if language == "python" else ["bash", "-ec", code]
    run_command(command, folder)


def run_command(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command beside this Python's scripts, compiled as a reader's would be."""
    scripts = Path(sys.executable).parent
    environment = os.environ | {
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "XLA_FLAGS": "",
    }
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done
