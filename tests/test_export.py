"""An exported layer is a program of its own: it runs where this package is not."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mhalearn as mha

# What the docstring of `AttentionLayer.export` says, where mhalearn cannot be imported.
ELSEWHERE = """
import sys
from pathlib import Path
sys.modules["mhalearn"] = None
import jax
import jax.export
import numpy as np

for name in sys.argv[1:]:
    X = np.load(name + ".x.npy")
    program = jax.export.deserialize(Path(name + ".jaxexport").read_bytes())
    with jax.enable_x64(True):
        Y = program.call(X)
    assert Y.dtype == np.float64
    np.save(name + ".y.npy", Y)
assert not [module for module in sys.modules if module.startswith("mhalearn.")]
"""


def layers() -> dict[str, mha.AttentionLayer]:
    plain = mha.random_layer(3, 8, scale=2.0, out_dim=5, seed=0)
    biased = mha.random_layer(2, 8, scale=2.0, key_vector=True, out_bias=True, seed=1)
    return {
        "plain": plain,
        "biased": biased,
        "key_vector": biased.replace(out_bias=None),
        "out_bias": biased.replace(key_vector=None),
        "causal": plain.replace(causal=True),
        "biased_causal": biased.replace(causal=True),
    }


def test_a_program_computes_what_its_layer_does_without_the_package(tmp_path: Path) -> None:
    """For numbers of examples and of tokens that nobody named when it was written."""
    sizes = [(1, 2), (7, 3), (64, 12), (5, 2), (2, 30), (130, 4)]
    inputs = {}
    for number, ((name, layer), (n, k)) in enumerate(zip(layers().items(), sizes, strict=True)):
        inputs[name] = np.random.default_rng(number).standard_normal((n, k, 8))
        np.save(tmp_path / f"{name}.x.npy", inputs[name])
        layer.export(tmp_path / f"{name}.jaxexport")
    names = [str(tmp_path / name) for name in inputs]
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, *names], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for name, layer in layers().items():
        expected = layer(inputs[name])
        found = np.load(tmp_path / f"{name}.y.npy")
        assert found.shape == expected.shape
        assert np.abs(found - expected).max() <= 1e-12 * np.abs(expected).max(), name


def test_a_file_of_another_name_or_place_is_refused_before_any_work(tmp_path: Path) -> None:
    layer = mha.random_layer(1, 2, seed=0)
    with pytest.raises(ValueError, match=r"ends in \.jaxexport"):
        layer.export(tmp_path / "layer.safetensors")
    with pytest.raises(ValueError, match="does not exist; create it first"):
        layer.export(tmp_path / "missing" / "layer.jaxexport")
    (tmp_path / "folder.jaxexport").mkdir()
    with pytest.raises(ValueError, match="is a folder"):
        layer.export(tmp_path / "folder.jaxexport")
    assert [path.name for path in tmp_path.iterdir()] == ["folder.jaxexport"]


def test_without_flatbuffers_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    with pytest.raises(ValueError, match=r"mhalearn\[export\]"):
        mha.random_layer(1, 2, seed=0).export(tmp_path / "layer.jaxexport")
    assert not list(tmp_path.iterdir())
