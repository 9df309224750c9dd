"""Own data on the studio's page: taken, checked in a process of its own, bounded, forgotten."""

import json
import sys
import zipfile

import numpy as np
import pytest
from safetensors.numpy import save_file
from starlette.testclient import TestClient

import mhalearn as mha
from mhalearn.studio import dropped, runs, server, worker
from mhalearn.studio.own_data import check_names, main, read_examples
from mhalearn.studio.request import Limits, Wish

HERE = "http://127.0.0.1:8042"
# Tells what it was started with, in place of learning from it.
ECHO = """
import json, pathlib, sys
files = json.loads(sys.argv[2])
print(json.dumps({"kind": "stage", "name": json.dumps(files)}))
sizes = sum(pathlib.Path(path).stat().st_size for path in files.values())
print(json.dumps({"kind": "ended", "outcome": str(sizes)}))
"""
# In place of the process that reads files: it believes everything.
TRUSTING = """
import json
print(json.dumps({"n": 40, "k": 3, "d": 4, "out_dim": 4, "lengths": []}))
"""


@pytest.fixture(scope="module")
def made():
    layer = mha.random_layer(n_heads=1, d=4)
    x = mha.sample_inputs("gaussian", 40, 3, 4, seed=1)
    return x, layer(x)


@pytest.fixture
def client(monkeypatch):
    monkeypatch.setattr(runs, "_WORKER", (sys.executable, "-c", ECHO))
    monkeypatch.setattr(dropped, "_READER", (sys.executable, "-c", TRUSTING))
    limits = Limits(file_bytes=10_000, files=2)
    with TestClient(server.make_app(limits), base_url=HERE) as client:
        yield client


def send(client, body=b"12345", files="5:mine.npz", kind="application/octet-stream"):
    address = "/data?" + "&".join(f"file={one}" for one in files.split("|"))
    return client.post(address, content=body, headers={"content-type": kind})


# Reading


def test_all_formats_give_the_same_examples(tmp_path, made):
    x, y = made
    np.savez(tmp_path / "a.npz", X=x, Y=y)
    np.save(tmp_path / "0.npy", x)
    np.save(tmp_path / "1.npy", y)
    save_file({"X": x, "Y": y}, tmp_path / "a.safetensors")
    mha.Examples(x, y).save(tmp_path / "b.safetensors")
    for files in (
        {"a.npz": "a.npz"},
        {"a.safetensors": "a.safetensors"},
        {"b.safetensors": "b.safetensors"},
        {"x_train.npy": "0.npy", "y_train.npy": "1.npy"},
        {"outputs.npy": "1.npy", "inputs.npy": "0.npy"},
    ):
        paths = {name: tmp_path / path for name, path in files.items()}
        read = read_examples(paths, Limits()).arrays()
        assert np.array_equal(read[0], x)
        assert np.array_equal(read[1], y)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["evil.pkl"], "not a format of examples"),
        (["X.npy"], "X.npy and Y.npy together"),
        (["a.npz", "b.npz"], "drop one .npz"),
        (["X.npy", "Y.npy", "Z.npy"], "drop one .npz"),
        (["X.npy", "x2.npy"], "which is X"),
        (["a.npy", "b.npy"], "which is X"),
        ([], "nothing was dropped"),
    ],
)
def test_names_that_are_no_examples_are_refused_in_one_line(names, said):
    with pytest.raises(ValueError, match=said) as refusal:
        check_names(names)
    assert "\n" not in str(refusal.value)


def written(path, kind, x, y):
    """A file that must be refused, and what is said of it."""
    if kind == "pickle":
        np.savez(path, X=np.array([{"a": 1}], dtype=object), Y=y)
        return "not a readable .npz file of numbers"
    if kind == "damage":
        path.write_bytes(b"PK\x03\x04 nothing")
        return "not a readable .npz file"
    if kind == "names":
        np.savez(path, x=x, labels=y)
        return "X"
    if kind == "shape":
        np.savez(path, X=x[:5], Y=y)
        return "5"
    if kind == "nan":
        np.savez(path, X=x, Y=np.where(y == y.max(), np.nan, y))
        return "NaN"
    if kind == "wide":
        np.savez(path, X=np.zeros((2, 2, 300)), Y=np.zeros((2, 2, 3)))
        return "300 features: at most 128"
    # A small archive of many zeros.
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("X.npy", bytes(5_000_000))
    assert path.stat().st_size < 10_000
    return "5 MB of numbers"


@pytest.mark.parametrize("kind", ["pickle", "damage", "names", "shape", "nan", "wide", "bomb"])
def test_bad_files_are_refused_in_one_line_under_the_visitors_name(tmp_path, made, kind, capsys):
    path = tmp_path / "0.npz"
    said = written(path, kind, *made)
    limits = {"file_bytes": 1_000_000}
    main([json.dumps(limits), json.dumps({"my data.npz": str(path)})])
    line = json.loads(capsys.readouterr().out)["error"]
    assert said in line
    assert "\n" not in line
    assert str(tmp_path) not in line


