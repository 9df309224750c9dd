"""import and export on the command line: round trips, exit codes, one line for a mistake."""

import json

import numpy as np
import pytest
import safetensors.numpy
import torch

import mhalearn as mha
from mhalearn import cli, interop


@pytest.fixture
def mhalearn(capsys):
    """Run a command in this process: (exit code, standard output, standard error)."""

    def call(*arguments):
        capsys.readouterr()
        code = cli.run([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return call


def make_module():
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    with torch.no_grad():
        module.in_proj_bias.normal_()
        module.out_proj.bias.normal_()
    return module.eval()


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_module_goes_in_and_out_unchanged(mhalearn, tmp_path, suffix):
    module = make_module()
    source, layer, out = (
        tmp_path / name for name in ("in.pt", "layer.safetensors", f"out{suffix}")
    )
    torch.save(module.state_dict(), source)
    code, text, error = mhalearn(
        *("import", "torch", source, "--heads", 2, "--causal", "--out", layer, "--json")
    )
    assert (code, error) == (0, "")
    facts = {"heads": 2, "dim": 8, "out_dim": 8, "bias": True, "causal": True, "file": str(layer)}
    assert json.loads(text) == facts
    assert mha.load_layer(layer).causal
    code, text, error = mhalearn("export", "torch", layer, "--out", out)
    assert (code, error) == (0, "")
    assert "2 heads, d = 8, causal" in text
    read = torch.load if suffix == ".pt" else safetensors.numpy.load_file
    state = read(out)
    assert state.keys() == module.state_dict().keys()
    for name, tensor in module.state_dict().items():
        assert np.asarray(state[name]).tobytes() == tensor.numpy().tobytes()

    # What export wrote tells its heads and its mask by itself, as far as the format can.
    again = tmp_path / "again.safetensors"
    heads = () if suffix == ".safetensors" else ("--heads", 2, "--causal")
    assert mhalearn("import", "torch", out, *heads, "--out", again)[0] == 0
    assert mha.compare(mha.load_layer(again), mha.load_layer(layer)).max_error == 0
    assert mha.load_layer(again).causal


def test_huggingface_files(mhalearn, tmp_path):
    rng = np.random.default_rng(0)
    state = {}
    for i in range(2):
        start = f"transformer.h.{i}.attn."
        state[f"{start}c_attn.weight"] = rng.standard_normal((8, 24)).astype(np.float32)
        state[f"{start}c_attn.bias"] = rng.standard_normal(24).astype(np.float32)
        state[f"{start}c_proj.weight"] = rng.standard_normal((8, 8)).astype(np.float32)
        state[f"{start}c_proj.bias"] = rng.standard_normal(8).astype(np.float32)
    source, out = tmp_path / "model.safetensors", tmp_path / "layer.safetensors"
    safetensors.numpy.save_file(state, source)
    code, _, error = mhalearn("import", "huggingface", source, "--layer", 1, "--out", out)
    assert code == 2
    assert error.startswith("mhalearn import: ")
    assert "pass n_heads (--heads)" in error
    assert not out.exists()
    (tmp_path / "config.json").write_text('{"n_head": 4}')
    assert mhalearn("import", "huggingface", source, "--layer", 1, "--out", out)[0] == 0
    layer = mha.load_layer(out)
    assert (layer.n_heads, layer.causal) == (4, True)
    expected = mha.from_huggingface(state, 1, 4)
    assert mha.compare(layer, expected).max_error == 0
    assert mhalearn("import", "huggingface", source, "--not-causal", "--out", out)[0] == 0
    assert not mha.load_layer(out).causal


def test_a_learned_layer_goes_out_at_a_head_dimension(mhalearn, tmp_path):
    truth = mha.random_layer(2, 8, rank=2, seed=1)
    layer, out = tmp_path / "layer.safetensors", tmp_path / "out.safetensors"
    truth.save(layer)
    code, _, _ = mhalearn(
        *("export", "torch", layer, "--head-dim", 2, "--dtype", "float32", "--out", out)
    )
    assert code == 0
    assert safetensors.numpy.load_file(out)["in_proj_weight"].dtype == np.float32
    back = interop.from_torch_state(out)
    assert back.n_heads == 4
    assert mha.compare(back.canonical(), truth).max_error < 1e-6
    assert mhalearn("export", "transformerlens", layer, "--out", out)[0] == 0
    assert mha.compare(mha.from_huggingface(out), truth).max_error < 1e-12


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("export", "torch", "full", "--out", "out.pt"), "head 0: Theta has rank 8"),
        (("export", "torch", "full", "--out", "out.bin"), "ends in .safetensors or .pt"),
        (("export", "torch", "full", "--out", "full"), "is the file to read"),
        (("export", "torch", "full", "--head-dim", "3", "--out", "out.pt"), "does not divide"),
        (
            ("export", "torch", "full", "--head-dim", "2", "--heads", "2", "--out", "out.pt"),
            "--heads 2 and --head-dim 2 conflict",
        ),
        (("export", "transformerlens", "full", "--heads", "2", "--out", "out.pt"), "--heads 2"),
        (("export", "onnx", "full", "--out", "out.pt"), "onnx"),
        (("export", "torch", "missing", "--out", "out.pt"), "does not exist"),
        (("import", "torch", "missing", "--out", "full"), "is the file to read"),
        (("import", "torch", "missing.pt", "--out", "out.safetensors"), "does not exist"),
        (("import", "torch", "noise.pt", "--out", "out.safetensors"), "not a readable PyTorch"),
        (("import", "huggingface", "full", "--out", "out.safetensors"), "no attention layer named"),
        (("import", "torch", "full", "--out", "out.npz"), "ends in .safetensors"),
        (("import", "torch", "full", "--out", "nowhere/out.safetensors"), "create it first"),
    ],
)
def test_mistakes_get_one_line_and_code_2(mhalearn, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    mha.random_layer(2, 8).save("full.safetensors")
    (tmp_path / "noise.pt").write_bytes(b"noise")
    names = {"full": "full.safetensors", "missing": "missing.safetensors"}
    if words == "is the file to read":
        names["missing"] = "full.safetensors"
    code, text, error = mhalearn(*(names.get(argument, argument) for argument in arguments))
    assert (code, text) == (2, "")
    assert words in error
    assert error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full.safetensors", "noise.pt"]


def test_a_llama_style_layer_is_read_where_nothing_is_rotated(mhalearn, tmp_path):
    rng = np.random.default_rng(0)
    start, rows = "model.layers.0.self_attn.", {"q": 8, "k": 4, "v": 4, "o": 8}
    state = {
        f"{start}{name}_proj.weight": rng.standard_normal((count, 8)).astype(np.float32)
        for name, count in rows.items()
    }
    source, out = tmp_path / "model.safetensors", tmp_path / "layer.safetensors"
    safetensors.numpy.save_file(state, source)
    command = ("import", "huggingface", source, "--heads", 2, "--out", out)
    code, _, error = mhalearn(*command)
    assert code == 2
    assert "RoPE" in error
    assert "--no-rope" in error
    code, _, error = mhalearn(*command, "--no-rope")
    assert (code, error) == (0, "")
    layer = mha.load_layer(out)
    assert (layer.n_heads, layer.causal) == (2, True)
    assert mhalearn("import", "torch", source, "--no-rope", "--out", out)[0] == 2
    assert mhalearn("import", "torch", source, "--cross", "--out", out)[0] == 2
