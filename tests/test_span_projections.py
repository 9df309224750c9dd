"""Projected heads in coordinates of their tokens' span."""

import numpy as np
import pytest

import mhalearn as mha
from mhalearn.layer.span_coordinates import choose_coordinates
from mhalearn.layer.token_span import measure_span, read_tokens

ROPE = mha.Rope(base=100.0)
RNG = np.random.default_rng(0)
# Tokens that spread unevenly about a mean.
X = RNG.standard_normal((120, 6, 8)) * np.geomspace(1.0, 0.03, 8) @ RNG.standard_normal((8, 8)) + 1


def teach(bias, **given):
    more = {"key_vector": True, "out_bias": True} if bias else {}
    return mha.random_layer(2, 8, head_dim=4, causal=True, rope=ROPE, seed=3, **more, **given)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kept", [8, 5], ids=["spanned", "not spanned"])
def test_a_layer_is_the_same_function_in_both_coordinates(bias, kept):
    layer = teach(bias)
    x = X - (0 if bias else X.mean(axis=(0, 1)))
    x = x @ np.diag([1.0] * kept + [0.0] * (8 - kept))
    coordinates = choose_coordinates(measure_span(read_tokens(x)), layer.architecture)
    inside = coordinates.restrict(layer)
    assert inside.d == kept
    assert np.allclose(inside(coordinates.tokens(x)), layer(x), atol=1e-10)
    lifted = coordinates.lift(inside)
    assert lifted.architecture == layer.architecture
    assert np.allclose(lifted(x), layer(x), atol=1e-10)
    if kept == 8:
        assert mha.compare(lifted, layer).max_error < 1e-10


def test_biases_that_projections_could_not_take_back_are_not_made():
    x = X @ np.diag([1.0] * 7 + [0.0]) + np.eye(8)[7]
    assert choose_coordinates(measure_span(read_tokens(x)), teach(False).architecture) is None


def test_heads_are_recovered_from_tokens_that_spread_unevenly():
    layer = teach(True)
    found = mha.AttentionRegressor(2, head_dim=4, causal=True, bias=True, rope=ROPE).fit(
        X, layer(X)
    )
    assert found.outcome_ is mha.Outcome.RECOVERED, found.solution_.reason
    assert mha.compare(found.layer_, layer).max_error < 1e-8
