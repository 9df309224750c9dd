"""The command line: exit codes, one line for a mistake, pure JSON, Ctrl-C, and real small runs."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import mhalearn as mha
from mhalearn import cli
from mhalearn._runtime import storage
from mhalearn.cli import cache, learn, output

SOURCE = Path(mha.__file__).parents[1]
SMALL = ("--heads", "2", "--dim", "6", "--tokens", "4", "--examples", "120")


@pytest.fixture
def mhalearn(capsys):
    """Run a command in this process: (exit code, standard output, standard error)."""

    def call(*arguments):
        capsys.readouterr()
        code = cli.run([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return call


@pytest.fixture(scope="session")
def environment():
    """For processes of their own."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")]),
        "COLUMNS": "100",
        "TERM": "xterm",
    }


def command(*arguments):
    start = "from mhalearn.cli import main; main()"
    return [sys.executable, "-c", start, *map(str, arguments)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A small layer and examples of it, as `generate` writes them, and fresh ones."""
    folder = tmp_path_factory.mktemp("data")
    assert cli.run(["generate", *SMALL, "--out", str(folder)]) == 0
    layer = mha.load_layer(folder / "layer.safetensors")
    x = mha.sample_inputs("boolean", 200, 4, 6, seed=99)
    mha.Examples(x, layer(x)).save(folder / "fresh.safetensors")
    return folder


@pytest.fixture(scope="module")
def learned(data, tmp_path_factory):
    """The layer learned back from those examples, with its report and the printed JSON."""
    folder = tmp_path_factory.mktemp("learned")
    with pytest.MonkeyPatch.context() as patch, open(folder / "result.json", "w+") as out:
        patch.setattr(sys, "stdout", out)
        code = cli.run(
            [
                *("learn", str(data / "examples.safetensors"), "--heads", "2", "--json"),
                *("--out", str(folder / "layer.safetensors")),
                *("--report", str(folder / "report.html")),
            ]
        )
    assert code == 0
    return folder


def assert_one_line(code, out, err, *, expected=2):
    assert code == expected, err
    assert out == ""
    assert err.startswith("mhalearn")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert "Traceback" not in err


# Help and usage


def test_help_lists_the_commands_that_exist(mhalearn):
    code, out, err = mhalearn("--help")
    assert (code, err) == (0, "")
    names = (
        "demo",
        "generate",
        "learn",
        "certify",
        "compare",
        "check",
        "import",
        "export",
        "studio",
        "bench",
        "hard parity",
        "hard rounding",
        "hard lwr",
        "hard curve",
    )
    for name in (*names, "--version"):
        assert name.split()[0] in out
    for name in names:
        code, out, _ = mhalearn(*name.split(), "--help")
        assert code == 0
        assert f"mhalearn {name} " in out.split("Example", 1)[1]  # an example to copy


@pytest.mark.parametrize("name", ["studio", "bench"])
def test_help_shows_the_extra_in_its_brackets(mhalearn, name):
    shown = " ".join(mhalearn(name, "--help")[1].split())
    assert f"pip install '.[{name}]'" in shown


def test_help_and_version_do_not_import_jax(environment):
    check = (
        "import sys\nfrom mhalearn.cli import run\n"
        "code = run([sys.argv[1]])\nassert 'jax' not in sys.modules\n"
        "assert 'matplotlib' not in sys.modules\nsys.exit(code)"
    )
    for option in ("--help", "--version"):
        done = subprocess.run(
            [sys.executable, "-c", check, option], env=environment, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.strip()


def test_no_arguments_show_the_help(mhalearn):
    code, out, err = mhalearn()
    assert code == 2
    assert "certify" in out + err


@pytest.mark.parametrize(
    "arguments",
    [
        ["unknown"],
        ["learn"],
        ["generate"],
        ["learn", "x.npz", "--heads", "0"],
        ["learn", "x.npz", "--window", "0"],
        ["learn", "x.npz", "--kv-heads", "some"],
        ["learn", "x.npz", "--rope-base", "fast"],
        ["learn", "x.npz", "--softcap", "soft"],
        ["learn", "x.npz", "--heads", "three"],
        ["learn", "x.npz", "--method", "sculpt"],
        ["learn", "x.npz", "--method", "magic"],
        ["learn", "x.npz", "--head-dim", "0"],
        ["learn", "x.npz", "--max-seconds", "0"],
        ["learn", "x.npz", "--max-seconds", "nan"],
        ["learn", "x.npz", "--resume"],
        ["learn", "x.npz", "--seed", "-1"],
        ["learn", "x.npz", "--no-such-option"],
        ["certify", "x.safetensors"],
        ["certify", "x.safetensors", "y.npz", "--delta", "1"],
        ["compare", "x.safetensors"],
        ["check", "x.safetensors"],
        ["check", "x.safetensors", "--tokens", "1"],
        ["generate", "--heads", "0", "--out", "x"],
        ["generate", "--scale", "-1", "--out", "x"],
        ["generate", "--noise", "-1", "--out", "x"],
        ["generate", "--noise", "nan", "--out", "x"],
        ["generate", "--rank", "99", "--out", "x"],
        ["generate", "--inputs", "dice", "--out", "x"],
        ["generate", "--layer", "absent.safetensors", "--out", "x"],
    ],
)
def test_bad_usage_is_one_line(mhalearn, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_one_line(*mhalearn(*arguments))
    assert list(tmp_path.iterdir()) == []


# generate


def test_generate_writes_a_layer_and_its_examples(data):
    layer = mha.load_layer(data / "layer.safetensors")
    examples = mha.load_examples(data / "examples.safetensors")
    assert (layer.n_heads, layer.d) == (2, 6)
    assert (examples.n, examples.k, examples.d) == (120, 4, 6)
    x, y, _ = examples.arrays()
    assert x.dtype == np.int8
    np.testing.assert_allclose(y, layer(x), rtol=1e-12, atol=1e-12)


def test_generate_is_reproducible_and_its_seed_matters(mhalearn, data, tmp_path):
    for seed, same in ((0, True), (1, False)):
        assert mhalearn("generate", *SMALL, "--seed", seed, "--out", tmp_path)[0] == 0
        for name in ("layer.safetensors", "examples.safetensors"):
            assert ((tmp_path / name).read_bytes() == (data / name).read_bytes()) is same


def test_generate_with_noise_rank_and_gaussian_inputs(mhalearn, tmp_path):
    options = ("--noise", "0.1", "--rank", "2", "--inputs", "gaussian", "--scale", "3", "--json")
    code, out, _ = mhalearn("generate", *SMALL, *options, "--out", tmp_path / "new" / "folder")
    assert code == 0
    files = json.loads(out)["files"]
    layer, examples = mha.load_layer(files["layer"]), mha.load_examples(files["examples"])
    assert np.linalg.matrix_rank(layer.theta[0]) == 2
    np.testing.assert_allclose(np.linalg.norm(layer.theta, axis=(1, 2)), 3.0)
    x, y, _ = examples.arrays()
    clean = layer(x)
    assert 0.05 < np.std(y - clean) / np.sqrt(np.mean(clean**2)) < 0.2


def test_generate_draws_examples_of_a_given_layer(mhalearn, data, tmp_path):
    options = ("--tokens", "5", "--examples", "30", "--inputs", "gaussian", "--json")
    given = data / "layer.safetensors"
    code, out, err = mhalearn("generate", "--layer", given, *options, "--out", tmp_path / "a")
    assert (code, err) == (0, "")
    files = json.loads(out)["files"]
    assert Path(files["layer"]).read_bytes() == given.read_bytes()
    examples = mha.load_examples(files["examples"])
    assert (examples.n, examples.k, examples.d) == (30, 5, 6)
    x, y, _ = examples.arrays()
    assert x.dtype == np.float64
    np.testing.assert_allclose(y, mha.load_layer(given)(x), rtol=1e-12, atol=1e-12)

    options = ("--layer", given, "--tokens", "4", "--examples", "120")
    assert mhalearn("generate", *options, "--out", tmp_path / "b")[0] == 0
    first, again = data / "examples.safetensors", tmp_path / "b" / "examples.safetensors"
    assert first.read_bytes() == again.read_bytes()  # the same layer, the same seed
    options = (*options, "--seed", "1", "--noise", "1")
    assert mhalearn("generate", *options, "--out", tmp_path)[0] == 0
    x, y, _ = mha.load_examples(tmp_path / "examples.safetensors").arrays()
    clean = mha.load_layer(given)(x)
    assert not np.array_equal(x, mha.load_examples(first).arrays()[0])
    assert 0.5 < np.std(y - clean) / np.sqrt(np.mean(clean**2)) < 2


def test_generate_says_how_to_learn_the_given_layer(mhalearn, tmp_path):
    layer = mha.random_layer(2, 6, key_vector=True, causal=True)
    layer.save(tmp_path / "given.safetensors")
    arguments = ("--layer", tmp_path / "given.safetensors", "--tokens", "4", "--out", tmp_path)
    code, out, _ = mhalearn("generate", *arguments)
    assert code == 0
    assert out.rstrip().endswith("--heads 2 --bias --causal")
    limit = mha.load_layer(tmp_path / "layer.safetensors").architecture.counting_limit(4)
    assert f"counting limit of {limit:.1f}" in out
    assert mha.load_layer(tmp_path / "layer.safetensors").causal


@pytest.mark.parametrize("option", ["--heads", "--dim", "--scale", "--rank"])
def test_a_given_layer_and_a_recipe_for_one_conflict(mhalearn, data, tmp_path, option):
    result = mhalearn(
        *("generate", "--layer", data / "layer.safetensors", option, "2", "--out", tmp_path / "x")
    )
    assert_one_line(*result)
    assert f"{option} and --layer conflict" in result[2]
    assert list(tmp_path.iterdir()) == []


def test_generate_does_not_overwrite_the_given_layer(mhalearn, data, tmp_path):
    given = tmp_path / "examples.safetensors"
    given.write_bytes((data / "layer.safetensors").read_bytes())
    assert_one_line(*mhalearn("generate", "--layer", given, "--out", tmp_path))
    assert_one_line(*mhalearn("generate", "--layer", data / "fresh.safetensors", "--out", tmp_path))
    assert list(tmp_path.iterdir()) == [given]
    assert given.read_bytes() == (data / "layer.safetensors").read_bytes()


def test_generate_refuses_a_place_it_cannot_write_to(mhalearn, tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert_one_line(*mhalearn("generate", *SMALL, "--out", tmp_path / "file"))
    (tmp_path / "out" / "layer.safetensors").mkdir(parents=True)
    assert_one_line(*mhalearn("generate", *SMALL, "--out", tmp_path / "out"))
    assert not (tmp_path / "out" / "examples.safetensors").exists()


# learn


def test_learn_recovers_saves_and_reports(learned, data):
    result = json.loads((learned / "result.json").read_text())
    assert result["outcome"] == "RECOVERED"
    assert result["recovered"] is True
    assert result["n_heads"] == 2
    assert result["layer"] == str(learned / "layer.safetensors")
    (finding,) = result["findings"]
    assert (finding["name"], finding["sentence"]) == ("recovered", result["reason"])
    found = mha.compare(
        mha.load_layer(learned / "layer.safetensors"), mha.load_layer(data / "layer.safetensors")
    )
    assert found.max_error < 1e-8
    assert "The layer was recovered" in (learned / "report.html").read_text(encoding="utf-8")


def test_learn_prints_a_summary_and_says_how_to_save(mhalearn, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = mhalearn("learn", data / "examples.safetensors", "--heads", "2")
    assert (code, err) == (0, "")
    assert out.startswith("RECOVERED")
    assert "--out layer.safetensors" in out
    assert "times the counting limit" in out
    assert list(tmp_path.iterdir()) == []


def test_too_few_examples_is_exit_code_3(mhalearn, tmp_path):
    mhalearn("generate", *SMALL[:-1], "4", "--out", tmp_path)
    code, out, err = mhalearn("learn", tmp_path / "examples.safetensors", "--heads", "2", "--json")
    assert (code, err) == (3, "")
    assert json.loads(out)["outcome"] == "TOO_FEW_EXAMPLES"


def test_noise_is_never_recovered_exactly_without_saying_so(mhalearn, tmp_path):
    mhalearn("generate", *SMALL, "--noise", "0.5", "--out", tmp_path)
    arguments = ("--heads", "2", "--max-seconds", "20", "--json")
    code, out, _ = mhalearn("learn", tmp_path / "examples.safetensors", *arguments)
    result = json.loads(out)
    assert result["recovered"] is False
    assert code == 3


def bad_examples(folder):
    """Files that must be refused, by name."""
    x = mha.sample_inputs("boolean", 5, 4, 6, seed=0)
    y = np.zeros((5, 4, 6))
    good = folder / "good.safetensors"
    mha.Examples(x, y).save(good)
    np.savez(folder / "rank.npz", X=x[0], Y=y)
    np.savez(folder / "labels.npz", X=x, Y=y[:3])
    np.savez(folder / "nan.npz", X=x, Y=np.full_like(y, np.nan))
    np.savez(folder / "missing.npz", X=x)
    np.savez(folder / "objects.npz", X=np.array([{}], dtype=object), Y=y)
    np.savez(folder / "one-token.npz", X=x[:, :1], Y=y[:, :1])
    np.savez(folder / "empty.npz", X=x[:0], Y=y[:0])
    (folder / "pickle.npz").write_bytes(b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00K\x01.")
    (folder / "text.safetensors").write_text("not a tensor in sight")
    (folder / "nothing.safetensors").write_bytes(b"")
    (folder / "truncated.safetensors").write_bytes(good.read_bytes()[:-50])
    mha.random_layer(2, 6).save(folder / "layer.safetensors")
    (folder / "examples.txt").write_text("x")
    (folder / "folder").mkdir()
    good.unlink()
    return sorted(folder.iterdir())


def test_bad_examples_are_refused_in_one_line(mhalearn, tmp_path):
    folder, out = tmp_path / "bad", tmp_path / "out"
    folder.mkdir()
    out.mkdir()
    paths = [*bad_examples(folder), folder / "absent.npz", folder / "no\nsuch\x1b[31m.npz"]
    for path in paths:
        result = mhalearn("learn", path, "--out", out / "layer.safetensors")
        assert_one_line(*result)
        assert path.stem.partition("\n")[0] in result[2]
        assert "\x1b" not in result[2]
    assert list(out.iterdir()) == []


def test_the_folder_that_generate_wrote_is_not_what_to_learn_from(mhalearn, data):
    result = mhalearn("learn", data)
    assert_one_line(*result)
    assert f"give {data / 'examples.safetensors'}" in result[2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("parity", "--heads", "5"), "--heads 5: "),
        (("parity", "--heads", "4", "--dim", "4"), "--heads 4 --dim 4: "),
        (("rounding", "--modulus", "3"), "--modulus 3: "),
        (("lwr", "--modulus", "12"), "--modulus 12: "),
    ],
)
def test_hard_speaks_of_its_options(mhalearn, arguments, said, tmp_path):
    result = mhalearn("hard", *arguments, "--out", tmp_path / "x")
    assert_one_line(*result)
    assert said in result[2]


def test_hard_says_that_learning_is_expected_to_fail(mhalearn, tmp_path):
    out = mhalearn("hard", "parity", "--dim", "6", "--examples", "20", "--out", tmp_path)[1]
    assert "--heads 4 --max-seconds 60" in out
    assert "expect" in out.partition("next")[2]


def test_bad_layers_are_refused_in_one_line(mhalearn, data, tmp_path):
    storage.write_tensors(
        tmp_path / "half.safetensors", {"theta": np.zeros((2, 6, 6))}, {"kind": "layer"}
    )
    (tmp_path / "garbage.safetensors").write_bytes(b"garbage")
    for path in (*tmp_path.iterdir(), data / "examples.safetensors", tmp_path / "absent"):
        assert_one_line(*mhalearn("certify", path, data / "fresh.safetensors"))
        assert_one_line(*mhalearn("compare", data / "layer.safetensors", path, "--json"))
        assert_one_line(*mhalearn("check", path, "--tokens", "4"))


def test_outputs_are_checked_before_any_work(mhalearn, data, tmp_path, monkeypatch):
    monkeypatch.setattr(learn, "fit", lambda *_: pytest.fail("the work began"))
    examples = tmp_path / "examples.safetensors"
    examples.write_bytes((data / "examples.safetensors").read_bytes())
    missing, twice = (tmp_path / f"{name}.safetensors" for name in ("missing/file", "twice"))
    for options in (
        ("--out", missing),
        ("--report", missing),
        ("--checkpoint", missing),
        ("--out", tmp_path),
        ("--out", twice, "--report", twice),
        ("--out", examples),
        ("--report", examples),
        ("--out", tmp_path / "layer.pt"),
        ("--out", tmp_path / "layer"),
    ):
        assert_one_line(*mhalearn("learn", examples, *options))
    assert list(tmp_path.iterdir()) == [examples]
    assert examples.read_bytes() == (data / "examples.safetensors").read_bytes()


class FullDisk:
    """A disk that is full for files of some name."""

    def __init__(self, monkeypatch, *names):
        self.names, self.replace = names, os.replace
        monkeypatch.setattr(os, "replace", self)

    def __call__(self, source, target):
        if Path(target).name in self.names:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), source)
        self.replace(source, target)


def test_a_full_disk_is_exit_code_4_and_leaves_no_empty_folder(mhalearn, tmp_path, monkeypatch):
    FullDisk(monkeypatch, "examples.safetensors", "layer.safetensors")
    out = tmp_path / "new" / "folder"
    for name, command in (("examples", ("generate", *SMALL)), ("layer", ("hard", "parity"))):
        code, printed, err = mhalearn(*command, "--out", out)
        assert_one_line(code, printed, err, expected=4)
        assert f"{out / name}.safetensors: No space left on device" in err
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("lost", [("layer",), ("report",), ("layer", "report")])
def test_the_verdict_is_told_where_its_files_cannot_be_written(
    mhalearn, data, tmp_path, monkeypatch, lost
):
    paths = {"layer": tmp_path / "o.safetensors", "report": tmp_path / "r.html"}
    FullDisk(monkeypatch, *(paths[name].name for name in lost))
    arguments = ("learn", data / "examples.safetensors", "--heads", "2")
    arguments += ("--out", paths["layer"], "--report", paths["report"])
    code, out, err = mhalearn(*arguments)
    assert code == 4
    assert out.startswith("RECOVERED")
    assert out.count("could not be written") == len(lost)
    assert err.count("\n") == 1
    assert err.startswith(f"mhalearn learn: {paths[lost[0]]}: No space left on device; free some")
    assert {path for path in paths.values() if path.exists()} == {
        path for name, path in paths.items() if name not in lost
    }
    code, out, _ = mhalearn(*arguments, "--json")
    told = json.loads(out)
    assert (code, told["outcome"]) == (4, "RECOVERED")
    assert {name for name in paths if told[name] is None} == set(lost)


# certify, compare, check


def test_certify(mhalearn, learned, data):
    layer, fresh = learned / "layer.safetensors", data / "fresh.safetensors"
    code, out, err = mhalearn("certify", layer, fresh, "--json")
    assert (code, err) == (0, "")
    certificate = json.loads(out)
    assert certificate["recovered"] is True
    assert certificate["n_examples"] == 200
    code, out, _ = mhalearn("certify", layer, fresh, "--delta", "0.5")
    assert code == 0
    assert out.startswith("RECOVERED")


def test_certify_refuses_the_examples_learned_from(mhalearn, learned, data):
    assert_one_line(
        *mhalearn("certify", learned / "layer.safetensors", data / "examples.safetensors")
    )


def test_certify_on_what_was_learned_from_in_another_order_is_exit_code_3(
    mhalearn, learned, data, tmp_path
):
    x, y, _ = mha.load_examples(data / "examples.safetensors").arrays()
    mha.Examples(-x[:, ::-1], -y[:, ::-1]).save(tmp_path / "copies.safetensors")
    code, out, err = mhalearn(
        "certify", learned / "layer.safetensors", tmp_path / "copies.safetensors"
    )
    assert (code, err) == (3, "")
    first = out.splitlines()[0]
    assert first.startswith("NOT RECOVERED")
    assert "learned from" in first


def test_certify_says_that_a_layer_made_the_labels_itself(mhalearn, data, learned):
    examples = data / "examples.safetensors"
    code, out, _ = mhalearn("certify", data / "layer.safetensors", examples)
    assert code == 0
    assert "this very layer made these labels" in out
    out = mhalearn("certify", data / "layer.safetensors", examples, "--json")[1]
    assert json.loads(out)["labelled_by_this_layer"] is True
    out = mhalearn("certify", learned / "layer.safetensors", data / "fresh.safetensors")[1]
    assert "this very layer" not in out


def test_certify_of_another_layer_is_exit_code_3(mhalearn, data, tmp_path):
    mha.random_layer(2, 6, seed=8).save(tmp_path / "other.safetensors")
    code, out, _ = mhalearn("certify", tmp_path / "other.safetensors", data / "fresh.safetensors")
    assert code == 3
    assert out.startswith("NOT RECOVERED")


def test_compare(mhalearn, learned, data):
    pair = (learned / "layer.safetensors", data / "layer.safetensors")
    code, out, _ = mhalearn("compare", *pair, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["comparable"] is True
    assert found["max_error"] < 1e-8
    assert sorted(found["order"]) == [0, 1]
    assert len(found["theta_errors"]) == len(found["w_errors"]) == 2
    code, out, _ = mhalearn("compare", *pair)
    assert code == 0
    assert "largest relative error" in out


def test_compare_with_other_head_counts_is_not_comparable(mhalearn, data, tmp_path):
    mha.random_layer(3, 6).save(tmp_path / "three.safetensors")
    pair = (tmp_path / "three.safetensors", data / "layer.safetensors")
    code, out, _ = mhalearn("compare", *pair, "--json")
    found = json.loads(out, parse_constant=pytest.fail)
    assert (code, found["comparable"], found["max_error"]) == (0, False, None)
    assert found["why"].startswith("3 heads beside 2")
    code, out, _ = mhalearn("compare", *pair)
    assert code == 0
    assert "not comparable" in out
    assert "3 heads beside 2" in out


def test_check_says_which_conditions_hold(mhalearn, data, tmp_path):
    code, out, _ = mhalearn("check", data / "layer.safetensors", "--tokens", "4", "--json")
    found = json.loads(out)
    assert code == (0 if found["ok"] else 3)
    assert {"name", "value", "threshold", "ok", "explanation"} <= set(found["items"][0])
    truth = mha.load_layer(data / "layer.safetensors")
    twin = truth.replace(theta=truth.theta[[0, 0]])  # two heads with one attention
    twin.save(tmp_path / "twin.safetensors")
    code, out, _ = mhalearn("check", tmp_path / "twin.safetensors", "--tokens", "4")
    assert code == 3
    assert "NO" in out


# Ctrl-C and pipes


def test_ctrl_c_saves_the_best_layer_so_far(mhalearn, data, tmp_path, monkeypatch):
    from mhalearn.report.terminal import Progress

    def press(_, event):
        if np.isfinite(event.loss) and event.stage == "polish":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)

    monkeypatch.setattr(Progress, "on_event", press)
    before = signal.getsignal(signal.SIGINT)
    out = tmp_path / "best.safetensors"
    code, printed, err = mhalearn(
        "learn", data / "examples.safetensors", "--heads", "2", "--out", out, "--json"
    )
    assert code == 130
    assert err.count("\n") == 1
    assert "interrupted" in err
    result = json.loads(printed)
    assert result["interrupted"] is True
    assert result["layer"] == str(out)
    assert mha.load_layer(out).metadata["outcome"] == "interrupted"
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.skipif(os.name != "posix", reason="signals and pseudo-terminals are a POSIX matter")
def test_ctrl_c_ends_a_process_cleanly_and_the_live_line_shows(environment, tmp_path):
    import pty

    # Noise near the counting limit keeps the learner busy for much longer than this test.
    layer = mha.random_layer(4, 12, seed=0)
    x = mha.sample_inputs("boolean", 60, 4, 12, seed=0)
    noise = np.random.default_rng(0).standard_normal((60, 4, 12))
    mha.Examples(x, layer(x) + noise).save(tmp_path / "hard.safetensors")
    reader, writer = pty.openpty()
    process = subprocess.Popen(
        command("learn", "hard.safetensors", "--heads", "4", "--out", "best.safetensors"),
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=writer,
    )
    os.close(writer)
    seen, deadline = b"", time.monotonic() + 120
    while b"step" not in seen:
        assert time.monotonic() < deadline
        assert process.poll() is None, seen
        seen += os.read(reader, 4096)
    process.send_signal(signal.SIGINT)
    out = process.communicate(timeout=60)[0]
    while True:
        try:
            seen += os.read(reader, 4096)
        except OSError:  # the other end is closed
            break
    os.close(reader)
    assert process.returncode == 130
    assert out == b""
    assert b"Traceback" not in seen
    assert b"interrupted" in seen
    saved = [path.name for path in tmp_path.iterdir() if path.name != "hard.safetensors"]
    assert saved == (["best.safetensors"] if b"saved to" in seen else [])


def test_a_closed_pipe_is_quiet(environment, tmp_path):
    for arguments in (["--help"], ["generate", *SMALL, "--out", tmp_path, "--json"]):
        with subprocess.Popen(
            command(*arguments), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            process.stdout.close()
            said = process.stderr.read()
        assert said == b""
    assert process.returncode == 0
    assert mha.load_layer(tmp_path / "layer.safetensors").n_heads == 2


# demo, in a process of its own: the main job


def test_demo(environment, tmp_path):
    done = subprocess.run(
        command("demo", "--json"), env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stderr == ""
    assert done.returncode == 0
    result = json.loads(done.stdout)
    assert result["outcome"] == "RECOVERED"
    assert result["max_error"] <= 1e-10
    folder = tmp_path / "demo"
    names = {"examples.safetensors", "truth.safetensors", "layer.safetensors", "report.html"}
    assert {path.name for path in folder.iterdir()} == names
    found = mha.compare(
        mha.load_layer(folder / "layer.safetensors"), mha.load_layer(folder / "truth.safetensors")
    )
    assert found.max_error <= 1e-10
    assert (folder / "report.html").stat().st_size < 2_000_000


# Small parts


def test_json_is_strict():
    value = {"a": np.array([1.0, np.nan]), "b": (np.inf, np.float64(2)), 3: {"c": np.bool_(True)}}
    assert output.strict(value) == {"a": [1.0, None], "b": [None, 2.0], "3": {"c": True}}


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("MHALEARN_CACHE_DIR", str(tmp_path))
    assert cache.cache_folder() == tmp_path
    monkeypatch.setenv("MHALEARN_CACHE_DIR", "")
    assert cache.cache_folder() is None
    monkeypatch.delenv("MHALEARN_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    if sys.platform.startswith("linux"):
        assert cache.cache_folder().is_relative_to(tmp_path / "xdg" / "mhalearn")


def test_an_unusable_cache_folder_is_no_obstacle(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("MHALEARN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    before = jax.config.jax_compilation_cache_dir
    cache.use_compilation_cache()
    assert jax.config.jax_compilation_cache_dir == before
