"""One run over many devices and over many processes: the same layer, and each reads its own."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import mhalearn as mha
from mhalearn._runtime import storage
from mhalearn.data import examples as sources

SOURCE = Path(mha.__file__).parents[1]
LAYER = mha.random_layer(2, 6, out_dim=6, seed=3)
K = 5

# Spread and held apart however few; notes what is read of shards, and which record a run goes on
# from. PLENTY: times the counting limit of a working set. STOP: the record to interrupt after.
PROGRAM = """
import os, sys
from mhalearn._runtime import devices
from mhalearn._runtime import storage
from mhalearn.data import examples
from mhalearn.run.checkpoint import Checkpoint
from mhalearn.run.run import Run
devices.WORTH, examples._SMALL = 0.0, 0
if "PLENTY" in os.environ:
    examples._PLENTY, examples._WORKING = int(os.environ["PLENTY"]), 0
read, record, follow = storage.read_tensors, Checkpoint.record, Run.follow
def note(*words):
    with open(os.environ["NOTES"], "a") as notes:
        print(*words, file=notes)
def noted(path, **options):
    note("/".join(str(path).split(os.sep)[-2:]))
    return read(path, **options)
def counted(checkpoint, *state, **options):
    record(checkpoint, *state, **options)
    if checkpoint.records == int(os.environ.get("STOP", -1)):
        raise KeyboardInterrupt
def followed(trace, checkpoint):
    note("record", checkpoint.records)
    follow(trace, checkpoint)
storage.read_tensors, Checkpoint.record, Run.follow = noted, counted, followed
"""
LEARN = """
from mhalearn.cli import main
main(["learn", *sys.argv[1:], "--distributed", "--json", "--out", "l.safetensors"])
"""


@pytest.fixture(scope="module")
def cache():
    return os.environ["JAX_COMPILATION_CACHE_DIR"]


def environment(cache, **more):
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_", "SLURM_", "OMPI_"))
    }
    kept = {
        "PYTHONPATH": str(SOURCE),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "MHALEARN_HEARTBEAT_SECONDS": "10",
    }
    return inherited | kept | more


def write_shards(folder, n=160, noise=0.0, shard_size=30, layer=LAYER, k=K, lengths=None):
    x = mha.sample_inputs("boolean", n, k, layer.d, seed=1)
    y = layer(x)
    y = y + noise * np.random.default_rng(5).standard_normal(y.shape)
    mha.Examples(x, y, lengths).save(folder, shard_size=shard_size)
    return sorted(f"{folder.name}/{path.name}" for path in folder.glob("shard-*"))


class Run:
    """Two processes of one run of a program, each in a folder of its own."""

    def __init__(self, cache, folder, *options, program=LEARN, **more):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        self.folders = [folder / str(number) for number in range(2)]
        self.processes = []
        for number, own in enumerate(self.folders):
            own.mkdir(parents=True, exist_ok=True)
            place = {
                "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
                "JAX_NUM_PROCESSES": "2",
                "JAX_PROCESS_ID": str(number),
                "NOTES": str(folder / f"notes-{number}"),
            }
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", PROGRAM + program, *map(str, options)],
                    env=environment(cache, **place, **more),
                    cwd=own,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        self._notes = [folder / f"notes-{number}" for number in range(2)]

    @property
    def notes(self):
        return [path.read_text().splitlines() for path in self._notes]

    @property
    def layer(self):
        return mha.load_layer(self.folders[0] / "l.safetensors")

    def end(self, seconds=240):
        """What both said, once both are gone: (exit code, standard output, standard error)."""
        try:
            said = [process.communicate(timeout=seconds) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
        codes = [process.returncode for process in self.processes]
        return [(code, *texts) for code, texts in zip(codes, said, strict=True)]

    def wait_for_layer(self, seconds=120):
        """Until the checkpoint has a layer."""
        path, until = self.folders[0] / "c.safetensors", time.monotonic() + seconds
        while True:
            with contextlib.suppress(ValueError):
                return mha.load_layer(path)
            assert time.monotonic() < until
            assert all(process.poll() is None for process in self.processes)
            time.sleep(0.1)


def same(one, other):
    return mha.compare(one, other).max_error < 1e-9


# Many devices of one process

DEVICES = """
import json, sys
from unittest.mock import patch
import jax, numpy as np
import mhalearn as mha
from mhalearn._runtime import devices
from mhalearn.layer.dense import Dense
from mhalearn.layer.factored import Factored
from mhalearn.solvers import gauss_newton, scaled_problem
from mhalearn.solvers.gauss_newton import JOINT, init_dense, init_state, take_step
from mhalearn.solvers.scaled_problem import make_problem

