"""Layers of projected heads are compared by what their function determines."""

from dataclasses import replace

import numpy as np
import pytest
from test_projected import POSITIONS, VARIANTS, D, K, N, inputs_of, layer_of

import mhalearn as mha


def gauged(layer, seed=5):
    """Other projections of the same function."""
    a, rng = layer.architecture, np.random.default_rng(seed)
    p = {name: leaf.copy() for name, leaf in layer.params.items()}
    h, each = a.qk_rank, a.heads // a.groups
    if a.latent is not None:
        gauge_latents(a, p, rng)
    for g in range(a.groups):
        of = range(g * each, (g + 1) * each)
        change = np.eye(a.values) + 0.3 * rng.standard_normal((a.values, a.values))
        p["value"][g] = p["value"][g] @ change
        if "value_bias" in p:
            p["value_bias"][g] = p["value_bias"][g] @ change
        for i in of:
            p["out"][i] = np.linalg.solve(change, p["out"][i])
        left, right = key_gauge(a, rng)
        if a.latent is not None:  # heads share the rotated dimensions
            left[: a.rotated, : a.rotated] = np.eye(a.rotated)
            right = right[a.rotated :, a.rotated :]
        for side, heads, turn in (("query", of, left), ("key", [g], right)):
            for i in heads:
                p[side][i] = p[side][i] @ turn
                if f"{side}_bias" in p:
                    p[f"{side}_bias"][i] = p[f"{side}_bias"][i] @ turn
    if not a.sinks and "value_bias" in p:
        p["out_bias"] += np.einsum("mh,mhe->e", np.repeat(p["value_bias"], each, 0), p["out"])
        p["value_bias"][:] = 0.0
    if "position_table" in p:
        shift = rng.standard_normal(a.heads)
        p["position_table"] += shift
        if a.sinks:
            p["sink"] += shift
    if a.rope is None and not (a.sinks or a.softcap or a.norm) and "key_bias" in p:
        p["key_bias"] += 1.0
    if a.norm is not None and a.norm.has_gains:  # one number for queries, its inverse for keys
        p["query_gain"] *= 1.7
        p["key_gain"] /= 1.7
    order = rng.permutation(a.groups)
    inside = np.concatenate([g * each + rng.permutation(each) for g in order])
    for name in p:
        if name in ("key", "value", "key_bias", "value_bias") or (
            name == "key_gain" and p[name].ndim == 2
        ):
            p[name] = p[name][order]
        elif name in ("query", "out", "query_bias", "sink") or p[name].shape == (a.heads, h):
            p[name] = p[name][inside]
        elif name == "position_table":
            p[name] = p[name][:, inside]
    return layer.replace(params=p)


def gauge_latents(a, p, rng):
    """Turned, of another size under a norm, with other gains; and the rotary key as others have."""
    for name, readers in (("latent", ("key", "value")), ("query_latent", ("query",))):
        if name not in p:
            continue
        r = p[name].shape[1]
        change = np.eye(r) + 0.3 * rng.standard_normal((r, r))
        if a.latent.norm:
            change = np.linalg.qr(change)[0]
            gain = np.exp(0.3 * rng.standard_normal(r))
            for reader in readers:  # of gains one, then turned, then of others
                read = change.T @ (p[f"{name}_gain"][:, None] * p[reader])
                p[reader] = read / gain[:, None]
            p[f"{name}_gain"], p[name] = gain, 2.5 * p[name] @ change
        else:
            p[name] = p[name] @ change
            for reader in readers:
                p[reader] = np.linalg.solve(change, p[reader])
    if a.rotated:
        left, right = key_gauge(a, rng)
        p["query"][..., : a.rotated] = p["query"][..., : a.rotated] @ left[: a.rotated, : a.rotated]
        p["rotary_key"] = p["rotary_key"] @ right[: a.rotated, : a.rotated]


def exact(name):
    """With norms whose epsilon shows nothing."""
    layer = layer_of(name)
    a = layer.architecture
    if a.norm is not None:
        a = replace(a, qk_norm=replace(a.norm, epsilon=0.0))
    if a.latent is not None:
        a = replace(a, latent=replace(a.latent, epsilon=0.0))
    return layer.replace(architecture=a)


def key_gauge(a, rng):
    """What queries and keys of a group may be multiplied by."""
    h = a.qk_rank
    if a.norm is not None:
        size = 1.0 if a.norm.across_heads else 1.9
        return size * np.eye(h), np.eye(h) / size
    left, right = np.eye(h), np.eye(h)
    first = 0 if a.rope is None else a.rope.rotated(h)
    if a.rope is not None:
        for x, y in zip(*a.rope.pairs(h), strict=True):
            z = rng.standard_normal() + 1j * rng.standard_normal()
            for turn, w in ((left, z), (right, 1 / z.conjugate())):
                turn[np.ix_([x, y], [x, y])] = [[w.real, w.imag], [-w.imag, w.real]]
    rest = slice(first, h)
    change = np.eye(h - first) + 0.3 * rng.standard_normal((h - first, h - first))
    left[rest, rest], right[rest, rest] = change, np.linalg.inv(change).T
    return left, right


