"""Paragraphs of a page, broken again once their numbers are in."""

import textwrap

WIDTH = 97


def reflow(text: str) -> str:
    """Paragraphs in lines of at most so many characters; headings, tables and lists stay."""
    return "\n\n".join(map(_fill, text.split("\n\n")))


def _fill(paragraph: str) -> str:
    if paragraph.lstrip("\n").startswith(("#", "|", "!", "```", "1. ")):
        return paragraph
    end = "\n" * (len(paragraph) - len(paragraph.rstrip("\n")))
    return (
        textwrap.fill(
            " ".join(paragraph.split()),
            width=WIDTH,
            break_long_words=False,
            break_on_hyphens=False,
        )
        + end
    )
