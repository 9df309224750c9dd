"""Factors: what they refuse, what they carry, and what a layer's file may not smuggle in."""

import numpy as np
import pytest

import mhalearn as mha
from mhalearn.interop import WeightFactors, carried_factors, factorise

M, H, D, E = 2, 3, 5, 4


def draw(seed=0, dtype=np.float32, **changes):
    rng = np.random.default_rng(seed)
    shapes = {
        "query": (M, H, D),
        "key": (M, H, D),
        "value": (M, H, D),
        "out": (M, H, E),
        "query_bias": (M, H),
        "key_bias": (M, H),
        "value_bias": (M, H),
        "out_bias": (E,),
    }
    arrays = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    return {name: array for name, array in (arrays | changes).items() if array is not None}


@pytest.mark.parametrize("without", [(), ("query_bias",), ("value_bias",), ("out_bias",)])
def test_a_layer_of_factors_carries_them(without, tmp_path):
    arrays = draw(**dict.fromkeys(without))
    layer = WeightFactors(**arrays).to_layer(causal=True)
    assert layer.causal
    layer.save(tmp_path / "layer.safetensors")
    carried = carried_factors(mha.load_layer(tmp_path / "layer.safetensors")).arrays()
    assert carried.keys() == arrays.keys()
    for name, array in arrays.items():
        assert carried[name].tobytes() == array.tobytes()
    assert carried_factors(mha.random_layer(2, 4)) is None


def test_a_key_bias_changes_nothing():
    with_bias, without = (
        WeightFactors(**draw()).to_layer(),
        WeightFactors(**draw(key_bias=None)).to_layer(),
    )
    assert mha.compare(with_bias, without).max_error == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"key": np.zeros((M, H, D + 1))}, r"key weight has shape \(2, 3, 6\)"),
        ({"out": np.zeros((M, H + 1, E))}, r"expected \(2, 3, 4\)"),
        ({"query_bias": np.zeros((H, M))}, "query_bias"),
        ({"query": np.zeros((M, H))}, "expected 3 axes"),
        ({"out_bias": np.full(E, np.inf)}, "out_bias weight has 4 NaN or infinite"),
        ({"value": np.zeros((M, H, D), np.int32)}, "dequantise"),
    ],
)
def test_wrong_factors_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        WeightFactors(**draw(**changes))


@pytest.mark.parametrize("key_vector", [False, True])
@pytest.mark.parametrize("out_bias", [False, True])
@pytest.mark.parametrize(("rank", "out_dim"), [(1, 6), (3, 6), (6, 6), (6, 2)])
def test_factorising_is_exact(rank, out_dim, key_vector, out_bias):
    layer = mha.random_layer(
        3, 6, rank=rank, out_dim=out_dim, key_vector=key_vector, out_bias=out_bias, seed=2
    )
    factors = factorise(layer)
    assert factors.head_dim == rank
    assert mha.compare(factors.to_layer(), layer).max_error < 1e-13
    wider = factorise(layer, rank + 2, 5)
    assert wider.query.shape == (5, rank + 2, 6)
    assert mha.compare(wider.to_layer().canonical(), layer).max_error < 1e-13


def test_the_tolerance_decides_what_counts_as_zero():
    layer = mha.random_layer(2, 6, rank=2, seed=1)
    noisy = layer.replace(theta=layer.theta + 1e-5 * np.eye(6))
    with pytest.raises(ValueError, match=r"head 0: Theta has rank 6 \(singular values above 1e-08"):
        factorise(noisy, 2)
    close = factorise(noisy, 2, tolerance=1e-3).to_layer()
    assert mha.compare(close, noisy).max_error < 1e-4


def test_a_layer_of_zeros_has_factors():
    zero = mha.AttentionLayer(np.zeros((2, 4, 4)), np.zeros((2, 4, 4)))
    assert factorise(zero).head_dim == 1
    assert not factorise(zero, 2).to_layer().theta.any()


@pytest.mark.parametrize(
    "change",
    [
        {"query": np.ones((M, H, D))},
        {"value_bias": None},
        {"query_bias": None},
        {"out": np.ones((M, H + 1, E))},
        {"surprise": np.ones(3)},
        {"query": None},
    ],
)
def test_factors_that_make_another_layer_are_refused(change):
    layer = WeightFactors(**draw()).to_layer().replace(factors=draw(**change))
    with pytest.raises(ValueError, match=r"layer.replace\(factors=None\) leaves them out"):
        carried_factors(layer)
    assert carried_factors(layer.replace(factors=None)) is None
