"""Pieces of HTML that notebooks show for an object: static, small, and with all text escaped.

A piece is a Markup, and everything else is text: `Markup.format` escapes what is not a Markup.
Styles are inline, and only lay out: what a notebook's sanitiser takes away leaves a plain table.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

from markupsafe import Markup

from mhalearn._runtime.pixels import as_data_uri, draw_png, thin
from mhalearn._runtime.types import Float64

Tone = Literal["good", "fair", "bad"]

# Characters of one text: what comes from a file may be as long as it likes.
_MOST_CHARACTERS = 2000
# Cells on a side of a picture, and the pixels they have at most.
MOST_CELLS, _PIXELS = 32, 96
_COLOURS = {"good": "#1a7f37", "fair": "#9a6700", "bad": "#b3261e"}
_CELL = "text-align:left;vertical-align:top;padding:2px 10px 2px 0"


def card(title: Markup, parts: Iterable[Markup]) -> Markup:
    """What stands for an object: a title, and its parts below it."""
    body = Markup("").join(parts)
    return Markup('<div style="max-width:60em"><div>{}</div>{}</div>').format(title, body)


def title(name: str, said: str = "") -> Markup:
    return Markup("<b>{}</b> {}").format(clean(name), clean(said))


def badge(words: str, tone: Tone) -> Markup:
    style = f"color:#fff;background:{_COLOURS[tone]};border-radius:3px;padding:1px 6px"
    return Markup('<b style="{}">{}</b>').format(style, clean(words))


def paragraph(said: str) -> Markup:
    return Markup('<p style="margin:4px 0">{}</p>').format(clean(said))


def table(rows: Iterable[Sequence[str | Markup]], header: Sequence[str] = ()) -> Markup:
    """Cells are text, or pieces."""
    head = Markup("<tr>{}</tr>").format(_cells("th", header)) if header else Markup("")
    body = Markup("").join(Markup("<tr>{}</tr>").format(_cells("td", row)) for row in rows)
    return Markup('<table style="margin:4px 0">{}{}</table>').format(head, body)


def folded(summary: str, part: Markup) -> Markup:
    """Shown when it is asked for."""
    return Markup("<details><summary>{}</summary>{}</details>").format(clean(summary), part)


def heat_map(matrix: Float64, limit: float, name: str) -> Markup:
    """A matrix on the scale -limit .. limit; of a large one, each block's largest entry."""
    shown = thin(matrix, MOST_CELLS)
    cell = max(1, _PIXELS // max(shown.shape))
    return Markup(
        '<img alt="{}" title="{}" width="{}" height="{}" src="{}" '
        'style="border:1px solid #8888;max-width:none">'
    ).format(
        said := f"{clean(name)}: {matrix.shape[0]} by {matrix.shape[1]} entries between "
        f"{matrix.min():.2g} and {matrix.max():.2g}",
        said,
        shown.shape[1] * cell,
        shown.shape[0] * cell,
        as_data_uri(draw_png(shown, limit, cell)),
    )


def clean(text: str) -> str:
    """What can be sent as UTF-8, at a length that can be read."""
    sent = str(text[: _MOST_CHARACTERS + 1]).encode("utf-8", "replace").decode()
    return (
        sent
        if len(sent) <= _MOST_CHARACTERS
        else sent[:_MOST_CHARACTERS] + " \N{HORIZONTAL ELLIPSIS}"
    )


def _cells(tag: str, row: Sequence[str | Markup]) -> Markup:
    cell = Markup(f'<{tag} style="{_CELL}">{{}}</{tag}>')
    return Markup("").join(
        cell.format(one if isinstance(one, Markup) else clean(one)) for one in row
    )
