"""The comparison: what counts as worse, and how the command ends."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mhalearn.cli import run

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


# Each script as the first thing of a process sees it: its own folder on the path, and nothing of
# the package imported. Only the libraries it needs are loaded once for all.
IMPORTS = """
import runpy, sys
from pathlib import Path
path = list(sys.path)
for script in sys.argv[1:]:
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        del sys.modules[name]
    sys.path[:] = [str(Path(script).parent), *path]
    runpy.run_path(script, run_name="imported")
    print(script)
"""


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent))
    return importlib.import_module("benchmarks.bench")


def test_every_script_finds_what_it_imports():
    found = sorted(path for path in BENCHMARKS.rglob("*.py") if path.name != "__init__.py")
    scripts = [str(path) for path in found if '__name__ == "__main__"' in path.read_text()]
    assert len(scripts) > 20
    elsewhere = [path for path in sys.path if Path(path).resolve() != BENCHMARKS.parent]
    done = subprocess.run(
        [sys.executable, "-P", "-c", IMPORTS, *scripts],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(elsewhere)},
    )
    assert done.stdout.splitlines() == scripts, done.stderr


def test_figures_that_got_worse_or_went_missing_are_named(bench):
    def figures(ratio, count):
        return [
            bench.figure("speed", "a", "times slower than newton", ratio),
            bench.figure("near the limit", "b", "recovered", count, 5),
        ]

    committed, both = figures(9.0, 5), {"speed", "near the limit"}
    assert bench.worse(figures(5.0, 4), committed, both) == []
    assert len(bench.worse(figures(4.0, 3), committed, both)) == 2
    assert bench.worse(figures(float("inf"), 5), committed, both) != []
    other = [bench.figure("speed", "c", "times slower than newton", 9.0)]
    assert "failed" in bench.worse(other, committed, {"speed"})[0]
    assert "failed" in bench.worse(figures(9.0, 5)[1:], committed, both)[0]
    assert bench.worse(figures(9.0, 5)[1:], committed, {"near the limit"}) == []  # one was not run


def test_every_kind_of_figure_can_be_worse_and_what_peers_do_cannot(bench):
    the_more_the_better = "times slower than newton", "arrived", "recovered", "learned"
    for kind in bench.SLACK:
        more = kind in the_more_the_better
        for good, bad in [(99.0, 0.0), (2.0, 0.9)] if more else [(1e-15, 9.0), (0.3, 0.5)]:
            committed = [bench.figure("a suite", "a case", kind, good)]
            assert bench.worse(committed, committed, {"a suite"}) == []
            found = [bench.figure("a suite", "a case", kind, bad)]
            assert bench.worse(found, committed, {"a suite"}), kind
    peers = [bench.figure("a", "a case", "recovered", n, 5, "", guarded=False) for n in (5, 0)]
    assert bench.worse(peers[1:], peers[:1], {"a"}) == []


def test_the_command_ends_with_3_when_the_solver_got_worse(bench, tmp_path, monkeypatch, capsys):
    """From end to end, with suites that take no time."""
    ratio = 9.0

    def stand_in(name):
        def suite(ledger):
            """What it measures."""
            kind = "times slower than newton"
            return [bench.figure(name, "a case", kind, ratio, None, "3/3 arrive")]

        suite.__name__ = name
        return suite

    monkeypatch.setattr(bench, "SUITES", {"one": stand_in("one"), "two": stand_in("two")})
    monkeypatch.setattr(bench, "COMMITTED", tmp_path / "committed.json")
    monkeypatch.setattr(bench, "PAGE", tmp_path / "page.md")
    call = ["--folder", str(tmp_path / "out")]
    assert bench.main(call) == 3, "nothing is committed"
    assert bench.main([*call, "--record"]) == 0
    assert (tmp_path / "page.md").read_text() == (tmp_path / "out" / "bench.md").read_text()
    assert "| a case | 9 | 3/3 arrive |" in (tmp_path / "page.md").read_text()
    assert bench.main(call) == 0
    assert bench.main(["one", *call]) == 0
    ratio = 2.0
    capsys.readouterr()
    assert bench.main(["one", *call]) == 3
    assert "WORSE: one, a case" in capsys.readouterr().out
    assert json.loads((tmp_path / "committed.json").read_text())["figures"][0]["value"] == 9.0
    with pytest.raises(SystemExit):
        bench.main(["one", *call, "--record"])
    ratio = float("inf")
    assert bench.main([*call, "--record"]) == 3, "a failure is nothing to commit to"
    ratio = 9.0
    monkeypatch.delitem(bench.SUITES, "two")
    assert bench.main(call) == 3, "a suite is gone"


def test_the_page_shows_every_figure_and_every_failure(bench):
    rows = [
        bench.figure("speed", "case, Adam", "times slower than newton", 7.0, None, "1/3 arrive"),
        bench.figure("speed", "case, SciPy", "times slower than newton", float("inf")),
        bench.figure("hard", "parity", "learned", 2, 3),
    ]
    text = bench.page(rows, "a machine")
    assert "| case, Adam | 7 | 1/3 arrive |" in text
    assert "| case, SciPy | failed |" in text
    assert "| parity | 2/3 |" in text


def test_the_page_in_docs_is_that_of_the_committed_figures(bench):
    committed = json.loads(bench.COMMITTED.read_text())
    assert bench.page(**committed) == bench.PAGE.read_text(), "bench.py --record writes both"
    assert {one["suite"] for one in committed["figures"]} == set(
        map(bench.suite_name, bench.SUITES.values())
    )


def test_without_the_source_the_command_says_where_to_run_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(["bench"]) == 2
    assert "clone" in capsys.readouterr().err


def test_an_unknown_suite_is_refused(monkeypatch, capfd):
    monkeypatch.chdir(BENCHMARKS.parent)
    assert run(["bench", "everything"]) == 2
    assert "choose among" in capfd.readouterr().err


@pytest.mark.parametrize("code", [0, 2, 3])
def test_the_command_ends_as_the_comparison_does(code, tmp_path, monkeypatch):
    script = tmp_path / "benchmarks" / "bench.py"
    script.parent.mkdir()
    script.write_text(f"raise SystemExit({code})")
    monkeypatch.chdir(tmp_path)
    assert run(["bench"]) == code


def test_powers_of_a_law_in_rank_and_features_are_found(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent))
    ranks = importlib.import_module("benchmarks.pages.query_ranks")
    law = [5.0 * r**0.5 * d**2 for r, d in ranks.RANKS]
    assert ranks.fit_powers(law) == pytest.approx((0.5, 2.0, 1.0))
    assert ranks.fit_powers([2 * law[0], *law[1:]])[2] > 1.1  # one that is off says so