scaled_problem._FEW_UNKNOWNS = 0  # the same compiled steps on one device as on eight
examples = mha.load_examples(sys.argv[1])
assert len(jax.devices()) == 8
thetas, queries, preconditioned, chunks = [], [], [], []
theta = np.random.default_rng(0).standard_normal((1, 2, 6, 6))
for worth in (np.inf, 0.0):
    devices.WORTH = worth
    problem = make_problem(examples, Dense(examples.architecture(2)))
    thetas.append(np.asarray(take_step(init_dense(theta, problem), problem).params.theta))
    with patch("mhalearn.solvers.scaled_problem.WORKSPACE", 2**10):
        problem = make_problem(examples, Factored(examples.architecture(2, head_dim=3)))
    heads = problem.parametrisation.init(np.random.default_rng(0))
    before = init_state(jax.tree.map(lambda leaf: leaf[None], heads))
    before = before._replace(damping=np.full(1, 10.0))
    # Signs that the preconditioner draws go with an example's place among the devices, and the
    # step is solved for up to a tolerance: without it sums alone can make a difference.
    with patch.object(gauss_newton, "_precondition", lambda *point: None):
        after = take_step(before, problem, JOINT)
    assert np.abs(after.params.query - before.params.query).max() > 1e-3  # it was taken
    queries.append(np.asarray(after.params.query))
    step = np.asarray(take_step(before, problem, JOINT).params.query - before.params.query)
    preconditioned.append(step / np.linalg.norm(step))
    chunks.append(len(problem.data.tokens))
data = make_problem(examples, Dense(examples.architecture(2, bias=True, causal=True))).data
leaves = jax.tree.leaves(data)
parts = [len(leaf.addressable_shards) for leaf in leaves]
share = max(part.data.nbytes / leaf.nbytes for leaf in leaves for part in leaf.addressable_shards)
rows = sum(float(part.data.sum()) for part in data.weight.addressable_shards)
differences = [float(np.abs(one - other).max()) for one, other in (thetas, queries)]
said = {"differences": differences, "parts": parts, "share": share, "rows": rows}
said["preconditioned"] = float(np.linalg.norm(preconditioned[0] - preconditioned[1]))
print(json.dumps(said | {"chunks": chunks}))
"""


def run_on_eight_devices(cache, program, *arguments):
    eight = environment(cache, XLA_FLAGS="--xla_force_host_platform_device_count=8")
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=eight, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_eight_devices_take_the_step_of_one_and_hold_an_eighth_each(cache, tmp_path):
    write_shards(tmp_path / "s")
    said = run_on_eight_devices(cache, DEVICES, str(tmp_path / "s"))
    assert max(said["differences"]) < 1e-12  # of dense heads, and of narrow ones in chunks
    assert said["preconditioned"] < 1e-2  # the tolerance of a first step
    assert min(said["chunks"]) > 1
    assert set(said["parts"]) == {8}
    assert said["share"] == 1 / 8
    assert said["rows"] == 160 * K


NARROW = """
import json, sys
import jax, numpy as np
import mhalearn as mha
from mhalearn._runtime import devices
from mhalearn._runtime.programs import in_float64, in_single
from mhalearn.layer.factored import Factored, Factors
from mhalearn.solvers import first_order
from mhalearn.solvers.scaled_problem import make_problem

