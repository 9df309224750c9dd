"""What a stranger gets: the built wheel with the newest and with the oldest dependencies."""

import json
import os
import subprocess
import sys
import tomllib
import urllib.request
import venv
import zipfile
from pathlib import Path

import pytest
from blocks import ROOT

pytestmark = pytest.mark.slow


def bare() -> dict[str, str]:
    """The variables of this process that do not speak of its Python or JAX, and no cache."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "JAX_", "XLA_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    return kept | {"MHALEARN_CACHE_DIR": ""}


def call(*command: object, folder: Path) -> str:
    """Run a command that sees nothing of this environment; returns what it printed."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=bare(),
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


def requirements() -> dict[str, str]:
    """Package and lower bound of all that the command line and the studio ask for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["studio"]]
    return dict(one.split(">=") for one in needed)


def outdated(scripts: Path) -> dict[str, str]:
    """Which requirements have a newer release than the one installed, and that release."""
    listing = (scripts / "python", "-m", "pip", "list", "--outdated", "--format", "json")
    newer = {
        one["name"]: one["latest_version"] for one in json.loads(call(*listing, folder=scripts))
    }
    return {name: newer[name] for name in requirements() if name in newer}


def use(scripts: Path, folder: Path) -> None:
    """Every requirement at work: solver, phases, reports, comparisons, the studio's page."""
    mhalearn = scripts / "mhalearn"
    assert "RECOVERED" in call(mhalearn, "demo", "--out", "demo", folder=folder)
    assert (folder / "demo" / "report.html").stat().st_size > 10_000
    sizes = ("--heads", 2, "--dim", 8, "--tokens", 3, "--scale", 4, "--examples", 50_000)
    call(mhalearn, "generate", *sizes, "--out", "data", folder=folder)
    learn = (mhalearn, "learn", "data/examples.safetensors", "--heads", 2, "--method", "sculpt")
    assert "RECOVERED" in call(*learn, "--out", "learned.safetensors", folder=folder)
    call(mhalearn, "compare", "learned.safetensors", "data/layer.safetensors", folder=folder)
    call(mhalearn, "check", "data/layer.safetensors", "--tokens", 3, folder=folder)
    with subprocess.Popen(
        [mhalearn, "studio", "--port", "0"],
        cwd=folder,
        env=bare(),
        stdout=subprocess.PIPE,
        text=True,
    ) as studio:
        assert studio.stdout is not None
        address = studio.stdout.readline().split()[0]
        page = urllib.request.urlopen(address, timeout=30).read()
        studio.terminate()
    assert b"<html" in page


def test_wheel_holds_what_is_needed(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "mhalearn/py.typed" in names
    for part in ("page.html", "phases.html", "switch.html", "style.css"):
        assert f"mhalearn/report/{part}.jinja" in names
    assert any(name.endswith("LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "docs"))]


def test_wheel_works_with_the_newest_dependencies(wheel: Path, tmp_path: Path) -> None:
    """In an empty environment pip takes the newest, unless a bound of ours or of others forbids."""
    scripts = make_environment(tmp_path / "environment", f"{wheel}[studio]")
    where = call(
        scripts / "python", "-c", "import mhalearn; print(mhalearn.__file__)", folder=tmp_path
    )
    assert Path(where).is_relative_to(tmp_path)
    assert outdated(scripts) == {}
    use(scripts, tmp_path)


def test_wheel_works_with_the_oldest_dependencies(wheel: Path, tmp_path: Path) -> None:
    oldest = [f"{name}=={version}" for name, version in requirements().items()]
    scripts = make_environment(tmp_path / "environment", wheel, *oldest)
    assert outdated(scripts)  # it does find what is old
    use(scripts, tmp_path)
