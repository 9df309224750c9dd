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
    for found, expected in zip(examples.arrays()[:2], WIDE, strict=True):
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(LAYER(x), LAYER(WIDE[0]))
    np.testing.assert_array_equal(
        mha.certify(LAYER, x, y).relative_mse, mha.certify(LAYER, *WIDE).relative_mse
    )
    box = mha.Examples.from_callable(
        lambda x: KINDS[kind](LAYER(x).astype(ml_dtypes.bfloat16)), n=10, k=4, d=4
    )
    inputs, labels, _ = box.arrays()
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
    for name in ("bf16.safetensors", "bf16.npz"):
        x, y, _ = mha.load_examples(tmp_path / name).arrays()
        np.testing.assert_array_equal(x, WIDE[0])
        np.testing.assert_array_equal(y, WIDE[1])


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
