"""The studio: what it refuses, what it limits, and that a run can be stopped."""

import asyncio
import base64
import contextlib
import http.client
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from starlette.testclient import TestClient

import mhalearn as mha
from mhalearn import cli
from mhalearn.learners import list_learners
from mhalearn.run.events import Event
from mhalearn.studio import connections, runs, server, worker
from mhalearn.studio.film import Film
from mhalearn.studio.pictures import MOST_CELLS
from mhalearn.studio.recorded import PAGE
from mhalearn.studio.request import PRESETS, Limits, Wish, bounds, list_methods, read_wish
from mhalearn.studio.watcher import LayerWatcher
from mhalearn.studio.words import explain_stage

HERE = "http://127.0.0.1:8042"
# Stand-ins for the worker: what the server does must not depend on how fast a layer is learned.
SLEEPER = "import sys, time; sys.stdin.readline(); time.sleep(600)"
# Has a layer to show, and then waits to be told why it should stop.
STOPPABLE = """
import json, pathlib, sys
sys.stdin.readline()
print(json.dumps({"kind": "heads", "heads": []}), flush=True)
why = sys.stdin.readline().strip()
"""
REPORTER = STOPPABLE + "pathlib.Path(sys.argv[1]).write_text(f'<p>{why}</p>')"
SPEAKER = """
import json, pathlib, sys
print(json.dumps({"kind": "heads", "heads": []}))
print(json.dumps({"kind": "heads", "heads": [1]}))
pathlib.Path(sys.argv[1]).write_text("<p>a report</p>")
print(json.dumps({"kind": "ended", "outcome": "RECOVERED"}))
"""


@pytest.fixture
def studio(monkeypatch):
    """A client of the page, with the given program in place of the worker."""
    clients = []

    def make(program, **limits):
        monkeypatch.setattr(runs, "_WORKER", (sys.executable, "-c", program))
        client = TestClient(server.make_app(Limits(**limits)), base_url=HERE)
        clients.append(client.__enter__())
        return client

    yield make
    for client in clients:
        client.__exit__(None, None, None)


def events(client, number):
    """What a run tells, until it is over; the last one is its summary."""
    lines = client.get(f"/runs/{number}/events").text.split("\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


# What is asked for


def test_presets_are_within_the_limits():
    for wish in PRESETS.values():
        assert read_wish(vars(wish), Limits()) == wish
    assert PRESETS["Three heads"] == Wish() == read_wish({}, Limits())


@pytest.mark.parametrize("name", bounds(Limits()))
def test_numbers_have_bounds_and_beyond_them_one_line(name):
    least, most = bounds(Limits())[name]
    assert getattr(read_wish({name: least}, Limits()), name) == least
    for value in (least - 1, most + 1):
        with pytest.raises(ValueError, match=f"{name} is .*: choose from") as refusal:
            read_wish({name: value}, Limits())
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ([], "one JSON object"),
        (None, "one JSON object"),
        ({"rm": 1}, "'rm' is no setting"),
        ({"heads": "3"}, "heads is '3': give a whole number"),
        ({"heads": 2.5}, "give a whole number"),
        ({"heads": True}, "give a whole number"),
        ({"heads": None}, "give a whole number"),
        ({"heads": 10**400}, "give a whole number"),
        ({"scale": "NaN"}, "give a number"),
        ({"scale": float("nan")}, "give a number"),
        ({"noise": float("inf")}, "give a number"),
        ({"scale": 10**400}, "give a number"),
        ({"count_heads": 1}, "give true or false"),
        ({"method": 3}, "give a word"),
        ({"method": "magic"}, "choose one of newton"),
        ({"inputs": "x" * 1000}, "choose one of boolean"),
        ({"method": "adam", "count_heads": True}, "must be told the number of heads"),
        ({"method": "adam", "ask": True}, "adam cannot choose examples"),
        ({"block": True, "method": "adam"}, "leave method adam out"),
        ({"block": True, "ask": True}, "leave ask out"),
        ({"block": True, "dim": 17}, "dim is 17: choose from 4 to 16"),
        ({"block": True, "heads": 5}, "heads is 5: choose from 1 to 4"),
        ({"block": True, "neurons": 33}, "neurons is 33: choose from 1 to 32"),
        ({"block": True, "activation": "tanh"}, "choose one of gelu"),
        ({"block": True, "norm": "both"}, "choose one of none, pre, post"),
        ({"data": 3}, "drop it on the page once more"),
        ({"causal": True}, "for a file of your own"),
        ({"examples": 50_000, "dim": 32, "tokens": 16}, "choose at most 19531 examples"),
    ],
)
def test_bad_wishes_are_refused_in_one_line(asked, said):
    with pytest.raises(ValueError, match=said) as refusal:
        read_wish(asked, Limits())
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 200


