"""One HTML file about an audit, in the style of the report on a learned layer."""

from __future__ import annotations

import os
from typing import NamedTuple

import jinja2
from markupsafe import Markup

from mhalearn._runtime import html, storage
from mhalearn._runtime.types import Float64
from mhalearn.auditing.result import Audit
from mhalearn.report.numbers import number


class Pair(NamedTuple):
    """Two pictures side by side."""

    caption: str
    expected: Markup
    found: Markup | None


def write_audit(audit: Audit, path: str | os.PathLike[str]) -> None:
    """Write the page of an audit; it opens without a network."""
    storage.check_writable(path)
    storage.write_atomically(path, render(audit).encode())


def render(audit: Audit) -> str:
    """The page as a string."""
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(
            [
                jinja2.PackageLoader("mhalearn.auditing", "."),
                jinja2.PackageLoader("mhalearn.report", "."),
            ]
        ),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"number": number, "capitalize_first": _capital}
    headline, tone = "The box computes what was claimed", "good"
    if not audit.ok:
        headline, tone = "The box computes something else", "fair" if audit.explained else "bad"
    return environment.get_template("audit.html.jinja").render(
        audit=audit,
        headline=headline,
        tone=tone,
        badge="ok" if audit.ok else "differs",
        lead=_sentence(str(audit).split("\n", 1)[0]),
        pairs=[] if audit.ok else _pairs(audit),
        shown=audit.shown,
    )


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _sentence(text: str) -> str:
    return f"{_capital(text)}."


def _pairs(audit: Audit) -> list[Pair]:
    shown = audit.shown
    if shown is None:
        return []
    pairs = []
    for index, head in enumerate(shown.heads):
        if shown.found is None:
            break
        name = f"attention of head {head + 1}"
        limit = float(max(shown.expected[index].max(), shown.found[index].max()))
        pairs.append(
            Pair(
                name,
                html.heat_map(shown.expected[index], limit, f"{name}, expected"),
                html.heat_map(shown.found[index], limit, f"{name}, found"),
            )
        )
    limit = _largest(shown.expected_outputs, shown.found_outputs)
    pairs.append(
        Pair(
            "outputs",
            html.heat_map(shown.expected_outputs, limit, "outputs, expected"),
            html.heat_map(shown.found_outputs, limit, "outputs, found"),
        )
    )
    return pairs


def _largest(*arrays: Float64) -> float:
    return max(float(abs(array).max(initial=0.0)) for array in arrays)
