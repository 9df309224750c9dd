"""One run over many devices and over many processes: the same layer, and each reads its own."""

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

SOURCE = Path(mha.__file__).parents[1]
LAYER = mha.random_layer(2, 6, out_dim=6, seed=3)
K = 5

# Spread, and held apart, however small; and every read of a shard's rows is written down.
PROGRAM = """
import os, sys
from mhalearn import devices, storage
from mhalearn.examples import examples
devices.WORTH, examples._SMALL = 0.0, 0
read = storage.read_tensors
def noted(path, **options):
    with open(os.environ["READS"], "a") as notes:
        print(path.name, file=notes)
    return read(path, **options)
storage.read_tensors = noted
from mhalearn.cli import main
main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def environment(cache, **more):
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_", "XLA_", "SLURM_", "OMPI_"))
    }
    kept = {
        "PYTHONPATH": str(SOURCE),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
        "MHALEARN_HEARTBEAT_SECONDS": "10",
    }
    return inherited | kept | more


def write_shards(folder, n=160, noise=0.0, shard_size=30, layer=LAYER, k=K):
    x = mha.sample_inputs("boolean", n, k, layer.d, seed=1)
    y = layer(x)
    y = y + noise * np.random.default_rng(5).standard_normal(y.shape)
    mha.Examples(x, y).save(folder, shard_size=shard_size)
    return sorted(path.name for path in folder.glob("shard-*"))


class Run:
    """Two processes of one `mhalearn learn --distributed`, each with a folder of its own."""

    def __init__(self, cache, folder, shards, *options, **more):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        self.folders = [folder / str(number) for number in range(2)]
        self.processes = []
        for number, own in enumerate(self.folders):
            own.mkdir()
            place = {
                "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
                "JAX_NUM_PROCESSES": "2",
                "JAX_PROCESS_ID": str(number),
                "READS": str(folder / f"reads-{number}"),
            }
            command = [sys.executable, "-c", PROGRAM, "learn", str(shards), "--distributed"]
            outputs = ["--json", "--out", "l.safetensors", "--checkpoint", "c.safetensors"]
            self.processes.append(
                subprocess.Popen(
                    [*command, *outputs, *options],
                    env=environment(cache, **place, **more),
                    cwd=own,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )

    def end(self, seconds=240):
        """What both said, once both are gone: (exit code, standard output, standard error)."""
        try:
            said = [process.communicate(timeout=seconds) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
        codes = [process.returncode for process in self.processes]
        return [(code, *texts) for code, texts in zip(codes, said, strict=True)]

    def wait_for_checkpoint(self, seconds=120):
        path, until = self.folders[0] / "c.safetensors", time.monotonic() + seconds
        while not path.exists():
            assert time.monotonic() < until
            assert all(process.poll() is None for process in self.processes)
            time.sleep(0.1)
        return path


def same(one, other):
    return mha.compare(one, other).max_error < 1e-9


# Many devices of one process

DEVICES = """
import json, sys
import jax, numpy as np
import mhalearn as mha
from mhalearn import devices
from mhalearn.polish import begin, descend
from mhalearn.problem import make_problem

examples = mha.load_examples(sys.argv[1])
assert len(jax.devices()) == 8
differences, thetas = [], []
theta = np.random.default_rng(0).standard_normal((1, 2, 6, 6))
for worth in (np.inf, 0.0):
    devices.WORTH = worth
    problem = make_problem(examples, 2, bias=False, causal=False)
    thetas.append(np.asarray(descend(begin(theta, problem), problem).theta))
differences.append(float(np.abs(thetas[0] - thetas[1]).max()))
for fit in json.loads(sys.argv[2]):
    layers = []
    for worth in (np.inf, 0.0):
        devices.WORTH = worth
        layers.append(mha.AttentionRegressor(**fit).fit(examples).layer_)
    differences.append(mha.compare(*layers).max_error)
