"""Nothing is lost: interrupted, killed or out of disk, a run goes on to the same layer."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import mhalearn as mha
from mhalearn import cli
from mhalearn._runtime import locks, storage
from mhalearn.data import Examples
from mhalearn.data import examples as examples_module
from mhalearn.estimator import AttentionRegressor
from mhalearn.layer.layer import load_layer
from mhalearn.layer.random_layers import random_layer
from mhalearn.learners import NewtonOptions, Round
from mhalearn.report.terminal import Progress
from mhalearn.run import checkpoint as journals
from mhalearn.run.checkpoint import Checkpoint, generator_from, generator_words
from mhalearn.run.clock import Clock
from mhalearn.run.outcome import Candidate, Outcome
from mhalearn.run.run import Run

SOURCE = Path(mha.__file__).parents[1]
K, D = 4, 4
TRUTH = random_layer(2, D, seed=3)
X = mha.sample_inputs("gaussian", 60, K, D, seed=1)
Y = TRUTH(X)
NOISY = Y + 0.05 * np.random.default_rng(0).standard_normal(Y.shape)
RUN = {"method": "newton", "random_state": 0, "examples": "abc"}
SEEN = np.arange(3, dtype=np.uint64)


def opened(path, run=RUN, resume=True):
    return Checkpoint.open(path, run, SEEN, resume=resume)


def same_layer(one, other):
    return (
        np.array_equal(one.theta, other.theta)
        and np.array_equal(one.w, other.w)
        and np.array_equal(one.seen, other.seen)
    )


def refusal(path, run=RUN):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        opened(path, run)
    assert len(str(caught.value).splitlines()) == 1
    assert str(path) in str(caught.value)
    return str(caught.value)


# The journal


class Pair(NamedTuple):
    a: np.ndarray
    b: tuple


def test_states_come_back_as_they_were(tmp_path):
    path = tmp_path / "run.safetensors"
    state = Pair(np.arange(3.0), (np.float32(2.5), {"c": np.zeros((0, 2)), "d": np.array([True])}))
    one = opened(path)
    one.record("stage", (7, 0.1, state))
    one.record("numbers", {"x": np.array(3), "y": np.eye(2, dtype=np.float32)})
    one.record("array", np.arange(4), now=True)
    two = opened(path)
    step, number, found = two.recall("stage", like=(0, 0.0, state))
    assert (step, number) == (7, 0.1)
    assert type(step) is int and type(number) is float  # noqa: PT018
    assert isinstance(found, Pair)
    for a, b in zip(found.a, state.a, strict=True):
        assert a == b
    assert found.b[0] == np.float32(2.5)
    assert found.b[0].dtype == np.float32
    assert found.b[1]["c"].shape == (0, 2)
    assert two.recall("numbers")["x"] == 3
    assert two.recall("numbers")["y"].dtype == np.float32
    assert np.array_equal(two.recall("array"), np.arange(4))
    assert two.recall("nothing") is None
    assert two.records == 3


def test_parts_of_a_stage_are_replaced_by_its_result(tmp_path):
    checkpoint = opened(tmp_path / "run.safetensors")
    note = checkpoint.noter("choice")
    with checkpoint.within("round"):
        checkpoint.record("part", np.zeros(1))
        note({"loss": np.array(1.0)})
        assert checkpoint.recall("part") is not None
        with checkpoint.within("deeper"):
            checkpoint.record("part", np.zeros(1))
    assert checkpoint.begun("round")
    assert not checkpoint.begun("roun")
    checkpoint.record("round", np.ones(2), now=True)
    again = opened(tmp_path / "run.safetensors")
    assert set(again._states) == {"choice", "round"}
    assert again.recall("choice") == {"loss": 1.0}


def test_a_note_is_kept_with_the_next_state_only(tmp_path):
    checkpoint = opened(tmp_path / "run.safetensors")
    checkpoint.record("a", np.zeros(1), now=True)
    checkpoint.noter("note")(np.ones(1))
    checkpoint.flush()
    assert opened(tmp_path / "run.safetensors").recall("note") is None
    checkpoint.record("a", np.zeros(1), now=True)
    assert opened(tmp_path / "run.safetensors").recall("note") == np.ones(1)


def test_work_is_done_once(tmp_path):
    done = []

    def work():
        done.append(1)
        return np.arange(3)

    for _ in range(2):
        checkpoint = opened(tmp_path / "run.safetensors")
        assert np.array_equal(checkpoint.once("work", work), np.arange(3))
    assert done == [1]


def test_without_a_file_nothing_is_remembered():
    checkpoint = Checkpoint()
    checkpoint.record("a", np.zeros(1), now=True)
    checkpoint.keep(TRUTH, 0.5)
    checkpoint.flush()
    assert checkpoint.recall("a") is None
    assert not checkpoint.begun("a")


def test_a_closed_journal_keeps_the_best_layer_and_the_old_states(tmp_path):
    path = tmp_path / "run.safetensors"
    trace = Run(max_seconds=1e-9)
    trace.checkpoint = opened(path)
    with trace.checkpoint.within("stage"):
        trace.checkpoint.record("part", np.zeros(1))
        assert trace.is_over()
        trace.checkpoint.record("part", np.ones(1))
    trace.checkpoint.record("stage", np.ones(1))
    trace.keep(TRUTH, 0.5)
    trace.checkpoint.flush()
    again = opened(path)
    assert set(again._states) == {"stage/part"}
    assert again.recall("stage/part") == np.zeros(1)
    assert np.array_equal(load_layer(path).theta, TRUTH.theta)


def test_the_file_is_a_layer_once_there_is_one(tmp_path):
    path = tmp_path / "run.safetensors"
    checkpoint = opened(path)
    checkpoint.record("a", np.zeros(1))
    with pytest.raises(ValueError, match="holds 'journal'"):
        load_layer(path)
    layer = random_layer(2, D, key_vector=True, out_bias=True, seed=1)
    checkpoint.keep(layer, 0.25)
    checkpoint.flush()
    for name in ("theta", "w", "key_vector", "out_bias"):
        assert np.array_equal(getattr(load_layer(path), name), getattr(layer, name))
    assert np.array_equal(load_layer(path).seen, SEEN)
    assert load_layer(path).metadata["held_out_loss"] == "0.25"
    best, error = opened(path).best
    assert error == 0.25
    assert np.array_equal(best.key_vector, layer.key_vector)


def test_writes_are_few_unless_a_stage_has_ended(tmp_path, monkeypatch):
    written = []
    write = storage.write_tensors
    monkeypatch.setattr(
        storage, "write_tensors", lambda *arguments: (written.append(1), write(*arguments))
    )
    checkpoint = opened(tmp_path / "run.safetensors")
    for step in range(50):
        checkpoint.record("a", step)
    assert len(written) == 1
    checkpoint.record("b", 1, now=True)
    checkpoint.flush()
    assert len(written) == 2
    monkeypatch.setattr(journals, "_SECONDS", 0.0)
    monkeypatch.setattr(journals, "_SHARE", 0.0)
    checkpoint.record("a", 50)
    assert len(written) == 3


def test_a_solution_comes_back(tmp_path):
    def solve():
        return Candidate(TRUTH, Outcome.STUCK, "phase 2: ünclear", loss=0.5)

    def solve_again():
        raise AssertionError("it was known")

    for work in (solve, solve_again):
        trace = Run()
        trace.follow(opened(tmp_path / "run.safetensors"))
        found = trace.once("solution", work)
        assert found.outcome is Outcome.STUCK
        assert (found.reason, found.loss) == ("phase 2: ünclear", 0.5)
        assert np.array_equal(found.layer.w, TRUTH.w)


def test_generators_go_on():
    rng = np.random.default_rng([3, 5])
    rng.integers(7, size=3)  # half a word is left over
    other = generator_from(generator_words(rng))
    for _ in range(3):
        assert rng.integers(7) == other.integers(7)
        assert rng.random() == other.random()
        assert np.array_equal(rng.normal(size=3), other.normal(size=3))


# Files that are not what they should be


def test_another_run_is_refused_by_name(tmp_path):
    path = tmp_path / "run.safetensors"
    opened(path).record("a", np.zeros(1), now=True)
    assert "method='newton', now it is 'adam'" in refusal(path, RUN | {"method": "adam"})
    assert "random_state=0, now it is 1" in refusal(path, RUN | {"random_state": 1})
    assert "other examples" in refusal(path, RUN | {"examples": "def"})
    assert opened(path).recall("a") is not None


def test_every_damaged_byte_is_noticed(tmp_path):
    path = tmp_path / "run.safetensors"
    checkpoint = opened(path)
    checkpoint.record("a", {"x": np.arange(5.0), "y": 3})
    checkpoint.keep(TRUTH, 0.5)
    checkpoint.flush()
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    rng = np.random.default_rng(0)
    places = [*rng.integers(header, len(whole), 40), *rng.integers(8, header, 40)]
    noticed = 0
    for place in map(int, places):
        spoiled = bytearray(whole)
        spoiled[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(spoiled)
        try:
            again = opened(path)
        except ValueError:
            refusal(path)
            noticed += 1
        else:  # the version that wrote it, or the spaces that pad the header
            assert place < header
            assert np.array_equal(again.recall("a")["x"], np.arange(5.0))
    assert noticed >= 70
    for length in (1, 7, 8, 100, header, len(whole) - 1):
        path.write_bytes(whole[:length])
        refusal(path)


def test_what_is_no_journal_is_refused(tmp_path):
    path = tmp_path / "run.safetensors"
    for content in (b"\x80\x04K\x01.", b"PK\x03\x04", b"hello world", bytes(1000)):
        path.write_bytes(content)
        refusal(path)
    Examples(X, Y).save(path)
    refusal(path)
    TRUTH.save(path)
    assert opened(path).is_plain
    path.write_bytes(b"")  # an empty file holds no work
    assert not opened(path).resumed


def forged(path, states, run=None):
    """A checkpoint that nobody recorded, with a digest that is right."""
    said = {"run": RUN, "records": 1} if run is None else run
    tensors = {"journal/run": np.frombuffer(json.dumps(said).encode(), np.uint8)}
    tensors |= {f"journal/at/{name}": array for name, array in states.items()}
    metadata = {"kind": "journal"}
    tensors["journal/digest"] = journals._digest(tensors, metadata)
    storage.write_tensors(path, tensors, metadata)


@pytest.mark.parametrize("run", [[], 5, {"run": 5}, {"run": RUN}, {"run": RUN, "records": "x"}])
def test_a_forged_head_is_refused(tmp_path, run):
    forged(tmp_path / "run.safetensors", {}, run)
    refusal(tmp_path / "run.safetensors")


@pytest.mark.parametrize(
    "states",
    [
        {"a#0": np.zeros(2)},
        {"a#0": np.zeros(2), "a#1": np.zeros((2, 3))},
        {"a#0": np.array(1), "a#1": np.zeros((2, 3), np.float32)},
        {"a#0": np.array(1), "a#1": np.zeros((2, 3)), "a#2": np.zeros(1)},
    ],
)
def test_forged_states_are_refused(tmp_path, states):
    path = tmp_path / "run.safetensors"
    forged(path, states)
    with pytest.raises(ValueError, match="damaged"):
        opened(path).recall("a", like=(0, np.zeros((2, 3))))


def test_a_forged_solution_is_refused(tmp_path):
    path = tmp_path / "run.safetensors"
    good = {"theta": np.eye(3)[None], "w": np.eye(3)[None], "causal": np.array(False)}
    good |= {"outcome": np.array(0), "reason": np.zeros(0, np.uint8), "loss": np.array(0.0)}
    spoiled = {
        "theta": np.full((1, 3, 3), np.nan),
        "w": np.eye(3),
        "outcome": np.array(99),
        "reason": np.array([255], np.uint8),
        "loss": None,
    }
    for name, value in spoiled.items():
        arrays = {key: array for key, array in (good | {name: value}).items() if array is not None}
        forged(path, {f"solution#{key}": array for key, array in arrays.items()})
        trace = Run()
        trace.follow(opened(path))
        with pytest.raises(ValueError, match="damaged"):
            trace.once("solution", lambda: Candidate(TRUTH))


# Where a run may begin


def test_a_checkpoint_that_is_there_is_not_overwritten(tmp_path):
    path = tmp_path / "run.safetensors"
    AttentionRegressor(2, checkpoint=path).fit(X, Y)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="resume, or remove the file"):
        AttentionRegressor(2, checkpoint=path).fit(X, Y)
    with pytest.raises(ValueError, match="random_state=0, now it is 1"):
        AttentionRegressor(2, checkpoint=path, resume=True, random_state=1).fit(X, Y)
    with pytest.raises(ValueError, match="other examples"):
        AttentionRegressor(2, checkpoint=path, resume=True).fit(X[1:], Y[1:])
    assert path.read_bytes() == before


def test_leftovers_of_killed_writes_are_removed(tmp_path):
    path = tmp_path / "run.safetensors"
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for pid in (dead.pid, os.getpid()):  # a number may come again
        storage.beside(path, f"-{pid}-0123456789abcdef.tmp").write_bytes(b"half")
    kept = {f".other-{dead.pid}-0123456789abcdef.tmp", "run.safetensors"}
    (tmp_path / f".other-{dead.pid}-0123456789abcdef.tmp").write_bytes(b"of another file")
    living = storage.beside(path, f"-{os.getppid()}-0123456789abcdef.tmp")
    living.write_bytes(b"being written")
    AttentionRegressor(2, checkpoint=path, resume=True).fit(X, Y)
    assert set(os.listdir(tmp_path)) == kept | {living.name}


HOLDER = """
import sys, time
from mhalearn._runtime.locks import locked
with locked(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that uses a checkpoint."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "run.safetensors")]
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def test_a_checkpoint_that_another_run_uses_is_refused_by_its_process_id(holder, tmp_path, capsys):
    path, data = tmp_path / "run.safetensors", tmp_path / "data.safetensors"
    Examples(X, Y).save(data)
    (tmp_path / "link.safetensors").symlink_to(path)
    for name in (path, tmp_path / "link.safetensors"):
        arguments = ("learn", data, "--heads", "2", "--checkpoint", name, "--resume")
        code, out, err = cli_in_process(capsys, *arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert f"{name}: process {holder.pid} on " in err
    assert not path.exists()
    AttentionRegressor(2, checkpoint=tmp_path / "other.safetensors").fit(X, Y)


@pytest.mark.parametrize("by_system", [True, False])
def test_a_killed_run_holds_nothing(holder, tmp_path, monkeypatch, by_system):
    path = tmp_path / "run.safetensors"
    if not by_system:
        monkeypatch.setattr(locks, "fcntl", None)
        with pytest.raises(ValueError, match=rf"process {holder.pid} .* remove .*\.lock"):
            AttentionRegressor(2, checkpoint=path).fit(X, Y)
    holder.kill()
    holder.wait()
    assert storage.beside(path, ".lock").exists()
    AttentionRegressor(2, checkpoint=path).fit(X, Y)
    assert os.listdir(tmp_path) == ["run.safetensors"]


def test_runs_of_one_process_are_kept_apart_and_errors_let_go(tmp_path):
    path = tmp_path / "run.safetensors"

    def begin_another(event):
        with pytest.raises(ValueError, match=f"process {os.getpid()} on "):
            AttentionRegressor(2, checkpoint=path, resume=True).fit(X, Y)
        raise Killed

    for _ in range(2):
        with pytest.raises(Killed):
            AttentionRegressor(2, checkpoint=path, resume=True, on_event=begin_another).fit(X, Y)
    assert not list(tmp_path.glob(".*"))


def test_a_lock_goes_from_one_to_the_next_and_never_to_two(tmp_path):
    """Threads that take and release it as fast as they can; counted by the one who holds it."""
    path, holders, held = tmp_path / "run.safetensors", [], []

    def take_often():
        for _ in range(200):
            with suppress(ValueError), locks.locked(path):
                holders.append(1)
                held.append(len(holders))
                holders.pop()

    threads = [threading.Thread(target=take_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(held) == {1}
    assert not list(tmp_path.iterdir())


def test_a_run_out_of_time_goes_on_with_more(tmp_path, monkeypatch):
    path = tmp_path / "run.safetensors"
    whole = AttentionRegressor(2).fit(X, NOISY)
    looks = {}

    def seconds(clock):  # that ticks when it is looked at
        looks[clock] = looks.get(clock, 0) + 1
        return float(looks[clock])

    monkeypatch.setattr(Clock, "seconds", property(seconds))
    records = []
    for _ in range(3):
        stopped = AttentionRegressor(2, checkpoint=path, resume=True, max_seconds=25.0).fit(
            X, NOISY
        )
        assert stopped.outcome_ is Outcome.TIME_LIMIT
        records.append(stopped._run.checkpoint.records)
    assert records == sorted(set(records))
    again = AttentionRegressor(2, checkpoint=path, resume=True).fit(X, NOISY)
    assert again.outcome_ is whole.outcome_
    assert same_layer(again.layer_, whole.layer_)


# Interrupted at every stage


class Killed(BaseException):
    """Nobody catches this."""


class Interruptions:
    """End a run right after the first record of every stage it has not been ended at before."""

    def __init__(self, monkeypatch, only=None):
        self.stages, self.records, self.on = [], 0, True
        record = Checkpoint.record

        def watched(checkpoint, name, state, *, now=False):
            record(checkpoint, name, state, now=now)
            self.records += 1
            stage = checkpoint._place + name
            asked = only is None or name in only
            if self.on and asked and stage not in self.stages:
                self.stages.append(stage)
                raise Killed

        monkeypatch.setattr(Checkpoint, "record", watched)


SHORT = (
    Round(1, 4, 1e-2),
    Round(2, 6, 1e-3, release_steps=3, first_order_steps=1500, hops=3),
    Round(2, 4, 1e-3, release_steps=2, hops=2, prior=1.3),
)
ONE = NewtonOptions(plenty=SHORT[:1], scarce=SHORT[:1], brief=SHORT[:1])
PHASES = mha.Examples.from_callable(
    random_layer(2, 8, scale=4.0, seed=11), "boolean", n=20_000, k=3, d=8, seed=12
)
CASES = {
    "newton": (
        {"n_heads": 2, "options": NewtonOptions(plenty=SHORT, scarce=SHORT)},
        (X[:20], NOISY[:20]),
        {"round 2, first-order annealing", "round 2, head exchange 3", "round 3, no ridge"},
    ),
    "auto": (
        {"n_heads": "auto", "options": ONE},
        (X[:9], NOISY[:9]),
        {"1 heads, brief", "2 heads, patient"},
    ),
    "adam": ({"n_heads": 2, "method": "adam"}, (X, NOISY), {"adam", "start 3"}),
    "lbfgs": ({"n_heads": 2, "method": "lbfgs"}, (X, NOISY), {"walk", "start 5"}),
    "linear": ({"n_heads": 2, "method": "linear"}, (X, NOISY), {"starts"}),
    "sculpt": (
        {"n_heads": 2, "method": "sculpt", "polish": False},
        (PHASES,),
        {"certified rows 1", "refined sum 1", "coarse"},
    ),
}
LONG = ("auto", "sculpt", "lbfgs")


@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in CASES],
)
def test_interrupted_at_every_stage_it_ends_at_the_same_layer(case, tmp_path, monkeypatch):
    settings, data, expected = CASES[case]
    interruptions = Interruptions(monkeypatch, expected if case == "sculpt" else None)
    interruptions.on = False
    whole = AttentionRegressor(checkpoint=tmp_path / "whole.safetensors", **settings).fit(*data)
    records, interruptions.records, interruptions.on = interruptions.records, 0, True
    path = tmp_path / "run.safetensors"
    for _ in range(records + 1):
        model = AttentionRegressor(checkpoint=path, resume=True, **settings)
        try:
            model.fit(*data)
            break
        except Killed:
            assert os.listdir(tmp_path).count("run.safetensors") == 1
    assert same_layer(model.layer_, whole.layer_)
    assert model.outcome_ is whole.outcome_
    assert interruptions.records == records  # nothing was done twice
    known = {part for stage in interruptions.stages for part in stage.split("/")}
    assert expected <= known
    assert len(interruptions.stages) >= len(expected)


# The command line: killed, out of disk, a shard gone


@pytest.fixture(scope="session")
def environment():
    """For processes of their own."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")]),
    }


def command(*arguments):
    start = "from mhalearn.cli import main; main()"
    return [sys.executable, "-c", start, *map(str, arguments)]


def hard_examples():
    """Noise near the counting limit: nothing is exact, so that every round is gone through."""
    layer = random_layer(2, 6, seed=5)
    x = mha.sample_inputs("boolean", 9, 4, 6, seed=6)
    noise = 0.05 * np.random.default_rng(0).standard_normal((9, 4, 6))
    return Examples(x, layer(x) + noise)


def cli_in_process(capsys, *arguments):
    capsys.readouterr()
    code = cli.run([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


def interrupted_in(stage, path, data):
    """A checkpoint of a run that was interrupted in a stage."""

    def stop(event):
        if event.stage.startswith(stage):
            raise Killed

    with pytest.raises(Killed):
        AttentionRegressor(2, checkpoint=path, on_event=stop).fit(data)


def test_resume_begins_where_there_is_no_checkpoint_yet(tmp_path, capsys):
    Examples(X, Y).save(tmp_path / "data.safetensors")
    arguments = ("learn", tmp_path / "data.safetensors", "--heads", "2")
    arguments += ("--checkpoint", tmp_path / "run.safetensors")
    assert cli_in_process(capsys, *arguments, "--resume")[0] == 0
    code, _, err = cli_in_process(capsys, *arguments)
    assert code == 2
    assert err.count("\n") == 1
    assert "resume" in err
    assert cli_in_process(capsys, *arguments, "--resume")[0] == 0
    code, _, err = cli_in_process(capsys, *arguments, "--resume", "--seed", "1")
    assert code == 2
    assert "random_state=0, now it is 1" in err


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_full_disk_is_exit_code_4_and_harms_nothing(failing, tmp_path, capsys, monkeypatch):
    path, out, data = (tmp_path / f"{name}.safetensors" for name in ("run", "best", "data"))
    hard_examples().save(data)
    interrupted_in("round 2", path, mha.load_examples(data))
    before = path.read_bytes()
    real = getattr(os, failing)

    def full(*arguments):
        if failing == "replace" and Path(arguments[1]) != path:
            return real(*arguments)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, failing, full)
        arguments = ("learn", data, "--heads", "2", "--checkpoint", path, "--resume", "--out", out)
        code, printed, err = cli_in_process(capsys, *arguments)
    assert code == 4
    assert printed == ""
    assert err.count("\n") == 1
    assert f"{path}: No space left on device; free some space" in err
    assert "--resume goes on from the checkpoint" in err
    assert ("best layer so far saved to" in err) == (failing == "replace") == out.exists()
    assert path.read_bytes() == before
    assert not list(tmp_path.glob(".*"))


def test_a_folder_that_vanishes_is_broken_from_outside(tmp_path):
    checkpoint = opened(tmp_path / "folder" / "run.safetensors")
    with pytest.raises(OSError, match=r"folder .* does not exist"):
        checkpoint.record("a", np.zeros(1), now=True)


def test_ctrl_c_leaves_a_checkpoint_to_go_on_from(tmp_path, capsys, monkeypatch):
    path, data = tmp_path / "run.safetensors", tmp_path / "data.safetensors"
    hard_examples().save(data)

    def press(self, event):
        if event.stage == "round 2" and event.step == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "on_event", press)
    code, _, err = cli_in_process(capsys, "learn", data, "--heads", "2", "--checkpoint", path)
    assert code == 130
    assert err.count("\n") == 1
    assert "--resume goes on from the checkpoint" in err
    known = Checkpoint.open(path, {}, SEEN, resume=True)  # the very last state, written or not
    assert any(name.endswith("round 2/descent/round 2") for name in known._states)
    assert known.best is not None


@pytest.mark.skipif(os.name != "posix", reason="limits of a process are a POSIX matter")
def test_a_process_that_may_write_no_more_ends_with_4(environment, tmp_path):
    path, data = tmp_path / "run.safetensors", tmp_path / "data.safetensors"
    hard_examples().save(data)
    interrupted_in("round 1", path, mha.load_examples(data))
    before = path.read_bytes()
    limit = len(before) // 2
    start = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit})); "
    python, flag, main, *arguments = command(
        "learn", data, "--heads", "2", "--checkpoint", path, "--resume"
    )
    done = subprocess.run(
        [python, flag, start + main, *arguments],
        env=environment | {"MHALEARN_CACHE_DIR": "", "JAX_COMPILATION_CACHE_DIR": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 4
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert f"{path}: File too large" in done.stderr
    assert path.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["data.safetensors", "run.safetensors"]


def test_a_shard_that_vanishes_between_passes_is_exit_code_4(tmp_path, capsys, monkeypatch):
    for name in ("_SMALL", "_WORKING"):  # these would be held in memory
        monkeypatch.setattr(examples_module, name, 0)
    folder, path = tmp_path / "shards", tmp_path / "run.safetensors"
    PHASES.save(folder, shard_size=5_000)
    shard = folder / "shard-00002.safetensors"
    show = Progress.on_event

    def vanish(self, event):
        if event.stage == "phase 2: certification" and "certified" in event.data and shard.exists():
            shard.rename(tmp_path / "elsewhere")
        show(self, event)

    monkeypatch.setattr(Progress, "on_event", vanish)
    arguments = ("learn", folder, "--heads", "2", "--method", "sculpt", "--no-polish")
    arguments += ("--checkpoint", path)
    code, printed, err = cli_in_process(capsys, *arguments)
    assert code == 4
    assert printed == ""
    assert err.count("\n") == 1
    assert "lost a shard" in err
    assert "shard-00002" in err
    assert "--resume goes on from the checkpoint" in err
    known = Checkpoint.open(path, {}, SEEN, resume=True)
    assert known.begun("solution/certified rows 0")
    monkeypatch.setattr(Progress, "on_event", show)
    code, _, err = cli_in_process(capsys, *arguments, "--resume")
    assert code == 2  # of a folder that is not whole, before any work
    assert "shard-00002" in err
    (tmp_path / "elsewhere").rename(shard)
    assert cli_in_process(capsys, *arguments, "--resume")[0] == 3  # to its end: fitted


def phase_examples():
    layer = random_layer(2, 10, scale=4.0, seed=11)
    x = mha.sample_inputs("boolean", 60_000, 3, 10, seed=12)
    return Examples(x, layer(x))


KILLS = 20


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="SIGKILL is a POSIX matter")
@pytest.mark.parametrize(
    ("method", "make"), [("newton", hard_examples), ("sculpt", phase_examples)]
)
def test_killed_at_twenty_moments_it_ends_at_the_same_layer(method, make, environment, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    path, data = folder / "run.safetensors", tmp_path / "data.safetensors"
    make().save(data)
    base = ("learn", data, "--heads", "2", "--method", method)

    def begin(name, checkpoint):
        arguments = (*base, "--checkpoint", checkpoint, "--resume", "--out", tmp_path / name)
        return subprocess.Popen(command(*arguments), env=environment, stdout=subprocess.DEVNULL)

    began = time.monotonic()
    code = begin("whole.safetensors", tmp_path / "checkpoint.safetensors").wait(timeout=900)
    seconds = time.monotonic() - began
    whole = Checkpoint.open(tmp_path / "checkpoint.safetensors", {}, SEEN, resume=True)

    def same():
        pair = (load_layer(tmp_path / f"{name}.safetensors") for name in ("whole", "layer"))
        return mha.compare(*pair).max_error <= 1e-12

    rng = np.random.default_rng(0)
    records, kills = 0, 0
    while kills < KILLS:
        process = begin("layer.safetensors", path)
        before = path.stat().st_mtime_ns if path.exists() else None
        if kills % 2:  # after it has written, else at any moment of its first seconds
            while process.poll() is None and (
                not path.exists() or path.stat().st_mtime_ns == before
            ):
                time.sleep(0.005)
            time.sleep(rng.uniform(0, 0.05 if method == "sculpt" else seconds / KILLS))
        else:
            time.sleep(rng.uniform(0, min(6.0, seconds / 3)))
        process.kill()
        if process.wait() == code:  # it came to its end between two kills: another run
            assert same()
            path.unlink()
            records = 0
            continue
        assert process.returncode == -signal.SIGKILL
        kills += 1
        left = sorted(Path(name).suffix for name in os.listdir(folder) if name != path.name)
        # of the write it was killed in and of the lock it held: removed by the next process
        assert left in ([], [".lock"], [".tmp"], [".lock", ".tmp"])
        if path.exists():
            found = Checkpoint.open(path, {}, SEEN, resume=True)
            assert found.records >= max(1, records)
            assert found.begun("solution")
            records = found.records
            if found.best is not None:
                assert np.isfinite(load_layer(path).theta).all()
    assert records <= whole.records
    assert begin("layer.safetensors", path).wait(timeout=900) == code
    assert os.listdir(folder) == [path.name]
    assert Checkpoint.open(path, {}, SEEN, resume=True).records == whole.records
    assert same()
