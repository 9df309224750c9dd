"""Projected layers in files, and what a file may not say."""

import json

import numpy as np
import pytest
import safetensors.numpy
from test_projected import LENGTHS, VARIANTS, D, K, N, layer_of

import mhalearn as mha
from mhalearn.layer.architecture_record import read_architecture, write_architecture


@pytest.mark.parametrize("name", VARIANTS)
def test_a_layer_comes_back_from_its_file(name, tmp_path):
    path = tmp_path / "layer.safetensors"
    layer = layer_of(name).replace(seen=np.arange(3, dtype=np.uint64))
    layer.save(path)
    again = mha.load_layer(path)
    assert isinstance(again, mha.ProjectedLayer)
    assert again.architecture == layer.architecture
    assert again.metadata["teacher"] == layer.metadata["teacher"]
    np.testing.assert_array_equal(again.seen, layer.seen)
    assert again.params.keys() == layer.params.keys()
    for key, leaf in layer.params.items():
        np.testing.assert_array_equal(again.params[key], leaf)
    again.save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


def test_a_loaded_layer_computes_the_same(tmp_path):
    layer = layer_of("everything")
    layer.save(tmp_path / "layer.safetensors")
    x = np.random.default_rng(0).standard_normal((N, K, D))
    np.testing.assert_array_equal(
        mha.load_layer(tmp_path / "layer.safetensors")(x, LENGTHS), layer(x, LENGTHS)
    )


RECORD = json.loads(write_architecture(layer_of("everything").architecture))


@pytest.mark.parametrize("name", VARIANTS)
def test_records_are_read_as_they_were_written(name):
    architecture = layer_of(name).architecture
    assert read_architecture(write_architecture(architecture)) == architecture


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"d": "5"}, "d=5 in the architecture: pass int"),
        ({"d": True}, "d=True"),
        ({"d": 10**400}, "d=1000"),
        ({"d": None}, "d=None"),
        ({"n_heads": None}, "n_heads is open"),
        ({"n_heads": -4}, "n_heads=-4"),
        ({"head_dim": None}, "head_dim is missing"),
        ({"sinks": 1}, "sinks=1"),
        ({"softcap": float("nan")}, "softcap=nan"),
        ({"softcap": "2"}, "softcap=2"),
        ({"window": 2.5}, "window=2.5"),
        ({"attention": "os.system"}, "'attention' is no field"),
        ({"x" * 99: 1}, "is no field of a Architecture"),
        ({"rope": 3}, "rope=3"),
        ({"rope": {"base": [10]}}, "base="),
        ({"rope": {"scaling": 3}}, "rope_type=None"),
        ({"rope": {"scaling": {"rope_type": "linear"}}}, "factor is missing"),
        ({"rope": {"scaling": {"rope_type": "linear", "factor": "8"}}}, "factor=8"),
        ({"rope": {"layout": "x"}}, "layout='x'"),
        ({"qk_norm": True}, "qk_norm=True"),
        ({"qk_norm": {"kind": "exec"}}, "kind 'exec'"),
        ({"position_bias": {"name": "os"}}, "position_bias='os'"),
        ({"position_bias": {"name": "t5", "max_distance": 10**15}}, "max_distance=1000000"),
        ({"position_bias": {"name": "alibi", "slopes": 1}}, "'slopes' is no field"),
        ({"d": 6}, r"query has shape \(4, 5, 4\): expected \(4, 6, 4\)"),
        ({"sinks": False}, "'sink' is no parameter"),
    ],
    ids=str,
)
def test_a_file_that_says_something_else_is_refused(changes, said, tmp_path):
    path = tmp_path / "layer.safetensors"
    params = dict(layer_of("everything").params)
    metadata = {"kind": "layer", "architecture": json.dumps(RECORD | changes)}
    safetensors.numpy.save_file(params, path, metadata)
    with pytest.raises(ValueError, match=said) as error:
        mha.load_layer(path)
    assert "layer.safetensors" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "3", "[" * 9000, "{}" + " " * 20_000, "{"], ids=len)
def test_a_record_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="not readable"):
        read_architecture(text)