@pytest.mark.parametrize(
    "name", [name for name in VARIANTS if "ALiBi" not in name]
)  # whose slopes know the order of heads
def test_other_projections_of_one_function_are_equal(name):
    layer = exact(name)
    other = gauged(layer)
    x, beside = inputs_of(layer)
    np.testing.assert_allclose(other(x, **beside), layer(x, **beside), atol=1e-10)
    found = mha.compare(other, layer)
    assert found.max_error < 1e-11
    assert len(found.theta_errors) == layer.n_heads


@pytest.mark.parametrize("name", VARIANTS)
def test_every_parameter_counts(name):
    layer = layer_of(name)
    for key, leaf in layer.params.items():
        if key == "key_bias" and layer.architecture.shares_only:
            continue  # it cancels
        moved = leaf + 1e-3 * np.random.default_rng(0).standard_normal(leaf.shape)
        error = mha.compare(layer.replace(params=layer.params | {key: moved}), layer).max_error
        assert 1e-5 < error < 1e-1, key
    assert mha.compare(layer, layer).max_error < 1e-13


def with_neighbours_as_pairs(layer):
    """A half-split layer as an interleaved one, its dimensions in another order."""
    a = layer.architecture
    first, second = a.rope.pairs(a.qk_rank)
    order = np.arange(a.qk_rank)
    order[: a.rotated] = np.stack([first, second], axis=1).ravel()
    params = dict(layer.params)
    sides = ("query", "key") if a.latent is None else ("query",)  # whose key is no head's own
    for side in sides:
        for name in {side, f"{side}_bias", f"{side}_gain"} & params.keys():
            params[name] = params[name][..., order]
    if a.latent is not None:
        params["rotary_key"] = params["rotary_key"][:, order[: a.rotated]]
    other = replace(a, rope=replace(a.rope, layout="interleaved"))
    return layer.replace(architecture=other, params=params)


LAYOUTS = ["partial rotary", "dynamic NTK", "Gemma 3", "gpt-oss", "DeepSeek-V3"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_layout_of_pairs_is_a_matter_of_order(name):
    """No function shows it, with gains, biases, shared keys, latents or given positions."""
    layer = mha.random_layer(**({"n_heads": 4, "d": 9, "head_dim": 8} | VARIANTS[name]), seed=1)
    other = with_neighbours_as_pairs(layer)
    x = np.random.default_rng(0).standard_normal((N, K, 9))
    for options in ({}, {"positions": POSITIONS}):
        np.testing.assert_allclose(other(x, **options), layer(x, **options), atol=1e-12)
    assert mha.compare(other, layer).max_error < 1e-12
    wrong = layer.replace(architecture=other.architecture)
    assert mha.compare(wrong, layer).max_error > 0.1


SCALED = {
    "rotary": "query",
    "soft-cap": "query",
    "ALiBi": "query",
    "T5": "query",
    "gpt-oss": "query",
    "RMS norm": "query_gain",
}


@pytest.mark.parametrize("name", SCALED)
def test_the_scale_of_logits_is_taken_up_by_queries_or_their_gains(name):
    layer, taken = layer_of(name), SCALED[name]
    params = dict(layer.params)
    for one in {taken, f"{taken}_bias"} & params.keys():
        params[one] = params[one] / 3
    scale = 3 * layer.architecture.qk_rank**-0.5
    other = layer.replace(
        architecture=replace(layer.architecture, logit_scale=scale), params=params
    )
    x = np.random.default_rng(0).standard_normal((N, K, D))
    np.testing.assert_allclose(other(x), layer(x), atol=1e-13)


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ("rotary", "partial rotary", "rope="),
        ("rotary", "window", "rope="),
        ("window", "sinks", "window=3 beside None"),
        ("soft-cap", "sinks", "sinks=False beside True"),
        ("ALiBi", "T5", "position_bias="),
    ],
)
def test_layers_of_other_kinds_are_infinitely_far(one, other, said):
    found = mha.compare(layer_of(one), layer_of(other))
    assert found.max_error == np.inf
    assert said in found.why


def test_shared_keys_are_compared_by_theta_and_w():
    layer = layer_of("biases")
    assert mha.compare(layer, layer.to_attention_layer()).max_error < 1e-14
    assert "rope=" in mha.compare(layer_of("rotary"), layer.to_attention_layer()).why
    assert mha.compare(layer, layer_of("grouped")).max_error > 1e-2


def test_no_metric_of_data_for_heads_with_positions():
    layer, x = layer_of("rotary"), np.random.default_rng(0).standard_normal((N, K, D))
    with pytest.raises(ValueError, match="leave inputs out"):
        mha.compare(layer, layer, x)


def test_heads_with_slopes_have_their_places():
    layer = layer_of("ALiBi")
    moved = {name: layer.params[name][::-1] for name in layer.params}
    assert mha.compare(layer.replace(params=moved), layer).max_error > 0.1
