"""The studio refuses at once what counting knows, and says how many examples would do."""

import sys

import pytest
from starlette.testclient import TestClient

import mhalearn as mha
from mhalearn.learners.chen_li.breakdown import Breakdown, check_label_dimension
from mhalearn.studio import runs, server
from mhalearn.studio.counting import count
from mhalearn.studio.request import PRESETS, Limits, Sizes, Wish

HERE = "http://127.0.0.1:8042"


def no_file(number):
    return None


def problem(find=no_file, **wish):
    return count(Wish(**wish), find)["problem"]


@pytest.mark.parametrize("name", PRESETS)
def test_of_the_presets_only_the_one_with_too_few_is_refused(name):
    refused = count(PRESETS[name], no_file)["problem"]
    assert (refused is not None) == (name == "Too few examples")


@pytest.mark.parametrize("wish", [Wish(), Wish(heads=8, dim=4, tokens=2), Wish(tokens=2, dim=32)])
def test_examples_at_the_counting_limit_are_let_in_and_one_fewer_is_not(wish):
    layer = mha.random_layer(n_heads=wish.heads, d=wish.dim)
    limit = layer.architecture.counting_limit(wish.tokens)
    known = count(wish, no_file)
    assert known["limit"] - 1 < limit <= known["limit"]
    assert known["ratio"] == pytest.approx(wish.examples / limit)
    shape = {"heads": wish.heads, "dim": wish.dim, "tokens": wish.tokens}
    assert problem(**shape, examples=known["limit"]) is None
    line = problem(**shape, examples=known["limit"] - 1)
    assert f"at least {known['limit']}" in line
    assert "\n" not in line


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("dim", [3, 4, 8])
@pytest.mark.parametrize("tokens", [2, 3, 5, 9])
def test_phases_are_refused_where_their_own_check_would_end_them(heads, dim, tokens):
    try:
        check_label_dimension(heads, tokens, dim)
        works = True
    except Breakdown:
        works = False
    shape = {"heads": heads, "dim": dim, "tokens": tokens, "examples": 5000}
    line = problem(method="sculpt", **shape)
    assert (line is None) == works
    assert works or f"= {heads * (tokens - 1)}" in line
    assert problem(method="newton", **shape) is None


def test_phases_without_enough_rows_are_refused():
    shape = {"heads": 2, "dim": 32, "tokens": 3}
    line = problem(method="sculpt", examples=227, **shape)
    assert "2048 rows" in line
    assert "at least 228 examples" in line
    assert problem(method="sculpt", examples=228, **shape) is None
    assert problem(examples=227, **shape) is None


def test_own_data_are_counted_by_their_lengths_and_widths():
    whole = Sizes(n=30, k=6, d=8, out_dim=8)
    short = Sizes(n=30, k=6, d=8, out_dim=8, lengths=(2,) * 30)
    narrow = Sizes(n=30, k=6, d=8, out_dim=2)
    asked = {"data": 1, "heads": 2, "dim": 8, "tokens": 6, "examples": 30}
    found = {1: whole, 2: short, 3: narrow}
    limits = [count(Wish(**asked | {"data": i}), found.get)["limit"] for i in found]
    assert limits[0] < limits[2] < limits[1]
    assert "need one length" in problem(lambda _: short, method="sculpt", **asked)
    assert "at most 2" in problem(lambda _: narrow, method="sculpt", **asked)
    assert "no row sees two tokens" in problem(lambda _: Sizes(30, 1, 8, 8), **asked)
    causal = problem(lambda _: whole, method="sculpt", causal=True, **asked)
    assert "causal=True" in causal


def test_what_counting_refuses_is_never_started(monkeypatch):
    monkeypatch.setattr(runs, "_WORKER", (sys.executable, "-c", "raise SystemExit"))
    with TestClient(server.make_app(Limits()), base_url=HERE) as client:
        asked = {"examples": 10}
        refused = client.post("/runs", json=asked)
        assert refused.status_code == 400
        assert refused.json()["error"] == client.post("/check", json=asked).json()["problem"]
        assert "examples is 10: by counting" in refused.json()["error"]
        assert client.get("/runs").json() == []
        known = client.post("/check", json={}).json()
        assert (known["problem"], known["limit"]) == (None, 12)
        bad = client.post("/check", json={"heads": 99}).json()
        assert bad == {"limit": None, "ratio": None, "problem": "heads is 99: choose from 1 to 8"}
