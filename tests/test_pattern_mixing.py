"""Heads that share values, decoded: their patterns are told apart by what attention they have."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mhalearn as mha
from mhalearn._runtime.programs import in_float64
from mhalearn.layer.batches import in_one_chunk
from mhalearn.layer.distinct_heads import join_groups, own_groups, split_by_group
from mhalearn.layer.position_bias import T5Bias
from mhalearn.layer.projected import Projected
from mhalearn.layer.relaxed import Relaxed
from mhalearn.layer.shared_projections import group_by_values, share_keys, share_values
from mhalearn.learners.newton.projected_decoding import (
    decode_student,
    make_rows,
    may_decode,
    writers_of,
)
from mhalearn.learners.newton.student import compare_patterns
from mhalearn.run.run import Run
from mhalearn.solvers.free_patterns import decode
from mhalearn.solvers.gauss_newton import loss_of
from mhalearn.solvers.pattern_mixing import measure_groups, mix_writers
from mhalearn.solvers.scaled_problem import make_problem

ROPE = mha.Rope(base=100.0)
KINDS = {
    "soft-cap, shared": {"softcap": 5.0, "kv_heads": 2},
    "rotary, shared": {"rope": ROPE, "kv_heads": 2},
    "rotary, sinks, window, biases": {
        "rope": ROPE,
        "sinks": True,
        "window": 3,
        "key_vector": True,
        "out_bias": True,
    },
    "T5": {"position_bias": T5Bias(4, 4, bidirectional=False)},
}


def case(given, d=24, heads=4, head_dim=6, n=120, k=4):
    """A layer, its problem, and its parameters in the wider class."""
    layer = mha.random_layer(heads, d, head_dim=head_dim, causal=True, scale=3.0, seed=3, **given)
    x = np.random.default_rng(0).standard_normal((n, k, d))
    examples = mha.Examples(x, layer(x))
    problem = make_problem(examples, Projected(layer.architecture))
    kind = Relaxed(layer.architecture)
    return layer, examples, problem, kind, kind.from_layer(layer, problem.units)


def rough(params, share, seed=0):
    rng = np.random.default_rng(seed)
    leaves = {name: np.array(leaf, np.float64) for name, leaf in params.items()}
    return {
        name: leaf + share * np.std(leaf) * rng.standard_normal(leaf.shape)
        for name, leaf in leaves.items()
    }


def decode_from(start, kind, examples, problem):
    patterns = compare_patterns(kind, start, problem)
    return decode_student(kind, start, patterns, examples, problem, Run(), small=0.01, stage="")


def slow(name):
    return pytest.param(name, marks=pytest.mark.slow)


@pytest.mark.parametrize("name", ["soft-cap, shared", *map(slow, list(KINDS)[1:])])
@in_float64
def test_rough_heads_of_any_kind_are_decoded(name):
    layer, examples, problem, kind, exact = case(KINDS[name])
    assert may_decode(kind, problem)
    found = decode_from(rough(exact, 0.1), kind, examples, problem)
    assert found is not None
    assert found.loss < 1e-20
    read = {name: jnp.asarray(leaf) for name, leaf in kind.read(found.params).items()}
    assert mha.compare(problem.to_layer(read), layer).max_error < 1e-8


@in_float64
def test_heads_are_not_decoded_where_what_they_write_is_not_near():
    _, examples, problem, kind, exact = case(KINDS["rotary, shared"])
    noise = rough({name: np.zeros_like(leaf) + 1e-9 for name, leaf in exact.items()}, 0.0)
    start = noise | {name: rough(exact, 30.0)[name] for name in ("value", "out")}
    assert decode_from(start, kind, examples, problem) is None


@pytest.mark.parametrize("name", ["rotary, shared", "rotary, sinks, window, biases"])
@in_float64
def test_free_patterns_of_heads_that_share_values_may_be_mixed(name):
    """Outputs that other patterns make fit as well, and patterns tell by how much."""
    layer, examples, problem, _, exact = case(KINDS[name])
    a, data = layer.architecture, make_rows(examples, problem)
    writers = writers_of(a, exact)
    before = decode(writers, data)
    mix = 0.1 * np.random.default_rng(0).standard_normal((a.groups, a.heads // a.groups, 1))
    mix = jnp.asarray(mix * np.ones(a.heads // a.groups))
    mixed = mix_writers(a, writers, mix)
    after = decode(mixed, data)
    assert before.squared < 1e-22
    assert after.squared < 1e-22
    apart = np.max(np.abs(np.asarray(after.patterns - before.patterns)))
    assert apart > 1e-2
    _, by = measure_groups(after, data, a, 1e6, np.zeros(a.groups))
    assert np.max(by) > 1e-3
    _, by = measure_groups(before, data, a, 1e6, np.zeros(a.groups))
    assert np.max(by) < 1e-9


@in_float64
def test_heads_with_their_own_keys_and_values_are_read_as_those_that_share_them():
    _, _, problem, kind, exact = case(KINDS["rotary, shared"])
    a = kind.architecture
    own = own_groups(a, {name: np.asarray(leaf) for name, leaf in exact.items()})
    alone = Relaxed(own.architecture)
    rng = np.random.default_rng(0)
    change = rng.standard_normal((a.heads, 6, 6))
    back = np.linalg.inv(change)
    moved = own.params | {
        "key": own.params["key"] @ change,
        "query": own.params["query"] @ back.swapaxes(1, 2),
        "turn": change.swapaxes(1, 2) @ own.params["turn"] @ back.swapaxes(1, 2),
        "value": own.params["value"] @ change,
        "out": back @ own.params["out"],
    }
    wide = replace(problem, parametrisation=alone)
    assert loss_of({name: jnp.asarray(leaf) for name, leaf in moved.items()}, wide) < 1e-24
    shuffled = np.array([2, 0, 3, 1])
    moved = {name: leaf[shuffled] for name, leaf in moved.items()}
    order = group_by_values(moved["value"], a.groups)
    assert sorted(map(sorted, shuffled[order].reshape(2, 2).tolist())) == [[0, 1], [2, 3]]
    assert group_by_values(rng.standard_normal((4, 24, 6)), 2) is None
    value, out = share_values(moved["value"], moved["out"], order, a.groups)
    ordered = {name: jnp.asarray(moved[name][order]) for name in ("query", "key", "turn")}
    shared = join_groups(share_keys(split_by_group(ordered, a)))
    found = shared | {"value": value, "out": out}
    assert found["key"].shape == (2, 24, 6)
    assert loss_of(found, replace(problem, parametrisation=kind)) < 1e-24


@in_float64
def test_logits_are_what_patterns_are_the_softmax_of():
    _, _, problem, kind, exact = case(KINDS["rotary, sinks, window, biases"])
    chunk = in_one_chunk(problem.data)
    logits = kind.logits(exact, chunk)
    index = np.arange(logits.shape[1])
    seen = (index[:, None] >= index) & (index[:, None] - index < 3)
    logits = jnp.where(seen[:, None], logits, -jnp.inf)
    sinks = jnp.broadcast_to(exact["sink"][:, None], (*logits.shape[:3], 1))
    p = jax.nn.softmax(jnp.concatenate([logits, sinks], axis=-1), axis=-1)[..., :-1]
    counts = np.asarray(chunk.weight) > 0
    attended = np.asarray(kind.attend(exact, chunk).p)
    np.testing.assert_allclose(np.asarray(p)[counts], attended[counts], atol=1e-14)