def test_every_learner_is_offered_with_its_words():
    assert list_methods() == {learner.name: learner.title for learner in list_learners()}


# Who is let in


def test_the_page_and_its_limits_are_served(studio):
    client = studio(SLEEPER)
    page = client.get("/")
    assert page.status_code == 200
    assert "default-src 'self'" in page.headers["content-security-policy"]
    for name in ("studio.css", "studio.js"):
        assert name in page.text
    for file in PAGE.iterdir():
        if file.is_file():
            assert client.get(f"/{file.name}").status_code == 200
            imported = re.findall(r' from "./(.+?)"', file.read_text())
            assert all((PAGE / name).exists() for name in imported)
            assert file.suffix != ".js" or len(file.read_text().split("\n")) < 200
    assert " style=" not in page.text  # which the policy would not allow
    about = client.get("/about").json()
    assert about["bounds"]["heads"] == [1, Limits().heads]
    assert about["presets"]["Three heads"]["heads"] == 3


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8042", "127.0.0.1.evil.example", ""),
        *("127.0.0.1:anything@evil", "127.0.0.1:80@evil", "localhost:", "127.0.0.1:8042 evil"),
    ],
)
@pytest.mark.parametrize("path", ["/", "/about", "/runs", "/runs/1/report"])
def test_other_host_names_are_refused(studio, host, path):
    answer = studio(SLEEPER).get(path, headers={"host": host})
    assert answer.status_code == 403
    assert "127.0.0.1 or localhost" in answer.json()["error"]
    assert "frame-ancestors" in answer.headers["content-security-policy"] or "report" in path
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("host", ["127.0.0.1:8042", "localhost:1", "LOCALHOST", "127.0.0.1"])
def test_own_host_names_are_let_in(studio, host):
    assert studio(SLEEPER).get("/about", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:3000"},
        {"origin": "https://127.0.0.1:8042"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_other_sites_may_start_and_stop_nothing(studio, headers):
    client = studio(SLEEPER)
    for path in ("/runs", "/runs/1/stop", "/check", "/data?file=1:X.npz"):
        assert client.post(path, json={}, headers=headers).status_code == 403
    assert client.get("/runs").json() == []


@pytest.mark.parametrize(
    ("body", "kind", "said"),
    [
        (b"{", "application/json", "not JSON"),
        (b"\xff", "application/json", "not JSON"),
        (b"[" * 4000, "application/json", "not JSON"),
        (b"{}", "text/plain", "send JSON"),
        (b" " * 5000, "application/json", "at most 4096 bytes"),
        (b'{"heads": 99}', "application/json", "choose from 1 to 8"),
    ],
)
def test_bad_requests_are_answered_in_one_line(studio, body, kind, said):
    answer = studio(SLEEPER).post("/runs", content=body, headers={"content-type": kind})
    assert answer.status_code == 400
    assert said in answer.json()["error"]


def test_runs_that_are_not_there(studio):
    client = studio(SLEEPER)
    assert client.get("/runs/7/events").status_code == 404
    assert client.get("/runs/7/report").status_code == 404
    assert client.post("/runs/7/stop").status_code == 404
    assert client.get("/runs/..%2f..%2fetc/report").status_code == 404


# Runs


def test_a_run_is_stopped_at_once_and_makes_room(studio):
    client = studio(SLEEPER, running=1)
    began = time.monotonic()
    assert client.post("/runs", json={}, headers={"origin": HERE}).status_code == 201
    refused = client.post("/runs", json={})
    assert refused.status_code == 429
    assert "stop one, or wait" in refused.json()["error"]
    stopped = client.post("/runs/1/stop").json()
    assert (stopped["state"], stopped["running"], stopped["report"]) == ("stopped", False, False)
    assert time.monotonic() - began < 10  # which a process is given to leave by itself
    *_, last, over = events(client, 1)
    assert last == {"kind": "stopped", "reason": "stopped by hand"}
    assert over["state"] == "stopped"
    assert client.get("/runs/1/report").status_code == 404
    assert client.post("/runs", json={}).status_code == 201


def test_a_run_that_overstays_is_ended_from_outside(studio):
    client = studio(SLEEPER, grace=0.0)
    client.post("/runs", json={"seconds": 1})
    *_, last, over = events(client, 1)
    assert "time limit" in last["reason"]
    assert over["state"] == "stopped"


def begin_and_wait_for_heads(client, **wish):
    client.post("/runs", json=wish)
    run = client.app.state.runs.find(1)
    while not any("heads" in message for message in run.messages):
        time.sleep(0.01)


def test_a_stopped_run_that_has_a_layer_reports_it(studio):
    client = studio(REPORTER)
    begin_and_wait_for_heads(client)
    assert not client.get("/runs").json()[0]["report"]
    assert client.get("/runs/1/report").status_code == 404
    stopped = client.post("/runs/1/stop").json()
    assert (stopped["state"], stopped["report"]) == ("stopped", True)
    assert client.get("/runs/1/report").text == "<p>stopped by hand</p>"
    assert client.post("/runs/1/stop").json() == stopped


def test_a_run_that_overstays_reports_too(studio):
    client = studio(REPORTER, grace=0.0)
    client.post("/runs", json={"seconds": 1})
    assert events(client, 1)[-1]["state"] == "stopped"
    assert "after its time limit" in client.get("/runs/1/report").text


def test_a_stopped_run_that_does_not_report_in_time_is_ended(studio, monkeypatch):
    monkeypatch.setattr(runs, "_REPORT_SECONDS", 0.2)
    client = studio(STOPPABLE + "import time; time.sleep(600)")
    begin_and_wait_for_heads(client)
    stopped = client.post("/runs/1/stop").json()
    assert (stopped["state"], stopped["running"], stopped["report"]) == ("stopped", False, False)


def test_a_run_that_ends_while_it_is_stopped_has_ended(studio):
    client = studio(STOPPABLE + "print(json.dumps({'kind': 'ended', 'outcome': 'FITTED'}))")
    begin_and_wait_for_heads(client)
    assert client.post("/runs/1/stop").json()["state"] == "FITTED"


def test_a_finished_run_has_a_report_that_may_run_no_script(studio):
    client = studio(SPEAKER)
    client.post("/runs", json={})
    events(client, 1)
    told = events(client, 1)  # who comes late hears the same, to go back to any moment
    assert [message.get("kind") for message in told] == ["heads", "heads", "ended", None]
    assert told[-1]["state"] == "RECOVERED"
    assert told[-1]["report"]
    report = client.get("/runs/1/report")
    assert report.text == "<p>a report</p>"
    assert "sandbox" in report.headers["content-security-policy"]


def test_of_many_pictures_few_are_kept_evenly_spread(studio):
    program = """
import json
for at in range(500):
    print(json.dumps({"kind": "heads", "at": at, "heads": []}))
print(json.dumps({"kind": "ended", "outcome": "RECOVERED"}))
"""
    client = studio(program)
    client.post("/runs", json={})
    events(client, 1)  # who watches hears all; who comes late, this:
    *told, _ = events(client, 1)
    assert len(told) == 501  # the numbers of the others stay taken
    places = [message["at"] for message in told if message["kind"] == "heads"]
    assert len(places) == runs._PICTURES
    assert (places[0], places[-1]) == (0, 499)
    gaps = [b - a for a, b in itertools.pairwise(places)]
    assert max(gaps) <= 4 * 500 / runs._PICTURES


def test_a_closed_page_is_noticed_before_the_next_message():
    """Else a long run is written to nobody, and every message of it ends in a complaint."""

    class LongRun:
        async def follow(self, after):
            for number in range(1, 4):
                yield number, "{}"

        def summary(self):
            return {}

    async def listen():
        heard = []
        async for message in server._stream(LongRun(), 0):
            # As a transport does where the other side has gone: it says so in the loop's next turn.
            asyncio.get_running_loop().call_soon(heard.append, "gone")
            heard.append(message.partition(":")[0])
        return heard

    heard = asyncio.run(listen())
    messages = [place for place, word in enumerate(heard) if word == "id"]
    assert len(messages) == 3
    assert all(heard[place + 1] == "gone" for place in messages)


def test_a_stream_goes_on_where_it_was_cut(studio):
    client = studio(SPEAKER)
    client.post("/runs", json={})
    assert len(events(client, 1)) == 4
    answer = client.get("/runs/1/events", headers={"last-event-id": "2"})
    assert "id: 2\n" not in answer.text
    assert "id: 3\n" in answer.text


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("raise RuntimeError('no luck')", "the process broke: RuntimeError: no luck"),
        ("pass", "without a word"),
        ("print('no JSON')", "could not be followed"),
        ("import os; os.abort()", "without a word"),
    ],
)
def test_a_run_that_breaks_takes_nothing_with_it(studio, program, said):
    client = studio(program)
    client.post("/runs", json={})
    *_, last, over = events(client, 1)
    assert said in last["reason"]
    assert not over["running"]
    assert client.get("/about").status_code == 200


