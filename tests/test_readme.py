"""The README's code blocks, run as a reader would run them."""

import re
from pathlib import Path

import pytest
from blocks import ROOT, find_blocks, run_block

BLOCKS = find_blocks(ROOT / "README.md")
# The first, which a reader tries first, every day; the others compile as much again.
CASES = [
    pytest.param(*block, id=block[0], marks=[pytest.mark.slow] if number else [])
    for number, block in enumerate(BLOCKS)
]


@pytest.mark.parametrize(("language", "code"), CASES)
def test_block_runs(language: str, code: str, tmp_path: Path) -> None:
    run_block(language, code, tmp_path)
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
        if target.startswith("http"):
            continue
        path, _, heading = target.partition("#")
        assert (ROOT / path).exists(), target
        assert not heading or heading in anchors_of(ROOT / path), target


def anchors_of(page: Path) -> set[str]:
    """The names a forge gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