data = make_problem(examples, 2, bias=True, causal=True).data
parts = [len(leaf.addressable_shards) for leaf in data]
share = max(part.data.nbytes / leaf.nbytes for leaf in data for part in leaf.addressable_shards)
rows = sum(float(part.data.sum()) for part in data.weight.addressable_shards)
print(json.dumps({"differences": differences, "parts": parts, "share": share, "rows": rows}))
"""


def on_eight_devices(cache, shards, *fits):
    eight = environment(cache, XLA_FLAGS="--xla_force_host_platform_device_count=8")
    command = [sys.executable, "-c", DEVICES, str(shards), json.dumps(fits)]
    done = subprocess.run(command, env=eight, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_eight_devices_take_the_step_of_one_and_hold_an_eighth_each(cache, tmp_path):
    write_shards(tmp_path / "s")
    said = on_eight_devices(cache, tmp_path / "s")
    assert max(said["differences"]) < 1e-12
    assert set(said["parts"]) == {8}
    assert said["share"] == 1 / 8
    assert said["rows"] == 160 * K


@pytest.mark.slow
def test_eight_devices_find_the_layer_of_one(cache, tmp_path):
    write_shards(tmp_path / "s")
    fits = [{"n_heads": 2}, {"n_heads": "auto"}, {"n_heads": 2, "method": "adam"}]
    assert max(on_eight_devices(cache, tmp_path / "s", *fits)["differences"]) < 1e-9


@pytest.mark.slow
def test_eight_devices_fit_noise_like_one(cache, tmp_path):
    write_shards(tmp_path / "s", noise=1e-3)
    fits = [{"n_heads": 2}, {"n_heads": 2, "bias": True}, {"n_heads": 2, "method": "lbfgs"}]
    assert max(on_eight_devices(cache, tmp_path / "s", *fits)["differences"]) < 1e-9


SCULPT = """
import sys
import mhalearn as mha
examples = mha.load_examples(sys.argv[1])
estimator = mha.AttentionRegressor(2, "sculpt", polish=False).fit(examples)
estimator.layer_.save(sys.argv[2])
"""


@pytest.mark.slow
def test_the_phases_on_eight_devices_find_what_they_find_on_one(cache, tmp_path):
    layer = mha.random_layer(2, 8, scale=4.0, seed=3)
    write_shards(tmp_path / "s", n=30_000, shard_size=10_000, layer=layer, k=4)
    layers = []
    for count in (1, 8):
        out = tmp_path / f"{count}.safetensors"
        flags = f"--xla_force_host_platform_device_count={count}"
        command = [sys.executable, "-c", SCULPT, str(tmp_path / "s"), str(out)]
        subprocess.run(command, env=environment(cache, XLA_FLAGS=flags), check=True)
        layers.append(mha.load_layer(out))
    assert same(*layers)


# Many processes


def test_two_processes_find_the_layer_and_each_reads_its_own_shards(cache, tmp_path):
    names = write_shards(tmp_path / "s")
    run = Run(cache, tmp_path, tmp_path / "s", "--heads", "2", "--report", "r.html")
    (code, out, err), (other_code, other_out, other_err) = run.end()
    assert (code, other_code) == (0, 0), err + other_err
    assert json.loads(out)["outcome"] == "RECOVERED"
    assert other_out == ""
    files = [sorted(path.name for path in folder.iterdir()) for folder in run.folders]
    assert files == [["c.safetensors", "l.safetensors", "r.html"], []]
    reads = [set((tmp_path / f"reads-{number}").read_text().split()) for number in range(2)]
    shards = [{name for name in names if name in seen} for seen in reads]
    assert shards == [set(names[:3]), set(names[3:])]
    learned = mha.load_layer(run.folders[0] / "l.safetensors")
    assert same(learned, LAYER)  # as one process does, to rounding
    expected = mha.load_examples(tmp_path / "s").hashes()
    np.testing.assert_array_equal(np.sort(learned.seen), np.sort(expected))


@pytest.mark.slow
def test_two_processes_fit_noise_like_one(cache, tmp_path):
    write_shards(tmp_path / "s", noise=1e-3)
    (_, out, err), _ = (run := Run(cache, tmp_path, tmp_path / "s", "--heads", "2")).end()
    assert json.loads(out)["outcome"] == "FITTED", err
    alone = mha.AttentionRegressor(2).fit(mha.load_examples(tmp_path / "s"))
    assert same(mha.load_layer(run.folders[0] / "l.safetensors"), alone.layer_)


@pytest.mark.slow
def test_two_processes_stop_together_when_time_is_up(cache, tmp_path):
    write_shards(tmp_path / "s", noise=0.1)
    run = Run(cache, tmp_path, tmp_path / "s", "--heads", "2", "--max-seconds", "0.2")
    (code, out, err), (other_code, *_) = run.end(90)
    assert (code, other_code) == (3, 3), err
    assert json.loads(out)["outcome"] == "TIME_LIMIT"


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_other_and_leaves_the_checkpoint(cache, tmp_path, victim):
    # Noise, and hardly more examples than unknowns: there is always another round to make.
    write_shards(tmp_path / "s", n=40, noise=0.5, shard_size=10, layer=mha.random_layer(4, 6))
    run = Run(cache, tmp_path, tmp_path / "s", "--heads", "4")
    checkpoint = run.wait_for_checkpoint()
    run.processes[victim].kill()
    code, _, err = run.end(60)[1 - victim]
    assert code == 4
    assert "another process of this run died" in err.splitlines()[-1]
    assert mha.load_layer(checkpoint).d == LAYER.d
    assert [path.name for path in run.folders[0].iterdir()] == ["c.safetensors"]


@pytest.mark.slow
def test_ctrl_c_in_one_process_stops_both_and_saves_the_best_layer(cache, tmp_path):
    write_shards(tmp_path / "s", n=40, noise=0.5, shard_size=10, layer=mha.random_layer(4, 6))
    run = Run(cache, tmp_path, tmp_path / "s", "--heads", "4")
    run.wait_for_checkpoint()
    run.processes[1].send_signal(signal.SIGINT)
    (code, out, err), (other_code, other_out, _) = run.end(60)
    assert (code, other_code) == (130, 130), err
    assert json.loads(out)["interrupted"]
    assert other_out == ""
    assert mha.load_layer(run.folders[0] / "l.safetensors").d == LAYER.d
    assert list(run.folders[1].iterdir()) == []


@pytest.mark.slow
def test_two_processes_run_adam_like_one(cache, tmp_path):
    write_shards(tmp_path / "s")
    run = Run(cache, tmp_path, tmp_path / "s", "--heads", "2", "--method", "adam")
    (_, out, err), _ = run.end()
    assert json.loads(out)["recovered"], err
    learned = mha.load_layer(run.folders[0] / "l.safetensors")
    assert same(learned, LAYER)


@pytest.mark.slow
def test_two_processes_walk_the_phases_over_their_own_shards(cache, tmp_path):
    layer = mha.random_layer(2, 8, scale=4.0, seed=3)
    names = write_shards(tmp_path / "s", n=30_000, shard_size=4_000, layer=layer, k=4)
    options = ("--heads", "2", "--method", "sculpt", "--no-polish")
    run = Run(cache, tmp_path, tmp_path / "s", *options)
    (_, out, err), _ = run.end()
    assert json.loads(out)["outcome"] == "FITTED", err
    learned = mha.load_layer(run.folders[0] / "l.safetensors")
    examples = mha.load_examples(tmp_path / "s")
    alone = mha.AttentionRegressor(2, "sculpt", polish=False).fit(examples)
    assert same(learned, alone.layer_)
    reads = [set((tmp_path / f"reads-{number}").read_text().split()) for number in range(2)]
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
