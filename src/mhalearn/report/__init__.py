"""One self-contained HTML file from a run: verdict, heads, descent, certificate.

`page.write_report` writes it. It is not imported here: a fit needs the terminal's progress alone,
and drawing takes a third of a second to import.
"""
