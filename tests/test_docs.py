"""The pages build without a warning, say what the code does, and their blocks run."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
from blocks import ROOT, find_blocks, find_file, run_block, run_command

import mhalearn

DOCS = ROOT / "docs"
PAGES = sorted(page.name for page in DOCS.glob("*.md") if find_blocks(page))
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_blocks_of_page_run(page: str, tmp_path: Path) -> None:
    """The Python blocks are one session, as a reader types them; the others come after it.

    A block that is a file lies beside them.
    """
    blocks = find_blocks(DOCS / page)
    for _, code in blocks:
        if (name := find_file(code)) is not None:
            (tmp_path / name).write_text(code)
    session = "\n\n".join(code for language, code in blocks if language == "python")
    run_block("python", session, tmp_path)
    for language, code in blocks:
        if language == "bash":
            run_block(language, code, tmp_path)


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_end_in_something_that_can_fail(page: str) -> None:
    for language, code in find_blocks(DOCS / page):
        if language == "python" and find_file(code) is None:  # the next one uses it
            assert re.search(r"^assert ", code.rstrip().rpartition("\n\n")[2], re.MULTILINE), code


def test_tutorial_has_blocks() -> None:
    assert "tutorial.md" in PAGES


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(name: str, tmp_path: Path) -> None:
    assert run_command([sys.executable, str(ROOT / "examples" / name)], tmp_path).stdout


def test_there_are_three_examples_that_assert() -> None:
    assert len(EXAMPLES) >= 3
    for name in EXAMPLES:
        assert "\nassert " in (ROOT / "examples" / name).read_text(), name


@pytest.mark.slow
def test_pages_build_strictly(tmp_path: Path) -> None:
    """Warnings fail: a dead link, a page outside the navigation, a name without docstring."""
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    run_command(command, ROOT)
    reference = (site / "api" / "index.html").read_text()
    for name in mhalearn.__all__:
        assert f'id="mhalearn.{name}"' in reference, name
    assert "--max-seconds" in (site / "commands" / "index.html").read_text()
    for page in site.rglob("*.html"):
        sources = re.findall(
            r'<(?:script|link|img)[^>]+(?:src|href)="(http[^"]+)"', page.read_text()
        )
        assert not sources, f"{page.relative_to(site)} needs {sources} from elsewhere"


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        "audit",
        "block",
        "gradient",
        "hard",
        "open_questions",
        "phases",
        "plans",
        "queries",
        "real",
        "reasons",
        "rotary",
        "solver",
        "tails",
    ],
)
def test_page_is_what_its_script_writes(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    script = importlib.import_module(f"benchmarks.pages.write_{page}")
    written = tmp_path / "page.md"
    monkeypatch.setattr(script, "OUT", written)
    script.main()
    assert written.read_text() == (DOCS / f"{page}.md").read_text(), f"run write_{page}.py again"


def test_tables_of_many_hosts_are_what_their_script_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    hosts = importlib.import_module("benchmarks.studies.hosts")
    page = DOCS / "many_hosts.md"
    copy = tmp_path / "page.md"
    copy.write_text(re.sub(r"(?m)^\|.*(\d\.\d| MB| GB| ms).*\n", "", page.read_text()))
    assert copy.read_text() != page.read_text()
    monkeypatch.setattr(hosts, "DOC", copy)
    hosts.write_tables(json.loads((hosts.RESULTS / "hosts.json").read_text())["runs"])
    assert copy.read_text() == page.read_text(), "run hosts.py --table again"


def test_reference_lists_every_public_name() -> None:
    listed = re.findall(r"^::: mhalearn\.(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(mhalearn.__all__)


def test_every_phase_has_a_figure() -> None:
    text = (DOCS / "phases.md").read_text()
    for phase in range(1, 7):
        assert f"## Phase {phase}: " in text
        assert f"](images/phase_{phase}.svg)" in text
        assert (DOCS / "images" / f"phase_{phase}.svg").exists()
