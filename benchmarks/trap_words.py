"""What a sentence asserts: noise, or only that noise is one of several things it may be.

A mention of noise is an assertion unless what stands around it says otherwise, so that a sentence
nobody thought of is looked at rather than passed over.
"""

import re

# What may stand before the word: comparisons, negations, "one or the other", and conjectures.
_BEFORE = re.compile(
    r"\b(above|than|times|as much as|beyond|unlike|tell|from|no|not|nor|without|exclude|or|either)"
    r"( like| be)?( the| label| any| random)* $"
    r"|\b(if|whether|were|would|cannot|could|may|might|can)\b[^,;:.]*$",
    re.IGNORECASE,
)
# What may follow it: "noise or structure", "noise, structure, or a layer that was not found".
_AFTER = re.compile(r"^( level)?( from| or| nor| alone does not| cannot)\b|^,[^;:.]*\bor\b")
_MENTION = re.compile(r"\bnois[ey]\w*", re.IGNORECASE)
_DISTANT = re.compile(r"\b(distant|far away|far from|further away|nearby|elsewhere)\b")


def asserts_noise(sentence: str) -> bool:
    """Whether it says that the labels hold noise."""
    return any(
        not (_BEFORE.search(sentence[: at.start()]) or _AFTER.search(sentence[at.end() :]))
        for at in _MENTION.finditer(sentence)
    )


def leaves_distant_layers_open(sentence: str) -> bool:
    """Whether it says that only layers near the one found are excluded."""
    return bool(_DISTANT.search(sentence))


def stated_dimension(sentence: str) -> tuple[int, bool] | None:
    """The dimension of a family of layers, and whether it is a lower bound."""
    found = re.search(r"dimension (at least )?(\d+)", sentence)
    return (int(found[2]), bool(found[1])) if found else None