def test_a_header_that_promises_more_than_there_is_costs_nothing(tmp_path, made):
    path = tmp_path / "0.npy"
    np.save(path, np.zeros(3))
    path.write_bytes(path.read_bytes().replace(b"(3,), }", b"(10000000000000,), }")[:128])
    np.save(tmp_path / "1.npy", made[1])
    with pytest.raises(ValueError, match=r"X\.npy is not a readable \.npy file"):
        read_examples({"X.npy": path, "Y.npy": tmp_path / "1.npy"}, Limits())


# Receiving


def test_a_dropped_file_is_learned_from_and_gone_with_the_studio(client):
    found = send(client, b"12345abc", "5:X.npy|3:../../Y.npy")
    assert found.status_code == 201
    assert found.json()["name"] == "X.npy, ../../Y.npy"
    run = client.post("/runs", json={"data": 1, "heads": 1}).json()
    assert (run["wish"]["dim"], run["wish"]["tokens"], run["wish"]["examples"]) == (4, 3, 40)
    assert run["data"]["name"] == "X.npy, ../../Y.npy"
    told = client.get("/runs/1/events").text
    assert '"outcome": "8"' in told
    started = json.loads(next(line for line in told.split("\n") if "stage" in line)[6:])
    paths = list(json.loads(started["name"]).values())
    folder = client.app.state.runs.find(1).report.parent
    assert paths == [str(folder / "data-1" / "0.npy"), str(folder / "data-1" / "1.npy")]
    assert (folder / "data-1" / "1.npy").read_bytes() == b"abc"
    client.__exit__(None, None, None)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("body", "files", "kind", "said"),
    [
        (b"12345", "5:mine.txt", "application/octet-stream", "not a format"),
        (b"12345", "5:mine.npz", "text/plain", "octet-stream"),
        (b"12345", "x:mine.npz", "application/octet-stream", "file=SIZE:NAME"),
        (b"12345", "99:mine.npz", "application/octet-stream", "another size"),
        (b"1" * 9000, "5:mine.npz", "application/octet-stream", "another size"),
        (b"1" * 20_000, "20000:mine.npz", "application/octet-stream", "too much for this page"),
    ],
)
def test_bad_drops_are_refused_and_leave_nothing(client, body, files, kind, said):
    refused = send(client, body, files, kind)
    assert refused.status_code == 400
    assert said in refused.json()["error"]
    assert list(client.app.state.runs._make_folder().iterdir()) == []


def test_only_the_newest_files_are_kept(client):
    for _ in range(3):
        assert send(client).status_code == 201
    kept = sorted(path.name for path in client.app.state.runs._make_folder().iterdir())
    assert kept == ["data-2", "data-3"]
    refused = client.post("/runs", json={"data": 1, "heads": 1})
    assert "drop it on the page once more" in refused.json()["error"]


@pytest.mark.parametrize("program", ["import os; os.abort()", "print('no JSON')"])
def test_a_file_that_breaks_its_reader_takes_nothing_with_it(client, monkeypatch, program):
    monkeypatch.setattr(dropped, "_READER", (sys.executable, "-c", program))
    refused = send(client)
    assert refused.status_code == 400
    assert "could not be read" in refused.json()["error"]
    assert client.get("/about").status_code == 200


def test_a_file_is_read_by_the_process_that_is_meant_to(tmp_path, made):
    np.savez(tmp_path / "mine.npz", X=made[0], Y=made[1])
    body = (tmp_path / "mine.npz").read_bytes()
    with TestClient(server.make_app(Limits()), base_url=HERE) as client:
        found = send(client, body, f"{len(body)}:mine.npz").json()
    sizes = {"n": 40, "k": 3, "d": 4, "out_dim": 4, "shortest": 3}
    assert found == {"number": 1, "name": "mine.npz"} | sizes


# Learning


@pytest.mark.slow
def test_the_worker_learns_from_own_data_without_a_truth(tmp_path, made):
    np.savez(tmp_path / "0.npz", X=made[0], Y=made[1])
    told = []
    wish = Wish(heads=1, dim=4, tokens=3, examples=40, data=1)
    files = {"mine.npz": tmp_path / "0.npz"}
    worker.Learning(wish, tmp_path / "report.html", told.append, files).learn()
    json.dumps(told, allow_nan=False)
    assert told[0]["heads"] == []
    assert told[-1]["outcome"] == "RECOVERED"
    assert told[-1]["max_error"] is None
    assert all(message["head_error"] is None for message in told if message["kind"] == "event")
    assert [len(message["heads"]) for message in told if message["kind"] == "heads"][-1] == 1
    assert (tmp_path / "report.html").exists()
