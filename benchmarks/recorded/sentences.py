"""Sentences from the documentation strings of installed packages, in an order that never changes.

Sources are parsed and never imported. A sentence's place comes from a hash of its words, so that
it is the same on every machine but for what another version of a package says otherwise.
"""

import ast
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from hashlib import blake2b
from pathlib import Path

PACKAGES = ("numpy", "scipy", "jax", "sklearn", "optax", "matplotlib", "networkx", "sympy")
# Asked too where these are not all there, and hold fewer sentences than this.
MORE_PACKAGES, _FEW = ("torch", "transformers", "pandas", "rich"), 12_000
# Words of a sentence, and the share of its characters that are letters or spaces: no formulas.
_WORDS, _LETTERS = (6, 60), 0.85
_FILES = 400
_ENDS = re.compile(r"(?<=[.!?])\s+(?=[A-Z])|\n\s*\n")


@cache
def read_sentences(packages: tuple[str, ...] = PACKAGES) -> tuple[str, ...]:
    """All distinct sentences of the first files of each package, ordered by a hash."""
    found: set[str] = set()
    for package in packages + MORE_PACKAGES:
        if package in packages or len(found) < _FEW:
            found.update(line for text in _docstrings(package) for line in _split(text))
    return tuple(sorted(found, key=lambda text: blake2b(text.encode(), digest_size=8).digest()))


def _docstrings(package: str) -> Iterator[str]:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return
    for path in sorted(Path(spec.origin).parent.rglob("*.py"))[:_FILES]:
        if "test" in str(path):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        for node in ast.walk(tree):
            text = ast.get_docstring(node) if isinstance(node, kinds) else None
            if text:
                yield text


def _split(text: str) -> Iterator[str]:
    for part in _ENDS.split(text):
        sentence = " ".join(part.split())
        letters = sum(char.isalpha() or char == " " for char in sentence)
        if ">>>" in sentence or letters < _LETTERS * len(sentence) or not sentence.endswith("."):
            continue
        if _WORDS[0] <= sentence.count(" ") + 1 <= _WORDS[1]:
            yield sentence
