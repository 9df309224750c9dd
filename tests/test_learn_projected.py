"""Learning heads as decoders have them: rotary, grouped, windowed, with sinks, caps and biases."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import mhalearn as mha
from mhalearn._runtime.programs import float64
from mhalearn.layer.batches import in_one_chunk
from mhalearn.layer.distinct_heads import fill_with_heads, keep_distinct_heads
from mhalearn.layer.position_bias import T5Bias
from mhalearn.layer.projected import Projected
from mhalearn.layer.relaxed import Relaxed
from mhalearn.solvers.gauss_newton import loss_of
from mhalearn.solvers.head_normal_matrix import head_normal_matrix
from mhalearn.solvers.scaled_problem import make_problem

SETTINGS = ("kv_heads", "rope", "window", "sinks", "softcap", "qk_norm", "position_bias", "latent")
ROPE = mha.Rope(base=100.0)
VARIANTS = {
    "rotary, sinks, window": {"rope": ROPE, "sinks": True, "window": 4},
    "partial rotary": {"rope": mha.Rope(100.0, fraction=0.5)},
    "soft-cap": {"softcap": 3.0},
    "ALiBi": {"position_bias": "alibi"},
    "T5": {"position_bias": T5Bias(4, 4, bidirectional=False)},
    "QK-norm, rotary": {"rope": ROPE, "qk_norm": True},
    "MLA": {"rope": mha.Rope(100.0, fraction=0.5), "latent": mha.Latent(5)},
}


def teach(given, ratio=12.0, d=8, heads=2, head_dim=4, k=6, seed=0, size=1.0):
    layer = mha.random_layer(heads, d, head_dim=head_dim, causal=True, seed=seed, **given)
    n = int(ratio * layer.architecture.counting_limit(k))
    x = size * np.random.default_rng(seed + 100).standard_normal((n, k, d))
    return layer, x, layer(x)


def learn(layer, x, y, **changes):
    a = layer.architecture
    given = {name: getattr(a, name) for name in SETTINGS} | changes
    return mha.AttentionRegressor(
        a.n_heads, head_dim=a.head_dim, causal=True, bias=a.bias, **given
    ).fit(x, y)


def check_recovered(layer, x, y):
    found = learn(layer, x, y)
    assert found.outcome_ is mha.Outcome.RECOVERED, found.solution_.reason
    assert mha.compare(found.layer_, layer).max_error < 1e-10
    assert found.certificate_.recovered


def test_turns_stay_rotations_whatever_adam_does():
    """Two hundred steps of the longest kind, of signs that agree, as those of noise may."""
    kind = Relaxed(mha.Architecture(8, 2, 4, causal=True, rope=mha.Rope(base=100.0)))
    turn = jnp.tile(jnp.eye(4), (2, 1, 1))
    for _ in range(200):
        turn = kind.steady({"turn": turn - 0.03 * jnp.ones((4, 4))})["turn"]
        apart = turn @ turn.swapaxes(1, 2) - jnp.eye(4)
        assert jnp.linalg.norm(apart, axis=(1, 2)).max() < 0.1


def test_rotary_heads_with_sinks_and_a_window_are_recovered():
    check_recovered(*teach(VARIANTS["rotary, sinks, window"]))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(VARIANTS)[1:])
def test_heads_of_each_variant_are_recovered(name):
    check_recovered(*teach(VARIANTS[name]))


@pytest.mark.parametrize(
    "given",
    [
        VARIANTS["rotary, sinks, window"] | {"qk_norm": True},
        VARIANTS["ALiBi"],
        pytest.param(VARIANTS["MLA"], marks=pytest.mark.slow),
    ],
    ids=["rotary, normalised, sinks, window", "ALiBi", "MLA"],
)
def test_the_normal_matrix_by_heads_is_that_of_the_whole_jacobian(given):
    layer, x, y = teach(given, ratio=2.0)
    kind = Relaxed(layer.architecture, frees_sizes=True)
    problem = make_problem(mha.Examples(x, y), kind)
    with float64():
        params = kind.from_layer(layer, problem.units)
        flat, unflatten = ravel_pytree(params)
        data = in_one_chunk(problem.data, 1)
        jacobian = jax.jacfwd(lambda flat: kind.outputs(unflatten(flat), data).ravel())(flat)
        expected = np.asarray(jacobian.T @ jacobian)
    found = head_normal_matrix(params, problem)
    assert np.abs(found - expected).max() < 1e-12 * np.abs(expected).max()


def move_in_the_wider_class(params, a, rng):
    """Other bases of queries and keys, of those that the wider class does not tell apart."""
    h = a.qk_rank

    def draw():
        turn = np.linalg.qr(rng.standard_normal((h, h))).Q
        return turn if a.norm is not None else turn + 0.2 * rng.standard_normal((h, h))

    each = a.heads // a.groups
    for g in range(a.groups):
        basis = draw()
        back, heads = np.linalg.inv(basis), slice(g * each, (g + 1) * each)
        params["key"][g] @= basis.T
        if "turn" in params:
            params["turn"][g] = basis @ params["turn"][g] @ back
        if "meet" not in params:
            params["query"][heads] @= back
            continue
        params["meet"][heads] = params["meet"][heads] @ back
        for i in range(g * each, (g + 1) * each):
            own = draw()
            params["query"][i] @= own
            params["meet"][i] = own.T @ params["meet"][i]


@pytest.mark.parametrize(
    "given",
    [
        {"rope": ROPE},
        {"rope": mha.Rope(100.0, fraction=0.5, layout="interleaved")},
        {"rope": ROPE, "kv_heads": 2},
        {"rope": ROPE, "qk_norm": True, "kv_heads": 2},
        {"rope": mha.Rope(100.0, fraction=0.5), "qk_norm": True},
        {"rope": ROPE, "qk_norm": "l2"},
        {"qk_norm": True},
    ],
    ids=["rotary", "partial", "grouped", "normalised", "partial, normalised", "l2", "norm alone"],
)
def test_positions_and_gains_are_read_from_any_basis_of_the_wider_class(given):
    layer, x, y = teach(given, heads=4, ratio=1.0)
    kind = Relaxed(layer.architecture, frees_sizes=True)
    problem, rng = make_problem(mha.Examples(x, y), kind), np.random.default_rng(0)
    params = {name: np.array(leaf) for name, leaf in kind.from_layer(layer, problem.units).items()}
    move_in_the_wider_class(params, layer.architecture, rng)
    assert loss_of(params, problem) < 1e-20
    with float64():
        found = kind.to_layer(jax.tree.map(jnp.asarray, params), problem.units)
    assert mha.compare(found, layer).max_error < 1e-9
    for side in ("query", "key"):  # which an epsilon shows, and comparing does not
        if layer.architecture.norm is not None:
            ours, theirs = (np.linalg.norm(one.params[side], axis=(1, 2)) for one in (found, layer))
            assert np.allclose(ours, theirs, rtol=1e-9)


def test_the_shared_rotary_key_and_the_size_of_a_latent_are_read():
    layer, x, y = teach(
        {"rope": mha.Rope(100.0, fraction=0.5), "latent": mha.Latent(5)}, head_dim=8, ratio=1.0
    )
    kind = Relaxed(layer.architecture, frees_sizes=True)
    problem, rng = make_problem(mha.Examples(x, y), kind), np.random.default_rng(0)
    params = {name: np.array(leaf) for name, leaf in kind.from_layer(layer, problem.units).items()}
    basis = rng.standard_normal((4, 4))
    params["query"][..., :4] @= basis
    params["rotary_key"] @= np.linalg.inv(basis).T
    params["rotary_turn"] = np.linalg.inv(basis) @ params["rotary_turn"] @ basis
    params["latent"] *= 3.0
    params["latent_epsilon"] *= 9.0
    assert loss_of(params, problem) < 1e-20
    with float64():
        found = kind.to_layer(jax.tree.map(jnp.asarray, params), problem.units)
    assert mha.compare(found, layer).max_error < 1e-9
    assert np.allclose(found.params["latent"], layer.params["latent"], rtol=1e-12)


def test_copies_of_a_head_become_one_and_idle_heads_go():
    layer, x, _ = teach({"sinks": True, "window": 4}, heads=3, ratio=2.0)
    params = {name: np.array(leaf) for name, leaf in layer.params.items()}
    halves = {name: np.concatenate([leaf, leaf[:1]]) for name, leaf in params.items()}
    halves["out"][0] *= 0.25
    halves["out"][3] *= 0.75
    halves["out"][2] *= 1e-6
    wider = replace(layer.architecture, n_heads=4)
    patterns = np.moveaxis(mha.ProjectedLayer(wider, halves).patterns(x), 1, 2)
    kept = keep_distinct_heads(wider, halves, patterns, alike=0.1, small=0.05, most=None)
    assert kept.architecture.n_heads == 2
    expected = mha.ProjectedLayer(
        kept.architecture, {name: leaf[:2] for name, leaf in params.items()}
    )
    found = mha.ProjectedLayer(kept.architecture, kept.params)
    assert mha.compare(found, expected).max_error < 1e-12
    assert fill_with_heads(kept, halves, 3).architecture.n_heads == 3


def test_tokens_and_labels_of_another_size_make_the_same_problem():
    layer, x, y = teach({"rope": ROPE, "sinks": True, "key_vector": True, "out_bias": True})
    kind = Projected(layer.architecture)
    problem = make_problem(mha.Examples(1024 * x, y / 64), kind)
    assert problem.units.x_scale == 1024
    with float64():
        params = jax.tree.map(jnp.asarray, kind.from_layer(layer, problem.units))
        back = problem.to_layer(params)
        outputs = kind.outputs(params, in_one_chunk(problem.data, 1))[: len(x)]
        assert np.allclose(outputs * problem.units.y_scale, layer(1024 * x), rtol=1e-12, atol=0)
    for name, leaf in layer.params.items():
        assert np.array_equal(back.params[name], leaf)


@pytest.mark.slow
def test_wrong_positions_are_never_called_recovered():
    layer, x, y = teach(VARIANTS["rotary, sinks, window"])
    found = learn(layer, x, y, window=5)
    assert found.outcome_ is not mha.Outcome.RECOVERED
    assert found.certificate_ is None or not found.certificate_.recovered


@pytest.mark.parametrize(
    ("given", "said"),
    [({"rope": ROPE, "kv_heads": 1}, "kv_heads"), ({"position_bias": "alibi"}, "alibi")],
)
def test_heads_whose_kind_depends_on_their_number_need_it(given, said):
    x = np.zeros((4, 3, 4))
    with pytest.raises(ValueError, match=f"{said}.*give a number"):
        mha.AttentionRegressor(head_dim=2, **given).fit(x, x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "heads", "d"),
    [({"rope": ROPE}, 3, 8), ({"rope": ROPE}, 2, 8), ({"sinks": True, "window": 4}, 2, 12)],
)
def test_the_number_of_heads_is_found(given, heads, d):
    """Also where the student begins with more, some of which become copies."""
    layer, x, y = teach(given, heads=heads, d=d)
    found = mha.AttentionRegressor(head_dim=4, causal=True, **given).fit(x, y)
    assert found.outcome_ is mha.Outcome.RECOVERED, found.solution_.reason
    assert found.n_heads_ == heads
    assert mha.compare(found.layer_, layer).max_error < 1e-10
