"""X and Y as two .npy files: learned from, and refused in one line where they are not that."""

from pathlib import Path

import numpy as np
import pytest

import mhalearn as mha
from mhalearn import cli
from mhalearn.data.loading import load_pair

LAYER = mha.random_layer(2, 4, seed=0)
X = mha.sample_inputs("boolean", 120, 4, 4, seed=1)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("X.npy", X)
    np.save("Y.npy", LAYER(X))
    return tmp_path


def test_two_files_are_learned_from(folder, capsys):
    assert cli.run(["learn", "X.npy", "Y.npy", "--heads", "2", "--out", "layer.safetensors"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "RECOVERED" in said
    assert "299 fresh examples, all of them below, would give 99 %." in said
    assert mha.compare(mha.load_layer("layer.safetensors"), LAYER).max_error < 1e-9
    x, y, _ = load_pair("X.npy", "Y.npy").arrays()
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(y, LAYER(X))


def damage(name):
    content = (X if name.startswith("X") else LAYER(X)).copy()
    np.save(name, content)
    with open(name, "r+b") as file:
        file.truncate(200)


REFUSED = {
    "no second file": (lambda: None, ["X.npy"], "give X.npy and Y.npy"),
    "missing": (lambda: None, ["X.npy", "Z.npy"], "Z.npy"),
    "another format": (
        lambda: np.savez("Y.npz", LAYER(X)),
        ["X.npy", "Y.npz"],
        "both must be .npy",
    ),
    "names": (
        lambda: None,
        ["X.npy", "Y.npy", "--inputs", "x", "--outputs", "y"],
        "leave them out",
    ),
    "a block with rotary positions": (
        lambda: None,
        ["X.npy", "Y.npy", "--block", "--rope-base", "100"],
        "leave the others out",
    ),
    "neurons without a block": (
        lambda: None,
        ["X.npy", "Y.npy", "--hidden", "8"],
        "add --block",
    ),
    "other n": (lambda: np.save("Z.npy", LAYER(X)[:7]), ["X.npy", "Z.npy"], "X.npy and Z.npy"),
    "two axes": (lambda: np.save("Z.npy", X[0]), ["Z.npy", "Y.npy"], "axes"),
    "objects": (
        lambda: np.save("Z.npy", np.array([print, 1], object), allow_pickle=True),
        ["Z.npy", "Y.npy"],
        "not a readable .npy file of numbers",
    ),
    "text": (lambda: np.save("Z.npy", np.array(["a"])), ["Z.npy", "Y.npy"], "of numbers"),
    "cut short": (lambda: damage("X.npy"), ["X.npy", "Y.npy"], "not a readable .npy file"),
    "huge header": (
        lambda: Path("Z.npy").write_bytes(
            b"\x93NUMPY\x01\x00v\x00"
            + b"{'descr': '<f8', 'fortran_order': False, 'shape': (99999999, 99999, 8), }".ljust(
                117
            )
            + b"\n"
        ),
        ["Z.npy", "Y.npy"],
        "not a readable .npy file",
    ),
    "overwritten": (lambda: None, ["X.npy", "Y.npy", "--report", "Y.npy"], "is the examples too"),
}


@pytest.mark.parametrize(("prepare", "arguments", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_a_pair_is_refused_in_one_line(folder, capsys, prepare, arguments, said):
    prepare()
    assert cli.run(["learn", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1