def test_only_the_newest_runs_are_kept(studio):
    client = studio("pass", kept=2)
    for number in (1, 2, 3):
        client.post("/runs", json={})
        events(client, number)
    assert [run["number"] for run in client.get("/runs").json()] == [3, 2]


def test_closing_the_studio_ends_its_runs_and_removes_its_files(monkeypatch):
    monkeypatch.setattr(runs, "_WORKER", (sys.executable, "-c", SLEEPER))

    async def work():
        all_runs = runs.Runs(Limits())
        run = all_runs.start(Wish())
        await asyncio.sleep(0.2)
        await all_runs.close()
        return run

    run = asyncio.run(work())
    assert run.state == "stopped"
    assert not run.report.parent.exists()


def test_a_worker_leaves_with_its_server(tmp_path):
    """A server that is killed closes the pipe, and its runs do not outlive it."""
    program = (
        "import threading, time\nfrom mhalearn.studio import worker\n"
        "threading.Thread(target=worker._heed_the_server, args=[print], daemon=True).start()\n"
        "print('here', flush=True)\ntime.sleep(600)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )
    with process:
        assert process.stdout.readline() == b"here\n"
        process.stdin.close()
        assert process.wait(10) == 1


# Connections


@pytest.fixture
def served():
    """The port of a studio in a process of its own, as the command serves it."""
    program = (
        "from mhalearn.studio.server import serve\n"
        "serve(0, ready=lambda address: print(address, flush=True))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
    )
    with process:
        yield int(process.stdout.readline().rstrip("/\n").rpartition(":")[2])
        process.terminate()


def ask(port, timeout=5.0):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    with contextlib.closing(connection):
        connection.request("GET", "/about")
        return connection.getresponse().status


def test_silent_connections_starve_nobody_and_are_hung_up_on(served):
    with contextlib.ExitStack() as held:
        sockets = [
            held.enter_context(socket.create_connection(("127.0.0.1", served))) for _ in range(80)
        ]
        for slow in sockets[:5]:
            slow.sendall(b"GET /about HTTP/1.1\r\nHost: ")
        assert ask(served) == 200
        until = time.monotonic() + connections.HEAD_SECONDS + 5.0
        for silent in sockets:
            silent.settimeout(max(0.1, until - time.monotonic()))
            assert silent.recv(1) == b""
        assert ask(served) == 200


def test_a_body_that_does_not_come_is_not_waited_for(served):
    with socket.create_connection(("127.0.0.1", served), timeout=15) as slow:
        slow.sendall(
            b"POST /runs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 10\r\n\r\n{"
        )
        assert slow.recv(1000).startswith(b"HTTP/1.1 400 ")


def test_requests_at_a_time_are_limited():
    async def wait(scope, receive, send):
        await asyncio.sleep(600)

    async def refused():
        few = connections.FewRequests(wait, most=2)
        going = [asyncio.create_task(few({"type": "http"}, None, None)) for _ in range(2)]
        await asyncio.sleep(0)
        told = []

        async def tell(message):
            told.append(message)

        await few({"type": "http"}, None, tell)
        for task in going:
            task.cancel()
        return told[0]["status"]

    assert asyncio.run(refused()) == 503


# The worker


@pytest.mark.slow
def test_the_worker_learns_tells_and_reports(tmp_path):
    told = []
    wish = Wish(heads=1, dim=4, tokens=4, examples=60)
    worker.Learning(wish, tmp_path / "report.html", told.append).learn()
    json.dumps(told, allow_nan=False)
    kinds = [message["kind"] for message in told]
    assert kinds[0] == "begin"
    assert told[0]["floor"] == {"value": 2**-52, "name": "rounding of the labels"}
    pictures = [message for message in told if message["kind"] == "heads"]
    assert pictures[-1]["at"] == kinds.count("event")
    assert pictures[0]["heads"][0]["theta_error"] > 1e-3 > pictures[-1]["heads"][0]["theta_error"]
    assert kinds[-1] == "ended"
    assert {"event", "heads", "stage"} <= set(kinds)
    errors = [m["head_error"] for m in told if m["kind"] == "event" and m["head_error"]]
    assert errors[0] > 1e-3 > 1e-12 > errors[-1]
    assert told[-1]["outcome"] == "RECOVERED"
    assert told[-1]["max_error"] < 1e-12
    assert "RECOVERED" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_a_box_is_asked_and_the_account_is_told(tmp_path):
    """Calls spent, what for, and heads found, within what may be asked."""
    told = []
    wish = Wish(2, 4, 8, examples=24, inputs="gaussian", count_heads=True, ask=True)
    worker.make_run(wish, tmp_path / "report.html", told.append, {}).learn()
    json.dumps(told, allow_nan=False)
    accounts = [message for message in told if message["kind"] == "asked"]
    calls = [account["calls"] for account in accounts]
    assert calls == sorted(calls)
    assert calls[-1] <= 24 == accounts[-1]["most"]
    assert calls[-1] == sum(count for _, count in accounts[-1]["steps"])
    # The last call is one sequence of half the length.
    assert accounts[-1]["scalars"] == 8 * (4 * calls[-1] - 2)
    assert [accounts[0]["heads"], accounts[-1]["heads"]] == [None, 2]
    kinds = [message["kind"] for message in told]
    assert all(0 < account["at"] <= kinds.count("event") for account in accounts)
    assert told[-1]["outcome"] == "RECOVERED"
    assert told[-1]["max_error"] < 1e-12


@pytest.mark.slow
def test_a_stopped_worker_reports_its_best_layer_and_promises_nothing(tmp_path):
    report = tmp_path / "report.html"
    process = subprocess.Popen(
        [*runs._WORKER, str(report)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
    )
    with process:
        wish = Wish(heads=2, dim=8, tokens=4, examples=500, method="adam", seconds=300.0)
        process.stdin.write(json.dumps(vars(wish)) + "\n")
        process.stdin.flush()
        told = (json.loads(line) for line in process.stdout)
        assert any(message["kind"] == "heads" for message in told)
        process.stdin.write("stopped by hand\n")
        process.stdin.flush()
        rest = list(told)
    assert rest[-1] == {"kind": "stage", "name": "writing the report"}
    said = report.read_text()
    assert "TIME_LIMIT" in said
    assert "RECOVERED" not in said
    assert "Stopped by hand; this is the best layer until then" in said
    assert "nothing is promised about unseen inputs" in said
    assert "mhalearn learn EXAMPLES --heads 2 --method adam" in said


class StubEstimator:
    """Has one layer at hand, whenever it is asked."""

    def __init__(self, layer):
        self._layer = layer

    def layer_at_hand(self):
        return self._layer


def test_the_worker_thins_what_a_fast_learner_tells():
    told = []
    truth = mha.random_layer(n_heads=1, d=2)
    watcher = LayerWatcher(truth, StubEstimator(truth), told.append)
    for step in range(5000):
        watcher.on_event(Event("adam", step, 1.0 / (step + 1), 0.0))
    events = [message for message in told if message["kind"] == "event"]
    assert 600 <= len(events) < 700
    assert [message.get("words") for message in events[:2]] == [explain_stage("adam"), None]
    places = [message["at"] for message in told if message["kind"] == "heads"]
    assert places[:4] == [1, 2, 3, 4]  # all are shown at first
    assert 64 < len(places) < 250
    assert max(b - a for a, b in itertools.pairwise(places)) <= 16  # and none is far from another
    watcher.on_event(Event("outcome", 0, float("nan"), 0.0, "told in any case"))
    last = [message for message in told if message["kind"] == "event"][-1]
    assert last["detail"] == "told in any case"
    assert last["error"] is None


def test_a_slow_learner_is_shown_at_least_every_second():
    film = Film()
    assert all(film.takes(float(second)) for second in range(300))
    quick = Film()
    assert sum(quick.takes(1e-3 * step) for step in range(900)) < 250


def test_pictures_are_small_and_heads_without_truth_keep_their_places():
    told = []
    layer = mha.random_layer(n_heads=2, d=100)
    watcher = LayerWatcher(None, StubEstimator(None), told.append)
    watcher.show(layer)
    watcher.show(layer.replace(theta=layer.theta[::-1], w=layer.w[::-1]))
    first, second = (message["heads"] for message in told)
    assert first == second
    assert (first[0]["theta"]["rows"], first[0]["w"]["columns"]) == (MOST_CELLS, MOST_CELLS)
    cells = np.frombuffer(base64.b64decode(first[0]["theta"]["bytes"]), np.int8)
    largest = np.abs(layer.theta).max(axis=(1, 2))  # drawn, though cells are fewer than entries
    assert np.abs(cells).max() == round(127 * largest[0] / largest.max())
    watcher.show(layer.replace(w=0 * layer.w))  # nothing was found: nothing is shown
    assert len(told) == 2


def test_a_layer_is_at_hand_only_inside_an_event():
    truth = mha.random_layer(n_heads=1, d=4)
    examples = mha.Examples.from_callable(truth, "boolean", n=60, k=4, d=4)
    seen = []
    estimator = mha.AttentionRegressor(1)
    assert estimator.layer_at_hand() is None
    estimator.set_params(on_event=lambda event: seen.append(estimator.layer_at_hand()))
    estimator.fit(examples)
    assert estimator.layer_at_hand() is None
    layers = [layer for layer in seen if layer is not None]
    assert (
        mha.compare(layers[-1], truth).max_error < 1e-12 < mha.compare(layers[0], truth).max_error
    )


# The command


def test_without_the_extra_one_line_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "mhalearn.studio.server")
    assert cli.run(["studio"]) == 2
    complaint = capsys.readouterr().err
    assert complaint.count("\n") == 1
    assert "pip install 'mhalearn[studio]'" in complaint


def test_a_port_that_is_taken_is_one_line(capsys):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.run(["studio", "--port", str(port)]) == 2
    complaint = capsys.readouterr().err
    assert complaint.count("\n") == 1
    assert f"--port {port}" in complaint
