"""Heads whose kind is open: what they compute, and which kind is read from them."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mhalearn as mha
from mhalearn import cli
from mhalearn._runtime.programs import float64
from mhalearn.judge.kind_words import list_differences
from mhalearn.layer.batches import make_chunk
from mhalearn.layer.key_sharing import share_keys
from mhalearn.layer.kind_reading import read_kind
from mhalearn.layer.open_heads import OpenHeads
from mhalearn.layer.projected import Projected
from mhalearn.layer.rope_scaling import LinearScaling
from mhalearn.layer.units import Units
from mhalearn.learners.newton.open_kinds import can_be_open, opened

K, D, H = 6, 8, 4
X = np.random.default_rng(5).standard_normal((3, K, D))
KINDS = {
    "window": {"window": 3},
    "sinks": {"sinks": True},
    "soft-cap": {"softcap": 1.5},
    "rotary": {"rope": mha.Rope(37.5)},
    "half of it rotary": {"rope": mha.Rope(10000.0, fraction=0.5)},
    "divided positions": {"rope": mha.Rope(100.0, scaling={"rope_type": "linear", "factor": 4.0})},
    "ALiBi": {"position_bias": "alibi"},
    "T5": {"position_bias": "t5"},
    "all of them": {"rope": mha.Rope(50.0), "window": 4, "sinks": True, "softcap": 2.0},
}


def make(name, causal=True, seed=1, heads=2, **more):
    return mha.random_layer(
        heads, D, head_dim=H, causal=causal, seed=seed, **(KINDS.get(name, {}) | more)
    )


def open_up(layer, seed=0):
    """The parameters of open heads that compute what a layer does, in another basis of its keys."""
    a, rng = layer.architecture, np.random.default_rng(seed)
    kind = OpenHeads(opened(a), tokens=K)
    found = {name: np.array(leaf) for name, leaf in layer.params.items()}
    each = a.heads // a.groups
    for name in ("key", "value", "key_bias", "value_bias"):
        if name in found:
            found[name] = np.repeat(found[name], each, axis=0)
    spin = np.zeros((H, H))
    if a.rope is not None:
        real, imaginary = a.rope.pairs(H)
        spin[real, imaginary], spin[imaginary, real] = (
            sign * np.tan(a.rope.frequencies(H) / 2) for sign in (-1, 1)
        )
    steps = np.arange(1, K) if a.causal else np.r_[np.arange(1 - K, 0), 1:K]
    reach = np.ones((a.heads, len(steps)))
    if a.distance_bias is not None:
        table = found.get("position_table")
        with float64():
            bias = a.distance_bias(
                jnp.asarray(-np.r_[0, steps], float)[None, None],
                None if table is None else jnp.asarray(table),
                a.heads,
            )
        bias = np.asarray(bias)[0, 0]
        reach = np.exp(bias[:, 1:] - bias[:, :1])
    if a.window is not None:
        reach = reach * (np.abs(steps) < a.window)
    found.pop("position_table", None)
    found["reach"] = reach
    found["sink_weight"] = np.exp(found.pop("sink", np.full(a.heads, -np.inf)))
    found["bend"] = np.array([0.0 if a.softcap is None else a.softcap**-2])
    bases = rng.standard_normal((a.heads, H, H))
    found["spin"] = np.stack([np.linalg.inv(one) @ spin @ one for one in bases])
    found["query"] = found["query"] @ bases
    found["key"] = found["key"] @ np.linalg.inv(bases).swapaxes(1, 2)
    return kind, found


def compute(kind, params, x):
    """Outputs of a class, not compiled: there are many classes, and each is asked once."""
    with float64():
        chunk = make_chunk(
            x, np.full(len(x), K), key_vector=False, out_bias=False, causal=kind.architecture.causal
        )
        tree = jax.tree.map(jnp.asarray, (params, chunk))
        return np.asarray(kind.outputs(*tree))


def compute_layer(layer, x):
    return compute(Projected(layer.architecture), dict(layer.params), x)


@pytest.mark.parametrize(
    ("name", "causal"),
    [(name, True) for name in KINDS] + [("T5", False), ("all of them", False)],
)
def test_every_kind_is_a_point_of_the_open_class_and_is_read_from_it(name, causal):
    layer = make(name, causal)
    kind, params = open_up(layer)
    labels = compute_layer(layer, X)
    assert np.abs(compute(kind, params, X) - labels).max() < 1e-10
    reading = read_kind(params, kind, 1e-7, opened(layer.architecture))
    assert reading.architecture == layer.architecture
    found = compute(Projected(reading.architecture), reading.params, X)
    assert np.abs(found - labels).max() < 1e-6


def test_open_heads_can_be_looked_at_on_their_way():
    layer = make("window")
    kind, params = open_up(layer)
    with float64():
        shown = kind.to_layer(jax.tree.map(jnp.asarray, params), Units(1.0, 1.0))
    assert np.abs(shown(X) - compute_layer(layer, X)).max() < 1e-10


def test_what_was_asked_for_keeps_its_words():
    asked = make("all of them", rope=mha.Rope(50.0, layout="interleaved"), window=9).architecture
    kind, params = open_up(make("all of them", window=9))
    read = read_kind(params, kind, 1e-7, asked).architecture
    assert read == asked
    scaled = mha.Rope(100.0, scaling=LinearScaling(4.0))
    asked = replace(asked, rope=scaled, logit_scale=0.3)
    kind, params = open_up(make("all of them", rope=scaled, window=9))
    reading = read_kind(params, kind, 1e-7, asked)
    assert reading.architecture == asked
    found = compute(Projected(asked), reading.params, X)
    assert np.abs(found - compute(kind, params, X)).max() < 1e-6


def test_frequencies_too_slow_to_tell_are_those_asked_for_or_none():
    slow = mha.Rope(1e10)  # of the second pair 1e-5 a token
    kind, params = open_up(make("rotary", rope=slow))
    assert read_kind(params, kind, 1e-7, make("", rope=slow).architecture).architecture.rope == slow
    read = read_kind(params, kind, 1e-7, kind.architecture).architecture.rope
    assert read == mha.Rope(10000.0, fraction=0.5)


def test_a_mask_shows_without_being_asked_for():
    kind, params = open_up(make("window"))
    steps = K - 1
    params["reach"] = np.concatenate([np.zeros((2, steps)), params["reach"]], axis=1)
    wider = replace(kind, architecture=replace(kind.architecture, causal=False))
    read = read_kind(params, wider, 1e-7, wider.architecture).architecture
    assert read.causal
    assert read.window == 3


def test_numbers_that_no_kind_has_are_not_read():
    for name, change in (
        ("spin", lambda leaf: leaf * np.array([1.0, 1.3])[:, None, None]),  # frequencies by head
        ("reach", lambda leaf: leaf * np.array([1.0, 0.0, 1.0, 1.0, 1.0])),  # a hole
    ):
        kind, params = open_up(make("rotary"))
        params[name] = change(params[name])
        if name == "spin":
            params[name] = params[name] * 1.3  # faster than one radian a token
        assert read_kind(params, kind, 1e-7, kind.architecture) is None


@pytest.mark.parametrize("name", ["plain", "rotary", "half of it rotary"])
def test_shared_keys_are_found_by_the_angles_between_them(name):
    layer = make(name, heads=4, kv_heads=2)  # "plain" is no kind of the table
    kind, params = open_up(layer)
    order = [2, 0, 3, 1]
    shuffled = {leaf: value if leaf == "bend" else value[order] for leaf, value in params.items()}
    reading = read_kind(shuffled, kind, 1e-7, opened(layer.architecture))
    assert share_keys(reading.architecture, reading.params, 1, 1e-6) is None
    found = share_keys(reading.architecture, reading.params, 2, 1e-6)
    assert found is not None
    assert found[0].kv_heads == 2
    shared = compute(Projected(found[0]), found[1], X)
    assert np.abs(shared - compute_layer(layer, X)).max() < 1e-6


def test_heads_with_keys_of_their_own_share_none():
    kind, params = open_up(make("rotary"))
    reading = read_kind(params, kind, 1e-7, kind.architecture)
    assert share_keys(reading.architecture, reading.params, 1, 1e-2) is None


def test_differences_are_said_with_the_settings_that_ask_for_them():
    asked = make("rotary", kv_heads=1).architecture
    other = make("rotary", rope=mha.Rope(20.0, fraction=0.5), position_bias="t5").architecture
    told = list_differences(asked, replace(other, sinks=True, softcap=2.0))
    assert [one.setting for one in told] == [
        "rope=Rope(base=20, fraction=0.5)",
        "position_bias='t5'",
        "sinks=True",
        "softcap=2",
        "kv_heads=None",
    ]
    back = list_differences(make("all of them").architecture, make("ALiBi").architecture)
    assert [one.said for one in back] == [
        "no rotary positions",
        "ALiBi's slopes by distance",
        "no window of 4 tokens",
        "no sink beside their keys",
        "no cap on their logits",
    ]
    assert list_differences(asked, asked) == []


def test_what_cannot_be_open_is_said():
    x = np.zeros((4, K, D))
    examples = mha.Examples(x, x)
    assert can_be_open(make("rotary").architecture, examples) is None
    assert "norms" in can_be_open(make("rotary", qk_norm=True).architecture, examples)
    assert "head_dim" in can_be_open(mha.Architecture(D, 2), examples)
    large = mha.Architecture(D, 32, head_dim=8, window=3)
    assert "parameters" in can_be_open(large, examples)


def learn_open(truth, n=80, **given):
    x = np.random.default_rng(9).standard_normal((n, K, D))
    return mha.AttentionRegressor(2, head_dim=H, causal=True, **given).fit(x, truth(x))


@pytest.mark.slow
def test_rotary_base_window_and_shared_keys_are_found():
    truth = make("rotary", rope=mha.Rope(37.123456789), window=4, kv_heads=1, sinks=True)
    found = learn_open(truth, rope="auto", window="auto", kv_heads="auto", sinks=True)
    assert found.outcome_ is mha.Outcome.RECOVERED, found.solution_.reason
    a = found.layer_.architecture
    assert (a.window, a.kv_heads) == (4, 1)
    assert abs(a.rope.base / 37.123456789 - 1) < 1e-10
    assert mha.compare(found.layer_, truth).max_error < 1e-10
    assert found.solution_.reason.endswith(
        "; found: kv_heads=1, rope=Rope(base=37.1234568), window=4"
    )


@pytest.mark.slow
def test_the_command_finds_kinds(tmp_path, capsys):
    truth = make("", softcap=1.5)
    x = np.random.default_rng(9).standard_normal((80, K, D))
    mha.Examples(x, truth(x)).save(tmp_path / "examples.safetensors")
    sizes = ["--heads", "2", "--head-dim", str(H), "--causal"]
    found = ["--softcap", "auto", "--window", "auto", "--rope-base", "auto", "--kv-heads", "auto"]
    code = cli.run(["learn", str(tmp_path / "examples.safetensors"), *sizes, *found, "--json"])
    said = json.loads(capsys.readouterr().out)
    assert code == 0
    assert said["reason"].endswith("found: kv_heads=None, rope=None, softcap=1.5, window=None")


@pytest.mark.slow
def test_what_is_not_there_is_found_missing_and_what_is_given_is_kept():
    everything = dict.fromkeys(
        ("rope", "window", "kv_heads", "sinks", "softcap", "position_bias"), "auto"
    )
    for made in ({}, {"position_bias": "alibi"}):
        truth = make("", **made)
        found = learn_open(truth, **everything)
        assert found.outcome_ is mha.Outcome.RECOVERED, found.solution_.reason
        assert found.layer_.architecture.extras() == list(made)
        assert mha.compare(found.layer_, truth).max_error < 1e-10
    wrong = learn_open(make("sinks"), rope="auto", window=3)
    assert wrong.outcome_ is mha.Outcome.STUCK
    assert "learn with window=None, sinks=True; found: rope=None" in wrong.solution_.reason


@pytest.mark.slow
def test_noise_is_no_kind_of_heads():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 80, K, D))
    found = mha.AttentionRegressor(2, head_dim=H, causal=True, window="auto", max_seconds=5.0).fit(
        x, y
    )
    assert found.outcome_ is not mha.Outcome.RECOVERED
    assert "window could not be found" in found.solution_.reason


def test_auto_is_refused_where_nothing_can_be_found(tmp_path):
    truth = make("window")
    for given, said in (
        ({"method": "adam"}, "finds no kinds of heads"),
        ({"head_dim": None}, "head_dim"),
        ({"checkpoint": tmp_path / "run.safetensors"}, "leave it out beside 'auto'"),
    ):
        settings = {"head_dim": H, "causal": True, "window": "auto"} | given
        with pytest.raises(ValueError, match=said):
            mha.AttentionRegressor(2, **settings).fit(X, truth(X))


@pytest.mark.slow
def test_a_wrong_kind_is_told_which_one_it_is():
    cases = (
        ({"rope": mha.Rope(100.0)}, {"rope": mha.Rope(50.0)}, "rope=Rope(base=50)"),
        ({"kv_heads": 1}, {"position_bias": "alibi"}, "position_bias='alibi', kv_heads=None"),
    )
    x = np.random.default_rng(9).standard_normal((64, K, D))
    for asked, made, said in cases:
        truth = mha.random_layer(2, D, head_dim=H, causal=True, seed=1, **made)
        found = mha.AttentionRegressor(2, head_dim=H, causal=True, **asked).fit(x, truth(x))
        assert found.outcome_ in (mha.Outcome.STUCK, mha.Outcome.FITTED)
        assert found.solution_.findings[0].name == "another kind"
        assert found.solution_.reason.endswith(f"learn with {said}"), found.solution_.reason
