"""One choice of projections for each function."""

import numpy as np
import pytest
from test_projected import LENGTHS, VARIANTS, D, K, N, inputs_of, layer_of
from test_projected_comparison import exact, gauged

import mhalearn as mha


@pytest.mark.parametrize("name", VARIANTS)
def test_the_canonical_form_computes_the_same(name):
    layer = layer_of(name)
    x, beside = inputs_of(layer)
    form = layer.canonical()
    found, wanted = (one(x, LENGTHS, **beside) for one in (form, layer))
    np.testing.assert_allclose(found, wanted, atol=1e-11)
    assert mha.compare(form, layer).max_error < 1e-11


@pytest.mark.parametrize("name", [name for name in VARIANTS if "ALiBi" not in name])
def test_other_projections_of_one_function_have_the_same_form(name):
    layer = exact(name)
    form, other = layer.canonical(), gauged(layer).canonical()
    for key, leaf in form.params.items():
        np.testing.assert_allclose(other.params[key], leaf, atol=1e-9, err_msg=key)
    again = form.canonical()
    for key, leaf in form.params.items():
        np.testing.assert_allclose(again.params[key], leaf, atol=1e-9, err_msg=key)


@pytest.mark.parametrize("name", ["RMS norm", "Gemma 3", "everything"])
def test_dimensions_under_a_norm_may_change_places_and_signs(name):
    """Still ones in any order, those of a pair by a quarter turn, each with its gain."""
    layer = exact(name)
    a, h = layer.architecture, layer.architecture.qk_rank
    order, sign = np.arange(h), np.ones(h)
    first = 0 if a.rope is None else a.rope.rotated(h)
    if a.rope is not None:
        x, y = (side[0] for side in a.rope.pairs(h))
        order[x], order[y], sign[x] = y, x, -1.0
    order[first:] = order[first:][::-1]
    sign[first:] = -1.0
    params = dict(layer.params)
    for side in ("query", "key"):
        params[side] = params[side][..., order] * sign
        params[f"{side}_gain"] = params[f"{side}_gain"][order]
        if f"{side}_bias" in params:
            params[f"{side}_bias"] = params[f"{side}_bias"][..., order] * sign
    other = layer.replace(params=params)
    x = np.random.default_rng(0).standard_normal((N, K, D))
    np.testing.assert_allclose(other(x), layer(x), atol=1e-12)
    form = layer.canonical()
    for key, leaf in other.canonical().params.items():
        np.testing.assert_allclose(form.params[key], leaf, atol=1e-10, err_msg=key)
