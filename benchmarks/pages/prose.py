"""Paragraphs of a page, broken again once their numbers are in."""

import re
import textwrap

WIDTH = 97


def reflow(text: str) -> str:
    """Paragraphs in lines of at most so many characters; headings, tables, lists and code stay."""
    parts = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(
        part if part.startswith("```") else "\n\n".join(map(_fill, part.split("\n\n")))
        for part in parts
    )


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