devices.WORTH = 0.0
truth, examples = mha.load_layer(sys.argv[1]), mha.load_examples(sys.argv[2])
learned = mha.AttentionRegressor(head_dim=8).fit(examples)

@in_float64
def lower():
    kind = Factored(examples.architecture(8, head_dim=8))
    problem = make_problem(examples, kind)
    data, there = first_order.draw_from(problem, True)
    chosen = first_order._draw(there, 100, 128, np.random.default_rng(0))
    rates = np.zeros(len(chosen))
    heads = in_single(kind.init(np.random.default_rng(0)))
    heads = jax.tree.map(lambda leaf: leaf[None], heads)
    memory = jax.vmap(first_order.optax.scale_by_adam().init)(heads)
    walk = first_order.Walk(heads, memory, np.ones(1, np.float32))
    weights, each = Factors(1.0, 1.0, 1.0, 1.0, 0.0), (kind, 1e-8, True)
    lowered = first_order._advance.lower(
        walk, data, np.float32(1.0), weights, chosen, rates, rates, *each
    )
    return lowered.compile(), there

program, there = lower()
said = {
    "outcome": learned.outcome_.name,
    "error": mha.compare(learned.layer_, truth).max_error,
    "examples": [len(own) for own in there],
    "moved": [name for name in ("all-gather", "all-to-all") if f"{name}(" in program.as_text()],
}
print(json.dumps(said))
"""


@pytest.mark.slow
def test_many_narrow_heads_are_learned_on_eight_devices_from_their_own_examples(cache, tmp_path):
    layer = mha.random_layer(8, 64, rank=8, seed=1)
    layer.save(tmp_path / "t.safetensors")
    x = mha.sample_inputs("boolean", 800, 8, 64, seed=3)
    mha.Examples(x, layer(x)).save(tmp_path / "e.safetensors")
    files = [str(tmp_path / name) for name in ("t.safetensors", "e.safetensors")]
    said = run_on_eight_devices(cache, NARROW, *files)
    assert said["outcome"] == "RECOVERED"
    assert said["error"] < 1e-9
    assert said["examples"] == 8 * [100]
    assert said["moved"] == []  # nothing but sums


# Many processes

SAMPLE = """
import numpy as np
import mhalearn as mha
from mhalearn.cli.distributed import join
join()
for number, folder in enumerate(sys.argv[1:]):
    shared = mha.load_examples(folder)
    survey, part = shared.survey_and_sample(40, seed=3)
    np.savez(f"{number}.npz", *part.arrays(), *survey)
    assert shared.rows == sum(int(lengths.sum()) for _, _, lengths in shared.chunks(64))
