"""The comparison: what counts as worse, and how the command ends."""

import sys
from pathlib import Path

import pytest

from mhalearn.cli import run

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bench

    yield bench
    sys.modules.pop("bench")


def test_figures_that_got_worse_or_went_missing_are_named(bench):
    def figures(ratio, count):
        return [
            bench.figure("speed", "a", "times slower than newton", ratio),
            bench.figure("near the limit", "b", "recovered", count, 5),
        ]

    committed = figures(9.0, 5)
    assert bench.worse(figures(4.0, 4), committed) == []
    assert len(bench.worse(figures(2.0, 3), committed)) == 2
    assert bench.worse(figures(float("inf"), 5)[:1], committed) != []
    gone = bench.worse([bench.figure("speed", "c", "times slower than newton", 9.0)], committed)
    assert "failed" in gone[0]
    assert bench.worse(figures(9.0, 5)[1:], committed) == []  # that suite was not run


def test_the_page_shows_every_figure_and_every_failure(bench):
    rows = [
        bench.figure("speed", "case, Adam", "times slower than newton", 7.0),
        bench.figure("speed", "case, SciPy", "times slower than newton", float("inf")),
        bench.figure("hard", "parity", "learned", 2, 3),
    ]
    text = bench.page(rows, "a machine")
    assert "| case, Adam | 7 |" in text
    assert "| case, SciPy | failed |" in text
    assert "| parity | 2/3 |" in text


def test_without_the_source_the_command_says_where_to_run_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(["bench"]) == 2
    assert "clone" in capsys.readouterr().err


def test_an_unknown_suite_is_refused(monkeypatch, capfd):
    monkeypatch.chdir(BENCHMARKS.parent)
    assert run(["bench", "everything"]) == 2
    assert "choose among" in capfd.readouterr().err
