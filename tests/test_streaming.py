"""Examples that do not fit into memory: views over them, how often they are read, and the room a
fit takes."""

import json
import os
import shutil
import subprocess
import sys
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

import mhalearn as mha
from mhalearn._runtime import storage
from mhalearn.data import Examples, answers, examples, inputs, load_examples
from mhalearn.data import shards as files
from mhalearn.data.inputs import sample_inputs
from mhalearn.data.shards import Shards
from mhalearn.judge.consistency_checks import all_examples
from mhalearn.judge.evidence import Evidence
from mhalearn.judge.jacobian_spectrum import measure_spectrum
from mhalearn.judge.subsets import Subsets
from mhalearn.learners import Learner, find_learner
from mhalearn.run.outcome import Candidate, Outcome
from mhalearn.run.run import Run
from mhalearn.solvers import streaming_bfgs as refit_module
from mhalearn.solvers.polish import polish_on

LAYER = mha.random_layer(2, 3, out_dim=2, seed=1)
SOURCE = Path(mha.__file__).parents[1]
GIB = 2**30


def sharded(folder):
    x = sample_inputs("boolean", 50, 4, 3, seed=2)
    lengths = np.random.default_rng(3).integers(1, 5, 50)
    whole = Examples(x, LAYER(x, lengths), lengths, metadata={"who": "me"})
    whole.save(folder / "shards", shard_size=7)
    return load_examples(folder / "shards")


def drawn(folder):
    return Examples.from_callable(LAYER, n=50, k=4, d=3, seed=2)


def a_view(folder):
    return Examples.from_callable(LAYER, n=100, k=4, d=3, seed=2).view(slice(1, None, 2))


@pytest.fixture
def nothing_is_held(monkeypatch):
    """Answers of boxes are asked for in every pass, as those are that are too many to hold."""
    monkeypatch.setattr(answers, "HELD", 0)


@pytest.fixture
def nothing_is_small(monkeypatch, nothing_is_held):
    monkeypatch.setattr(examples, "_SMALL", 0)
    monkeypatch.setattr(inputs, "_BLOCK_EXAMPLES", 16)


@pytest.fixture(params=[sharded, drawn, a_view])
def lazy(request, tmp_path, nothing_is_small):
    made = request.param(tmp_path)
    assert not made.in_memory
    return made


# Views


CHOICES = [slice(5, 40, 3), slice(0, 20), slice(-9, None), np.arange(50) % 7 == 2, [0, 17, 49]]


