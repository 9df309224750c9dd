"""What makes the command line pleasant to start: completion, and programs compiled only once."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

START = [sys.executable, "-c", "from mhalearn.cli import main; main()"]


def run(*arguments: str, **variables: str) -> str:
    """What the command prints, started without the tests' cache."""
    done = subprocess.run(
        [*START, *arguments],
        env=os.environ | {"JAX_COMPILATION_CACHE_DIR": ""} | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("mhalearn le", "learn"), ("mhalearn learn --max-s", "--max-seconds")],
)
def test_the_shell_completes_commands_and_options(typed: str, offered: str) -> None:
    last = str(len(typed.split()) - 1)
    words = run(_MHALEARN_COMPLETE="complete_bash", COMP_WORDS=typed, COMP_CWORD=last).split()
    assert words == [offered]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_calls_mhalearn(shell: str) -> None:
    script = run("--show-completion", shell, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "_MHALEARN_COMPLETE=complete_" + shell in script


@pytest.mark.slow
def test_a_second_run_starts_faster(tmp_path: Path) -> None:
    """In processor time, which a busy machine changes little."""
    data, cache = tmp_path / "data", tmp_path / "cache"
    sizes = ("--heads", "2", "--dim", "20", "--tokens", "6", "--examples", "400")
    run("generate", *sizes, "--out", str(data), MHALEARN_CACHE_DIR="")
    used = []
    for attempt in ("first", "second"):
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        out = str(tmp_path / f"{attempt}.safetensors")
        examples = str(data / "examples.safetensors")
        run("learn", examples, "--heads", "2", "--out", out, MHALEARN_CACHE_DIR=str(cache))
        used.append(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before)
    assert any(cache.iterdir())
    assert used[1] < 0.8 * used[0], used
