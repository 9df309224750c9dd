"""`mhalearn extract` and `mhalearn plan`: exit codes, JSON, and answers that are paid for once."""

import json
import sys

import pytest

import mhalearn as mha
from mhalearn import cli
from mhalearn.data import box as boxes

BOX = """
import mhalearn as mha

layer = mha.random_layer(n_heads=2, d=4, scale=2.0, seed=1)
asked = []


def box(x):
    if len(asked) == BREAKS_AFTER:
        raise ConnectionError("gone")
    asked.append(x)
    return layer(x[None])[0]
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run a command beside a module with a box: (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(boxes, "WAITS", (0.0,))
    (tmp_path / "breaking_box.py").write_text(BOX.replace("BREAKS_AFTER", "5"))
    (tmp_path / "working_box.py").write_text(BOX.replace("BREAKS_AFTER", "-1"))
    monkeypatch.syspath_prepend(str(tmp_path))

    def call(*arguments):
        capsys.readouterr()
        code = cli.run([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return call


def test_a_broken_extraction_goes_on_and_pays_for_nothing_twice(run, tmp_path):
    asking = ("--dim", 4, "--one-by-one", "--checkpoint", "answers.sqlite")
    code, out, said = run("extract", "breaking_box:box", *asking)
    assert (code, out) == (4, "")
    assert "--resume" in said
    assert len(said.splitlines()) == 1
    code, _, said = run("extract", "working_box:box", *asking)
    assert code == 2
    assert "--resume" in said
    code, out, _ = run(
        "extract", "working_box:box", *asking, "--resume", "--json", "--out", "found.safetensors"
    )
    found = json.loads(out)
    assert code == 0
    assert found["recovered"]
    import working_box

    assert len(working_box.asked) == found["calls"] - 5
    learned = mha.load_layer(tmp_path / "found.safetensors")
    assert mha.compare(learned, working_box.layer).max_error < 1e-12


def test_an_interruption_says_where_answers_are(run, tmp_path):
    (tmp_path / "stopped_box.py").write_text(
        BOX.replace("BREAKS_AFTER", "3").replace('ConnectionError("gone")', "KeyboardInterrupt")
    )
    asking = ("extract", "stopped_box:box", "--dim", 4, "--one-by-one")
    code, _, said = run(*asking, "--checkpoint", "stopped.sqlite")
    assert code == 130
    assert "stopped.sqlite: --resume to go on" in said
    assert len(said.splitlines()) == 1
    sys.modules.pop("stopped_box")
    assert "add --checkpoint FILE" in run(*asking)[2]


def test_as_many_calls_for_one_purpose_as_for_another_are_told_apart(run):
    code, out, _ = run("extract", "working_box:box", "--dim", 4, "--one-by-one", "--heads", 3)
    assert code == 3
    assert "; 1 more for" in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere",), "module:function"),
        (("no_such_module:box",), "PYTHONPATH"),
        (("working_box:missing",), "has no function"),
        (("working_box:box", "--inputs", "sphere"), "radius"),
        (("working_box:box", "--resume"), "--checkpoint"),
        (("working_box:box", "--heads", "0"), "at least 1"),
    ],
)
def test_a_mistake_is_one_line(run, arguments, said):
    code, out, error = run("extract", *arguments, "--dim", 4)
    assert (code, out) == (2, "")
    assert said in error
    assert len(error.splitlines()) == 1


def test_a_plan_is_told_before_anything_is_paid(run):
    asked = ("plan", "--dim", 5, "--heads", 2, "--error", 1e-7, "--labels", "float32")
    code, out, _ = run(*asked, "--json")
    told = json.loads(out)
    assert code == 0
    assert told["predicted_error"] <= 1e-7
    assert told["scalars"] == 40 * told["examples"] == 5 * told["calls_of_last_row"]
    assert told["alternatives"]["float64"] < told["alternatives"]["bfloat16"]
    code, out, _ = run(*asked)
    assert code == 0
    assert "times the counting limit" in out
    assert "finding it takes a fit some 1.25 to 3 times" in " ".join(out.split())
    code, _, said = run(*asked[:-1], "float8")
    assert code == 2
    assert "choose one of" in said


def test_kinds_of_heads_are_named_as_for_learn(run):
    asking = ("extract", "working_box:box", "--dim", 4)
    code, _, said = run(*asking, "--rope-base", "x")
    assert (code, said) == (2, "mhalearn extract: --rope-base x: give a number, or auto\n")
    code, _, said = run(*asking, "--heads", 2, "--kv-heads", 1)
    assert code == 2
    assert "n_heads and head_dim" in said
