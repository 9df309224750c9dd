"""What a notebook shows for an audit."""

from markupsafe import Markup

from mhalearn._runtime import html
from mhalearn.auditing.result import Audit


def describe_audit(audit: Audit) -> Markup:
    """A card: whether the box is right, and what it does otherwise."""
    if audit.ok:
        return html.card(
            html.title("Audit") + html.badge("ok", "good"), [html.paragraph(str(audit))]
        )
    rows = [
        (one.name, f"{one.confidence:.0%}", one.sentence, ", ".join(one.seen_in) or "-")
        for one in audit.findings
    ]
    said = str(audit).split("\n", 1)[0]
    tone: html.Tone = "fair" if audit.explained else "bad"
    return html.card(
        html.title("Audit") + html.badge("differs", tone),
        [
            html.paragraph(said[0].upper() + said[1:] + "."),
            html.table(rows, ("fault", "confidence", "what is found", "seen in")),
        ],
    )
