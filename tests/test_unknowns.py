"""What projected heads leave to learn, against the rank of their Jacobian."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import mhalearn as mha
from mhalearn import Architecture
from mhalearn._runtime.programs import float64
from mhalearn.layer.batches import make_chunk
from mhalearn.layer.latent import Latent
from mhalearn.layer.position_bias import T5Bias
from mhalearn.layer.qk_norm import QKNorm
from mhalearn.layer.units import Units

D, K, N = 5, 6, 40
ROPE, PART = mha.Rope(base=10.0), mha.Rope(base=10.0, fraction=0.5)
RMS, L2, ALL = QKNorm(epsilon=0.0), QKNorm("l2", 0.0), QKNorm(epsilon=0.0, across_heads=True)
T5 = T5Bias(4, 4, bidirectional=False)
BOTH = Latent(3, 4, epsilon=0.0)
NORMED, LINEAR = Latent(3, epsilon=0.0), Latent(3, norm=False)

CASES = {
    "grouped": {"kv_heads": 2},
    "grouped, bias": {"kv_heads": 1, "bias": True},
    "grouped, few outputs": {"kv_heads": 2, "out_dim": 2},
    "rotary": {"rope": ROPE},
    "rotary, causal, bias": {"rope": ROPE, "causal": True, "bias": True},
    "rotary, grouped": {"rope": ROPE, "kv_heads": 2},
    "rotary, grouped, bias": {"rope": ROPE, "kv_heads": 2, "bias": True, "causal": True},
    "interleaved": {"rope": replace(ROPE, layout="interleaved")},
    "partial rotary": {"rope": PART},
    "partial rotary, grouped, bias": {"rope": PART, "kv_heads": 2, "bias": True},
    "sinks": {"sinks": True},
    "sinks, bias": {"sinks": True, "bias": True},
    "sinks, window, grouped": {"sinks": True, "window": 3, "kv_heads": 2, "causal": True},
    "sinks, rotary, bias": {"sinks": True, "rope": ROPE, "bias": True, "kv_heads": 2},
    "soft-cap": {"softcap": 2.0},
    "soft-cap, bias": {"softcap": 2.0, "bias": True, "kv_heads": 2},
    "window": {"window": 3, "causal": True},
    "own scale": {"logit_scale": 0.7},
    "ALiBi": {"position_bias": "alibi", "causal": True},
    "T5": {"position_bias": T5, "causal": True},
    "T5, both ways": {"position_bias": T5Bias(8, 4)},
    "T5, window": {"position_bias": T5, "causal": True, "window": 2},
    "T5, sinks, bias": {"position_bias": T5, "causal": True, "sinks": True, "bias": True},
    "RMS norm": {"qk_norm": RMS},
    "RMS norm, grouped, bias": {"qk_norm": RMS, "kv_heads": 2, "bias": True},
    "RMS norm, rotary": {"qk_norm": RMS, "rope": ROPE},
    "RMS norm, partial rotary, grouped": {"qk_norm": RMS, "rope": PART, "kv_heads": 2},
    "L2 norm": {"qk_norm": L2, "logit_scale": 2.0},
    "L2 norm, partial rotary, grouped": {"qk_norm": L2, "rope": PART, "kv_heads": 2},
    "norm of all heads": {"qk_norm": ALL},
    "norm of all heads, rotary": {"qk_norm": ALL, "rope": ROPE, "causal": True},
    "norm of all heads, rotary, grouped": {"qk_norm": ALL, "rope": ROPE, "kv_heads": 2},
    "norm of all heads, grouped, wide": {"qk_norm": ALL, "kv_heads": 1, "n_heads": 2, "d": 7},
    "norm of all heads, partial rotary": {"qk_norm": ALL, "rope": PART, "n_heads": 2, "d": 7},
    "narrow values": {"value_dim": 2, "rope": ROPE, "kv_heads": 2},
    "wide values": {"value_dim": 5, "head_dim": 2, "bias": True},
    "cross-attention": {"memory": 3, "head_dim": 2},
    "cross-attention, grouped, bias": {"memory": 6, "kv_heads": 2, "bias": True},
    "cross-attention, sinks, RMS norm": {"memory": 6, "sinks": True, "qk_norm": RMS},
    "latent": {"latent": NORMED, "value_dim": 2, "head_dim": 2},
    "latent, not normalised": {"latent": LINEAR, "value_dim": 2, "head_dim": 2},
    "latent, rotary": {"latent": NORMED, "rope": PART, "causal": True},
    "latent, rotary, not normalised": {"latent": LINEAR, "rope": PART, "value_dim": 2},
    "latent, rotary, queries too": {"latent": BOTH, "rope": PART, "value_dim": 3, "d": 6},
    "latent, queries too, not normalised": {"latent": replace(BOTH, norm=False), "rope": PART},
    "latent, wide": {"latent": replace(BOTH, rank=5), "rope": PART, "d": 7, "out_dim": 7},
    "latent, sinks, window": {
        "latent": BOTH,
        "rope": PART,
        "sinks": True,
        "window": 3,
        "causal": True,
    },
    "latent, cross-attention": {"latent": NORMED, "memory": 4, "head_dim": 2},
}
# The others take a minute together.
EVERY_DAY = {
    "grouped, bias",
    "rotary, grouped, bias",
    "partial rotary, grouped, bias",
    "sinks, rotary, bias",
    "soft-cap, bias",
    "T5, sinks, bias",
    "RMS norm, partial rotary, grouped",
    "L2 norm, partial rotary, grouped",
    "norm of all heads, rotary, grouped",
    "cross-attention, grouped, bias",
    "latent, rotary, queries too",
}


def architecture_of(name):
    return Architecture(**({"d": D, "n_heads": 4, "head_dim": 4, "out_dim": 4} | CASES[name]))


def at_random(a, seed=0):
    """Outputs of N examples as a function of all parameters, and some of these."""
    rng = np.random.default_rng(seed)
    kind = a.parametrisation()
    with float64():
        params = {name: 2.0 * leaf for name, leaf in kind.init(rng).items()}
        chunk = make_chunk(
            rng.standard_normal((N, K, a.d + (a.memory or 0))),
            np.full(N, K),
            columns=a.columns(a.d + (a.memory or 0)),
            key_vector=False,
            out_bias=False,
            causal=a.causal,
        )
        chunk = jax.tree.map(jnp.asarray, chunk)
        flat, unflatten = ravel_pytree(params)
    return lambda flat: kind.outputs(unflatten(flat), chunk), flat


def jacobian(a, seed=0):
    """Of N examples, (N, K e, parameters)."""
    outputs, flat = at_random(a, seed)
    with float64():
        return np.asarray(jax.jit(jax.jacfwd(outputs))(flat)).reshape(N, K * a.outputs, -1)


def rank_of(blocks):
    values = np.linalg.svd(blocks.reshape(-1, blocks.shape[-1]), compute_uv=False)
    return int(np.sum(values > 1e-10 * values[0]))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in EVERY_DAY else pytest.mark.slow) for n in CASES]
)
def test_counts_and_limits_are_those_of_a_jacobian(name):
    """All unknowns are seen by many examples, by few more than the limit, and never by fewer."""
    a = architecture_of(name)
    blocks, unknowns = jacobian(a), a.count()
    assert rank_of(blocks) == unknowns == a.parametrisation().count()
    assert blocks.shape[-1] == a.parametrisation().size() > unknowns
    limit = a.counting_limit(K)
    assert rank_of(blocks[: math.ceil(limit) + 2]) == unknowns
    assert rank_of(blocks[: math.ceil(limit) - 1]) < unknowns


def test_sharing_and_windows_have_their_price():
    a = Architecture(16, 4, 4, rope=ROPE)
    assert replace(a, kv_heads=2).count() < a.count()
    assert replace(a, kv_heads=2).counting_limit(8) < a.counting_limit(8)
    assert replace(a, kv_heads=4) == a
    narrow = replace(a, causal=True, window=2)
    assert narrow.count() == a.count()
    assert narrow.counting_limit(8) > replace(a, causal=True).counting_limit(8)
    assert replace(a, window=1).counting_limit(8) == math.inf  # a token sees itself alone
    assert replace(a, window=1, sinks=True).counting_limit(8) < math.inf


# Membership


@pytest.mark.parametrize("name", CASES)
def test_a_class_contains_its_own_layers_and_no_others(name):
    a = architecture_of(name)
    layer = a.parametrisation().to_layer(
        a.parametrisation().init(np.random.default_rng(0)), Units()
    )
    assert a.contains(layer)
    assert replace(a, n_heads=None).contains(layer)
    if a.latent is None:
        assert replace(a, bias=True).contains(layer)
    if a.memory is None:
        assert not replace(a, rope=mha.Rope(base=11.0)).contains(layer)
        assert not replace(a, causal=not a.causal).contains(layer)
    assert not replace(a, softcap=1.0).contains(layer)
    assert not replace(a, out_dim=9).contains(layer)
    assert Architecture(a.d, 4, out_dim=a.out_dim).contains(layer) == (
        a.shares_only and not a.bias and a.n_heads == 4
    )


def test_a_class_that_shares_less_contains_what_shares_more():
    layer = mha.random_layer(4, 6, head_dim=2, kv_heads=2, rope=ROPE)
    a = layer.architecture
    assert replace(a, kv_heads=None).contains(layer)
    assert not replace(a, kv_heads=1).contains(layer)
    assert not replace(a, n_heads=8).contains(layer)


def test_matrices_show_that_heads_share_keys():
    layer = mha.random_layer(4, 6, head_dim=2, kv_heads=2).to_attention_layer()
    grouped = Architecture(6, 4, 2, kv_heads=2)
    assert grouped.contains(layer)
    assert not replace(grouped, kv_heads=1).contains(layer)
    assert not grouped.contains(layer.replace(theta=layer.theta[[0, 2, 1, 3]]))
    assert not grouped.contains(mha.random_layer(4, 6, rank=2))
    assert not replace(grouped, rope=ROPE).contains(layer)


@pytest.mark.parametrize(("name", "shown"), [("L2 norm", True), ("own scale", False)])
def test_the_scale_of_logits_shows_where_unit_vectors_have_no_gains(name, shown):
    """Elsewhere a step in it is a step in the queries."""
    a = architecture_of(name)
    made = []
    for scale in (a.logit_scale - 1e-4, a.logit_scale + 1e-4):
        outputs, flat = at_random(replace(a, logit_scale=scale))
        with float64():
            made.append(np.asarray(outputs(flat)).ravel())
    wanted = (made[1] - made[0]) / 2e-4
    design = jacobian(a).reshape(len(wanted), -1)
    left = wanted - design @ np.linalg.lstsq(design, wanted, rcond=1e-10)[0]
    off = np.linalg.norm(left) / np.linalg.norm(wanted)
    assert off > 1e-2 if shown else off < 1e-6
