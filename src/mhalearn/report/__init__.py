"""One self-contained HTML file from a run: verdict, heads, descent, certificate."""

from mhalearn.report.page import write_report

__all__ = ["write_report"]
