"""Arrays and tensors as models have them: bfloat16 and float16, with or without gradients."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.torch
import torch

import mhalearn as mha

LAYER = mha.random_layer(2, 4, seed=0)
X = mha.sample_inputs("gaussian", 60, 4, 4, seed=0).astype(ml_dtypes.bfloat16)
Y = LAYER(X.astype(np.float64)).astype(ml_dtypes.bfloat16)
WIDE = X.astype(np.float32), Y.astype(np.float32)


def tensor(array, dtype=torch.bfloat16):
    return torch.from_numpy(array.astype(np.float32)).to(dtype)


KINDS = {
    "numpy": lambda a: a,
    "jax": jnp.asarray,
    "torch": tensor,
    "with gradients": lambda a: tensor(a).requires_grad_(),
    "in float32 with gradients": lambda a: tensor(a, torch.float32).requires_grad_(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_value_is_kept(kind):
    x, y = map(KINDS[kind], (X, Y))
    examples = mha.Examples(x, y)
    narrow = "float32" not in kind
    for found, expected in zip(examples.arrays()[:2], WIDE, strict=True):
        assert found.dtype == (ml_dtypes.bfloat16 if narrow else np.float32)
        np.testing.assert_array_equal(found.astype(np.float32), expected)
    assert examples.y_dtype.itemsize == (2 if narrow else 4)
    for chunk in examples.chunks(25):
        assert chunk.x.dtype == chunk.y.dtype == np.float32
    np.testing.assert_array_equal(LAYER(x), LAYER(WIDE[0]))
    np.testing.assert_array_equal(
        mha.certify(LAYER, x, y).relative_mse, mha.certify(LAYER, *WIDE).relative_mse
    )
    box = mha.Examples.from_callable(
        lambda x: KINDS[kind](LAYER(x).astype(ml_dtypes.bfloat16)), n=10, k=4, d=4
    )
    inputs, labels, _ = box.arrays()
    assert labels.dtype == (ml_dtypes.bfloat16 if narrow else np.float32)
    np.testing.assert_array_equal(labels, LAYER(inputs).astype(ml_dtypes.bfloat16))


def test_tensors_are_fitted_and_predicted():
    model = mha.AttentionRegressor(2, max_seconds=1.0).fit(tensor(X), tensor(Y))
    np.testing.assert_array_equal(model.predict(tensor(X)), model.layer_(WIDE[0]))
    assert model.score(tensor(X), tensor(Y)) == model.score(*WIDE)


def test_float16_stays_float16():
    x, y, _ = mha.Examples(tensor(X, torch.float16), tensor(Y, torch.float16)).arrays()
    assert x.dtype == y.dtype == np.float16


def test_files_of_examples(tmp_path):
    tensors = {"X": tensor(X), "Y": tensor(Y)}
    safetensors.torch.save_file(
        tensors, tmp_path / "bf16.safetensors", metadata={"kind": "examples"}
    )
    np.savez(tmp_path / "bf16.npz", X=X, Y=Y)
    torch.save({"x": tensor(X), "y": tensor(Y)}, tmp_path / "bf16.pt")
    for name in ("bf16.safetensors", "bf16.npz", "bf16.pt"):
        check_values(mha.load_examples(tmp_path / name))


def check_values(examples):
    for found, expected in zip(examples.arrays()[:2], WIDE, strict=True):
        assert found.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(found.astype(np.float32), expected)


@pytest.mark.parametrize("name", ["one.safetensors", "one.npz", "shards"])
def test_what_is_written_is_bfloat16_too(name, tmp_path):
    """Every way of holding and choosing examples keeps two bytes a number."""
    examples = mha.Examples(X, Y)
    examples.save(tmp_path / name, shard_size=25 if name == "shards" else None)
    loaded = mha.load_examples(tmp_path / name)
    check_values(loaded)
    np.testing.assert_array_equal(loaded.hashes(), mha.Examples(*WIDE).hashes())
    assert loaded.subset(slice(3, 9)).arrays().x.dtype == ml_dtypes.bfloat16
    assert loaded.sample(7, seed=0).arrays().y.dtype == ml_dtypes.bfloat16
    wide = tmp_path / "wide.npz"
    mha.Examples(*WIDE).save(wide)
    if name == "one.npz":
        assert (tmp_path / name).stat().st_size < 0.7 * wide.stat().st_size


@pytest.mark.parametrize(
    "method", ["newton", "adam", pytest.param("sculpt", marks=pytest.mark.slow)]
)
def test_a_fit_sees_the_same_numbers(method):
    """Whatever is summed on the way is summed in double precision, not in eight bits."""
    x, y = X[:, :, :3], mha.random_layer(1, 3, seed=0)(X[:, :, :3].astype(float))
    y = y.astype(ml_dtypes.bfloat16)
    settings = {"n_heads": 1, "method": method, "random_state": 0}
    narrow = mha.AttentionRegressor(**settings).fit(x, y)
    wide = mha.AttentionRegressor(**settings).fit(x.astype(float), y.astype(float))
    assert narrow.outcome_ == wide.outcome_
    assert narrow.solution_.reason == wide.solution_.reason
    np.testing.assert_allclose(narrow.layer_.theta, wide.layer_.theta, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (np.full(X.shape, "a"), "dtype <U1"),
        (np.full(X.shape, None), "dtype object"),
        (WIDE[0] + 1j, "Complex"),
        (tensor(X, torch.complex64), "Complex"),
        ([[[1.0], [2.0, 3.0]]], "rectangular array"),
        (list(tensor(X)), r"torch\.stack"),
        (tensor(X).to(torch.float8_e4m3fn), "float8_e4m3fn"),
        (tensor(X, torch.float32).to_sparse(), "sparse_coo"),
        (torch.empty(X.shape, device="meta"), "meta"),
        (X.astype(ml_dtypes.float8_e4m3fn), "dtype float8_e4m3fn"),
    ],
)
def test_what_is_no_array_of_numbers_is_refused(x, words):
    with pytest.raises(ValueError, match=words):
        mha.Examples(x, Y)
