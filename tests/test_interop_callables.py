"""Examples of any black box: torch modules in their own dtype and layout, JAX, plain functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import mhalearn as mha
from mhalearn import interop
from mhalearn.report.terminal import Progress


def attention(**options):
    torch.manual_seed(0)
    return torch.nn.MultiheadAttention(6, 2, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("inputs", ["boolean", "gaussian"])
def test_a_module_is_called_as_self_attention(inputs, batch_first, dtype):
    module = attention(batch_first=batch_first, dtype=dtype)
    examples = mha.Examples.from_callable(module, inputs, n=20, k=4, d=6, seed=3)
    x, y, _ = examples.arrays()
    np.testing.assert_array_equal(x, mha.sample_inputs(inputs, 20, 4, 6, seed=3))
    assert y.dtype == str(dtype).removeprefix("torch.")
    tolerance = 1e-6 if dtype is torch.float32 else 1e-12
    np.testing.assert_allclose(y, mha.from_torch(module)(x), rtol=0, atol=tolerance)


def test_a_causal_module():
    module = attention(dtype=torch.float64)
    f = interop.as_function(module, causal=True)
    x, y, _ = mha.Examples.from_callable(f, n=5, k=4, d=6).arrays()
    np.testing.assert_allclose(y, mha.from_torch(module, causal=True)(x), rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=r"causal=True is for torch.nn.MultiheadAttention"):
        interop.as_function(torch.nn.Linear(6, 6), causal=True)
    with pytest.raises(ValueError, match="mask inside f"):
        interop.as_function(np.tanh, causal=True)


def test_half_precision_is_kept():
    module = attention(dtype=torch.bfloat16, batch_first=True).eval()
    y = mha.Examples.from_callable(module, n=5, k=4, d=6).arrays().y
    assert y.dtype == jnp.bfloat16


class WithTuple(torch.nn.Module):
    """Has no weights, returns a tuple, and notes how it was called."""

    def forward(self, x):
        self.seen = (x.dtype, torch.is_grad_enabled())
        return 2 * x, "attention weights"


class Elsewhere(torch.nn.Module):
    """Lives on a device of its own and answers from another one."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(1, device="meta", dtype=torch.float64))

    def forward(self, x):
        assert (x.device.type, x.dtype) == ("meta", torch.float64)
        return torch.ones(x.shape)


def test_inputs_move_to_the_modules_device_and_outputs_back():
    y = mha.Examples.from_callable(Elsewhere().eval(), n=5, k=4, d=6).arrays().y
    assert (y == 1).all()


def test_any_module_in_eval_mode():
    module = WithTuple().eval()
    x, y, _ = mha.Examples.from_callable(module, n=5, k=4, d=6).arrays()
    np.testing.assert_array_equal(y, 2.0 * x)
    assert module.seen == (torch.float32, False)
    linear = torch.nn.Linear(6, 3, dtype=torch.float64).eval()
    x, y, _ = mha.Examples.from_callable(linear, "gaussian", n=5, k=4, d=6).arrays()
    expected = x @ linear.weight.detach().numpy().T + linear.bias.detach().numpy()
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("f", "words"),
    [
        (attention(dropout=0.2), r"dropout=0.2 in training mode .* module.eval\(\)"),
        (
            torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Dropout(0.5)),
            "1: dropout=0.5 in training mode",
        ),
        (torch.nn.Linear(6, 6), "Linear is in training mode"),
        (torch.nn.Sequential(torch.nn.BatchNorm1d(4)), "Sequential is in training mode"),
    ],
)
def test_modules_in_training_mode_are_refused(f, words):
    with pytest.raises(ValueError, match=words):
        mha.Examples.from_callable(f, n=5, k=4, d=6)
    if not isinstance(f, torch.nn.MultiheadAttention):
        assert len(mha.Examples.from_callable(f.eval(), "gaussian", n=5, k=4, d=6)) == 5


@pytest.mark.parametrize(
    "f",
    [
        lambda x: torch.as_tensor(x).double().requires_grad_(),
        lambda x: torch.as_tensor(x).to(torch.bfloat16),
        jax.jit(lambda x: jnp.asarray(x, jnp.float32)),
        jax.jit(lambda x: jnp.asarray(x, jnp.bfloat16)),
    ],
)
def test_functions_may_return_arrays_of_any_library(f):
    x, y, _ = mha.Examples.from_callable(f, n=5, k=4, d=6).arrays()
    np.testing.assert_array_equal(x, y)


def test_progress_is_told_block_by_block():
    events = []
    examples = mha.Examples.from_callable(
        lambda x: x, n=10_000, k=2, d=2, progress=events.append, noise=0.1
    )
    assert events == []
    examples.arrays()
    assert [event.step for event in events] == [4096, 8192, 10_000]
    assert {event.data["of"] for event in events} == {10_000}
    assert {event.stage for event in events} == {"labelling"}
    progress = Progress(enabled=False)
    progress.on_event(events[0])
    assert progress.line().plain.startswith("labelling  41%")