@pytest.mark.parametrize("indices", CHOICES)
def test_a_view_is_the_subset_without_holding_it(lazy, indices):
    view, subset = lazy.view(indices), lazy.subset(indices)
    assert not view.in_memory
    assert subset.in_memory
    assert (view.n, view.k, view.d, view.out_dim) == (subset.n, lazy.k, lazy.d, lazy.out_dim)
    assert (view.y_dtype, view.metadata) == (lazy.y_dtype, lazy.metadata)
    assert view.has_lengths == lazy.has_lengths
    asked = view.architecture(2)
    assert view.counting_limit(asked) == subset.counting_limit(asked)
    for size in (1, 4, 100):
        for found, expected in zip(view.chunks(size), subset.chunks(size), strict=True):
            for one, other in zip(found, expected, strict=True):
                assert not one.flags.writeable
                assert one.dtype == other.dtype
                np.testing.assert_array_equal(one, other)
    for one, other in zip(view.survey(), subset.survey(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("indices", [[3, 2], [1, 1], slice(None, None, -1)])
def test_a_view_is_ascending(lazy, indices):
    with pytest.raises(ValueError, match="ascending"):
        lazy.view(indices)


@pytest.mark.parametrize("indices", [[50], [], slice(3, 3), [0.5], [True, False]])
def test_views_that_do_not_exist_are_refused(lazy, indices):
    with pytest.raises(ValueError, match="view: choose at least one"):
        lazy.view(indices)


def test_what_is_in_memory_or_small_is_held():
    many = Examples.from_callable(lambda x: x, n=500_000, k=2, d=16)
    assert not many.in_memory
    assert many.view(slice(0, 1000)).in_memory
    half = many.view(slice(0, None, 2))
    assert not half.in_memory
    assert half.view(slice(0, 1000)).in_memory
    x = np.ones((500_000, 2, 16), np.int8)
    assert Examples(x, x).view(slice(0, None, 2)).in_memory


class Counted:
    """A black box that knows how often it was asked, and how many of its answers are alive."""

    def __init__(self, f):
        self.f, self.calls, self.alive, self.most = f, 0, 0, 0

    def __call__(self, x):
        y = np.array(self.f(x))
        self.calls, self.alive = self.calls + 1, self.alive + 1
        self.most = max(self.most, self.alive)
        weakref.finalize(y, self._forget)
        return y

    def _forget(self):
        self.alive -= 1


def test_only_blocks_that_are_needed_are_read(nothing_is_small):
    box = Counted(lambda x: x)
    lazy = Examples.from_callable(box, n=10**6, k=2, d=2)
    for select in (lazy.subset, lazy.view):
        box.calls = 0
        assert select(slice(0, 33)).arrays().x.shape == (33, 2, 2)
        assert box.calls == 3  # of 16 examples each
    few = Examples.from_callable(box, n=16_000, k=2, d=2).view([0, 5, 20, 15_999])
    box.calls = 0
    np.testing.assert_array_equal([len(chunk.x) for chunk in few.chunks(3)], [3, 1])
    assert box.calls == 3
    box.calls = 0
    next(few.chunks(1))
    assert box.calls == 1


def test_a_pass_over_a_view_holds_few_blocks(nothing_is_held):
    box = Counted(lambda x: x)
    view = Examples.from_callable(box, n=200_000, k=3, d=16).view(np.arange(200_000) % 8 != 3)
    for size in (100, 10_000):
        box.most = 0
        for chunk in view.chunks(size):
            assert chunk.x.shape[1:] == (3, 16)
        assert box.most <= 2


# What the estimator reads


@pytest.fixture
def small_working_set(monkeypatch):
    """Working sets of some hundred examples."""
    monkeypatch.setattr(examples, "_PLENTY", 20)
    monkeypatch.setattr(examples, "_WORKING", 0)


def test_a_sample_is_random_and_the_same_for_the_same_seed(lazy):
    whole, hashes = lazy.subset(slice(None)), lazy.hashes()
    survey, one = lazy.survey_and_sample(20, seed=3)
    for found, expected in zip(survey, whole.survey(), strict=True):
        np.testing.assert_array_equal(found, expected)
    for again in (lazy.sample(20, seed=3), whole.sample(20, seed=3)):
        for found, expected in zip(again.arrays(), one.arrays(), strict=True):
            np.testing.assert_array_equal(found, expected)
    assert one.in_memory
    assert (one.has_lengths, one.metadata) == (lazy.has_lengths, lazy.metadata)
    places = [int(np.flatnonzero(hashes == own)[0]) for own in one.hashes()]
    assert places != sorted(places)
    assert lazy.sample(20, seed=4).hashes().tolist() != one.hashes().tolist()
    assert lazy.sample(50, seed=3) is lazy


def test_every_example_is_as_likely_in_a_sample():
    many = Examples.from_callable(lambda x: x, "gaussian", n=1000, k=2, d=2)
    place = {own: i for i, own in enumerate(many.hashes().tolist())}
    counts = np.zeros(1000)
    for seed in range(200):
        counts[[place[own] for own in many.sample(100, seed).hashes().tolist()]] += 1
    assert counts.sum() == 200 * 100  # none twice in a sample
    # Twenty each on average, with a standard deviation of 4.2; of hundreds in a row, 0.42.
    assert counts.max() < 45
    assert np.abs(counts.reshape(10, 100).mean(axis=1) - 20).max() < 2


def test_plenty_is_what_the_layer_needs_or_little_room_or_all():
    many = Examples.from_callable(lambda x: x, n=10**7, k=4, d=8)
    assert many.working_set_size(many.architecture(1)) == 2**21 // 64
    wide = Examples.from_callable(lambda x: x, n=10**6, k=16, d=256)
    asked = wide.architecture(4, head_dim=64)
    assert wide.working_set_size(asked) == int(64 * wide.counting_limit(asked))
    assert wide.view(slice(0, 300)).working_set_size(asked) == 300


class Knowing(Learner):
    """A learner that knows the answer, and remembers what it was given."""

    name = "knowing"

    def __init__(self, layer, streams=False):
        self.layer, self.streams, self.seen = layer, streams, []

    def learn(self, examples, architecture, run, options):
        self.seen.append((examples.hashes(), examples.working_set.hashes()))
        return Candidate(self.layer, Outcome.FITTED)


@pytest.mark.parametrize("streams", [False, True])
def test_a_fit_does_not_depend_on_where_examples_live(
    lazy, streams, monkeypatch, small_working_set
):
    """Nor does what the learner is given; it knows the answer here."""
    learner = Knowing(LAYER, streams)
    monkeypatch.setattr(examples, "_PLENTY", 6)
    models = [
        mha.AttentionRegressor(2, learner, random_state=5).fit(given)
        for given in (lazy, lazy.subset(slice(None)))
    ]
    (given, part), (also_given, also_part) = learner.seen
    np.testing.assert_array_equal(given, also_given)
    held = models[0].certificate_.n_examples
    if streams:  # all but those held out, and a random part of them
        np.testing.assert_array_equal(part, also_part)
        assert len(given) <= lazy.n - held
        assert set(part) < set(given)
    else:
        assert len(given) + held < lazy.n
    first, second = (model.solution_.reason for model in models)
    assert first == second


class Walker(Learner):
    """A learner that knows the answer and walks over the examples once."""

    name = "walker"
    streams = True

    def learn(self, examples, architecture, run, options):
        assert not examples.in_memory
        assert examples.working_set.in_memory
        for _chunk in examples.chunks(5000):
            pass
        return Candidate(TEACHER, Outcome.FITTED)


TEACHER = mha.random_layer(2, 16, seed=0)


@pytest.mark.parametrize(("method", "passes"), [(Walker(), 3), ("newton", 2)])
def test_a_fit_reads_drawn_examples_a_few_times_and_holds_few(
    small_working_set, nothing_is_held, method, passes
):
    box = Counted(TEACHER)
    many = Examples.from_callable(box, n=100_000, k=3, d=16, seed=1)
    blocks, box.calls = 25, 0
    model = mha.AttentionRegressor(2, method).fit(many)
    assert model.outcome_ is Outcome.RECOVERED
    assert len(model.layer_.seen) == 3 * 100_000
    # To survey and draw the working set, to learn if the learner streams, to check all examples.
    assert box.calls == passes * blocks
    assert box.most <= 3
    (event,) = (event for event in model.trace_ if event.stage == "working set")
    assert event.detail == f"{event.step} of 100000 examples"
    assert int(model.layer_.metadata["n_examples"]) + model.certificate_.n_examples == event.step


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "shards"
    made = Examples.from_callable(TEACHER, n=100_000, k=3, d=16, seed=1)
    made.save(folder, shard_size=10_000)
    return folder


def test_a_fit_reads_shards_three_times(small_working_set, folder, monkeypatch):
    reads = []
    read = Shards.block
    monkeypatch.setattr(
        Shards, "block", lambda self, index: reads.append(index) or read(self, index)
    )
    model = mha.AttentionRegressor(2, Walker()).fit(load_examples(folder))
    assert model.outcome_ is Outcome.RECOVERED
    assert sorted(reads) == sorted([*range(10)] * 3)


def test_bad_values_in_the_last_shard_are_found_before_learning(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    last = tmp_path / "shard-00009.safetensors"
    tensors, metadata = storage.read_tensors(last, kind="examples", required=())
    tensors["Y"][-1] = np.nan
    storage.write_tensors(last, tensors, metadata)
    seen = []
    model = mha.AttentionRegressor(2, Walker(), on_event=seen.append)
    with pytest.raises(ValueError, match=r"shard-00009\.safetensors: Y has 48 NaN"):
        model.fit(load_examples(tmp_path))
    assert seen == []


# Large shards


def test_a_large_shard_is_read_in_parts(tmp_path, monkeypatch):
    whole = sharded(tmp_path).subset(slice(None))
    whole.save(tmp_path / "one", shard_size=50)
    each = 4 * (3 + 2 * 8)  # int8 inputs, float64 labels
    for size, starts in ((50, [0, 50]), (20, [0, 20, 40, 50]), (0, [*range(51)])):
        monkeypatch.setattr(files, "_BLOCK", size * each)
        found = load_examples(tmp_path / "one")
        assert found._source.starts == starts
        assert found.rows == whole.rows
        for one, other in zip(found.arrays(), whole.arrays(), strict=True):
            np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(found.view([3, 30]).hashes(), whole.hashes()[[3, 30]])


@pytest.mark.parametrize("n", [30, 45, 60])
def test_a_large_shard_that_changes_is_noticed(tmp_path, monkeypatch, n):
    x = sample_inputs("boolean", 60, 4, 3)
    whole = Examples(x, LAYER(x))
    whole.subset(slice(0, 50)).save(tmp_path / "one", shard_size=50)
    monkeypatch.setattr(files, "_BLOCK", 20 * 4 * (3 + 2 * 8))
    opened = load_examples(tmp_path / "one")
    whole.subset(slice(0, n)).save(tmp_path / "other", shard_size=60)
    name = "shard-00000.safetensors"
    (tmp_path / "other" / name).replace(tmp_path / "one" / name)
    with pytest.raises(OSError, match=r"lost a shard|has changed since it was opened"):
        opened.survey()


# Every example counts


SMALL = mha.random_layer(2, 4, seed=1)


def small_examples(n, seed=0):
    x = sample_inputs("gaussian", n, 5, 4, seed=seed)
    return x, SMALL(x)


def in_shards(x, y, folder):
    Examples(x, y).save(folder / "data", shard_size=1000)
    found = load_examples(folder / "data")
    assert not found.in_memory
    return found


@pytest.fixture
def knowing(small_working_set):
    """A learner that knows the answer: what comes after it is looked at."""
    return Knowing(SMALL)


def test_wrong_labels_in_a_late_shard_are_told(tmp_path, knowing):
    x, y = small_examples(4000)
    y[-3:] += 0.1
    model = mha.AttentionRegressor(2, knowing).fit(in_shards(x, y, tmp_path))
    assert model.outcome_ is Outcome.FITTED
    assert "random examples are explained exactly, all 4000 are not" in model.solution_.reason
    assert "3 of them off by more than 1e-06" in model.solution_.reason
    assert not model.certificate_.recovered
    assert mha.compare(model.layer_, SMALL).max_error < 1e-10


def test_noisy_labels_with_worse_ones_in_a_late_shard_are_told(tmp_path, knowing):
    x, y = small_examples(4000)
    y += 1e-3 * np.random.default_rng(1).standard_normal(y.shape)
    y[-3:] += 1.0
    model = mha.AttentionRegressor(2, knowing).fit(in_shards(x, y, tmp_path))
    assert model.outcome_ is Outcome.FITTED
    assert "3 of which are off by more than 10 times the median" in model.solution_.reason
    assert all(event.stage != "refit" for event in model.trace_)


def test_what_the_part_shows_too_is_no_objection():
    x, y = small_examples(400)
    rng = np.random.default_rng(2)
    noisy = y + 1e-3 * rng.standard_normal(y.shape)
    uneven = noisy + (np.arange(400) % 40 == 3)[:, None, None]
    late = noisy + (np.arange(400) == 399)[:, None, None]

    def objection(labels):
        given = Examples(x, labels)
        part = given.subset(slice(0, 200))
        subsets = Subsets(given, part, part, None)
        return all_examples(Evidence(Candidate(SMALL), given.architecture(2), subsets, Run()))

    assert [objection(labels) for labels in (y, noisy, uneven)] == [None] * 3
    assert "1 of which is off" in objection(late).sentence


def test_a_sorted_file_is_learned_like_any_other(tmp_path, small_working_set):
    """Its first three quarters never show the last feature."""
    x = sample_inputs("gaussian", 4000, 5, 4)
    x[:3000, :, 3] = 0.0
    model = mha.AttentionRegressor(2).fit(in_shards(x, SMALL(x), tmp_path))
    assert model.outcome_ is Outcome.RECOVERED, model.solution_.reason
    assert mha.compare(model.layer_, SMALL).max_error < 1e-10


@pytest.mark.parametrize("method", ["adam", "lbfgs", "linear"])
def test_baselines_say_how_many_examples_they_saw(method, monkeypatch, small_working_set):
    sizes = []
    kind = type(find_learner(method))
    learn = kind.learn

    def spy(self, fitted, *rest):
        sizes.append(fitted.n)
        return learn(self, fitted, *rest)

    monkeypatch.setattr(kind, "learn", spy)
    many = Examples.from_callable(SMALL, "gaussian", n=4000, k=5, d=4)
    model = mha.AttentionRegressor(2, method, max_seconds=1.0).fit(many)
    (event,) = (event for event in model.trace_ if event.stage == "working set")
    assert event.detail == f"{event.step} of 4000 examples"
    assert sizes[0] < event.step < 400


@pytest.mark.slow
def test_under_noise_all_examples_are_fitted(tmp_path, knowing, monkeypatch):
    monkeypatch.setattr(examples, "_PLENTY", 300)
    x, y = small_examples(10_000)
    sigma = 1e-2
    y += sigma * np.random.default_rng(1).standard_normal(y.shape)
    model = mha.AttentionRegressor(2, knowing).fit(in_shards(x, y, tmp_path))
    assert model.outcome_ is Outcome.FITTED
    (event,) = (event for event in model.trace_ if event.stage == "working set")
    assert event.step < 1000
    assert model.layer_.metadata["n_examples"] == "10000"
    best = polish_on(Examples(x, y), SMALL, SMALL.architecture, Run()).layer
    deviations = measure_spectrum(SMALL, Examples(x, y)).deviations
    certificate = model.certificate_
    order = mha.compare(model.layer_, best).order
    for name in ("theta", "w"):
        one = sigma * getattr(deviations, name)
        apart = (getattr(model.layer_, name) - getattr(best, name)[order]) / one[order]
        assert np.abs(apart).max() < 0.02
        width = getattr(certificate.intervals, name) / (1.96 * one[order])
        assert np.abs(width - 1).max() < 0.15  # from a tenth of the inputs
    # Of 200,000 scalars: a deviation of 0.16 %.
    assert certificate.noise_level == pytest.approx(sigma, rel=0.006)
    assert "fitted to all examples" in certificate.statement


def test_what_cannot_be_refitted_says_how_many_examples_it_rests_on(tmp_path, knowing, monkeypatch):
    monkeypatch.setattr(refit_module, "DENSE_LIMIT", 8)
    x, y = small_examples(4000)
    y += 1e-2 * np.random.default_rng(1).standard_normal(y.shape)
    model = mha.AttentionRegressor(2, knowing).fit(in_shards(x, y, tmp_path))
    n = model.layer_.metadata["n_examples"]
    assert int(n) < 400
    assert model.solution_.reason.endswith(f"; estimated from {n} of 4000 examples")


def test_certify_holds_a_part_of_a_stream(small_working_set, nothing_is_held, monkeypatch):
    monkeypatch.setattr(examples, "_PLENTY", 80)
    box = Counted(SMALL)
    many = Examples.from_callable(box, "gaussian", n=100_000, k=5, d=4)
    box.calls, box.most = 0, 0
    found = mha.certify(SMALL, many)
    assert found.recovered
    assert found.n_examples == 100_000
    assert found.tail_bound < 1e-4
    assert box.most <= 3
    x, y = small_examples(4000)
    noisy = mha.certify(SMALL, x, y + 1e-2 * np.random.default_rng(1).standard_normal(y.shape))
    whole = measure_spectrum(SMALL, Examples(x, y)).deviations
    width = noisy.intervals.theta / (1.96 * 1e-2 * whole.theta)
    assert np.abs(width - 1).max() < 0.3  # from the inputs of 256 examples


# The room it takes, in processes of their own


linux_only = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="peak memory is read from /proc"
)
PEAK = """
import json, sys
import mhalearn as mha

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
"""


def run(script, *arguments):
    """What a script prints last, as JSON."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")]),
        "JAX_COMPILATION_CACHE_DIR": "",  # compiling takes room too
        "MHALEARN_CACHE_DIR": "",
    }
    done = subprocess.run(
        [sys.executable, "-c", PEAK + script, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@linux_only
def test_walking_over_a_view_takes_little_room():
    script = """
import numpy as np
from mhalearn.data import answers
answers.HELD = 0
n, k, d = 200_000, 4, 64
many = mha.Examples.from_callable(lambda x: x, "gaussian", n=n, k=k, d=d)
next(many.chunks(1))
before = peak()
view = many.view(np.arange(n) % 8 != 3)
assert len(view.survey().hashes) == n * 7 // 8
for chunk in view.chunks(40_000 // k):
    pass
print(json.dumps({"more": peak() - before, "everything": 2 * 8 * n * k * d}))
"""
    found = run(script)
    assert found["more"] < found["everything"] / 4


@linux_only
def test_walking_over_one_large_shard_takes_little_room(tmp_path):
    many = Examples.from_callable(lambda x: x, "gaussian", n=30_000, k=8, d=64)
    many.save(tmp_path / "one", shard_size=30_000)
    script = """
many = mha.load_examples(sys.argv[1])
next(many.chunks(1))
before = peak()
for chunk in many.chunks(100):
    pass
print(json.dumps({"more": peak() - before}))
"""
    assert run(script, tmp_path / "one")["more"] < 64 * 2**20  # of 234 MiB


@pytest.mark.slow
@linux_only
def test_a_million_drawn_examples_are_learned_in_two_gibibytes():
    script = """
truth = mha.random_layer(2, 16, seed=0)
many = mha.Examples.from_callable(truth, n=1_000_000, k=3, d=16, seed=1)
model = mha.AttentionRegressor(2, method="sculpt").fit(many)
error = mha.compare(model.layer_, truth.canonical()).max_error
print(json.dumps({"peak": peak(), "outcome": model.outcome_.name, "error": error}))
"""
    found = run(script)
    assert found["outcome"] == "RECOVERED"
    assert found["error"] < 1e-10
    assert found["peak"] < 2 * GIB


# More than memory: learned under a hard ceiling.


WIDE = mha.random_layer(2, 16, out_dim=64, seed=0)
CEILING = 3 * GIB // 2


@pytest.fixture(scope="module")
def four_gibibytes(tmp_path_factory):
    """Examples of 4 GiB in eight shards; gone afterwards."""
    folder = tmp_path_factory.mktemp("large")
    n = -(-4 * GIB // (8 * 3 * (16 + 64)))
    many = Examples.from_callable(WIDE, "gaussian", n=n, k=3, d=16, seed=1)
    many.save(folder / "shards", shard_size=-(-n // 8))
    assert sum(path.stat().st_size for path in (folder / "shards").iterdir()) >= 4 * GIB
    yield folder / "shards"
    shutil.rmtree(folder)


def run_under_ceiling(*arguments):
    """Run the command; killed as soon as its memory passes the ceiling. Its exit code and peak."""
    script = """
from mhalearn import cli
code = cli.run(sys.argv[1:])
print(json.dumps({"peak": peak(), "code": code}))
"""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")]),
        "JAX_COMPILATION_CACHE_DIR": "",  # compiling takes room too
        "MHALEARN_CACHE_DIR": "",
    }
    child = subprocess.Popen(
        [sys.executable, "-c", PEAK + script, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    status, resident = Path(f"/proc/{child.pid}/status"), 0
    while child.poll() is None and resident <= CEILING:
        lines = [line.split() for line in status.read_text().splitlines()]
        resident = next((1024 * int(words[1]) for words in lines if words[0] == "VmRSS:"), 0)
        time.sleep(0.02)
    child.kill()
    output, _ = child.communicate()
    assert resident <= CEILING, f"killed at {resident / 2**20:.0f} MiB"
    found = json.loads(output.splitlines()[-1])
    return found["code"], found["peak"]


@pytest.mark.slow
@linux_only
@pytest.mark.parametrize("method", ["newton", "sculpt"])
def test_four_gibibytes_are_learned_in_one_and_a_half(four_gibibytes, tmp_path, method):
    out = tmp_path / "layer.safetensors"
    options = ("--method", method, "--heads", 2, "--out", out)
    code, peak = run_under_ceiling("learn", four_gibibytes, *options)
    assert peak < CEILING, f"{peak / 2**20:.0f} MiB"
    assert code == 0  # recovered
    assert mha.compare(mha.load_layer(out), WIDE.canonical()).max_error < 1e-10


@pytest.mark.slow
@linux_only
def test_a_million_examples_in_shards_are_learned_in_two_gibibytes(tmp_path):
    many = Examples.from_callable(TEACHER, n=1_000_000, k=3, d=16, seed=1)
    many.save(tmp_path / "shards", shard_size=50_000)
    script = """
from mhalearn import cli
code = cli.run(["learn", sys.argv[1], "--method", "sculpt", "--heads", "2", "--out", sys.argv[2]])
print(json.dumps({"peak": peak(), "code": code}))
"""
    found = run(script, tmp_path / "shards", tmp_path / "layer.safetensors")
    assert found["code"] == 0  # recovered
    learned = mha.load_layer(tmp_path / "layer.safetensors")
    assert mha.compare(learned, TEACHER.canonical()).max_error < 1e-10
    assert found["peak"] < 2 * GIB
