"""The notebooks run, and what is checked in is what they show: small, and of no machine."""

import json
import re
import sys
from pathlib import Path

import pytest
from blocks import ROOT, run_command

FOLDER = ROOT / "notebooks"
NAMES = ["layer_from_activations.ipynb", "six_phases.ipynb"]


def read_cells(path: Path) -> list[dict]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def list_outputs(path: Path) -> list[list[str]]:
    """Of each cell, the kinds of what it shows."""
    return [
        sorted(kind for one in cell["outputs"] for kind in one.get("data", {one["output_type"]: 0}))
        for cell in read_cells(path)
    ]


def test_all_notebooks_are_known() -> None:
    assert sorted(path.name for path in FOLDER.glob("*.ipynb")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_checked_in_as_it_was_run(name: str) -> None:
    path = FOLDER / name
    text = path.read_text()
    assert len(text) < 400_000
    assert not re.search(r"/(home|root|tmp|Users|work)/|0x[0-9a-f]{8}", text)
    cells = read_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        assert cell["metadata"] == {}
        for output in cell["outputs"]:
            assert output["output_type"] in ("execute_result", "stream")
            assert output.get("name", "stdout") == "stdout"  # no warnings
    kinds = {kind for kinds in list_outputs(path) for kind in kinds}
    assert {"image/svg+xml", "text/html"} <= kinds


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_asserts_what_it_says(name: str) -> None:
    sources = ["".join(cell["source"]) for cell in read_cells(FOLDER / name)]
    assert sum("\nassert " in source for source in sources) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_and_shows_what_is_checked_in(name: str, tmp_path: Path) -> None:
    """In a kernel: its assertions hold, and every cell shows the same kinds of things."""
    run_command(
        [sys.executable, str(FOLDER / "execute.py"), "--out", str(tmp_path), name], tmp_path
    )
    assert list_outputs(tmp_path / name) == list_outputs(FOLDER / name)