"""


def test_two_processes_draw_the_sample_of_one_and_each_reads_its_own_shards(cache, tmp_path):
    lengths = np.random.default_rng(0).integers(2, K + 1, 160)
    folders = [tmp_path / "six", tmp_path / "one"]
    names = write_shards(folders[0], lengths=lengths)
    whole = write_shards(folders[1], shard_size=160, lengths=lengths)  # for one of the two
    run = Run(cache, tmp_path, *folders, program=SAMPLE)
    assert [code for code, _, _ in run.end()] == [0, 0]
    assert [set(seen) for seen in run.notes] == [set(names[:3]), {*names[3:], *whole}]
    for number, folder in enumerate(folders):
        survey, part = mha.load_examples(folder).survey_and_sample(40, seed=3)
        for own in run.folders:
            found = np.load(own / f"{number}.npz").values()
            for one, other in zip([*part.arrays(), *survey], found, strict=True):
                np.testing.assert_array_equal(one, other)


def test_a_checkpoint_that_not_all_processes_see_is_refused(cache, tmp_path):
    write_shards(tmp_path / "s")
    (tmp_path / "0").mkdir()
    LAYER.save(tmp_path / "0" / "c.safetensors")
    options = ("--heads", "2", "--checkpoint", "c.safetensors", "--resume")
    ends = Run(cache, tmp_path, tmp_path / "s", *options).end()
    assert [code for code, _, _ in ends] == [2, 2]
    assert all("not all processes see the same checkpoint" in err for _, _, err in ends)


@pytest.mark.slow
def test_a_process_with_bad_data_says_so_and_the_other_that_it_is_alone(cache, tmp_path):
    names = write_shards(tmp_path / "s")
    shard = tmp_path / names[-1]
    tensors, metadata = storage.read_tensors(shard, kind="examples", required=())
    bad = tensors["Y"].copy()
    bad[0, 0, 0] = np.nan
    storage.write_tensors(shard, tensors | {"Y": bad}, metadata)
    (code, _, err), (other_code, _, other_err) = Run(cache, tmp_path, tmp_path / "s").end(60)
    assert (code, other_code) == (4, 2)
    assert "another process of this run died" in err.splitlines()[-1]
    assert "process 1" in other_err.splitlines()[-1]
    assert f"{shard.name}: Y has 1 NaN" in other_err.splitlines()[-1]


@pytest.mark.slow
def test_two_processes_find_the_layer_and_the_first_one_writes(cache, tmp_path):
    names = write_shards(tmp_path / "s")
    options = ("--heads", "2", "--report", "r.html", "--checkpoint", "c.safetensors")
    run = Run(cache, tmp_path, tmp_path / "s", *options)
    (code, out, err), (other_code, other_out, other_err) = run.end()
    assert (code, other_code) == (0, 0), err + other_err
    assert json.loads(out)["outcome"] == "RECOVERED"
    assert other_out == ""
    files = [sorted(path.name for path in folder.iterdir()) for folder in run.folders]
    assert files == [["c.safetensors", "l.safetensors", "r.html"], []]
    shards = [{name for name in names if name in seen} for seen in run.notes]
    assert shards == [set(names[:3]), set(names[3:])]
    assert same(run.layer, LAYER)  # as one process does, to rounding
    expected = mha.load_examples(tmp_path / "s").survey().remembered
    np.testing.assert_array_equal(np.sort(run.layer.seen), np.sort(expected))


@pytest.mark.slow
def test_two_processes_go_on_from_a_checkpoint_to_the_layer_of_one(cache, tmp_path, monkeypatch):
    """Under noise, from a working set, and then by passes over all examples."""
    write_shards(tmp_path / "s", n=600, noise=1e-3, shard_size=100)
    options = ("--heads", "2", "--checkpoint", tmp_path / "c.safetensors")
    few = {"PLENTY": "16"}
    stopped = Run(cache, tmp_path / "1", tmp_path / "s", *options, STOP="8", **few)
    (code, _, err), (other_code, _, _) = stopped.end()
    assert (code, other_code) == (130, 130), err
    run = Run(cache, tmp_path / "2", tmp_path / "s", *options, "--resume", **few)
    (code, out, err), (other_code, _, _) = run.end()
    assert (code, other_code) == (3, 3), err
    assert json.loads(out)["outcome"] == "FITTED"
    assert ["record 8" in notes for notes in run.notes] == [True, True]
    monkeypatch.setattr(sources, "_PLENTY", 16)
    monkeypatch.setattr(sources, "_WORKING", 0)
    alone = mha.AttentionRegressor(2).fit(mha.load_examples(tmp_path / "s"))
    assert "refit" in {event.stage for event in alone.trace_}
    assert same(run.layer, alone.layer_)


@pytest.mark.slow
def test_two_processes_stop_together_when_time_is_up(cache, tmp_path):
    write_shards(tmp_path / "s", noise=0.1)
    run = Run(cache, tmp_path, tmp_path / "s", "--heads", "2", "--max-seconds", "0.2")
    (code, out, err), (other_code, *_) = run.end(90)
    assert (code, other_code) == (3, 3), err
    assert json.loads(out)["outcome"] == "TIME_LIMIT"


# Noise, and hardly more examples than unknowns: there is always another round to make.
LONG = {"n": 40, "noise": 0.5, "shard_size": 10, "layer": mha.random_layer(4, 6)}


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_other_and_leaves_the_checkpoint(cache, tmp_path, victim):
    write_shards(tmp_path / "s", **LONG)
    run = Run(cache, tmp_path, tmp_path / "s", "--heads", "4", "--checkpoint", "c.safetensors")
    run.wait_for_layer()
    run.processes[victim].kill()
    code, _, err = run.end(60)[1 - victim]
    assert code == 4
    assert "another process of this run died" in err.splitlines()[-1]
    assert mha.load_layer(run.folders[0] / "c.safetensors").d == LAYER.d


@pytest.mark.slow
def test_ctrl_c_in_one_process_stops_both_and_saves_the_best_layer(cache, tmp_path):
    write_shards(tmp_path / "s", **LONG)
    run = Run(cache, tmp_path, tmp_path / "s", "--heads", "4", "--checkpoint", "c.safetensors")
    run.wait_for_layer()
    run.processes[1].send_signal(signal.SIGINT)
    (code, out, err), (other_code, other_out, _) = run.end(60)
    assert (code, other_code) == (130, 130), err
    assert json.loads(out)["interrupted"]
    assert other_out == ""
    assert run.layer.d == LAYER.d
    assert list(run.folders[1].iterdir()) == []


@pytest.mark.slow
def test_two_processes_walk_the_phases_over_their_own_shards(cache, tmp_path):
    layer = mha.random_layer(2, 8, scale=4.0, seed=3)
    names = write_shards(tmp_path / "s", n=30_000, shard_size=4_000, layer=layer, k=4)
    options = ("--heads", "2", "--method", "sculpt", "--no-polish")
    run = Run(cache, tmp_path, tmp_path / "s", *options)
    (_, out, err), _ = run.end()
    assert json.loads(out)["outcome"] == "FITTED", err
    examples = mha.load_examples(tmp_path / "s")
    alone = mha.AttentionRegressor(2, "sculpt", polish=False).fit(examples)
    # Seen further apart than the 1e-9 that polished layers are held to; the cause is not known.
    assert mha.compare(run.layer, alone.layer_).max_error < 1e-6
    reads = [set(seen) for seen in run.notes]
    assert [sum(name in seen for name in names) for seen in reads] == [4, 4]
    assert not reads[0] & reads[1] & set(names)


# What is refused


def test_a_process_that_meets_nobody_says_where_it_waited(cache, tmp_path):
    place = {
        "JAX_COORDINATOR_ADDRESS": "localhost:1",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": "1",
        "MHALEARN_JOIN_SECONDS": "1",
    }
    code, err = learn(cache, tmp_path, place)
    assert code == 4
    assert "did not meet at localhost:1 within 1 s" in err.splitlines()[-1]


def learn(cache, shards, place):
    command = [sys.executable, "-c", "from mhalearn.cli import main; main()", "learn", str(shards)]
    done = subprocess.run(
        [*command, "--distributed"],
        env=environment(cache, **place),
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ({}, "neither Slurm, Open MPI nor Kubernetes started this process"),
        ({"JAX_NUM_PROCESSES": "2"}, "JAX_COORDINATOR_ADDRESS, JAX_PROCESS_ID not set"),
        (
            {
                "JAX_COORDINATOR_ADDRESS": "localhost:1",
                "JAX_NUM_PROCESSES": "2",
                "JAX_PROCESS_ID": "2",
            },
            "number the processes from 0",
        ),
    ],
)
def test_a_process_without_a_place_is_told_what_to_set(cache, tmp_path, place, said):
    code, err = learn(cache, tmp_path, place)
    assert code == 2
    assert err.count("\n") == 1
    assert said in err
