"""Fill docs/commands.md with what every command says of itself when the pages are built."""

import os
import re
import subprocess
import sys

MARK = "<!-- commands -->"


def on_page_markdown(markdown: str, **_: object) -> str:
    """MkDocs calls this with every page."""
    return markdown.replace(MARK, _describe_commands()) if MARK in markdown else markdown


def _describe_commands() -> str:
    text = _help()
    listed = text[text.index("Commands") :]
    names = re.findall(r"^\W ([a-z]\w+)  ", listed, re.MULTILINE)
    parts = [f"## mhalearn {name}\n\n```text\n{_help(name)}\n```\n" for name in names]
    return "\n".join([f"## mhalearn\n\n```text\n{text}\n```\n", *parts])


def _help(*command: str) -> str:
    code = "from mhalearn.cli import main; main()"
    environment = os.environ | {"COLUMNS": "84", "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run(
        [sys.executable, "-c", code, *command, "--help"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())
