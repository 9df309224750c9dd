"""What a stranger gets: the built wheel in an empty environment, and the oldest dependencies."""

import os
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from blocks import ROOT

pytestmark = pytest.mark.slow


def call(*command: object, folder: Path) -> str:
    """Run a command that sees nothing of this environment; returns what it printed."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    kept |= {"MHALEARN_CACHE_DIR": ""}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=kept,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def make_environment(folder: Path, *packages: object) -> Path:
    """A new environment with these packages; returns the folder of its commands."""
    venv.create(folder, with_pip=True)
    scripts = folder / ("Scripts" if sys.platform == "win32" else "bin")
    quiet = ("--quiet", "--disable-pip-version-check")
    call(scripts / "python", "-m", "pip", "install", *quiet, *packages, folder=folder)
    return scripts


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    call(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", folder, ROOT, folder=folder)
    (found,) = folder.glob("mhalearn-*.whl")
    return found


def lower_bounds() -> list[str]:
    """The dependencies of the plain install at the versions that pyproject.toml begins with."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [needed.replace(">=", "==") for needed in project["dependencies"]]


def test_wheel_holds_what_is_needed(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "mhalearn/py.typed" in names
    assert "mhalearn/report/page.html.jinja" in names
    assert any(name.endswith("LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "docs"))]


def test_demo_runs_from_the_wheel_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    scripts = make_environment(tmp_path / "environment", wheel)
    where = call(
        scripts / "python", "-c", "import mhalearn; print(mhalearn.__file__)", folder=tmp_path
    )
    assert Path(where).is_relative_to(tmp_path)
    assert "RECOVERED" in call(scripts / "mhalearn", "demo", "--out", "demo", folder=tmp_path)
    assert (tmp_path / "demo" / "report.html").stat().st_size > 10_000


def test_oldest_dependencies_work(wheel: Path, tmp_path: Path) -> None:
    """The newest are those of every other test."""
    scripts = make_environment(tmp_path / "environment", wheel, *lower_bounds())
    sizes = ("--heads", 2, "--dim", 8, "--tokens", 6)
    mhalearn = scripts / "mhalearn"
    call(mhalearn, "generate", *sizes, "--examples", 120, "--out", "data", folder=tmp_path)
    learn = (mhalearn, "learn", "data/examples.safetensors", "--report", "report.html")
    assert "RECOVERED" in call(*learn, "--out", "learned.safetensors", folder=tmp_path)
    call(mhalearn, "compare", "learned.safetensors", "data/layer.safetensors", folder=tmp_path)
    call(mhalearn, "check", "data/layer.safetensors", "--tokens", 4, folder=tmp_path)
