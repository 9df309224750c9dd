import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhalearn.data.inputs import sample_inputs
from mhalearn.judge import jacobian_check as jacobian
from mhalearn.judge.jacobian_check import check_jacobian
from mhalearn.layer import attention
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.random_layers import random_layer

K, D = 4, 3


@pytest.fixture(scope="module")
def x():
    return sample_inputs("gaussian", 5, K, D, seed=2)


@pytest.fixture(scope="module")
def layer():
    return random_layer(2, D, seed=1)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_the_jacobian_passes_its_own_check(x, biased, causal):
    layer = random_layer(2, D, out_dim=2, key_vector=biased, out_bias=biased, causal=causal, seed=1)
    check = check_jacobian(layer, x)
    assert check.ok
    assert check.slope == pytest.approx(2.0, abs=0.05)
    assert check.adjoint_error < 1e-14
    assert check.steps.shape == check.errors.shape
    # The remainder itself, not only its slope: h^2 with a constant of order one.
    assert np.all(check.errors < 10 * check.steps**2)
    assert not jax.config.jax_enable_x64


def test_the_check_is_a_function_of_its_seed(layer, x):
    one, again, other = (check_jacobian(layer, x, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.errors, again.errors)
    assert np.abs(one.errors / other.errors - 1).max() > 1e-3


@pytest.mark.parametrize("scale", [0.1, 2.0, 20.0])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_units_of_the_inputs_do_not_matter(x, size, scale):
    layer = random_layer(2, D, scale=scale, seed=1)
    there = layer.replace(theta=layer.theta / size**2)
    check = check_jacobian(there, size * x)
    assert check.ok
    assert check.slope == pytest.approx(check_jacobian(layer, x).slope, abs=1e-2)


def test_a_layer_that_ignores_theta_passes(layer, x):
    assert check_jacobian(layer.replace(w=np.zeros_like(layer.w)), x).ok
    same = np.repeat(x[:, :1], K, axis=1)  # all tokens alike: no pattern matters
    assert check_jacobian(layer, same).ok


def without_centring(at, chunk, step):
    return jnp.einsum("brmj,bmje->bre", at.p * attention.logits(step, chunk), at.values)


WRONG = {
    "zero": lambda at, chunk, step: 0 * attention.jvp(at, chunk, step),
    "half": lambda at, chunk, step: 0.5 * attention.jvp(at, chunk, step),
    "one percent": lambda at, chunk, step: 1.01 * attention.jvp(at, chunk, step),
    "sign": lambda at, chunk, step: -attention.jvp(at, chunk, step),
    "transposed": lambda at, chunk, step: attention.jvp(at, chunk, step.mT),
    "heads exchanged": lambda at, chunk, step: attention.jvp(at, chunk, step[::-1]),
    "not centred": without_centring,
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
@pytest.mark.parametrize("size", [1e-4, 1.0])
def test_a_wrong_derivative_is_caught(monkeypatch, layer, x, size, wrong):
    monkeypatch.setattr(jacobian, "jvp", wrong)
    there = layer.replace(theta=layer.theta / size**2)
    check = check_jacobian(there, size * x)
    assert not check.ok
    assert check.adjoint_error > 1e-4


@pytest.mark.parametrize("wrong", [WRONG["zero"], WRONG["half"], WRONG["transposed"]])
def test_the_slope_catches_a_derivative_whose_transpose_is_wrong_too(monkeypatch, layer, x, wrong):
    def transpose(at, chunk, change):
        step = jnp.zeros((2, D, D))
        return jax.vjp(lambda step: wrong(at, chunk, step), step)[1](change)[0]

    monkeypatch.setattr(jacobian, "jvp", wrong)
    monkeypatch.setattr(jacobian, "vjp", transpose)
    check = check_jacobian(layer, x)
    assert check.adjoint_error < 1e-12
    assert check.slope < 1.5
    assert not check.ok


def test_a_wrong_transpose_is_caught(monkeypatch, layer, x):
    monkeypatch.setattr(
        jacobian, "vjp", lambda at, chunk, change: 1.001 * attention.vjp(at, chunk, change)
    )
    check = check_jacobian(layer, x)
    assert check.slope == pytest.approx(2.0, abs=0.05)
    assert check.adjoint_error > 1e-6
    assert not check.ok


def test_inputs_are_checked_at_the_boundary(layer):
    with pytest.raises(ValueError, match="features"):
        check_jacobian(layer, np.zeros((2, 3, D + 1)))


def test_saturated_attention_is_no_error(x):
    # Logits of some thousand: all derivatives are near zero, and rounding must not look like a bug.
    layer = random_layer(2, D, seed=1)
    for size in (10.0, 30.0, 100.0, 1000.0):
        assert check_jacobian(layer, size * x).ok, size


def test_one_head_of_one_feature(x):
    layer = AttentionLayer([[[1.5]]], [[[2.0]]])
    assert check_jacobian(layer, x[..., :1]).ok
