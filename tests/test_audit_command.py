"""The command, the page, and boxes of other libraries."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import mhalearn as mha
from mhalearn.cli import run

PORT = """
import numpy as np

import mhalearn as mha

layer = mha.load_layer("layer.safetensors")
lost = dict(layer.params)
lost["sink"] = np.where(np.arange(4) == 2, -50.0, lost["sink"])


def right(x):
    return layer(x).astype(np.float32)


def wrong(x):
    return layer.replace(params=lost)(x).astype(np.float32)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = {"head_dim": 4, "causal": True, "sinks": True, "rope": mha.Rope()}
    layer = mha.random_layer(n_heads=4, d=8, **made)
    layer.save(tmp_path / "layer.safetensors")
    x = mha.sample_inputs("gaussian", 12, 6, 8)
    mha.Examples(x, layer(x)).save(tmp_path / "right.safetensors")
    (tmp_path / "a_port.py").write_text(PORT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_ends_with_0_or_3_and_names_the_fault(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["audit", "layer.safetensors", "right.safetensors"]) == 0
    assert capsys.readouterr().out.startswith("ok at float")
    asked = ["--sequences", "12", "--tokens", "8", "--json", "--report", "audit.html"]
    assert run(["audit", "layer.safetensors", "a_port:wrong", *asked]) == 3
    said = json.loads(capsys.readouterr().out)
    assert (said["findings"][0]["name"], said["findings"][0]["head"]) == ("sink-missing", 2)
    page = (folder / "audit.html").read_text()
    assert "head 3 of 4: the sink is missing" in page
    assert page.count("data:image/png") == 2 * (4 + 1)  # four heads, and the outputs
    assert "modular/modular#6198" in page
    assert "http" not in page.replace("http-equiv", "")


def test_weights_of_a_model_are_audited_with_their_config(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Llama of two layers, as Hugging Face stores it; the port forgets the base of the second."""
    rng, sides = np.random.default_rng(0), {"q": (8, 8), "k": (4, 8), "v": (4, 8), "o": (8, 8)}
    weights = {
        f"model.layers.{at}.self_attn.{side}_proj.weight": rng.standard_normal(shape) / 2
        for at in range(2)
        for side, shape in sides.items()
    }
    save_file(
        {name: leaf.astype(np.float32) for name, leaf in weights.items()}, "model.safetensors"
    )
    config = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2}
    config |= {"num_key_value_heads": 1, "rope_theta": 500.0}
    Path("llama.json").write_text(json.dumps(config))
    port = mha.from_huggingface(weights, layer_index=1, config=config | {"rope_theta": 10000.0})
    x = mha.sample_inputs("gaussian", 16, 8, 8)
    mha.Examples(x, port(x).astype(np.float32)).save("recorded.safetensors")
    asked = ["audit", "model.safetensors", "recorded.safetensors", "--config", "llama.json"]
    assert run([*asked, "--layer", "1", "--json"]) == 3
    first = json.loads(capsys.readouterr().out)["findings"][0]
    assert (first["name"], first["numbers"]["base"]) == ("rotary-base", 10000.0)
    Path("config.json").write_text(json.dumps(config | {"rope_theta": 10000.0}))
    assert run(["audit", "model.safetensors", "recorded.safetensors", "--layer", "1"]) == 0
    assert run([*asked[:4], "nowhere.json"]) == 2
    assert "nowhere.json: not readable as the JSON of a model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("box", "said"),
    [
        ("nowhere.safetensors", "nowhere.safetensors"),
        ("a_port:missing", "has no function 'missing'"),
        ("no_such_module:f", "No module named"),
    ],
)
def test_a_box_that_is_not_there_is_said_in_one_line(
    box: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["audit", "layer.safetensors", box]) == 2
    line = capsys.readouterr().err
    assert said in line
    assert line.count("\n") == 1


def test_a_page_of_what_nothing_explains_shows_outputs_alone(tmp_path: Path) -> None:
    layer = mha.random_layer(n_heads=2, d=6)
    found = mha.audit(layer, lambda x: layer(x) ** 3, n=12, k=6, depth=1, max_seconds=3.0)
    found.write_report(tmp_path / "audit.html")
    page = (tmp_path / "audit.html").read_text()
    assert "Nothing explains the box" in page
    assert page.count("data:image/png") == 2


def test_a_jax_function_and_a_torch_module_are_boxes() -> None:
    torch = pytest.importorskip("torch", reason="one of the boxes is torch's")
    layer = mha.random_layer(n_heads=2, d=6)
    theta, w = jnp.asarray(layer.theta, jnp.float32), jnp.asarray(layer.w, jnp.float32)

    def box(x: np.ndarray) -> jnp.ndarray:
        logits = jnp.einsum("nrd,mde,nje->nmrj", x, theta, x)
        weights = jnp.exp(logits) / jnp.exp(logits).sum(-1, keepdims=True)
        return jnp.einsum("nmrj,njd,mde->nre", weights, x, w)

    assert mha.audit(layer, box, n=12, k=6).ok
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    module.in_proj_bias.data.normal_()
    claimed = mha.from_torch(module)
    assert mha.audit(claimed, module, n=12, k=6).ok
    module.in_proj_bias.data[16:] = 0  # of the values
    found = mha.audit(claimed, module, n=12, k=6)
    assert found.findings[0].name == "bias-missing"
    assert "value bias" in found.findings[0].sentence
